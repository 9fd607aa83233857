"""What the tests of the builder share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from build_engines.errors import BuildError


def refused(action: Any) -> str:
    """The message of the BuildError that `action` raises, which must be one line."""
    with pytest.raises(BuildError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny tensors gain nothing from a second thread, and lose a lot to it where other work shares the processors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
