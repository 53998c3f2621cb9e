"""What a kernel gets, read from the host code that launches it: pointers, and descriptors of copies by TMA.

CUDA refuses a descriptor that breaks its rules when the kernel is launched, and then the launch fails.
"""

import dataclasses
import re
from typing import NamedTuple

MAX_RANK, MAX_BOX, ALIGNMENT = 5, 256, 16
_WIDTH = {1: 1, 2: 2, 3: 4, 5: 2, 6: 4, 7: 2, 9: 4}
"""Bytes of an element, by Mosaic GPU's numbers: int8, int16, int32, two floats, bfloat16, signed int32."""
_NO_SWIZZLE = 16
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : \w+\)")
_STORE = re.compile(r"llvm\.store (%\w+), %\w+ : i64")
_CALL = re.compile(r"llvm\.call @mosaic_gpu_init_tma_desc\((.*?)\)")
# The last parameter of the function is a table of pointers to the program's arguments and results.
_FUNCTION = re.compile(r"llvm\.func @\w+_mosaic_gpu\(.*(%\w+): !llvm\.ptr")
_SLOT = re.compile(r"(%\w+) = llvm\.getelementptr (%\w+)\[(\d+)\]")
_RESULT = re.compile(r"(%\w+)(?::\d+)? = (\S+) (.*)")
_STORED_POINTER = re.compile(r"llvm\.store (%\w+), %\w+ : !llvm\.ptr,")


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """One; the innermost axis is the last.

    Attributes:
      width: Bytes of an element.
      sizes: Elements along each axis.
      strides: In elements, of each axis.
      box: Elements of one transfer along each axis.
      swizzle: Bytes of its pattern, 16 for none.
      buffer: Whose it is: the position among the program's arguments and results; -1 if unknown.
    """

    width: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    buffer: int = -1

    def faults(self) -> list[str]:
        """What CUDA would refuse, a phrase each."""
        found, row_bytes = [], self.box[-1] * self.width
        if len(self.box) > MAX_RANK:
            found.append(f"{len(self.box)} axes, at most {MAX_RANK}")
        if not all(1 <= size <= MAX_BOX for size in self.box):
            found.append(f"a box of {self.box}, at most {MAX_BOX} each")
        if self.strides[-1] != 1 or any(stride * self.width % ALIGNMENT for stride in self.strides[:-1]):
            found.append(
                f"strides of {self.strides} elements of {self.width} bytes, expected multiples of "
                f"{ALIGNMENT} bytes, and 1 element for the last"
            )
        if row_bytes % ALIGNMENT:
            found.append(f"rows of {row_bytes} bytes, expected multiples of {ALIGNMENT}")
        if self.swizzle != _NO_SWIZZLE and row_bytes > self.swizzle:
            found.append(f"rows of {row_bytes} bytes, at most the {self.swizzle} of the swizzle")
        return found


class HostCode(NamedTuple):
    """What a kernel gets: `pointers` to buffers, by position as in `Descriptor`, and `descriptors`."""

    pointers: tuple[int, ...]
    descriptors: tuple[Descriptor, ...]


def read_host_code(passes: str) -> HostCode:
    """Reads the last code in the log of the compiler's passes.

    Raises:
      ValueError: It is not written as this reader knows it.
    """
    code = passes[passes.rindex("IR Dump Before") :]
    function = _FUNCTION.search(code)
    table = function[1] if function else ""
    end = code.find("_mlir_ciface_", function.end()) if function else -1
    constants: dict[str, int] = {}
    slots = {table: 0}
    buffers: dict[str, int] = {}
    stored: list[str] = []
    pointers, descriptors = [], []
    for line in code[: end if end >= 0 else None].splitlines():
        if constant := _CONSTANT.search(line):
            constants[constant[1]] = int(constant[2])
        elif (slot := _SLOT.search(line)) and slot[2] == table:
            slots[slot[1]] = int(slot[3])
        elif result := _RESULT.search(line):
            used = re.findall(r"%\w+", result[3])
            if result[2] == "llvm.load" and used[0] in slots:
                buffers[result[1]] = slots[used[0]]
            elif known := [buffers[name] for name in used if name in buffers]:
                buffers[result[1]] = known[0]
        elif store := _STORE.search(line):
            stored.append(store[1])
        elif (pointer := _STORED_POINTER.search(line)) and pointer[1] in buffers:
            pointers.append(buffers[pointer[1]])
        elif call := _CALL.search(line):
            try:
                _, base, dtype, rank, _, _, swizzle, _ = call[1].split(", ")
                size = constants[rank]
                numbers = [constants[name] for name in stored[-3 * size :]]
                axes = (tuple(numbers[nth * size : (nth + 1) * size]) for nth in range(3))
                width, buffer = _WIDTH[constants[dtype]], buffers.get(base, -1)
                descriptors.append(Descriptor(width, *axes, constants[swizzle], buffer))
            except (KeyError, ValueError) as error:
                raise ValueError(f"cannot read the TMA descriptor of {line.strip()!r}: {error!r}") from error
    return HostCode(tuple(pointers), tuple(descriptors))
