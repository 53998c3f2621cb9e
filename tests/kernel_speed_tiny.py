"""The worker of `experiments.kernel_speed` with what a CPU does in seconds.

python -m tests.kernel_speed_tiny interpreted|timed ...    ... is what any worker gets
"""

import functools
import os
import sys
from pathlib import Path

import jax

from experiments import kernel_speed_cells, kernel_speed_jobs, kernel_speed_worker
from experiments.kernel_speed_cells import Cell, StepSizes
from experiments.kernel_speed_moves import Pools, ceiling_makers

CELL = Cell(2, 64, 4, 16, num_kv_heads=1, head_dim=64)
CACHE = Path(__file__).parent.parent / ".cache" / "jax" / jax.__version__


def interpreted(*arguments) -> kernel_speed_jobs.Jobs:
    kernel_speed_jobs.TINY = (CELL,)
    return kernel_speed_worker.device_jobs(*arguments)


def timed(is_quick: bool, _: bool) -> kernel_speed_jobs.Jobs:
    """As on a GPU."""
    kernel_speed_jobs.QUICK = (CELL._replace(batch=1),)
    kernel_speed_cells.ROTATED_BYTES = 3 * CELL.kv_bytes
    kernel_speed_jobs.ceiling_makers = functools.partial(ceiling_makers, 1 << 12)
    kernel_speed_jobs.Pools = functools.partial(Pools, 2, 8, 1, 8, 64)
    kernel_speed_jobs.NUM_MOVED = 2
    kernel_speed_jobs.STEPS = (StepSizes(2, 32, num_steps=2),)
    from experiments import kernel_speed_step as step

    step.LLAMA_1B = step.TINY
    return kernel_speed_jobs.Jobs(jax.devices()[0], is_quick, interpret=False)


if __name__ == "__main__":
    from tests.interpreters import callbacks_on_the_host

    jax.config.update("jax_compilation_cache_dir", str(CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    with callbacks_on_the_host():
        os._exit(
            kernel_speed_worker.main(sys.argv[2:], {"interpreted": interpreted, "timed": timed}[sys.argv[1]])
        )
