"""Bytes that a launch reads and writes, as its instruction tells.

A fusion reads of a parameter what it slices or gathers from it, and writes of an array that it updates in
place what is new. What Mosaic kernels move is not counted: they read blocks that only data name.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tests.aot.hlo_program import HloProgram, Instruction, arrays

_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "reshape", "transpose", "copy", "tuple")
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
"""Which operand is what they write into the first one."""
_WORKSPACE = ("s8", 2**22)
"""Of a library call: bytes in an array without further shape, at least so many."""


class Traffic(NamedTuple):
    """Bytes read and written."""

    read: int
    written: int


def traffic_of(program: HloProgram, computation: Mapping[str, Instruction], launch: Instruction) -> Traffic:
    """Counts the bytes of an instruction that launches something."""
    if "mosaic_gpu" in launch.attributes:
        return Traffic(0, 0)
    opcode = launch.opcode.removesuffix("-start")
    if opcode == "fusion":
        fused = program.computations[launch.called("calls")[0]]
        if any("mosaic_gpu" in each.attributes for each in fused.values()):  # one that reads slices in place
            return Traffic(0, 0)
        return _of_fusion(program, fused)
    read = sum(computation[name].num_bytes for name in launch.operands if name in computation)
    written = launch.num_bytes - _workspace(launch)
    if opcode != launch.opcode:  # its result names its operands too
        written -= read
    return Traffic(written if opcode in _SLICES else read, written)


def _of_fusion(program: HloProgram, fused: Mapping[str, Instruction]) -> Traffic:
    users = defaultdict(list)
    for each in fused.values():
        for name in dict.fromkeys(each.operands):
            users[name].append(each)

    def read_of(value: Instruction) -> int:
        """Bytes that the users of a value take of it; all if one takes all."""
        taken = 0
        for user in users[value.name]:
            if user.opcode in _SLICES and user.operands[0] == value.name:
                taken += user.num_bytes
            elif user.opcode in _UPDATES and user.operands[0] == value.name:
                taken += 0
            elif user.opcode in _VIEWS:
                taken += read_of(user)
            elif user.opcode == "fusion":
                inner = program.computations[user.called("calls")[0]]
                taken += _of_parameter(inner, user.operands.index(value.name), value.num_bytes)
            else:
                taken += value.num_bytes
        return min(taken, value.num_bytes)

    def written_of(value: Instruction) -> int:
        if value.opcode in _UPDATES:
            return fused[value.operands[_UPDATES[value.opcode]]].num_bytes
        if value.opcode == "tuple":
            return sum(written_of(fused[name]) for name in value.operands)
        if value.opcode == "bitcast":
            return written_of(fused[value.operands[0]])
        return 0 if value.opcode == "parameter" else value.num_bytes - _workspace(value)

    read = sum(read_of(each) for each in fused.values() if each.opcode == "parameter")
    return Traffic(read, sum(written_of(each) for each in fused.values() if each.is_root))


def _of_parameter(fused: Mapping[str, Instruction], number: int, num_bytes: int) -> int:
    """Bytes that a fusion within a fusion takes of a parameter: of slices these, else all."""
    (name,) = (
        each.name for each in fused.values() if each.opcode == "parameter" and each.arguments == str(number)
    )
    users = [each for each in fused.values() if name in each.operands]
    return sum(user.num_bytes if user.opcode in ("dynamic-slice", "slice") else num_bytes for user in users)


def _workspace(call: Instruction) -> int:
    dtype, least = _WORKSPACE
    sizes = [shape[0] for found, shape in arrays(call.type) if found == dtype and len(shape) == 1]
    return sum(size for size in sizes if size >= least)
