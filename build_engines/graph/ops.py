"""A thin hand on onnx_ir: operators by name, weights by the checkpoint's names, constants once each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

OPSET = 23  # Attention, RotaryEmbedding and RMSNormalization became standard operators here
IR_VERSION = 11  # the file version that came with opset 23
KERNEL_DOMAIN = "llm_runtime"


class GraphBuilder:
    """Records nodes and initializers of one graph; `finish` makes the model."""

    def __init__(self, weights: Mapping[str, ir.TensorProtocol], compute: ir.DataType = ir.DataType.FLOAT) -> None:
        self._tape = Tape()
        self._weights = weights
        self._compute = compute
        self._values: dict[str, ir.Value] = {}
        self._inputs: list[ir.Value] = []

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: object) -> ir.Value:
        return self._tape.op(op_type, inputs, attributes or None, domain=domain)  # type: ignore[arg-type]

    def ops(
        self, op_type: str, *inputs: ir.Value | None, num_outputs: int, domain: str = "", **attributes: object
    ) -> Sequence[ir.Value]:
        return self._tape.op_multi_out(op_type, inputs, attributes or None, num_outputs=num_outputs, domain=domain)  # type: ignore[arg-type]

    def to_float32(self, x: ir.Value) -> ir.Value:
        return x if self._compute == ir.DataType.FLOAT else self.op("Cast", x, to=ir.DataType.FLOAT)

    def to_compute(self, x: ir.Value) -> ir.Value:
        """A float32 value in the type that the graph computes in."""
        return x if self._compute == ir.DataType.FLOAT else self.op("Cast", x, to=self._compute)

    def weight(self, name: str) -> ir.Value:
        """The initializer called `name`; raises KeyError when the checkpoint gave no such tensor."""
        return self._initializer(name, self._weights[name])

    def const(self, value: object, dtype: type[np.generic] = np.int64) -> ir.Value:
        array = np.asarray(value, dtype=dtype)
        name = f"const_{array.dtype}_{'x'.join(map(str, array.shape))}_{array.tobytes().hex()[:64]}"
        return self._initializer(name, ir.tensor(array, name=name))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        if name not in self._values:
            self._values[name] = self._tape.initializer(tensor, name=name)
        return self._values[name]

    def finish(self, outputs: Sequence[tuple[str, ir.Value, ir.DataType, Sequence[int | str]]], name: str) -> ir.Model:
        values = []
        for output_name, value, dtype, shape in outputs:
            value.name, value.type, value.shape = output_name, ir.TensorType(dtype), ir.Shape(shape)
            values.append(value)
        domains = {node.domain for node in self._tape.nodes}
        opsets = {"": OPSET} | {domain: 1 for domain in domains if domain}
        graph = ir.Graph(
            self._inputs,
            values,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports=opsets,
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="build_engines")
