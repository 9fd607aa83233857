"""Manifests for tests that need no engine."""

from llm_runtime.manifest import EngineManifest, Plan, Profile


def make_manifest(
    *, num_layers: int = 2, num_kv_heads: int = 2, head_dim: int = 32, page_size: int = 16, max_context: int = 512
) -> EngineManifest:
    return EngineManifest.model_validate(
        {
            "schema_version": 2,
            "name": "test",
            "runtime": "onnxruntime",
            "model": {
                "family": "llama",
                "vocab_size": 512,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_layers": num_layers,
                "num_heads": 2 * num_kv_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "layer_windows": [0] * num_layers,
                "bos_token_id": 1,
                "eos_token_ids": [2],
            },
            "precision": {"weights": "fp32", "lm_head": "fp32", "embedding": "fp32"},
            "limits": {"max_context": max_context, "page_size": page_size},
            "graphs": {"standard": "graph.onnx", "fused": "graph.fused.onnx"},
            "files": {},
            "source": {"model": "test", "format": "hf"},
            "builder": {},
        }
    )


def make_plan(
    *,
    max_batch: int = 8,
    max_step_tokens: int = 64,
    max_prefill_rows: int = 2,
    max_row_pages: int = 32,
    max_pages: int = 1000,
    version: str = "1.7.1.116",
) -> Plan:
    prefill = Profile(
        max_rows=max_prefill_rows,
        max_tokens=max_step_tokens,
        max_row_tokens=max_step_tokens,
        max_row_pages=max_row_pages,
        max_logits=max_prefill_rows,
    )
    decode = Profile(
        max_rows=max_batch, max_tokens=max_batch, max_row_tokens=1, max_row_pages=max_row_pages, max_logits=max_batch
    )
    return Plan(
        file="engine.plan",
        tensorrt_version=version,
        compute_capabilities=("8.9", "12.0"),
        prefill=prefill,
        decode=decode,
        max_pages=max_pages,
    )


def with_plan(manifest: EngineManifest, plan: Plan, *, runtime: str = "tensorrt-rtx", kv_cache: str = "fp32") -> EngineManifest:
    """The same model as a plan."""
    content = manifest.model_dump() | {"runtime": runtime, "graphs": {}, "plan": plan.model_dump()}
    content["precision"]["kv_cache"] = kv_cache
    return EngineManifest.model_validate(content)
