"""Where a program makes a GPU wait for the host, and how many kernels it launches.

A `while` whose trips the compiler does not know copies a bool to the host and waits for it, before each trip
and after the last; a `conditional` does so once. A loop of known trips only launches.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcache_jax.engine.step import NEXT_TOKENS, STEPS
from tests.aot.hlo_program import HloProgram, Instruction, parse_hlo
from tests.aot.traffic import traffic_of

_NO_LAUNCH = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "domain",
    "get-dimension-size",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}


@dataclasses.dataclass(frozen=True)
class LoopCounts:
    """Counts of one program; those within a loop of known trips count once for each trip.

    Attributes:
      loops: Loops of unknown trips.
      conditionals: Branches that the host takes.
      known_loops: Loops of known trips, each once.
      launches: Kernels, copies and library calls outside loops of unknown trips, and of the largest branches.
      trip_launches: The same for one trip of every loop of unknown trips.
      read_bytes: By `launches`, see `traffic`.
      written_bytes: Likewise.
    """

    loops: int = 0
    conditionals: int = 0
    known_loops: int = 0
    launches: int = 0
    trip_launches: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def waits(self) -> int:
        """Least number of times that the host is waited for."""
        return self.loops + self.conditionals

    def __add__(self, other: "LoopCounts") -> "LoopCounts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return LoopCounts(*(mine + others for mine, others in pairs))

    def trips(self, num_trips: int) -> "LoopCounts":
        """Returns the counts of a loop with this body and so many trips."""
        counts = LoopCounts(*(num_trips * count for count in dataclasses.astuple(self)))
        return dataclasses.replace(counts, known_loops=1 + self.known_loops)

    def unknown_trips(self, is_opened: bool = False, is_passed: bool = False) -> "LoopCounts":
        """Returns the counts of a loop with this body, whose number of trips is unknown.

        Its launches count as those of the program if it `is_opened`. If it `is_passed`, it makes no trip.
        """
        if is_passed:
            return LoopCounts(loops=1)
        if is_opened:
            return dataclasses.replace(self, loops=1 + self.loops)
        launches = self.launches + self.trip_launches
        return LoopCounts(1 + self.loops, self.conditionals, self.known_loops, trip_launches=launches)


def compiled_counts(hlo: str, is_loop: bool = False, is_ordinary: bool = False) -> LoopCounts:
    """Counts in the text of a compiled program.

    Args:
      hlo: What `jax.stages.Compiled.as_text()` returns.
      is_loop: Whether what counts is one trip of the program's outer loops of unknown trips.
      is_ordinary: Whether the loops of unknown trips within it make none, as in an ordinary step, but for the
        engine's loops of steps and around the next tokens.

    Raises:
      ValueError: The text names no entry.
    """
    program = parse_hlo(hlo)
    return _counts_of(program, program.entry, is_loop, (STEPS, NEXT_TOKENS) if is_ordinary else ())


def step_counts(hlo: str, taken: str = NEXT_TOKENS) -> LoopCounts:
    """Counts one trip of the program's outer loop of unknown trips, or of steps, that moves most bytes.

    Loops of unknown trips within it make none, as in an ordinary step, but for loops of the scope `taken`.
    """
    program = parse_hlo(hlo)
    loops = [each for each in program.computations[program.entry].values() if each.opcode == "while"]
    loops += [each for part in program.computations.values() for each in part.values() if _is_of(STEPS, each)]
    bodies = [each.called("body")[0] for each in loops if each.num_trips is None]
    counts = [_counts_of(program, body, taken=(taken,)) for body in bodies]
    return max(counts, key=lambda count: count.read_bytes)


def _counts_of(
    program: HloProgram, computation: str, is_loop: bool = False, taken: Sequence[str] = ()
) -> LoopCounts:
    """Counts in a computation; of loops of unknown trips none is made if scopes are `taken`, but theirs."""

    def count(name: str, is_opened: bool = False) -> LoopCounts:
        instructions = program.computations[name]
        return sum((count_one(each, instructions, is_opened) for each in instructions.values()), LoopCounts())

    def count_one(
        instruction: Instruction, instructions: Mapping[str, Instruction], is_opened: bool
    ) -> LoopCounts:
        opcode = instruction.opcode
        if opcode in _NO_LAUNCH or opcode.endswith(("-done", "-update")):
            return LoopCounts()
        if opcode == "while":
            body = count(instruction.called("body")[0])
            if instruction.num_trips is not None:
                return body.trips(instruction.num_trips)
            is_opened |= any(_is_of(scope, instruction) for scope in taken)
            return body.unknown_trips(is_opened, is_passed=bool(taken) and not is_opened)
        if opcode == "conditional":
            names = instruction.called("branch_computations", "true_computation", "false_computation")
            return _largest([count(name) for name in names]) + LoopCounts(conditionals=1)
        if opcode in ("call", "async-start"):
            return sum((count(name) for name in instruction.called("to_apply", "calls")), LoopCounts())
        traffic = traffic_of(program, instructions, instruction)
        return LoopCounts(launches=1, read_bytes=traffic.read, written_bytes=traffic.written)

    return count(computation, is_loop)


def _is_of(scope: str, instruction: Instruction) -> bool:
    return instruction.opcode == "while" and f'{scope}/while"' in instruction.attributes


def _largest(branches: list[LoopCounts]) -> LoopCounts:
    columns = zip(*map(dataclasses.astuple, branches), strict=True)
    return LoopCounts(*map(max, columns))


def lowered_counts(module: Any, is_ordinary: bool = False, is_loop: bool = True) -> LoopCounts:
    """Counts loops and conditionals in a StableHLO module, which the compiler has not simplified yet.

    Args:
      module: What `jax.stages.Lowered.compiler_ir()` returns. A function counts at each of its calls.
      is_ordinary: Whether the loops of unknown trips make none.
      is_loop: Whether the outermost does make some, where the others do not.
    """
    functions = {op.attributes["sym_name"].value: op.operation for op in module.body.operations}

    def count(operation: Any, is_inner: bool) -> LoopCounts:
        if operation.name in ("func.call", "call"):
            return of_regions(functions[operation.attributes["callee"].value].regions, is_inner)
        if operation.name == "stablehlo.while":
            num_trips = _known_trips(operation)
            if num_trips is None:
                counts = of_regions(operation.regions, is_inner=True)
                is_passed = is_ordinary and (is_inner or not is_loop)
                location = str(operation.location)
                is_passed &= not any(f'{scope}/while"' in location for scope in (STEPS, NEXT_TOKENS))
                return counts.unknown_trips(is_passed=is_passed)
            return of_regions(operation.regions, is_inner).trips(num_trips)
        if operation.name in ("stablehlo.case", "stablehlo.if"):
            branch = _known_branch(operation)
            if branch is not None:
                return of_regions([branch], is_inner)
            branches = [of_regions([region], is_inner) for region in operation.regions]
            return _largest(branches) + LoopCounts(conditionals=1)
        return LoopCounts()

    def of_regions(regions: Any, is_inner: bool = False) -> LoopCounts:
        operations = (
            op.operation for region in regions for block in region.blocks for op in block.operations
        )
        return sum((count(operation, is_inner) for operation in operations), LoopCounts())

    return of_regions(functions["main"].regions)


def _known_trips(loop: Any) -> int | None:
    """The trips of a loop that counts one by one between constants, as `lax.scan` does; else None."""
    condition, body = (list(region.blocks[0].operations) for region in loop.regions)
    if [op.operation.name for op in condition[-2:]] != ["stablehlo.compare", "stablehlo.return"]:
        return None
    compare = condition[-2].operation
    counter, limit = compare.operands[0], _known_number(compare.operands[1])
    place = _argument_number(counter)
    if " LT," not in str(compare) or place is None or limit is None:
        return None
    start = _known_number(loop.operands[place])
    next_counter = _defining(body[-1].operation.operands[place])
    is_count = next_counter is not None and next_counter.name == "stablehlo.add"
    if start is None or not is_count:
        return None
    last, step = next_counter.operands
    if _argument_number(last) != place or _known_number(step) != 1:
        return None
    return max(limit - start, 0)


def _known_branch(choice: Any) -> Any:
    """The only branch that a conditional can take, as of a choice by platform; else None."""
    number = _known_number(choice.operands[0])
    if number is None:
        return None
    if choice.name == "stablehlo.if":
        return choice.regions[0 if number else 1]
    last = len(choice.regions) - 1
    return choice.regions[number if 0 <= number <= last else last]


def _known_number(value: Any) -> int | None:
    """A scalar that constants determine; else None."""
    operation = _defining(value)
    if operation is None:
        return None
    if operation.name == "stablehlo.constant":
        number = re.match(r"dense<(-?\d+|true|false)>", str(operation.attributes["value"]))
        return json.loads(number[1]) if number else None
    if operation.name in ("stablehlo.case", "stablehlo.if") and len(operation.results) == 1:
        branch = _known_branch(operation)
        return None if branch is None else _known_number(list(branch.blocks[0].operations)[-1].operands[0])
    return None


def _defining(value: Any) -> Any:
    """The operation that computes a value; None of an argument."""
    return None if _argument_number(value) is not None else value.owner


def _argument_number(value: Any) -> int | None:
    """A value's place among the arguments of its block; None of a result."""
    return getattr(value, "arg_number", None)
