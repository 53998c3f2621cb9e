"""How well aligned the shared memory is that the copy engine reads and writes, as a kernel's PTX shows it.

The copy engine (TMA) faults at run time where an address in shared memory is no multiple of 128 bytes;
neither the compiler nor an interpreter looks for that.
"""

import re
from collections import defaultdict

BASE = 1024
"""Multiple at which shared memory begins; no more is claimed of any address."""
_KEEPS = ("mov", "cvt", "cvta", "neg")
_SMALLER_OF_BOTH = ("add", "sub", "or", "xor", "min", "max", "selp")
_REGISTER = re.compile(r"%rd?\d+\b")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);", re.MULTILINE)
# Of loads the first address, of stores the second; a copy with a tensor map, and one of contiguous bytes.
_LOAD = re.compile(r"cp\.async\.bulk\.(?:tensor\.\dd\.)?shared::\w+\.global\S* \[([^\]]+)\]")
_STORE = re.compile(r"cp\.async\.bulk\.(?:tensor\.\dd\.)?global\.shared::cta\S* \[[^\]]+\], \[([^\]]+)\]")


def tma_alignment(ptx: str) -> int:
    """The largest power of two, up to `BASE`, of which every address in shared memory surely is a multiple.

    What an instruction computes is a multiple of what its operands let one conclude, of 1 if it is not known
    here; a register that is written in several places, say a counter, is as bad as the worst of them.

    Raises:
      ValueError: The kernel has no such copy.
    """
    addresses = _LOAD.findall(ptx) + _STORE.findall(ptx)
    if not addresses:
        raise ValueError("the kernel has no TMA copy that this reader knows, expected at least one")
    definitions = _definitions(ptx)
    multiple_of = dict.fromkeys(definitions, BASE)  # until an instruction says otherwise
    is_settled = False
    while not is_settled:
        is_settled = True
        for register, instructions in definitions.items():
            found = min(_result(*instruction, multiple_of) for instruction in instructions)
            if found < multiple_of[register]:
                multiple_of[register], is_settled = found, False
    return min(_operand(term.strip(), multiple_of) for address in addresses for term in address.split("+"))


def _definitions(ptx: str) -> dict[str, list[tuple[str, list[str]]]]:
    """Of each register the instructions that write it: name and operands."""
    found = defaultdict(list)
    for name, text in _INSTRUCTION.findall(ptx):
        result, *operands = (part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text))
        if result.startswith("["):
            continue
        registers = _REGISTER.findall(result)
        for register in registers:
            found[register].append((name if len(registers) == 1 else "several", operands))
    return found


def _result(name: str, operands: list[str], multiple_of: dict[str, int]) -> int:
    operation = name.split(".")[0]
    if operation not in (*_KEEPS, *_SMALLER_OF_BOTH, "and", "mul", "mad", "shl") or name.startswith("mul.hi"):
        return 1
    first, second, third = ([_operand(x, multiple_of) for x in operands] + [BASE, BASE])[:3]
    if operation in _KEEPS:
        return first
    if operation in _SMALLER_OF_BOTH:
        return min(first, second)
    if operation == "and":
        return max(first, second)
    if operation == "shl":
        return min(first << int(operands[1]), BASE) if operands[1].isdigit() else first
    product = min(first * second, BASE)
    return min(product, third) if operation == "mad" else product


def _operand(text: str, multiple_of: dict[str, int]) -> int:
    if text.startswith("__dynamic_shmem"):
        return BASE
    if re.fullmatch(r"-?\d+", text):
        number = abs(int(text))
        return min(number & -number, BASE) if number else BASE
    return multiple_of.get(text, 1)
