"""The operations `init` and `reset`: an empty cache, built where it will live."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvcache_jax.arrays.number_checks import static_flag
from kvcache_jax.arrays.sharding import axis_of_types, check_in_mesh
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.choose_backend import implementation_of, load
from kvcache_jax.core.config import CacheConfig, require_config
from kvcache_jax.core.context_axis import check_heads_divide, check_tokens_divide
from kvcache_jax.core.describe import describe
from kvcache_jax.core.empty_state import empty_control, empty_pools, in_place_of
from kvcache_jax.core.extras import KeptArray
from kvcache_jax.core.state import Cache, Control, KVPool
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.layer_group import LayerGroup

_log = logging.getLogger("kvcache_jax")
_DEFAULT_HASH_KEY = (0x9E3779B9, 0x7F4A7C15)


@explicit_transfers
def init(
    config: CacheConfig, *, sharding: Sharding | PartitionSpec | None = None, storage: bool = True
) -> Cache:
    """Builds an empty cache, where it will live.

    Args:
      config: Kinds, sizes, options.
      sharding: Of keys and values `[num_layers * num_blocks, num_kv_heads, block_size, head_dim]`; only the
        heads may be split, and the tokens as `config.context_axis` says, and are in arrays of other shapes
        too. The control state is replicated. A `PartitionSpec` refers to the current mesh. Default: as
        `config.head_axis` and `config.context_axis` say.
      storage: False builds the control state alone, for planning and for replaying traces.

    Returns:
      A cache with all rows idle, all blocks free and all keys and values 0.

    Raises:
      TypeError: `config` or `sharding` is something else.
      ValueError: `sharding` splits another axis than heads and tokens, the heads over another mesh axis than
        `config.head_axis`, the tokens over another than `config.context_axis`, or either over devices that do
        not divide them; or the current mesh does not have that axis.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=32))
      Cache(1 groups, 1 layers, float32; blocks 0/4 used, 0 B of 4.0 KiB; rows 0/2 active;
        allocations 0, forks 0, frees 0, copies 0)
    """
    require_config("init", config)
    static_flag("storage", storage)
    own_axes = {"head_axis": config.head_axis, "context_axis": config.context_axis}
    if sharding is None and any(own_axes.values()):
        for name, axis in own_axes.items():
            if axis is not None:
                check_in_mesh(name, axis)
        sharding = PartitionSpec(None, *own_axes.values(), None)
    if not (sharding is None or isinstance(sharding, Sharding | PartitionSpec)):
        raise TypeError(f"sharding is {sharding!r}, expected a jax.sharding.Sharding or a PartitionSpec")
    if isinstance(sharding, NamedSharding | PartitionSpec):
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        _check_spec(spec, config)
        _check_heads(sharding, spec, config)
    load(config)
    if sharding is None and _is_plain():
        # A program to make so many small arrays would take longer to compile than all of this.
        control = jax.device_put(empty_control(config, np.array(_DEFAULT_HASH_KEY, np.uint32), np))
        cache = Cache(control=control, pools=empty_pools(config) if storage else (), config=config)
    else:
        cache = _builder(config, sharding, storage)()
    if storage:
        cache = dataclasses.replace(cache, kept=_empty_kept(config, sharding))
    if _log.isEnabledFor(logging.INFO):
        _log.info("init: %s", describe(config))
    return cache


def _empty_kept(config: CacheConfig, sharding: Sharding | PartitionSpec | None) -> Any:
    """Makes what the config's keeper keeps, zeroed; `sharding` splits their heads too."""
    kind = config.keeper.memory_kind
    if kind is None:
        return None
    if isinstance(jnp.zeros(()), Tracer):  # the program knows the place

        def zeros(array: KeptArray) -> jax.Array:
            return jax.device_put(jnp.zeros(array.shape, array.dtype), jax.memory.Space.Host)

        return jax.tree.map(zeros, config.keeper.arrays(config))
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_mesh()
    if sharding is None and mesh.empty:
        sharding = SingleDeviceSharding(*jnp.zeros(()).devices())

    def placed(array: KeptArray) -> jax.Array:
        where = sharding
        if where is None or isinstance(where, NamedSharding | PartitionSpec):
            spec = where.spec if isinstance(where, NamedSharding) else where or PartitionSpec()
            where = NamedSharding(mesh, array.spec(spec[1] if len(spec) > 1 else None))
        return jax.device_put(np.zeros(array.shape, array.dtype), where.with_memory_kind(kind))

    return jax.tree.map(placed, config.keeper.arrays(config))


def _is_plain() -> bool:
    """Tests whether arrays made here and now are neither traced nor on a mesh: numpy's will do."""
    return jax.sharding.get_abstract_mesh().empty and not isinstance(jnp.zeros(()), Tracer)


