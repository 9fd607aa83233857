"""The Triton model: wiring between Triton's calls and the runtime. What is served is decided in config.pbtxt."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from llm_runtime.triton.service import Service

logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


class TritonPythonModel:
    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        self.service = Service(model_config, Path(args["model_repository"]), args["model_version"])

    def execute(self, requests):
        """Returns when there is room for more, not when these are done: until then others wait in Triton's queue."""
        self.service.accept(requests)
        self.service.wait_for_room()

    def is_ready(self):
        return self.service.is_healthy

    def finalize(self):
        self.service.close()
