"""Running Mosaic GPU kernels: compiled on a GPU, or interpreted on the CPU, where races are looked for."""

import contextlib
import inspect
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    body: Callable[..., None], *, cost: pl.CostEstimate, interpret: bool, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel` for every supported version of jax.

    Args:
      body: The kernel.
      cost: For XLA's scheduler; versions of jax that have no place for it do without.
      interpret: Run on the CPU and look for races (see `run_interpreted`).
      **options: Of `plgpu.kernel`.
    """
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:
        options["cost_estimate"] = cost
    if interpret:
        options["interpret"] = _interpret_params()
    return plgpu.kernel(body, **options)


def store(ref: Any, value: jax.Array) -> None:
    """`ref[...] = value` where it need not be fast: to device memory, or of another layout than is stored."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # the oldest jax does without being told
        ref[...] = value


def _interpret_params() -> Any:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True, num_tma_threads_per_device=_TMA_THREADS)


class RaceError(RuntimeError):
    """Two accesses to the same memory, at least one of them a write, of which neither is surely first."""


def run_interpreted(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """`function(*arguments, **keywords)` with its results computed, for functions that interpret kernels.

    Raises:
      RaceError: One of the kernels has a race. jax 0.12 raises by itself, jax 0.11.2 only prints.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            results = jax.block_until_ready(function(*arguments, **keywords))
    except Exception as error:
        gpu_callbacks.reset_gpu_interpret_mode_state()  # else no later kernel can be interpreted
        if _RACE in str(error):
            raise RaceError(str(error)) from error
        raise
    if _RACE in printed.getvalue():
        raise RaceError(printed.getvalue())
    print(printed.getvalue(), end="")
    return results


_RACE = "RACE DETECTED"
# Copies take turns on that many clocks. With jax's default of 5, two copies that do not wait for each other
# often look ordered: a ring that refilled a slot one copy too early had no race.
_TMA_THREADS = 61


def touch(ref: Any) -> None:
    """Reads shared memory with an ordinary load, which the race detector sees.

    It does not see what a wgmma reads. To be called after a wgmma, in interpreted kernels only, with each
    operand that copies refill; the fence is what an ordinary read needs before a copy overwrites the place.
    """
    total = ref[...].astype(jnp.float32).sum()
    pl.when(total == _UNLIKELY)(plgpu.commit_smem)  # keeps the read alive
    plgpu.commit_smem()


_UNLIKELY = 1.2345e30
