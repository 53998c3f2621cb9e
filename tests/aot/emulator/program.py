"""What a kernel's PTX says: its instructions, labels and parameters."""

import dataclasses
import re

from tests.aot.emulator.memory import UnknownError

# Two pieces of PTX in which Mosaic GPU writes what is one instruction here.
_WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*(mbarrier\.try_wait[^;]*);\s*@P1 bra\.uni DONE;\s*"
    r"bra\.uni\s+LAB_WAIT;\s*DONE:\s*\}"
)
_PRODUCT = re.compile(r"\{ \.reg \.pred p; setp\.ne\.b32 p, 1, 0; (wgmma\.mma_async[^;]*), p,([^;]*); \}")
_ENTRY = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param [^,]*?(\w+_param_\d+)")
_FILE = re.compile(r"^\s*\.file\s+(\d+) \"(?:[^\"]*/)?([^\"/]+)\"", re.MULTILINE)
_LINE = re.compile(r"^\s*\.loc\s+(\d+) (\d+).*$", re.MULTILINE)
_SCOPE = re.compile(r"^\s*[{}]\s*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^\s*\.[^;\n]*;?\s*$", re.MULTILINE)
_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One.

    Attributes:
      words: Its name, such as `("add", "s32")`.
      operands: As they are written.
      predicate: A register whose threads execute it, or None for all; if `is_negated`, the others.
      is_negated: See `predicate`.
      where: Source file and line, and the text.
    """

    words: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    is_negated: bool
    where: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
      instructions: In order.
      labels: Positions in `instructions`.
      parameters: Names; of pointers, and a last one that holds the descriptors of tensors, if there are any.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]


def parse(ptx: str) -> Program:
    """Reads the only kernel of a PTX file."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise UnknownError("PTX without a kernel")
    files = dict(_FILE.findall(ptx))
    body = ptx[ptx.index("\n{", entry.end()) + 2 : ptx.rindex("\n}")]
    body = _LINE.sub(r"$LINE_\1_\2:", re.sub(r"//[^\n]*", "", body))
    body = _SCOPE.sub("", _PRODUCT.sub(r"\1, 1,\2;", _WAIT.sub(r"\1;", body)))
    instructions, labels, line = [], {}, ""
    for part in re.split(r";|(\$\w+:)", _DIRECTIVE.sub("", body)):
        part = (part or "").strip()
        if place := re.fullmatch(r"\$LINE_(\d+)_(\d+):", part):
            line = f"{files.get(place[1], '?')}:{place[2]}: "
        elif part.endswith(":"):
            labels[part[:-1]] = len(instructions)
        elif part:
            statement = _STATEMENT.fullmatch(part)
            if statement is None:
                raise UnknownError(f"{line}{part!r}")
            negation, predicate, name, rest = statement.groups()
            operands = tuple(split(rest))
            where = line + " ".join(part.split())
            instructions.append(
                Instruction(tuple(name.split(".")), operands, predicate, bool(negation), where)
            )
    return Program(tuple(instructions), labels, tuple(_PARAMETER.findall(entry[1])))


def split(text: str) -> list[str]:
    """The parts between commas that are in no brackets; of `{a, b}` those in its braces."""
    text = text.strip()
    if text.startswith("{") and text.index("}") == len(text) - 1:
        text = text[1:-1]
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
