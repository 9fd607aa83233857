"""A readable card of an engine folder."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from llm_runtime.manifest import EngineManifest, Plan, Quality, read_manifest


def engine_card(folder: Path) -> Table:
    """Raises EngineError when `folder` is not an engine."""
    manifest = read_manifest(folder)
    table = Table(title=manifest.name, show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(folder, manifest):
        table.add_row(name, value)
    return table


def _rows(folder: Path, manifest: EngineManifest) -> list[tuple[str, str]]:
    model, precision, limits = manifest.model, manifest.precision, manifest.limits
    weights = precision.weights + (f", blocks of {precision.block_size}" if precision.block_size else "")
    weights += f", {precision.effective_bits:g} bits on average" if precision.effective_bits else ""
    weights += f" ({precision.algorithm})" if precision.algorithm else ""
    windows = sorted(set(model.layer_windows))
    attention = " and ".join(f"window {w}" if w else "full" for w in windows)
    source = manifest.source
    rows = [
        (
            "Model",
            f"{source.model}"
            + (f" @ {source.revision}" if source.revision else "")
            + f" ({model.family}, from {source.format})",
        ),
        ("Runs on", manifest.runtime + _hardware(manifest.plan)),
        ("Weights", weights),
        ("Head / embedding", f"{precision.lm_head} / {precision.embedding}"),
        ("Activations", f"{precision.activations or 'not rounded'}, computed in {precision.compute}"),
        (
            "Decoder",
            f"{model.num_layers} layers of {model.hidden_size}, {model.num_heads} query and {model.num_kv_heads} kv heads of "
            f"{model.head_dim}",
        ),
        ("Attention", attention),
        ("Vocabulary", f"{model.vocab_size:,} tokens"),
        ("Context", f"{limits.max_context:,} tokens"),
        (
            "KV cache",
            f"{precision.kv_cache}, {manifest.page_bytes / limits.page_size / 1024:.1f} KiB a token,"
            f" pages of {limits.page_size}",
        ),
        ("Size on disk", f"{size_bytes(folder, manifest) / 2**20:,.0f} MiB"),
        ("Built with", ", ".join(f"{package} {version}" for package, version in manifest.builder.items())),
    ]
    if plan := manifest.plan:
        steps = f"{plan.decode.max_rows} sequences decode, {plan.prefill.max_tokens} tokens of {plan.prefill.max_rows} prefill"
        rows.insert(2, ("Largest step", steps))
    if quality := manifest.quality:
        rows.append(("Quality", _quality(manifest, quality)))
    return rows


def size_bytes(folder: Path, manifest: EngineManifest) -> int:
    """Of the engine's files on disk."""
    return sum((folder / name).stat().st_size for name in manifest.files)


def _quality(manifest: EngineManifest, quality: Quality) -> str:
    text = f"perplexity {quality.perplexity:.2f}"
    if quality.reference_perplexity is not None:
        increase = quality.perplexity / quality.reference_perplexity - 1
        text += f", unquantized {quality.reference_perplexity:.2f} ({increase:+.1%})"
    if quality.top1_agreement is not None and quality.kl_divergence is not None:
        text += f", top-1 agreement {quality.top1_agreement:.1%}, KL {quality.kl_divergence:.4f} nats"
    text += f", on {quality.num_tokens:,} tokens of {quality.text}"
    return text + (f", as an {quality.runtime} engine of the same weights" if quality.runtime != manifest.runtime else "")


def _hardware(plan: Plan | None) -> str:
    if plan is None:
        return ""
    capabilities = ", ".join(plan.compute_capabilities)
    return f" {plan.tensorrt_version}, compute capability {capabilities}" + (f" ({plan.device})" if plan.device else "")
