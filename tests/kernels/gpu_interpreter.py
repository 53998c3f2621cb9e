"""Runs interpreted GPU kernels, and takes a race or whatever else the interpreter finds for a failure."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.mosaic_gpu import interpret
from tests.support.interpreters import callbacks_on_the_host, negative_indices_refused


def run_interpreted(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """The results of a function that interprets kernels."""
    try:
        with callbacks_on_the_host(), negative_indices_refused():
            return interpret.run_interpreted(function, *arguments, **keywords)
    except (interpret.RaceError, jax.errors.JaxRuntimeError) as error:
        raise AssertionError(str(error)) from error
