"""Which implementation serves a cache or a call: XLA, or the kernels for one kind of device."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

import jax

from kvcache_jax.core.config import IMPLEMENTATIONS, CacheConfig
from kvcache_jax.core.state import KVPool

XLA, MOSAIC_GPU, MOSAIC_TPU = IMPLEMENTATIONS
_PLATFORM = {MOSAIC_GPU: "cuda", MOSAIC_TPU: "tpu"}

# What `None` may pick: implementations that have run, and were measured, on their hardware.
_MEASURED: tuple[str, ...] = ()

is_interpreted = jax.make_user_context(False)
"""Whether kernels traced now are to run on the CPU; what is compiled elsewhere is not reused for it."""


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it, kernels are traced to run on the CPU, where races are looked for; slow.

    Those for GPUs on one device: jax's interpreter confuses the barriers of several.
    """
    with is_interpreted(True):
        yield


def choose(config: CacheConfig, asked: str | None, pool: KVPool, group_size: int = 1) -> str:
    """The implementation of a call; a named one runs or raises.

    Args:
      config: Names one for the cache, or leaves it open.
      asked: By the call.
      pool: Of the layer group.
      group_size: Query heads of a key/value head.

    Raises:
      ValueError: there is no such implementation, or it does not take this cache.
      NotImplementedError: it does not run here.
    """
    if asked not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation is {asked!r}, expected None or one of {', '.join(IMPLEMENTATIONS)}")
    name = asked or config.implementation
    if name is None:
        fits = (name for name in _MEASURED if not _why_not(name, pool, group_size))
        return next(fits, XLA)
    if name != XLA and (reason := _why_not(name, pool, group_size)):
        raise NotImplementedError(f"implementation {name!r} does not run here: {reason}; use 'xla' or None")
    return name


def load(name: str | None) -> None:
    """Imports the kernels of an implementation, or those that `None` may pick.

    Before anything is traced: importing Pallas makes jax trace anew whatever it has traced before.
    """
    names = _MEASURED if name is None else (name,)
    if kernel_names := [name for name in names if name != XLA]:
        from pallas_kernels.versions import untested_jax

        if not untested_jax():
            for name in kernel_names:
                kernels(name)


def _why_not(name: str, pool: KVPool, group_size: int) -> str | None:
    """Why a kernel does not serve a cache here, or None if it does."""
    from pallas_kernels.versions import untested_jax

    if reason := untested_jax():
        return reason
    if not is_interpreted.value:
        platform = _platform()
        if platform != _PLATFORM[name]:
            return f"it is for {_PLATFORM[name]} devices, and this is {platform}"
    elif name == MOSAIC_GPU and jax.sharding.get_abstract_mesh().size > 1:
        return "jax's interpreter of GPU kernels confuses the barriers of several devices, expected one"
    return kernels(name).why_not(pool.k, group_size)


def _platform() -> str:
    """Of the devices that the program is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = None if device is None else device.platform
    if platform is None:
        platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def kernels(name: str) -> ModuleType:
    """The package of an implementation other than XLA."""
    if name == MOSAIC_GPU:
        from pallas_kernels import mosaic_gpu

        return mosaic_gpu
    from pallas_kernels import mosaic_tpu

    return mosaic_tpu
