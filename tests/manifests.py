"""Manifests for tests that need no engine."""

from llm_runtime.manifest import EngineManifest


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
