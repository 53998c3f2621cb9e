"""A compiled program's text, taken apart into computations and instructions."""

import dataclasses
import math
import re

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r"([\w-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Unique in its computation.
      opcode: Such as "fusion".
      type: Of the result, such as "(s32[], f32[8,4]{1,0})".
      arguments: The text in the parentheses.
      attributes: The text after them.
      is_root: Whether its result is the computation's.
    """

    name: str
    opcode: str
    type: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.-]+)", self.arguments)

    @property
    def num_bytes(self) -> int:
        """Of the result; workspaces, which have no shape of a program, count too."""
        return sum(math.prod(sizes) * _bits(dtype) for dtype, sizes in arrays(self.type)) // 8

    @property
    def num_trips(self) -> int | None:
        """Of a `while`, if the compiler knows them."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations in these attributes, such as "body" or "branch_computations"."""
        names = []
        for attribute in attributes:
            for found in re.findall(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.-]+)", self.attributes):
                names += re.findall(r"[\w.-]+", found)
        return names


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """All computations of a program: instructions by their names, in order.

    Attributes:
      computations: By name.
      entry: Name of the computation that runs.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str


def parse_hlo(hlo: str) -> HloProgram:
    """Parses what `jax.stages.Compiled.as_text()` returns.

    Raises:
      ValueError: The text names no entry.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, instructions = None, {}
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            instructions = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif (found := _INSTRUCTION.match(line)) and (instruction := _parsed(*found.groups())):
            instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError(f"expected the text of a compiled program with an ENTRY, got {hlo[:80]!r}")
    return HloProgram(computations, entry)


def arrays(type_: str) -> list[tuple[str, list[int]]]:
    """Lists the arrays of a type: dtype and shape."""
    return [(dtype, [int(n) for n in sizes.split(",") if n]) for dtype, sizes in _ARRAY.findall(type_)]


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    assert found, dtype
    return int(found[1])


def _parsed(root: str | None, name: str, text: str) -> Instruction | None:
    """Takes a line apart; the type may be a tuple, with comments and layouts."""
    end = _end_of_parentheses(text) if text.startswith("(") else text.index(" ")
    type_, text = re.sub(r"/\*.*?\*/", "", text[:end]), text[end:].lstrip()
    opcode = _OPCODE.match(text)
    if opcode is None:
        return None
    text = text[len(opcode[1]) :]
    end = _end_of_parentheses(text)
    return Instruction(name, opcode[1], type_, text[1 : end - 1], text[end:], bool(root))


def _end_of_parentheses(text: str) -> int:
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    return len(text)
