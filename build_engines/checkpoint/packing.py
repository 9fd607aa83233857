"""Four-bit numbers out of the bytes and words that formats pack them into."""

import numpy as np


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., 2n], each in 0..15, of uint8 [..., n]: the low half of each byte comes first."""
    nibbles = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    nibbles[..., 0::2] = packed & 0x0F
    nibbles[..., 1::2] = packed >> 4
    return nibbles


def unpack_words(words: np.ndarray) -> np.ndarray:
    """uint8 [..., 8n], each in 0..15, of int32 [..., n]: the lowest bits of each word come first."""
    return unpack_nibbles(np.ascontiguousarray(words, "<i4").view(np.uint8))
