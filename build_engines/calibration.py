"""The text that quantization looks at, cut into windows of tokens."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from build_engines.errors import BuildError


def default_text() -> str:
    """The built-in calibration text, data/calibration.txt, without its header."""
    text = files("build_engines").joinpath("data").joinpath("calibration.txt").read_text(encoding="utf-8")
    return text.partition("\n\n")[2]


def read_text(path: Path) -> str:
    """A user's calibration text. Raises BuildError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: the calibration text cannot be read as UTF-8 ({error})") from error


def token_windows(text: str, tokenizer: Path, bos: int | None, num_windows: int, length: int) -> np.ndarray:
    """At most `num_windows` windows of `length` tokens, spread evenly over the text and not overlapping: int64 [n, length].

    Each begins with `bos` if there is one, since models are used to it, and some (Gemma) fail without. Raises BuildError for a
    text that is shorter than one window.
    """
    from tokenizers import Tokenizer

    ids = np.array(Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids, np.int64)
    first = [] if bos is None else [bos]
    size = length - len(first)
    count = min(num_windows, len(ids) // size)
    if count == 0:
        raise BuildError(f"the calibration text has {len(ids)} tokens; at least {size} are needed")
    step = (len(ids) - size) // max(1, count - 1)
    return np.stack([np.concatenate([first, ids[i * step : i * step + size]]) for i in range(count)]).astype(np.int64)
