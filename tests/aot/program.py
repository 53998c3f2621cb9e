"""A program whose loops, launches and copies are counted, and how many of each it may have."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Sharding, use_abstract_mesh

import kvcache_jax as kv
from tests.aot import h200


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may have at most; None stands for any number.

    Attributes:
      waits: Loops of unknown trips, and conditionals.
      known_loops: Loops of known trips, say over rows.
      launches: Kernels outside loops of unknown trips.
      temporary_bytes: Device memory beside arguments and results.
    """

    waits: int
    known_loops: int | None = None
    launches: int | None = None
    temporary_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """One operation, or one step of decoding.

    Attributes:
      subject: What it does: an operation's name, or a step's.
      detail: On what: the cache in words.
      config: Of the cache.
      function: Takes what `arguments` returns.
      arguments: Builds shapes, pytrees of `jax.ShapeDtypeStruct`.
      limits: See `Limits`.
      donated: Position of the argument that holds the cache and comes back; None if nothing does.
      is_loop: Whether the step is the body of the program's one outer loop, which also waits.
      is_ordinary: Whether the step passes its inner loops of unknown trips, so that what is in them does not
        count.
    """

    subject: str
    detail: str
    config: kv.CacheConfig
    function: Callable
    arguments: Callable[[], tuple]
    limits: Limits
    donated: int | None = 0
    is_loop: bool = False
    is_ordinary: bool = False

    @property
    def name(self) -> str:
        """Unique, as in `extend_2_groups_index_lru`."""
        return "_".join(f"{self.subject} {self.detail}".replace(",", "").split())

    @property
    def num_pool_elements(self) -> int:
        """Elements of the smallest array of keys or values."""
        return min(math.prod(array.shape) for array in jax.tree.leaves(shapes_of(self.config).pools))

    @property
    def num_prefix_elements(self) -> int:
        """Elements of the smallest array of what prefixes need."""
        pools = zip(self.config.groups, shapes_of(self.config).pools, strict=True)
        needed = [pool for group, pool in pools if group.span.is_in_prefix]
        return min(math.prod(array.shape) for array in jax.tree.leaves(needed))

    @property
    def host_bytes(self) -> int:
        """Bytes of what the cache keeps in host memory."""
        arrays = jax.tree.leaves(self.config.keeper.arrays(self.config))
        return sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in arrays)

    def jitted(self) -> jax.stages.Wrapped:
        """Returns the function, to be lowered."""
        return jax.jit(self.function, donate_argnums=() if self.donated is None else self.donated)


def traced_for_gpu() -> contextlib.AbstractContextManager:
    """What is traced within it, is traced for an H200, on any machine."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=h200.NUM_SMS, platform="cuda")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def placed(arguments: Any, device: Sharding, host: Sharding) -> Any:
    """Returns pytrees of shapes on `device`, and what caches keep outside of the pools on `host`."""

    def on(sharding: Sharding, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def of(tree: Any) -> Any:
        if not isinstance(tree, kv.Cache):
            return on(device, tree)
        return dataclasses.replace(on(device, tree), kept=on(host, tree.kept))

    return jax.tree.map(of, arguments, is_leaf=lambda tree: isinstance(tree, kv.Cache))


@functools.lru_cache
def shapes_of(config: kv.CacheConfig) -> kv.Cache:
    """Returns an empty cache of shapes."""
    return jax.eval_shape(lambda: kv.init(config))
