"""Compilation of the tests' programs into few kernels.

XLA's CPU backend compiles each fusion of a program by itself, and a program of this library is hundreds of
fusions of a few numbers. For small loops it has another way: a call with the attribute `xla_cpu_small_call`
becomes one kernel. Here each run of operations that this way knows becomes such a call, just before a program
for one CPU is compiled. `python -m tests.support.compile_times` says what that saves. What a test traces or
lowers is as it was, and what it looks at in a program is in what `compile_for_users` returns.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from tests.support.scatter_loops import Scatter

PREFIX, LOOP_PREFIX = "outlined_", "scatter_as_loop_"  # of the functions' names

# Products have kernels of their own; sorts, calls of libraries and callbacks are none; scatters become loops.
KNOWN = frozenset(
    f"stablehlo.{name}"
    for name in """
        abs add and atan2 bitcast_convert broadcast_in_dim cbrt ceil clamp compare concatenate constant
        convert cosine count_leading_zeros divide dynamic_slice dynamic_update_slice exponential
        exponential_minus_one floor gather iota is_finite log log_plus_one logistic maximum minimum multiply
        negate not or pad popcnt power reduce reduce_window remainder reshape return reverse
        round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic
        shift_right_logical sign sine slice sqrt subtract tan tanh transpose xor case if while
    """.split()
) | {"func.return"}
BRANCHES = "stablehlo.case", "stablehlo.if", "stablehlo.while"
# A kernel of fewer operations is not worth its call.
MIN_OPERATIONS = 4
# From this many numbers on, a library sums floats.
MAX_SUMMED = 4095
FOR_USERS: list[jax.stages.Lowered] = []  # which are being compiled as for users


@functools.cache
def install() -> None:
    """Outlines, once, what this process compiles from now on."""
    compile_module: Callable[..., Any] = compiler.compile_or_get_cached

    def compile_few_kernels(backend, module, devices, *args, **kwargs):
        if backend.platform == "cpu" and devices.size == 1 and not FOR_USERS:
            # The caller may still read the module that it has lowered.
            module = ir.Module.parse(mlir.module_to_bytecode(module), context=module.context)
            _Program(module).outline()
        return compile_module(backend, module, devices, *args, **kwargs)

    compiler.compile_or_get_cached = compile_few_kernels


def compile_for_users(lowered: jax.stages.Lowered, **compiler_options: str | bool) -> jax.stages.Compiled:
    """Compiles as XLA does for users, for a test that looks at copies, memory or the text of the program."""
    FOR_USERS.append(lowered)
    try:
        # With an option, which is the default, jax compiles again what was called before.
        compiled = lowered.compile({"xla_cpu_enable_fast_math": False, **compiler_options})
    finally:
        FOR_USERS.pop()
    assert PREFIX not in compiled.as_text(), "got what a call compiled, expected to compile first"
    return compiled


class _Program:
    """A module whose runs of known operations become functions, called in their place."""

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self._replace_scatters()
        self.functions = {
            op.sym_name.value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self.known_functions: dict[str, bool] = {}
        self.num_outlined = 0

    def _replace_scatters(self) -> None:
        names: dict[str, str] = {}
        functions = map(_inner_operations, _inner_operations(self.module.operation))
        for op in _all_operations(itertools.chain.from_iterable(functions)):
            scatter = Scatter.read(op) if op.name == "stablehlo.scatter" else None
            if scatter is None:
                continue
            text = scatter.function("NAME")
            if text not in names:
                names[text] = f"{LOOP_PREFIX}{len(names)}"
                loop = ir.Module.parse(text.replace("NAME", names[text]), self.module.context)
                loop.body.operations[0].operation.clone(ip=ir.InsertionPoint(self.module.body))
            with self.module.context, ir.Location.unknown():
                callee = ir.FlatSymbolRefAttr.get(names[text])
                call = _create(
                    "func.call", [op.result.type], [*op.operands], ir.InsertionPoint(op), callee=callee
                )
            op.result.replace_all_uses_with(call.result)
            op.erase()

    def outline(self) -> None:
        for name, function in self.functions.items():
            if name == "main" or not self._is_known_function(name):
                for block in function.regions[0].blocks:
                    self._outline_block(block)

    def _is_known(self, op: ir.Operation) -> bool:
        if op.name == "func.call":
            return self._is_known_function(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        is_known = op.name in KNOWN and not (op.name == "stablehlo.reduce" and _sums_many_floats(op))
        return is_known and all(map(self._is_known, _inner_operations(op)))

    def _is_known_function(self, name: str) -> bool:
        if name not in self.known_functions:
            operations = list(_inner_operations(self.functions[name]))
            self.known_functions[name] = bool(operations) and all(map(self._is_known, operations))
        return self.known_functions[name]

    def _outline_block(self, block: ir.Block) -> None:
        run: list[ir.Operation] = []
        for op in [op.operation for op in block.operations]:
            if op.name == "stablehlo.constant":  # each function has constants of its own
                continue
            if self._is_known(op) and not op.name.endswith(".return"):
                run.append(op)
                continue
            self._outline_run(run)
            run = []
            if op.name in BRANCHES:
                for region in op.regions:
                    for inner in region.blocks:
                        self._outline_block(inner)

    def _outline_run(self, run: list[ir.Operation]) -> None:
        if len(run) < MIN_OPERATIONS and not any(op.name in (*BRANCHES, "func.call") for op in run):
            return
        members = _all_operations(run)
        inner_values = {value for op in members for value in (*op.results, *_block_arguments(op))}
        inputs: dict[ir.Value, list[tuple[ir.Operation, int]]] = {}
        constants: dict[ir.Value, list[tuple[ir.Operation, int]]] = {}
        for op in members:
            for index, value in enumerate(op.operands):
                if value not in inner_values:
                    uses = constants if _is_constant(value) else inputs
                    uses.setdefault(value, []).append((op, index))
        member_set = set(members)
        outer_uses = {
            value: [use for use in value.uses if use.owner.operation not in member_set]
            for op in run
            for value in op.results
        }
        outputs = [value for value, uses in outer_uses.items() if uses]
        if not outputs:
            return
        with self.module.context, ir.Location.unknown():
            body, call = self._create_call(run[0], list(inputs), [value.type for value in outputs])
            for value, result in zip(outputs, call.results, strict=False):
                for use in outer_uses[value]:
                    use.owner.operation.operands[use.operand_number] = result
            needed = _get_element(
                body.arguments[0], len(inputs), call.results[-1].type, ir.InsertionPoint(body)
            )
            end = _create("func.return", [], [*outputs, needed], ir.InsertionPoint(body))
            start = ir.InsertionPoint(run[0])
            for op in run:
                op.move_before(end)
            for value, uses in constants.items():
                _set_operands(uses, value.owner.operation.clone(ip=start).results[0])
            for number, (value, uses) in enumerate(inputs.items()):
                _set_operands(uses, _get_element(body.arguments[0], number, value.type, start))

    def _create_call(self, place, inputs, result_types) -> tuple[ir.Block, ir.Operation]:
        """Creates a function without its operations, and its call before `place`.

        XLA aborts on a parameter that turns out not to be needed. So there is one, a tuple, of which the last
        element is a number that no pass can see through, and a result.
        """
        start = ir.InsertionPoint(place)
        number = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
        zero = ir.DenseElementsAttr.get_splat(number, ir.IntegerAttr.get(number.element_type, 0))
        constant = _create("stablehlo.constant", [number], [], start, value=zero)
        needed = _create("stablehlo.optimization_barrier", [number], constant.results, start).results[0]
        elements = [*inputs, needed]
        packed = ir.TupleType.get_tuple([value.type for value in elements])
        parameter = _create("stablehlo.tuple", [packed], elements, start).results[0]

        name = f"{PREFIX}{self.num_outlined}"
        self.num_outlined += 1
        result_types = [*result_types, number]
        function = ir.Operation.create(
            "func.func",
            regions=1,
            attributes={
                "sym_name": ir.StringAttr.get(name),
                "sym_visibility": ir.StringAttr.get("private"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get([packed], result_types)),
            },
            ip=ir.InsertionPoint(self.module.body),
        )
        body = function.regions[0].blocks.append(packed)
        attributes = {
            "callee": ir.FlatSymbolRefAttr.get(name),
            "mhlo.frontend_attributes": ir.DictAttr.get(
                {
                    "inlineable": ir.StringAttr.get("false"),
                    "xla_cpu_small_call": ir.StringAttr.get("true"),
                }
            ),
        }
        return body, _create("func.call", result_types, [parameter], start, **attributes)


def _create(name, types, operands, place, **attributes) -> ir.Operation:
    return ir.Operation.create(name, results=types, operands=operands, attributes=attributes, ip=place)


def _get_element(parameter, number, kind, place) -> ir.Value:
    index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
    return _create("stablehlo.get_tuple_element", [kind], [parameter], place, index=index).results[0]


def _set_operands(uses, value) -> None:
    for op, index in uses:
        op.operands[index] = value


def _inner_operations(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _all_operations(run: Iterable[ir.Operation]) -> list[ir.Operation]:
    """Lists `run` and what is in its branches; sums and the like have nothing of what is around them."""
    found = list(run)
    for op in found:  # which grows
        if op.name in BRANCHES:
            found += _inner_operations(op)
    return found


def _block_arguments(op: ir.Operation) -> Iterator[ir.Value]:
    if op.name in BRANCHES:
        for region in op.regions:
            for block in region.blocks:
                yield from block.arguments


def _is_constant(value: ir.Value) -> bool:
    return not isinstance(value.owner, ir.Block) and value.owner.operation.name == "stablehlo.constant"


def _sums_many_floats(op: ir.Operation) -> bool:
    kinds = [ir.RankedTensorType(value.type) for value in op.operands]
    return any(
        isinstance(kind.element_type, ir.FloatType) and math.prod(kind.shape) > MAX_SUMMED for kind in kinds
    )
