"""Reading the device made impossible, but in the one place where the engine does."""

import contextlib

import jax
import pytest
from jax._src.array import ArrayImpl

from kvcache_jax.engine.events import Reader


@pytest.fixture
def reads_are_refused(monkeypatch):
    """Makes a context in which every read of a device array fails that is not the `Reader`'s.

    A transfer guard sees nothing on CPUs, where arrays are read in place.
    """
    device_get, as_numpy, read, is_reading = jax.device_get, ArrayImpl.__array__, Reader.__call__, []

    def refuse(*_, **__):
        raise AssertionError("the host reads the device")

    def read_here(reader, array):
        is_reading.append(True)
        try:
            return read(reader, array)
        finally:
            is_reading.pop()

    @contextlib.contextmanager
    def refused():
        with monkeypatch.context() as patch:
            for name in ("__int__", "__float__", "__bool__", "__index__", "item", "tolist"):
                patch.setattr(ArrayImpl, name, refuse)
            patch.setattr(
                ArrayImpl, "__array__", lambda *a, **k: (as_numpy if is_reading else refuse)(*a, **k)
            )
            patch.setattr(jax, "device_get", lambda x: (device_get if is_reading else refuse)(x))
            patch.setattr(Reader, "__call__", read_here)
            yield

    return refused
