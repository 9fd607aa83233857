"""Rounds weights to INT4 or FP8 so that a layer's outputs, not its weights, stay close.

Round-to-nearest treats every weight alone. But an error in one column of a weight matrix can be undone, in part, by the
columns after it, as far as their inputs are correlated (GPTQ, https://arxiv.org/abs/2210.17323). And a scale that clips a
block's largest weights a little may serve its other weights better. Both need only the second moments of a layer's inputs,
H = X'X: rounding W to Q costs tr((W - Q) H (W - Q)').
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    # (the block [columns, out], its moments [columns, columns]) -> scales [out]
    ChooseScale = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    # (a column [out], scales [out], where the rounded column goes)
    Nearest = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

# Scales tried, as parts of the one that represents a block's largest weight.
_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64)
# Added to H's diagonal, as a part of its mean: H comes from few tokens, and may not be invertible.
_DAMPING = 0.01
_INT4, _E4M3 = 4, (4, 3)  # as modelopt writes them
_E4M3_MAX = 448.0
# Columns rounded one by one before the others hear of their errors, all at once: few enough to stay in the cache.
_RUN = 16


def round_layers(
    model: Any,
    batch: "torch.Tensor",
    groups: Sequence[Sequence[str]],
    progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Rounds the INT4 and FP8 layers of a model that modelopt simulates, in place, one decoder layer after another.

    batch: int64 [n, tokens], run through the model once; each layer sees what the rounded ones before it give. groups: names,
    within a decoder layer, of all linears; those of one group share their input, with its scale, and their precision.
    Afterwards weights are what their scales, which the quantizers hold, can represent, so that modelopt's own rounding leaves
    them as they are.
    """
    import torch

    layers = model.model.layers
    handles = []
    for index, layer in enumerate(layers):
        rounder = _LayerRounder(layer, groups)
        handles += rounder.handles

        def finish(layer: Any, args: Any, kwargs: Any, _: Any, rounder: _LayerRounder = rounder, index: int = index) -> Any:
            rounder.round()
            progress((index + 1) / len(layers))
            # The first output came from unrounded weights. Hooks do not run again on `forward`.
            return layer.forward(*args, **kwargs)

        handles.append(layer.register_forward_hook(finish, with_kwargs=True))
    try:
        with torch.no_grad():
            model.model(batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


class _LayerRounder:
    """The second moments of the inputs of one decoder layer's linears, from when the layer runs until it is rounded."""

    def __init__(self, layer: Any, groups: Sequence[Sequence[str]]) -> None:
        linears = [[layer.get_submodule(name) for name in names] for names in groups]
        self._groups = [group for group in linears if _bits(group[0]) in (_INT4, _E4M3)]
        self._moments: dict[int, torch.Tensor] = {}
        self.handles = [
            linears[0].register_forward_pre_hook(lambda linear, args, i=i: self._see(i, linear, args[0]))
            for i, linears in enumerate(self._groups)
        ]

    def _see(self, group: int, linear: Any, inputs: "torch.Tensor") -> None:
        # The input quantizer holds AWQ's scale, or rounds to FP8.
        scaled = linear.input_quantizer(inputs).flatten(0, -2).float()
        self._moments[group] = scaled.T @ scaled

    def round(self) -> None:
        import torch

        for handle in self.handles:
            handle.remove()
        for i, linears in enumerate(self._groups):
            sizes = [linear.weight.shape[0] for linear in linears]
            weight = torch.cat([linear.weight.detach() for linear in linears])
            quantizer = linears[0].weight_quantizer
            if _bits(linears[0]) == _INT4:
                rounded, scales = round_weight(weight, self._moments.pop(i), quantizer.block_sizes[-1])
                for linear, scale in zip(linears, scales.split(sizes), strict=True):
                    linear.weight_quantizer.amax = (scale * quantizer.maxbound).reshape(linear.weight_quantizer.amax.shape)
            else:  # one scale, which all of the group have
                rounded = round_to_e4m3(weight, self._moments.pop(i), float(quantizer.amax) / _E4M3_MAX)
            for linear, values in zip(linears, rounded.split(sizes), strict=True):
                linear.weight.data = values.clone()


def _bits(linear: Any) -> Any:
    """In modelopt's words; None: not quantized."""
    return linear.weight_quantizer.num_bits if linear.weight_quantizer.is_enabled else None


def round_weight(weight: "torch.Tensor", moments: "torch.Tensor", block_size: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The rounded weight, float32 [out, in], and the scales of its blocks, float32 [out, in / block_size].

    Every rounded value is a whole multiple, -8 to 7, of its block's scale. weight: float32 [out, in]. moments: float32
    [in, in], X'X of the layer's inputs. Neither is changed. block_size must divide `in`.
    """
    import torch

    def nearest(column: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        torch.div(column, scale, out=out).round_().clamp_(-8, 7).mul_(scale)

    return _round(weight, moments, block_size, _best_scale, nearest)


def round_to_e4m3(weight: "torch.Tensor", moments: "torch.Tensor", scale: float) -> "torch.Tensor":
    """The rounded weight, float32 [out, in], every value an E4M3 number times `scale`. Arguments as of `round_weight`."""
    import torch

    def nearest(column: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((column / scale).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)).mul_(scale)

    def same_scale(block: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        return torch.full((block.shape[1],), scale)

    return _round(weight, moments, _RUN, same_scale, nearest)[0]


def _round(
    weight: "torch.Tensor", moments: "torch.Tensor", block_size: int, choose_scale: "ChooseScale", nearest: "Nearest"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Column by column, the error of each made good by those after it; `choose_scale` is asked once a block of columns."""
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
    errors = torch.empty_like(left)
    scales = torch.empty(-(-num_in // block_size), weight.shape[0])
    for start in range(0, num_in, block_size):
        end = min(start + block_size, num_in)
        scale = choose_scale(left[start:end], moments[start:end, start:end])
        scales[start // block_size] = scale
        for first in range(start, end, _RUN):
            last = min(first + _RUN, end)
            with _one_thread():
                run = factor[first:last, first:last]
                _round_run(left[first:last], scale, run, rounded[first:last], errors[first:last], nearest)
            left[last:end].addmm_(factor[first:last, last:end].T, errors[first:last], alpha=-1)
        left[end:].addmm_(factor[start:end, end:].T, errors[start:end], alpha=-1)
    return rounded.T.contiguous(), scales.T.contiguous()


def _round_run(
    left: "torch.Tensor",
    scale: "torch.Tensor",
    factor: "torch.Tensor",
    rounded: "torch.Tensor",
    errors: "torch.Tensor",
    nearest: "Nearest",
) -> None:
    """Rounds a run of columns, each with its error passed on to those after it. All but `factor` and `scale`: [run, out]."""
    import torch

    for i, column in enumerate(left):
        nearest(column, scale, rounded[i])
        torch.sub(column, rounded[i], out=errors[i]).div_(factor[i, i])
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Steps this small are done before a second thread has woken, and on a busy machine wait for it all the longer."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


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
