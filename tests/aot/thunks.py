"""XLA's list of what it runs on a GPU, and what of it the host drives."""

import re

_THUNK = re.compile(r"^( *)\d+: k(\w+)")


def num_driven_by_host(thunks: str) -> int:
    """Counts the loops and branches outside of CUDA graphs, also those within others.

    Args:
      thunks: The file `*.thunk_sequence_after_thunk_passes.txt` of `--xla_dump_to`: a thunk a line, what is
        within it further to the right.
    """
    num, graph = 0, None  # the indentation of the graph that the line is in
    for found in filter(None, map(_THUNK.match, thunks.splitlines())):
        indentation, kind = len(found[1]), found[2]
        if graph is not None and indentation <= graph:
            graph = None
        if graph is None:
            num += kind in ("While", "Conditional")
            graph = indentation if kind == "CommandBuffer" else None
    return num
