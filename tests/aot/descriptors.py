"""The descriptors of a kernel's copies by TMA, read from the host code that makes them.

CUDA refuses a descriptor that breaks its rules when the kernel is launched, and then the launch fails.
"""

import dataclasses
import re

MAX_RANK, MAX_BOX, ALIGNMENT = 5, 256, 16
_WIDTH = {2: 2, 3: 4, 5: 2, 6: 4, 7: 2, 9: 4}
"""Bytes of an element, by Mosaic GPU's numbers: int16, int32, float16, float32, bfloat16, signed int32."""
_NO_SWIZZLE = 16
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : \w+\)")
_STORE = re.compile(r"llvm\.store (%\w+), %\w+ : i64")
_CALL = re.compile(r"llvm\.call @mosaic_gpu_init_tma_desc\((.*?)\)")


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """One; the innermost axis is the last.

    Attributes:
      width: Bytes of an element.
      strides: In elements, of each axis.
      box: Elements of one transfer along each axis.
      swizzle: Bytes of its pattern, 16 for none.
    """

    width: int
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

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


def read_descriptors(passes: str) -> list[Descriptor]:
    """Those of a kernel, from the log of the compiler's passes.

    Raises:
      ValueError: They are not written as this reader knows it.
    """
    code = passes[passes.rindex("IR Dump Before") :]
    constants: dict[str, int] = {}
    stored: list[str] = []
    found = []
    for line in code.splitlines():
        if constant := _CONSTANT.search(line):
            constants[constant[1]] = int(constant[2])
        elif store := _STORE.search(line):
            stored.append(store[1])
        elif call := _CALL.search(line):
            try:
                _, _, dtype, rank, _, _, swizzle, _ = call[1].split(", ")
                size = constants[rank]
                numbers = [constants[name] for name in stored[-3 * size :]]
                width = _WIDTH[constants[dtype]]
                found.append(
                    Descriptor(
                        width, tuple(numbers[size : 2 * size]), tuple(numbers[2 * size :]), constants[swizzle]
                    )
                )
            except (KeyError, ValueError) as error:
                raise ValueError(f"cannot read the TMA descriptor of {line.strip()!r}: {error!r}") from error
    return found
