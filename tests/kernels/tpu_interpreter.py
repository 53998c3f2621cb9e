"""Runs interpreted TPU kernels, and takes a race or a read out of bounds for a failure."""

from collections.abc import Callable

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from tests.support.interpreters import callbacks_on_the_host, negative_indices_refused


def run_interpreted(function: Callable, *arguments: object, **keywords: object):
    """The results of a function that interprets one kernel, under jit."""
    try:
        with callbacks_on_the_host(), negative_indices_refused():
            results = jax.block_until_ready(jax.jit(function)(*arguments, **keywords))
    except jax.errors.JaxRuntimeError as error:
        pltpu.reset_tpu_interpret_mode_state()
        raise AssertionError(str(error)) from error
    # jax 0.12 raises on a race, jax 0.11.2 prints it and goes on.
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found
    return results
