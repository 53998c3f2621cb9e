"""How interpreted kernels call back into Python, cheaply, and what they may read."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src.pallas.mosaic.interpret import utils as interpreters


def _call(*arguments: np.ndarray, callback, **_: object) -> tuple[np.ndarray, ...]:
    is_index = [x.ndim == 0 and x.dtype.kind == "i" for x in arguments]
    arguments = [x.item() if index else x for x, index in zip(arguments, is_index, strict=True)]
    # What must not be read is NaN: numpy's products of it warn on some processors.
    with np.errstate(invalid="ignore"):
        return jax.tree.map(np.asarray, callback(*arguments))


@contextlib.contextmanager
def callbacks_on_the_host() -> Iterator[None]:
    """Interpreters get numpy arrays: jax would put each on a device first, which takes most of the time."""
    with mock.patch.object(jax_callback, "io_callback_impl", _call):
        yield


def _clip(indices: tuple, shape: tuple[int, ...], clip=interpreters.clip_range_to_shape) -> tuple | None:
    if any((index.start if isinstance(index, slice) else index) < 0 for index in indices):
        raise IndexError(f"{indices} begins before the start of an array of shape {shape}")
    return clip(indices, shape)


@contextlib.contextmanager
def negative_indices_refused() -> Iterator[None]:
    """Interpreters would count them from the end; a device reads what lies before the array."""
    with mock.patch.object(interpreters, "clip_range_to_shape", _clip):
        yield