def _check_spec(spec: PartitionSpec, config: CacheConfig) -> None:
    _, axis, context_axis, *others = (*spec, *[None] * (4 - len(spec)))
    if spec and spec[0] is not None or any(other is not None for other in others):
        raise ValueError(
            f"sharding is {spec}, expected only the heads split: PartitionSpec(None, axis, None, None)"
        )
    if context_axis != config.context_axis:
        raise ValueError(
            f"sharding splits the tokens over {context_axis!r} and config.context_axis is "
            f"{config.context_axis!r}, expected the same: attention must know the axis, write "
            f"CacheConfig(..., context_axis={context_axis!r})"
        )
    uses_kernels = implementation_of(config) not in (None, "xla")
    if axis != config.head_axis and (uses_kernels or config.head_axis is not None):
        raise ValueError(
            f"sharding splits the heads over {axis!r} and config.head_axis is {config.head_axis!r}, expected "
            f"the same: a kernel must know the axis, write CacheConfig(..., head_axis={axis!r})"
        )


def _check_heads(sharding: NamedSharding | PartitionSpec, spec: PartitionSpec, config: CacheConfig) -> None:
    """Raises unless the devices that split the heads divide every array's heads; and tokens likewise."""
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    axis = spec[1] if len(spec) > 1 else None
    names = axis if isinstance(axis, tuple) else (axis,)
    used = [name for name in (*names, config.context_axis) if name is not None]
    if len({*used}) < len(used) or not {*used} <= {*mesh.axis_names}:
        raise ValueError(
            f"sharding is {spec} and the mesh has the axes {mesh.axis_names}, expected each of them once at "
            "most: a PartitionSpec is for the mesh of `with jax.set_mesh(mesh)`"
        )
    num_devices = math.prod(mesh.shape.get(name, 1) for name in names)
    check_heads_divide(config.groups, axis, num_devices)
    if config.context_axis is not None:
        check_tokens_divide(config.groups, config.context_axis, mesh.shape[config.context_axis])
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if types[config.context_axis] == AxisType.Explicit:
            raise NotImplementedError(
                f"the mesh axis {config.context_axis!r} of context_axis is explicit, expected an automatic "
                "one: jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...)); others may be"
            )


@functools.lru_cache(maxsize=64)
def _builder(config: CacheConfig, sharding: Sharding | PartitionSpec | None, storage: bool) -> Callable:
    """Makes the program that builds an empty cache where numpy cannot; kept, so that it compiles once."""

    def build() -> Cache:
        return Cache(
            control=empty_control(config, jnp.array(_DEFAULT_HASH_KEY, jnp.uint32)),
            pools=empty_pools(config) if storage else (),
            config=config,
        )

    if sharding is None:
        return jax.jit(build)
    control_sharding = sharding
    if isinstance(sharding, NamedSharding):
        control_sharding = NamedSharding(sharding.mesh, PartitionSpec())
    elif isinstance(sharding, PartitionSpec):
        control_sharding = PartitionSpec()
    cache = jax.eval_shape(build)
    pools = zip(cache.pools, config.groups if storage else (), strict=True)
    out_shardings = Cache(
        control=jax.tree.map(lambda _: control_sharding, cache.control),
        pools=tuple(_pool_shardings(pool, group, sharding) for pool, group in pools),
        config=config,
    )
    return jax.jit(build, out_shardings=out_shardings)


def _pool_shardings(pool: KVPool, group: LayerGroup, sharding: Sharding | PartitionSpec) -> KVPool:
    """Splits each array's heads and tokens as `sharding`, of keys and values, splits theirs."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        return jax.tree.map(lambda _: sharding, pool)
    _, heads, tokens, *_ = (*spec, None, None, None)

    def of(array: BlockArray) -> Sharding | PartitionSpec:
        own = PartitionSpec(None, *array.spec(heads, tokens))
        return NamedSharding(sharding.mesh, own) if isinstance(sharding, NamedSharding) else own

    return KVPool(arrays={name: of(array) for name, array in group.arrays})


def sharding_of(cache: Cache) -> NamedSharding | None:
    """Returns the sharding with which `init` builds such a cache again; None for one device's."""
    for pool, group in zip(cache.pools, cache.config.groups, strict=bool(cache.pools)):
        for name, position in group.head_positions.items():
            sharding = pool.arrays[name].sharding
            if isinstance(sharding, NamedSharding):
                axis = axis_of_types(pool.arrays, {name: position})
                tokens = cache.config.context_axis
                return NamedSharding(sharding.mesh, PartitionSpec(None, axis, tokens, None))
    return None


@takes_one
def reset(cache: Cache) -> Cache:
    """Ends all rows and forgets all contents; the pools' buffers are reused as they are."""
    return dataclasses.replace(cache, control=_reset(cache.control, config=cache.config))


@functools.partial(jax.jit, static_argnames="config")
def _reset(control: Control, config: CacheConfig) -> Control:
    return in_place_of(control, empty_control(config, control.hash_key))
