"""Reading a compiled program's text."""

import math
import re


def num_copies(hlo: str, at_least: int) -> int:
    """Copies of arrays of at least so many elements in a program's text."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", hlo)
    return sum(math.prod(int(n) for n in shape.split(",") if n) >= at_least for shape in shapes)
