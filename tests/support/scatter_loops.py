"""Scatters as functions that loop over their updates, which may become part of a larger kernel.

XLA's CPU backend has a compiler of its own for scatters, which takes as long for one as another for dozens
of operations. A loop computes the same: one update after the other, but for updates that do not lie in the
operand as a whole.
"""

import dataclasses
import math
from collections.abc import Iterable

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

# What a number becomes that meets an update; a scatter of a function of its own stays a scatter.
COMBINED = {
    f"stablehlo.{name}": f"stablehlo.{name} %old, %update : {{window}}"
    for name in ("add", "multiply", "minimum", "maximum", "and", "or", "xor")
} | {"stablehlo.return": "stablehlo.reshape %update : ({window}) -> {window}"}
LOOP = """
func.func private @{name}(%operand: {operand}, %indices: {indices}, %updates: {updates}) -> {operand} {{
  %zero = stablehlo.constant dense<0> : {index}
  %one = stablehlo.constant dense<1> : {index}
  %count = stablehlo.constant dense<{count}> : {index}
  {prepared}
  %end:2 = stablehlo.while(%step = %zero, %carried = %operand) : {index}, {operand} cond {{
    %more = stablehlo.compare LT, %step, %count, SIGNED : ({index}, {index}) -> tensor<i1>
    stablehlo.return %more : tensor<i1>
  }} do {{
    {written}
    %next = stablehlo.add %step, %one : {index}
    stablehlo.return %next, %written : {index}, {operand}
  }}
  return %end#1 : {operand}
}}
"""
# A loop of one step is simplified by XLA, which takes longer than to write none.
SINGLE = """
func.func private @{name}(%carried: {operand}, %indices: {indices}, %updates: {updates}) -> {operand} {{
  %zero = stablehlo.constant dense<0> : {index}
  %step = stablehlo.constant dense<0> : {index}
  {prepared}
  {written}
  return %written : {operand}
}}
"""


