"""Attention over the KV pages: the one layer where targets differ, behind the same inputs and outputs.

An attention is called once a layer with query [T, heads*dim], key and value [T, kv_heads*dim] (rotated) and returns [T,
heads*dim], and key and value as they go into the pages. It sees its row's past tokens in the pages and the row's own tokens up
to itself, at most `window` back where the layer has a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from build_engines.checkpoint.types import DecoderConfig
from build_engines.graph.io import GraphInputs
from build_engines.graph.numerics import NUMPY_TYPES, Numerics
from build_engines.graph.ops import KERNEL_DOMAIN, GraphBuilder
from llm_runtime.manifest import CacheName


class Attention(Protocol):
    def __call__(
        self, b: GraphBuilder, layer: int, query: ir.Value, key: ir.Value, value: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]: ...


class Cache:
    """How keys and values are kept in pages: as they are, or as FP8 E4M3 with one scale for a layer's keys, one for its values.

    A step's own keys and values are read back from what is kept too, so that no result depends on how a prompt was cut.
    """

    def __init__(self, numerics: Numerics, scales: Sequence[tuple[float, float] | None]) -> None:
        self._numerics = numerics
        self._scales = [(1.0, 1.0) if pair is None else pair for pair in scales]

    def store(self, b: GraphBuilder, layer: int, part: int, x: ir.Value) -> ir.Value:
        """`part` 0: keys, 1: values."""
        if self._numerics.cache != "fp8":
            return x
        return b.op("QuantizeLinear", x, self._scale(b, layer, part), b.const(0, ml_dtypes.float8_e4m3fn))

    def load(self, b: GraphBuilder, layer: int, part: int, kept: ir.Value) -> ir.Value:
        if self._numerics.cache != "fp8":
            return kept
        return b.op("DequantizeLinear", kept, self._scale(b, layer, part), b.const(0, ml_dtypes.float8_e4m3fn))

    def _scale(self, b: GraphBuilder, layer: int, part: int) -> ir.Value:
        return b.const(self._scales[layer][part], NUMPY_TYPES[self._numerics.compute])


FORMATS = {"int8": 1, "fp8": 2}  # of QuantizedPagedAttention


class FusedAttention:
    """`llm_runtime::PagedAttention`: a kernel that reads pages where they lie. Quantized pages have one of their own, which
    rounds keys and values itself, each block of a head by a scale of its own, and reads back what it rounded them to."""

    def __init__(self, config: DecoderConfig, inputs: GraphInputs, cache: CacheName) -> None:
        self._config = config
        self._inputs = inputs
        self._cache = cache

    def __call__(
        self, b: GraphBuilder, layer: int, query: ir.Value, key: ir.Value, value: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        config, inputs = self._config, self._inputs
        arguments = (
            query,
            key,
            value,
            inputs.key_pages[layer],
            inputs.value_pages[layer],
            inputs["row_starts"],
            inputs["past_lengths"],
            inputs.page_tables[layer],
        )
        attributes: dict[str, object] = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "scale": config.attention_scale,
            "window": config.layer_windows[layer],
        }
        if self._cache == "fp32":
            return b.op("PagedAttention", *arguments, domain=KERNEL_DOMAIN, **attributes), key, value
        attributes["format"] = FORMATS[self._cache]
        attended, kept_key, kept_value = b.ops(
            "QuantizedPagedAttention", *arguments, num_outputs=3, domain=KERNEL_DOMAIN, **attributes
        )
        return attended, kept_key, kept_value


class StandardAttention:
    """Standard operators: rows become a rectangle [B, M], pages are gathered, a mask hides what is not there.

    A window layer gathers only the pages that its window can touch, so its cost does not grow with the context.
    """

    def __init__(self, config: DecoderConfig, inputs: GraphInputs, page_size: int, cache: Cache) -> None:
        self._config = config
        self._inputs = inputs
        self._page_size = page_size
        self._cache = cache
        self._tables: dict[int, tuple[ir.Value, ir.Value]] = {}

    def __call__(
        self, b: GraphBuilder, layer: int, query: ir.Value, key: ir.Value, value: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        config, inputs = self._config, self._inputs
        window = config.layer_windows[layer]
        kept_key, kept_value = self._cache.store(b, layer, 0, key), self._cache.store(b, layer, 1, value)
        if window not in self._tables:
            self._tables[window] = self._table_and_mask(b, inputs.page_tables[layer], window)
        table, mask = self._tables[window]
        # The whole pool is dequantized on paper only: TensorRT takes FP8 from nothing but its own operator, which it then runs
        # on what is gathered.
        keys, key, values, value = (
            self._cache.load(b, layer, part, kept)
            for part, parts in enumerate(((inputs.key_pages[layer], kept_key), (inputs.value_pages[layer], kept_value)))
            for kept in parts
        )
        output = b.op(
            "Attention",
            b.op("Gather", query, inputs["row_tokens"]),
            self._past_and_new(b, keys, table, key),
            self._past_and_new(b, values, table, value),
            mask,
            q_num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=config.attention_scale,
        )
        tokens = b.op("Reshape", output, b.const([-1, config.num_heads * config.head_dim]))
        return b.op("Gather", tokens, inputs["token_slots"]), kept_key, kept_value

    def _past_and_new(self, b: GraphBuilder, pages: ir.Value, table: ir.Value, new: ir.Value) -> ir.Value:
        """[B, P*page_size + M, kv_heads*dim]"""
        gathered = b.op("Gather", pages, table)
        shape = b.op(
            "Concat",
            b.op("Shape", table, start=0, end=1),
            b.const([-1, self._config.num_kv_heads * self._config.head_dim]),
            axis=0,
        )
        return b.op("Concat", b.op("Reshape", gathered, shape), b.op("Gather", new, self._inputs["row_tokens"]), axis=1)

    def _table_and_mask(self, b: GraphBuilder, table: ir.Value, window: int) -> tuple[ir.Value, ir.Value]:
        """The part of the page table to gather and the mask bool [B, 1, M, past + M] of what each query may attend to."""
        inputs = self._inputs
        past = b.op("Unsqueeze", b.op("Cast", inputs["past_lengths"], to=ir.DataType.INT64), b.const([1]))  # [B, 1]
        query_index = _arange(b, b.op("Shape", inputs["row_tokens"], start=1, end=2))  # [M]
        table, key_position = self._windowed_table(b, table, past, window) if window else self._full_table(b, table)
        past_key = b.op("Unsqueeze", key_position, b.const([1]))  # [B or 1, 1, S]
        seen = b.op("Less", past_key, b.op("Unsqueeze", past, b.const([2])))  # [B, 1, S]
        query_column = b.op("Unsqueeze", query_index, b.const([1]))  # [M, 1]
        causal = b.op("LessOrEqual", b.op("Unsqueeze", query_index, b.const([0])), query_column)  # [M, M]
        query_position = b.op("Add", b.op("Unsqueeze", past, b.const([2])), query_column)  # [B, M, 1]
        if window:
            bound = b.op("Sub", query_position, b.const(window))
            seen = b.op("And", seen, b.op("Greater", past_key, bound))
            first = b.op("Sub", query_column, b.const(window))
            causal = b.op("And", causal, b.op("Greater", b.op("Unsqueeze", query_index, b.const([0])), first))
        else:
            seen = b.op("And", seen, b.op("GreaterOrEqual", query_position, b.const(0)))  # to [B, M, S]
        batch = b.op("Shape", past, start=0, end=1)
        size = b.op("Shape", query_index)
        causal = b.op("Expand", causal, b.op("Concat", batch, size, size, axis=0))  # [B, M, M]
        mask = b.op("Concat", seen, causal, axis=2)
        return table, b.op("Unsqueeze", mask, b.const([1]))

    def _full_table(self, b: GraphBuilder, table: ir.Value) -> tuple[ir.Value, ir.Value]:
        num_slots = b.op("Mul", b.op("Shape", table, start=1, end=2), b.const([self._page_size]))
        return table, b.op("Unsqueeze", _arange(b, num_slots), b.const([0]))

    def _windowed_table(self, b: GraphBuilder, table: ir.Value, past: ir.Value, window: int) -> tuple[ir.Value, ir.Value]:
        """Only pages from the one that holds the first query's oldest visible key (at past - window + 1)."""
        page_size = self._page_size
        num_pages = (window - 2) // page_size + 2  # window - 1 past tokens touch at most this many pages
        oldest = b.op("Max", b.op("Sub", past, b.const(window - 1)), b.const(0))
        first_page = b.op("Div", oldest, b.const(page_size))  # [B, 1]
        wanted = b.op("Add", first_page, b.const(np.arange(num_pages)[None]))  # [B, num_pages]
        last = b.op("Sub", b.op("Shape", table, start=1, end=2), b.const([1]))
        # Past the table's end the last page is read again; its positions there are beyond the past, so the mask hides it.
        table = b.op("GatherElements", table, b.op("Min", wanted, last), axis=1)
        slots = b.op("Add", b.op("Mul", first_page, b.const(page_size)), b.const(np.arange(num_pages * page_size)[None]))
        return table, slots


def _arange(b: GraphBuilder, size: ir.Value) -> ir.Value:
    """0 .. size-1 for a size of shape [1]."""
    return b.op("Range", b.const(0), b.op("Squeeze", size), b.const(1))
