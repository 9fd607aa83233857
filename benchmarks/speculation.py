"""One stream with and without guesses ahead, in turn in one run: `python benchmarks/speculation.py ENGINE [--draft ENGINE]`.

Three prompts: code to be copied, where nearly every guess from the text is right, a sentence to be continued, and a form to be
filled in, where the JSON schema says most of it. With --draft the guesses are another engine's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import machine
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from llm_runtime.engine import Engine, EngineConfig
from llm_runtime.executors.ort import OrtExecutor, OrtOptions
from llm_runtime.guide import Guides
from llm_runtime.manifest import read_manifest
from llm_runtime.page_pool import PageGroup
from llm_runtime.types import GenerationRequest, Guide, SamplingParams

CODE = """def add(a, b):
    return a + b

def subtract(a, b):
    return a - b

def multiply(a, b):
    return a * b

def divide(a, b):
    if b == 0:
        raise ZeroDivisionError("b is zero")
    return a / b
"""
PROMPTS = {
    "copy 14 lines of code": f"Copy the code.\n\nOriginal:\n{CODE}\nCopy:\ndef add(a, b):\n",
    "continue a sentence": "The history of computing began",
}
FORM = "fill in a form"
PROMPTS[FORM] = "Order: a blue shirt, large, two pieces, to Anna Berg in Oslo.\n\nAs JSON:\n"
PROPERTIES: dict[str, dict] = {
    "customer_first_name": {"type": "string", "maxLength": 20},
    "customer_last_name": {"type": "string", "maxLength": 20},
    "delivery_address_city": {"type": "string", "maxLength": 20},
    "product_description": {"type": "string", "maxLength": 30},
    "product_size": {"enum": ["small", "medium", "large"]},
    "number_of_pieces_ordered": {"type": "integer", "minimum": 1, "maximum": 99},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
LIMITS = (0, 2, 4, 8)
PAGES = [PageGroup(64)]


def main(
    engine: Annotated[Path, typer.Argument(help="Engine folder.")],
    draft: Annotated[Path | None, typer.Option(help="Folder of an engine that guesses.")] = None,
    threads: int = 2,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 100,
    repeats: Annotated[int, typer.Option(help="Runs of each; the best is shown.")] = 3,
) -> None:
    """Time the tokens of a stream, by the most that is guessed ahead."""
    manifest = read_manifest(engine)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    model = manifest.model
    form = Guides(engine / "tokenizer.json", model.vocab_size, model.eos_token_ids).compile("json_schema", json.dumps(SCHEMA))
    executor = OrtExecutor(engine, manifest, PAGES, OrtOptions(num_threads=threads))
    guesser, source = None, "its own text"
    if draft:
        draft_manifest = read_manifest(draft)
        guesser, source = OrtExecutor(draft, draft_manifest, PAGES, OrtOptions(num_threads=threads)), draft_manifest.name
    console = Console()
    console.print(
        f"{manifest.name}, guesses from {source}: {machine.describe(threads)}; {tokens} tokens, best of {repeats} runs"
    )
    table = Table("prompt", "at most", "ITL, ms", "times as fast", "guessed", "right", "steps", "same tokens")
    for name, prompt in PROMPTS.items():
        prompt_ids = tuple(tokenizer.encode(prompt).ids)
        guide = form if name == FORM else None
        best: dict[int, float] = {}
        last: dict[int, tuple[Engine, list[int]]] = {}
        for _ in range(repeats):
            for limit in LIMITS:
                run, token_ids, seconds = generate(executor, guesser, tokenizer, prompt_ids, tokens, limit, guide)
                best[limit] = min(seconds, best.get(limit, seconds))
                last[limit] = run, token_ids
        for limit in LIMITS:
            run, token_ids = last[limit]
            table.add_row(
                name,
                str(limit),
                f"{best[limit] * 1e3:.2f}",
                f"{best[0] / best[limit]:.2f}",
                str(run.stats.draft_tokens),
                str(run.stats.accepted_tokens),
                str(run.stats.step.count),
                "yes" if token_ids == last[0][1] else "no",
            )
    console.print(table)


def generate(
    executor: OrtExecutor,
    guesser: OrtExecutor | None,
    tokenizer: Tokenizer,
    prompt_ids: tuple[int, ...],
    count: int,
    limit: int,
    guide: Guide | None,
) -> tuple[Engine, list[int], float]:
    """(the engine that ran it, the tokens, the mean ITL in seconds)"""
    context = len(prompt_ids) + count
    config = EngineConfig(1, context, context, context, end_ids=(), prefix_caching=False, max_draft_tokens=limit)
    engine = Engine(executor, tokenizer, config, draft=guesser)
    sampling = SamplingParams(max_tokens=count, ignore_eos=guide is None, guide=guide)
    engine.add(GenerationRequest("stream", prompt_ids, sampling))
    token_ids = [token for output in engine.step(time.monotonic()) for token in output.token_ids]
    started = time.perf_counter()
    while engine.has_work:
        token_ids += [token for output in engine.step(time.monotonic()) for token in output.token_ids]
    return engine, token_ids, (time.perf_counter() - started) / (len(token_ids) - 1)


if __name__ == "__main__":
    typer.run(main)