@dataclasses.dataclass(frozen=True)
class Scatter:
    """A `stablehlo.scatter` of one operand: its types, which axes are which, and what is combined how."""

    operand: ir.RankedTensorType
    indices: ir.RankedTensorType
    updates: ir.RankedTensorType
    axes: hlo.ScatterDimensionNumbers
    combined: str

    @classmethod
    def read(cls, op: ir.Operation) -> "Scatter | None":
        """Reads `op`; None where no loop is written for it."""
        block = op.regions[0].blocks[0]
        first, old_and_update = block.operations[0].operation, [*block.arguments]
        expected = old_and_update[1:] if first.name == "stablehlo.return" else old_and_update
        if first.name not in COMBINED or len(block.operations) > 2 or [*first.operands] != expected:
            return None
        types = [ir.RankedTensorType(value.type) for value in op.operands]
        axes = hlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        is_signed = ir.IntegerType(types[1].element_type).is_signless
        is_empty = any(0 in kind.shape for kind in types)
        return cls(*types, axes, COMBINED[first.name]) if is_signed and not is_empty else None

    def function(self, name: str) -> str:
        """Writes a function of operand, indices and updates."""
        places = [size for axis, size in enumerate(self.updates.shape) if axis not in self._window_axes]
        count = math.prod(places)
        window = self._window()
        columns = self._columns(places)
        prepared = [*columns.values(), self._rows(count, window)]
        return (SINGLE if count == 1 else LOOP).format(
            name=name,
            operand=self.operand,
            indices=self.indices,
            updates=self.updates,
            index=self._index(),
            count=count,
            prepared="\n  ".join(prepared),
            written="\n    ".join(self._step(count, window, columns)),
        )

    @property
    def _window_axes(self) -> list[int]:
        return list(self.axes.update_window_dims)

    def _index(self, *shape: int) -> str:
        return _tensor(shape, self.indices.element_type)

    def _numbers(self, *shape: int) -> str:
        return _tensor(shape, self.operand.element_type)

    def _window(self) -> list[int]:
        """Of each axis of the operand, how much an update covers."""
        single = {*self.axes.inserted_window_dims, *self.axes.input_batching_dims}
        sizes = iter(self.updates.shape[axis] for axis in self._window_axes)
        return [1 if axis in single else next(sizes) for axis in range(self.operand.rank)]

    def _columns(self, places: list[int]) -> dict[int, str]:
        """Writes, per axis of the operand that has indices, where on it each update begins."""
        vector = self.axes.index_vector_dim
        order = [axis for axis in range(self.indices.rank) if axis != vector]
        columns = {}
        for number, axis in enumerate(self.axes.scattered_dims_to_operand_dims):
            bounds = [f"0:{size}" for size in self.indices.shape]
            shape = list(self.indices.shape)
            if vector < self.indices.rank:
                bounds[vector], shape[vector] = f"{number}:{number + 1}", 1
            columns[axis] = (
                f"%grid_{axis} = stablehlo.slice %indices [{', '.join(bounds)}] :"
                f" ({self.indices}) -> {self._index(*shape)}\n"
                f"  %column_{axis} = stablehlo.reshape %grid_{axis} :"
                f" ({self._index(*shape)}) -> {self._index(math.prod(places))}"
            )
        batched = zip(self.axes.input_batching_dims, self.axes.scatter_indices_batching_dims, strict=True)
        for axis, index_axis in batched:
            columns[axis] = (
                f"%grid_{axis} = stablehlo.iota dim = {order.index(index_axis)} : {self._index(*places)}\n"
                f"  %column_{axis} = stablehlo.reshape %grid_{axis} :"
                f" ({self._index(*places)}) -> {self._index(math.prod(places))}"
            )
        return columns

    def _rows(self, count: int, window: list[int]) -> str:
        """Writes all updates below each other."""
        order = [axis for axis in range(self.updates.rank) if axis not in self._window_axes]
        order += self._window_axes
        moved = self._numbers(*(self.updates.shape[axis] for axis in order))
        return (
            f"%moved = stablehlo.transpose %updates, dims = {order} : ({self.updates}) -> {moved}\n"
            f"  %rows = stablehlo.reshape %moved : ({moved}) -> {self._numbers(count, *window)}"
        )

    def _step(self, count: int, window: list[int], axes: Iterable[int]) -> list[str]:
        """Writes how update number `%step` becomes part of `%carried`."""
        index, rank = self._index(), self.operand.rank
        starts = ", ".join(f"%start_{axis}" if axis in axes else "%zero" for axis in range(rank))
        lines, inside = [], []
        for axis in axes:
            last = self.operand.shape[axis] - window[axis]
            lines += [
                f"%at_{axis} = stablehlo.dynamic_slice %column_{axis}, %step, sizes = [1] :"
                f" ({self._index(count)}, {index}) -> {self._index(1)}",
                f"%start_{axis} = stablehlo.reshape %at_{axis} : ({self._index(1)}) -> {index}",
                f"%last_{axis} = stablehlo.constant dense<{last}> : {index}",
                f"%nearest_{axis} = stablehlo.clamp %zero, %start_{axis}, %last_{axis} : {index}",
                f"%inside_{axis} = stablehlo.compare EQ, %start_{axis}, %nearest_{axis}, SIGNED :"
                f" ({index}, {index}) -> tensor<i1>",
            ]
            inside.append(f"%inside_{axis}")
        while len(inside) > 1:
            both = inside.pop(), inside.pop()
            inside.append(f"%all_{len(inside)}")
            lines.append(f"{inside[-1]} = stablehlo.and {both[0]}, {both[1]} : tensor<i1>")
        part, whole, row = self._numbers(*window), self.operand, self._numbers(1, *window)
        return [
            *lines,
            f"%old = stablehlo.dynamic_slice %carried, {starts}, sizes = {window} :"
            f" ({', '.join([str(whole)] + [index] * rank)}) -> {part}",
            f"%row = stablehlo.dynamic_slice %rows, {', '.join(['%step'] + ['%zero'] * rank)},"
            f" sizes = {[1, *window]} :"
            f" ({', '.join([self._numbers(count, *window)] + [index] * (rank + 1))}) -> {row}",
            f"%update = stablehlo.reshape %row : ({row}) -> {part}",
            f"%combined = {self.combined.format(window=part)}",
            f"%new = stablehlo.select {inside[0]}, %combined, %old : tensor<i1>, {part}",
            f"%written = stablehlo.dynamic_update_slice %carried, %new, {starts} :"
            f" ({', '.join([str(whole), part] + [index] * rank)}) -> {whole}",
        ]


def _tensor(shape: Iterable[int], element: ir.Type) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"
