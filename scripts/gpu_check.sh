#!/usr/bin/env bash
# Checks and measures TensorRT engines on the NVIDIA GPU at hand, without a network: scripts/gpu_check.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" benchmarks/gpu_check.py "$@"
