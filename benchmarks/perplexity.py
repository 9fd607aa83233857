"""Perplexity of engines on held-out text: `python benchmarks/perplexity.py TEXT ENGINE [ENGINE ...]`.

Windows of BOS + 512 tokens from the start of the text; the first token of a window is not scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track
from tokenizers import Tokenizer

from llm_runtime.executors.base import Row
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.manifest import read_manifest

WINDOW = 512
CHUNK = 128  # of logits at a time: a vocabulary of 262,144 makes each row a megabyte


def main(
    text: Annotated[Path, typer.Argument(help="UTF-8 text.")],
    engines: Annotated[list[Path], typer.Argument(help="Engine folders.")],
    num_windows: int = 8,
    skip_windows: int = 0,
    matmul: Annotated[str, typer.Option(help="int8 or fp32 activations beside INT4 weights.")] = "int8",
    threads: int = 0,
) -> None:
    """Print each engine's perplexity over the same tokens."""
    for folder in engines:
        manifest = read_manifest(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = tokenizer.encode(text.read_text(errors="replace"), add_special_tokens=False).ids
        bos = manifest.model.bos_token_id
        options = OrtOptions(num_threads=threads, matmul_accuracy={"int8": 4, "fp32": 1}[matmul])
        num_pages = -(-(WINDOW + 1) // manifest.limits.page_size)
        executor = OrtExecutor(folder, manifest, num_pages, options)
        losses = []
        for index in track(range(skip_windows, skip_windows + num_windows), description=folder.name, transient=True):
            window = ids[index * WINDOW : (index + 1) * WINDOW]
            losses.append(_losses(executor, [bos, *window] if bos is not None else window))
        perplexity = float(np.exp(np.concatenate(losses).mean()))
        print(
            f"{folder.name:32s} perplexity {perplexity:7.3f}   ({sum(map(len, losses))} tokens, {executor.attention} attention)"
        )
        executor.close()


def _losses(executor: OrtExecutor, ids: list[int]) -> np.ndarray:
    """-log p of each token after the first: [tokens - 1]"""
    pages = list(range(executor.num_pages))
    losses = []
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = ids[start : min(start + CHUNK, len(ids) - 1)]
        logits = executor.execute([Row(chunk, start, pages, len(chunk))])
        targets = ids[start + 1 : start + 1 + len(chunk)]
        top = logits.max(axis=1)
        totals = top + np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64))
        losses.append(totals - logits[np.arange(len(chunk)), targets])
    return np.concatenate(losses)


if __name__ == "__main__":
    typer.run(main)
