"""The choice of the backend that serves a call."""

from kvcache_jax.core.backends import XLA, Backend, get_backend, require_name, target_device
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import KVPool
from kvcache_jax.layers.layer_group import LayerGroup

# Backends that `None` may pick: those that have run, and were measured, on their hardware.
_MEASURED: tuple[str, ...] = ()


def choose(
    config: CacheConfig, asked: str | None, pool: KVPool, group: LayerGroup, group_size: int = 1
) -> Backend:
    """Chooses the backend of a call with `group_size` query heads per key/value head.

    One `asked` for by name, or else named by the config, runs or raises.
    """
    require_name(asked)
    name = asked or config.implementation
    if config.hides_tokens and get_backend(name or XLA).decode:
        raise NotImplementedError(
            f"implementation {name!r} is asked for and rows may hide tokens, expected 'xla' or None, or a "
            "cache without such extras: kernels do not know tokens that are hidden"
        )
    if name is None and config.hides_tokens:
        return get_backend(XLA)
    if name is None:
        fits = (name for name in _MEASURED if not _why_not(get_backend(name), pool, group, group_size))
        return get_backend(next(fits, XLA))
    backend = get_backend(name)
    if reason := _why_not(backend, pool, group, group_size):
        raise NotImplementedError(f"implementation {name!r} does not run here: {reason}; use 'xla' or None")
    return backend


def _why_not(backend: Backend, pool: KVPool, group: LayerGroup, group_size: int) -> str | None:
    return backend.supports(pool, group, group_size, target_device())


def load(name: str | None) -> None:
    """Imports the modules that a backend needs, or the backends that `None` may pick.

    Before anything is traced: importing Pallas makes jax trace anew whatever it has traced before.
    """
    for each in _MEASURED if name is None else (name,):
        if load_backend := get_backend(each).load:
            load_backend()
