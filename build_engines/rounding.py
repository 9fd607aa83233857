"""Rounds weights to INT4 so that a layer's outputs, not its weights, stay close.

Round-to-nearest treats every weight alone. But an error in one column of a weight matrix can be undone, in part, by the
columns after it, as far as their inputs are correlated (GPTQ, https://arxiv.org/abs/2210.17323). And a scale that clips a
block's largest weights a little may serve its other weights better. Both need only the second moments of a layer's inputs,
H = X'X: rounding W to Q costs tr((W - Q) H (W - Q)').
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Scales tried, as parts of the one that represents a block's largest weight.
_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64)
# Added to H's diagonal, as a part of its mean: H comes from few tokens, and may not be invertible.
_DAMPING = 0.01


def round_weight(weight: "torch.Tensor", moments: "torch.Tensor", block_size: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The rounded weight, float32 [out, in], and the scales of its blocks, float32 [out, in / block_size].

    Every rounded value is a whole multiple, -8 to 7, of its block's scale. weight: float32 [out, in]. moments: float32
    [in, in], X'X of the layer's inputs. Neither is changed. block_size must divide `in`.
    """
    import torch

    num_in = weight.shape[1]
    moments = moments.clone()
    diagonal = moments.diagonal()
    diagonal += _DAMPING * diagonal.mean() + torch.finfo(torch.float32).tiny
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    factor = torch.linalg.cholesky(inverse, upper=True)

    # By column of the weight, so that each step works on contiguous memory.
    left = weight.T.contiguous()
    rounded = torch.empty_like(left)
    scales = torch.empty(num_in // block_size, weight.shape[0])
    for start in range(0, num_in, block_size):
        end = start + block_size
        block = left[start:end]
        scale = _best_scale(block, moments[start:end, start:end])
        errors = torch.empty_like(block)
        for i in range(block_size):
            column = block[i]
            near = torch.round(column / scale).clamp_(-8, 7).mul_(scale)
            rounded[start + i] = near
            errors[i] = (column - near) / factor[start + i, start + i]
            block[i + 1 :].addr_(factor[start + i, start + i + 1 : end], errors[i], alpha=-1)
        left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
        scales[start // block_size] = scale
    return rounded.T.contiguous(), scales.T.contiguous()


def _best_scale(block: "torch.Tensor", moments: "torch.Tensor") -> "torch.Tensor":
    """For each row of the weight, the scale that costs least when its block is rounded to nearest. block: [block, out]."""
    import torch

    full = block.abs().amax(dim=0) / 7
    full = torch.where(full == 0, torch.ones_like(full), full)
    best, best_cost = full, torch.full_like(full, torch.inf)
    for shrink in _SHRINKS:
        scale = full * shrink
        error = block - torch.round(block / scale).clamp_(-8, 7).mul_(scale)
        cost = (error * (moments @ error)).sum(dim=0)
        is_better = cost < best_cost
        best, best_cost = torch.where(is_better, scale, best), torch.where(is_better, cost, best_cost)
    return best
