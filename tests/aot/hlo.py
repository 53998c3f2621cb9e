"""Reading a compiled program's text."""

import math
import re

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
"""What moves arrays between devices."""


def num_copies(hlo: str, at_least: int) -> int:
    """Copies of arrays of at least so many elements in a program's text."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", hlo)
    return sum(math.prod(int(n) for n in shape.split(",") if n) >= at_least for shape in shapes)


def kernel_calls(hlo: str) -> list[str]:
    """The names of the Mosaic GPU kernels that a program's text calls, each as often as it is called."""
    calls = [line for line in hlo.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return [name for call in calls for name in re.findall(r'op_name="(?:[^"]*/)?(\w+)/\w+"', call)]
