"""Arrays over a mesh: heads that are split, and what differs between devices inside `jax.shard_map`.

XLA cannot split a kernel by itself and would gather the pool, so `over_heads` has each device work on its own
heads. The axis that splits them is known from the pool's type where mesh axes are explicit, and else from
`CacheConfig.head_axis`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def over_heads(
    function: Callable[..., Any],
    pool: jax.Array,
    head_axis: str | None,
    inputs: Sequence[int | None],
    outputs: Sequence[int] | int,
) -> Callable[..., Any]:
    """Maps `function` over the devices' own heads.

    Args:
      function: From pytrees of arrays to such, for any number of heads.
      pool: `[rows, heads, block_size, head_dim]`.
      head_axis: Mesh axis over which the heads are split, if the pool's type does not tell.
      inputs: Per argument the position of its arrays' axis of heads, None where they have none.
      outputs: Likewise, per result; an int where there is one result.
    """
    axis = _axis_to_map(pool, head_axis)
    if axis is None:
        return function

    def spec(position: int | None) -> PartitionSpec:
        return PartitionSpec() if position is None else PartitionSpec(*[None] * position, axis)

    # All axes that the caller does not map over: kernels for TPUs take no mesh that XLA splits by itself.
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    in_specs = tuple(map(spec, inputs))
    out_specs = spec(outputs) if isinstance(outputs, int) else tuple(map(spec, outputs))
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def num_local_heads(pool: jax.Array, head_axis: str | None) -> int:
    """Counts the heads of one device."""
    axis = _axis_to_map(pool, head_axis)
    return pool.shape[1] // (1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis])


def _axis_to_map(pool: jax.Array, head_axis: str | None) -> str | None:
    """Returns the axis that splits the heads; None if there is none or the caller maps over it already."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = _axis_of_type(pool) or head_axis
    if axis is None or axis in mesh.manual_axes:
        return None
    check_in_mesh(axis)
    return axis


def for_each_head(array: jax.Array, pool: jax.Array) -> jax.Array:
    """Repeats an array per head, `[heads, ...]`, split as the pool's heads are where its type tells."""
    axis = _axis_of_type(pool)
    split = None if axis is None else NamedSharding(jax.typeof(pool).sharding.mesh, PartitionSpec(axis))
    return jnp.broadcast_to(array, (pool.shape[1], *array.shape), out_sharding=split)


def _axis_of_type(pool: jax.Array) -> str | None:
    """Returns the axis that splits the heads, if the pool's type tells."""
    spec = jax.typeof(pool).sharding.spec
    return spec[1] if len(spec) > 1 else None


def check_split(name: str, values: jax.Array, pool: jax.Array) -> None:
    """Raises where types tell that `values [..., heads, head_dim]` are split otherwise than the pool is."""
    spec = jax.typeof(values).sharding.spec
    *others, heads, head_dim = (*spec, *[None] * (values.ndim - len(spec)))
    axis = _axis_of_type(pool)
    if any(other is not None for other in (*others, head_dim)):
        raise ValueError(
            f"{name} has the sharding {spec}, expected explicit mesh axes to split its heads alone: "
            "jax.sharding.reshard it, or make the other axis automatic"
        )
    if heads != axis and (heads is not None or name == "q"):
        raise ValueError(
            f"{name}'s heads are split over {heads!r} and the cache's over {axis!r}, expected the same: "
            "reshard one of them; CacheConfig(head_axis=...) or init(sharding=PartitionSpec(None, ...)) "
            "splits the cache"
        )


def check_in_mesh(axis: str) -> None:
    """Raises unless the current mesh has the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        raise ValueError(
            f"head_axis is {axis!r} and the current mesh has the axes {mesh.axis_names}, expected it among "
            "them: run inside `with jax.set_mesh(mesh)`"
        )


def as_varied[T](arrays: T, *others: Any) -> T:
    """Types `arrays` (a pytree) as what differs between devices wherever one of them or of `others` does.

    Inside `jax.shard_map` types tell over which mesh axes an array differs. A loop's carries and a
    `jax.custom_vjp`'s gradients must have the types of what goes in, so what all devices share is typed as
    what differs where it meets a cache of each device's own, and the other way round. In reverse, what was
    shared gets the sum of the devices' gradients.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:  # not inside `shard_map`
        return arrays
    axes = frozenset[str]().union(*map(_axes, jax.tree.leaves((arrays, others))))

    def cast(array: jax.Array) -> jax.Array:
        missing = axes - _axes(array)
        return lax.pcast(array, tuple(missing), to="varying") if missing else array

    return jax.tree.map(cast, arrays)


def _axes(array: Any) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying
