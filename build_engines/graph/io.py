"""The graph's inputs and outputs, in one table (docs/architecture.md says what each means).

T tokens of all rows, B rows, P pages a row, L rows of logits, M tokens of the longest row, N pages of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from build_engines.graph.ops import GraphBuilder

INT32, INT64, FLOAT = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT

COMMON_INPUTS: tuple[tuple[str, ir.DataType, tuple[int | str, ...]], ...] = (
    ("input_ids", INT64, ("T",)),
    ("position_ids", INT64, ("T",)),
    ("past_lengths", INT32, ("B",)),
    ("page_table", INT32, ("B", "P")),
    ("logit_positions", INT64, ("L",)),
)
WINDOW_INPUTS = (("window_page_table", INT32, ("B", "P")),)  # where some layers have a window and others have none
FUSED_INPUTS = (("row_starts", INT32, ("B_plus_1",)),)
STANDARD_INPUTS = (("row_tokens", INT64, ("B", "M")), ("token_slots", INT64, ("T",)))
PAGE_AXES = ("N", "page_size", "kv_heads", "head_dim")


@dataclass(frozen=True)
class GraphInputs:
    """Input values by name, and the page table and the pool of each layer."""

    named: dict[str, ir.Value]
    page_tables: list[ir.Value]
    key_pages: list[ir.Value]
    value_pages: list[ir.Value]

    def __getitem__(self, name: str) -> ir.Value:
        return self.named[name]


def declare_inputs(
    b: GraphBuilder,
    *,
    fused: bool,
    windows: Sequence[int],
    window_table: bool,
    page_shape: tuple[int | str, ...],
    page_type: ir.DataType = FLOAT,
) -> GraphInputs:
    """`windows` are the layers', 0 where one has none; `page_shape` is (pages, page_size, kv_heads, head_dim)."""
    table = COMMON_INPUTS + (WINDOW_INPUTS if window_table else ()) + (FUSED_INPUTS if fused else STANDARD_INPUTS)
    named = {name: b.input(name, dtype, shape) for name, dtype, shape in table}
    pages = [
        (b.input(f"key_pages.{i}", page_type, page_shape), b.input(f"value_pages.{i}", page_type, page_shape))
        for i in range(len(windows))
    ]
    names = ["window_page_table" if window_table and window else "page_table" for window in windows]
    return GraphInputs(named, [named[name] for name in names], [key for key, _ in pages], [value for _, value in pages])


def input_axes(name: str) -> tuple[int | str, ...]:
    """Names of the axes of an input of the standard graph. Raises KeyError for another name."""
    if name.startswith(("key_pages.", "value_pages.")):
        return PAGE_AXES
    return {known: axes for known, _, axes in COMMON_INPUTS + WINDOW_INPUTS + STANDARD_INPUTS}[name]
