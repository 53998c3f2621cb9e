"""The worker of `experiments.kernel_speed` with what a CPU does in seconds.

python -m tests.experiments.kernel_speed_tiny interpreted|timed ...    ... is what any worker gets
"""

import functools
import os
import sys
from pathlib import Path

import jax

from experiments.kernel_speed import cells, jobs, worker
from experiments.kernel_speed.cells import Cell, StepSizes
from experiments.kernel_speed.moves import Pools, ceiling_makers

CELL = Cell(2, 64, 4, 16, num_kv_heads=1, head_dim=64)
CACHE = Path(__file__).parent.parent.parent / ".cache" / "jax" / jax.__version__


def interpreted(*arguments) -> jobs.Jobs:
    jobs.TINY = (CELL,)
    return worker.device_jobs(*arguments)


def timed(is_quick: bool, _: bool) -> jobs.Jobs:
    """As on a GPU."""
    jobs.QUICK = (CELL._replace(batch=1),)
    cells.ROTATED_BYTES = 3 * CELL.kv_bytes
    jobs.ceiling_makers = functools.partial(ceiling_makers, 1 << 12)
    jobs.Pools = functools.partial(Pools, 2, 8, 1, 8, 64)
    jobs.NUM_MOVED = 2
    jobs.STEPS = (StepSizes(2, 32, num_steps=2),)
    from experiments.kernel_speed import step

    step.LLAMA_1B = step.TINY
    return jobs.Jobs(jax.devices()[0], is_quick, interpret=False)


if __name__ == "__main__":
    from tests.support.interpreters import callbacks_on_the_host

    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    with callbacks_on_the_host():
        os._exit(worker.main(sys.argv[2:], {"interpreted": interpreted, "timed": timed}[sys.argv[1]]))
