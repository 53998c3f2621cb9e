"""Compiles the loops that `experiments.first_gpu_run` times for H200, without a GPU.

    python -m tests.aot.benchmark

A loop must launch what it says: its trip count known to the host (else the host waits for each launch),
nothing of the work moved out of it, no pool copied, pools that are written updated in place. Exit status 1 if
one does not. A decoder's step is compiled by `tests.aot.gpu`. Peers that need what is not installed here are
reported, and pass.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.on_device import contests, moves, problem
from experiments.on_device.cells import Cell
from experiments.on_device.problem import Problem
from experiments.on_device.sides import jax_sides
from tests.aot import h200
from tests.aot.hlo import num_copies

CELLS = {1: Cell(8, 1024, 4, 16), 3: Cell(32, 1024, 8, 64)}
"""By the number of buffers."""
POOLS = moves.Pools(num_blocks=256)
NUM_LAUNCHES = 16


class CompiledError(Exception):
    """The program, in place of its run."""


def compile_for_h200(function: Callable, *arguments: Any, **options: Any) -> Callable:
    with h200.lowering():
        program = jax.jit(function, **options).lower(*h200.place(arguments)).compile()
    raise CompiledError(program.as_text(), program.memory_analysis())


def failures(hlo: str, memory: Any, largest: int, num_launches: int, alias_bytes: int = 0) -> list[str]:
    """What is wrong with a loop's program, a phrase each.

    Args:
      hlo: Its text.
      memory: Its `memory_analysis()`.
      largest: Elements of the smallest array that must not be copied, nor made outside of the loop.
      num_launches: Of the loop.
      alias_bytes: To be updated in place.
    """
    found = []
    trips = re.findall(r'"known_trip_count":\{"n":"(\d+)"', hlo)
    if str(num_launches) not in trips:
        found.append(f"trip counts {trips} are known, expected {num_launches}")
    if copies := num_copies(hlo, largest):
        found.append(f"copies a pool {copies} times")
    entry = hlo[hlo.index("\nENTRY") :]
    shapes = re.findall(r"= \(?\w+\[([\d,]+)\][^=]* (?:fusion|custom-call|gather)\(", entry)
    outside = [shape for shape in shapes if np.prod([int(n) for n in shape.split(",")]) >= largest]
    if outside:
        found.append(f"makes [{'], ['.join(outside)}] outside of the loop")
    if memory.alias_size_in_bytes < alias_bytes:
        found.append(f"{alias_bytes - memory.alias_size_in_bytes} bytes not updated in place")
    return found


def zeros_problem(cell: Cell, num_buffers: int) -> Problem:
    table, _ = problem.make_table(cell)
    shape = (num_buffers * cell.num_blocks, cell.num_kv_heads, cell.block_size, cell.head_dim)
    pool = jnp.zeros(shape, jnp.bfloat16)
    q = jnp.zeros((cell.batch, cell.num_kv_heads, cell.group_size, cell.head_dim), jnp.bfloat16)
    return Problem(cell, num_buffers, q, pool, pool, jnp.asarray(table))


def loops() -> Iterator[tuple[str, contests.Side, int, int, int]]:
    """(name, side, `largest`, launches, bytes in place) of every loop."""
    for num_buffers, cell in CELLS.items():
        data = zeros_problem(cell, num_buffers)
        # What a gather makes counts too.
        largest = cell.kv_bytes // 4
        for side in jax_sides(data):
            yield f"{cell.name}, {num_buffers} buffers, {side.name}", side, largest, NUM_LAUNCHES, 0
    makers = moves.ceiling_makers(1 << 16)
    for name in (contests.READ, contests.COPY):
        contest, sides = makers[name]()
        largest, alias_bytes = 1 << 16, contest.num_bytes // 2 * (contest.name == contests.COPY)
        yield f"{contest.name}, {sides[0].name}", sides[0], largest, contest.num_launches, alias_bytes
    for make in moves.move_makers(POOLS, (128,), 64).values():
        contest, sides = make()
        sizes = POOLS._replace(is_scaled=contest.name.startswith("append_scaled"))
        largest, pool_bytes = int(np.prod(POOLS.shape)), sizes.num_blocks * sizes.block_bytes
        yield f"{contest.name}, ours", sides[0], largest, contest.num_launches, pool_bytes


def main() -> int:
    h200.start_compiler()
    contests.compiled = compile_for_h200
    # Only the shapes of random data matter.
    problem.random_pool = moves.random_pool = lambda _, shape: jnp.zeros(shape, jnp.bfloat16)
    start, num_loops, num_failed = time.monotonic(), 0, 0
    print(f"The benchmark's loops compiled for H200 by jax {jax.__version__}")
    for name, side, largest, num_launches, alias_bytes in loops():
        num_loops += 1
        try:
            side.prepare(num_launches)
            found = ["it compiled nothing"]
        except CompiledError as program:
            found = failures(*program.args, largest, num_launches, alias_bytes)
        except Exception as error:
            reason = contests.one_line(error)
            found = [] if "cuDNN" in reason else [reason]
            if not found:
                print(f"{name}: not compiled, {reason}")
                continue
        num_failed += bool(found)
        print(f"{name}: {'FAILED: ' + '; '.join(found) if found else 'ok'}", flush=True)
    print(f"{num_loops} loops, {num_failed} failed in {time.monotonic() - start:.0f} s")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
