"""Where a program makes a GPU wait for the host, and how many kernels it launches.

A `while` whose trips the compiler does not know copies a bool to the host and waits for it, before each trip
and after the last; a `conditional` does so once. A loop of known trips only launches.
"""

import dataclasses
import json
import re
from typing import Any

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*)$")
_OPCODE = re.compile(r"([\w-]+)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
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
    """

    loops: int = 0
    conditionals: int = 0
    known_loops: int = 0
    launches: int = 0
    trip_launches: int = 0

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
        """Returns the counts of a loop with this body, of which nobody knows the trips.

        Its launches count as those of the program if it `is_opened`. If it `is_passed`, it makes no trip.
        """
        if is_passed:
            return LoopCounts(loops=1)
        if is_opened:
            return dataclasses.replace(self, loops=1 + self.loops)
        launches = self.launches + self.trip_launches
        return dataclasses.replace(self, loops=1 + self.loops, launches=0, trip_launches=launches)


def compiled_counts(hlo: str, is_loop: bool = False, is_ordinary: bool = False) -> LoopCounts:
    """Counts in the text of a compiled program.

    Args:
      hlo: What `jax.stages.Compiled.as_text()` returns.
      is_loop: Whether what counts is one trip of the program's outer loops of unknown trips.
      is_ordinary: Whether the loops of unknown trips within it make none, as in an ordinary step.

    Raises:
      ValueError: The text names no entry.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = None, []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            lines.append(_without_type(instruction[1]))
    if entry is None:
        raise ValueError(f"expected the text of a compiled program with an ENTRY, got {hlo[:80]!r}")

    def count(name: str, is_opened: bool = False) -> LoopCounts:
        return sum((count_line(line, is_opened) for line in computations[name]), LoopCounts())

    def count_line(line: str, is_opened: bool) -> LoopCounts:
        is_passed = is_ordinary and not is_opened
        opcode = _OPCODE.match(line)
        if opcode is None or opcode[1] in _NO_LAUNCH or opcode[1].endswith(("-done", "-update")):
            return LoopCounts()
        if opcode[1] == "while":
            (body,) = re.findall(r"body=%?([\w.-]+)", line)
            trips = _TRIPS.search(line)
            if trips:
                return count(body).trips(int(trips[1]))
            return count(body).unknown_trips(is_opened, is_passed)
        if opcode[1] == "conditional":
            named = [name.strip(" %") for group in _BRANCHES.findall(line) for name in group.split(",")]
            branches = [count(name) for name in named or _CALLED.findall(line)]
            return _largest(branches) + LoopCounts(conditionals=1)
        if opcode[1] in ("call", "async-start"):
            return sum((count(name) for name in _CALLED.findall(line)), LoopCounts())
        return LoopCounts(launches=1)

    return count(entry, is_loop)


def _without_type(text: str) -> str:
    """An instruction from its opcode on; the type before it may be a tuple, with comments and layouts."""
    if not text.startswith("("):
        return text.partition(" ")[2]
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[i + 1 :].lstrip()
    return ""


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
                return counts.unknown_trips(is_passed=is_ordinary and (is_inner or not is_loop))
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
