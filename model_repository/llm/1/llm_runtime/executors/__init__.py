"""What runs an engine, chosen by its manifest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from llm_runtime.config import Parameters, size_pool
from llm_runtime.errors import EngineError
from llm_runtime.executors.base import Executor
from llm_runtime.manifest import EngineManifest
from llm_runtime.page_pool import PageGroup

log = logging.getLogger(__name__)


def open_executor(
    folder: Path, manifest: EngineManifest, parameters: Parameters, page_groups: Sequence[PageGroup] | None = None
) -> Executor:
    """The executor of an engine whose files are known to be whole.

    page_groups: of the KV pool, where an executor is to take another's place; None: as `parameters` say.
    Raises ConfigError where they cannot be had, EngineError where the engine cannot be run here.
    """
    # Imported here, since neither needs what the other does.
    if manifest.runtime == "onnxruntime":
        from llm_runtime.executors.ort import OrtExecutor, OrtOptions

        accuracy = {"int8": 4, "fp32": 1}[parameters.matmul_accuracy]
        ort_options = OrtOptions(parameters.num_threads, accuracy, parameters.attention)
        return OrtExecutor(folder, manifest, page_groups or size_pool(parameters, manifest), ort_options)
    try:
        from llm_runtime.executors.trt import TrtOptions, open_tensorrt
    except ImportError as error:
        raise EngineError(f"an engine for {manifest.runtime} needs torch with CUDA ({error}); pip install torch") from error
    _say_what_is_cut(parameters, manifest)
    trt_options = TrtOptions(cuda_graphs=parameters.cuda_graphs)
    return open_tensorrt(folder, manifest, trt_options, lambda gpu: page_groups or size_pool(parameters, manifest, gpu))


def _say_what_is_cut(parameters: Parameters, manifest: EngineManifest) -> None:
    """Steps larger than the plan's profiles run all the same, as several calls one after another."""
    plan = manifest.plan
    assert plan is not None
    for knob, asked, largest, option in (
        ("max_sequences", parameters.max_sequences, plan.decode.max_rows, "--max-batch"),
        ("max_step_tokens", parameters.max_step_tokens, plan.prefill.max_tokens, "--max-step-tokens"),
    ):
        if asked > largest:
            log.warning("%s %d is over the plan's %d: such steps run in parts; build with %s", knob, asked, largest, option)
