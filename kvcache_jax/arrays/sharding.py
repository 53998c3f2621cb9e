"""Arrays over a mesh: heads or tokens that are split, and arrays that differ inside `jax.shard_map`.

XLA cannot split a kernel by itself and would gather the pool, so `over_heads` has each device work on its own
heads. The axis that splits them is known from the pool's type where mesh axes are explicit, and else from
`CacheConfig.head_axis`. `over_tokens` has each device work on its own tokens of blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding


def over_heads(
    function: Callable[..., Any],
    axis: str | None,
    inputs: Sequence[Any],
    outputs: Any,
) -> Callable[..., Any]:
    """Maps `function` over the devices' own heads, split by `axis`; None leaves the function as it is.

    `inputs` has per argument the position of its arrays' axis of heads, None where they have none, or a
    pytree of positions. `outputs` has a tuple of these, or the positions of the one result.
    """
    if axis is None:
        return function
    # All axes that the caller does not map over: kernels for TPUs take no mesh that XLA splits by itself.
    mesh = jax.sharding.get_abstract_mesh()
    return _mapped(function, axis, inputs, outputs, set(mesh.axis_names) - set(mesh.manual_axes))


def over_tokens(
    function: Callable[..., Any],
    axis: str | None,
    inputs: Sequence[Any],
    outputs: Any,
) -> Callable[..., Any]:
    """Maps `function` over the devices' own tokens of blocks, split by `axis`; positions as in `over_heads`.

    None, and an axis that the caller maps over, leave the function as it is. XLA goes on to split other axes.
    """
    if axis is None or axis in jax.sharding.get_abstract_mesh().manual_axes:
        return function
    check_in_mesh("context_axis", axis)
    return _mapped(function, axis, inputs, outputs, {axis})


def _mapped(
    function: Callable[..., Any], axis: str, inputs: Sequence[Any], outputs: Any, axes: set[str]
) -> Callable[..., Any]:
    """Maps over `axes` a function of arrays that `axis` splits."""

    def spec(position: int | None) -> PartitionSpec:
        return PartitionSpec() if position is None else PartitionSpec(*[None] * position, axis)

    def specs(positions: Any) -> Any:
        return jax.tree.map(spec, positions, is_leaf=lambda position: position is None)

    in_specs = tuple(map(specs, inputs))
    out_specs = tuple(map(specs, outputs)) if isinstance(outputs, tuple) else specs(outputs)
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def axis_to_map(type_axis: str | None, head_axis: str | None) -> str | None:
    """Finds the mesh axis that splits the heads; None for none, or if the caller maps over it already.

    `type_axis` is from `axis_of_types`, `head_axis` from the config.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axis = type_axis or head_axis
    if axis is None or axis in mesh.manual_axes:
        return None
    check_in_mesh("head_axis", axis)
    return axis


def axis_of_types(arrays: Mapping[str, jax.Array], positions: Mapping[str, int | None]) -> str | None:
    """Finds the mesh axis that splits the heads of a pool's arrays, where their types tell; else None."""
    for name, position in positions.items():
        spec = jax.typeof(arrays[name]).sharding.spec
        if position is not None and len(spec) > position and spec[position] is not None:
            return spec[position]
    return None


def num_local(size: int, axis: str | None) -> int:
    """Counts the heads of one device, of `size` that `axis` splits."""
    return size // (1 if axis is None else jax.sharding.get_abstract_mesh().shape[axis])


def for_each_head(array: jax.Array, values: jax.Array) -> jax.Array:
    """Repeats an array per head of `values [rows, heads, ...]`, split as these are where their type tells."""
    spec = jax.typeof(values).sharding.spec
    axis = spec[1] if len(spec) > 1 else None
    split = None if axis is None else NamedSharding(jax.typeof(values).sharding.mesh, PartitionSpec(axis))
    return jnp.broadcast_to(array, (values.shape[1], *array.shape), out_sharding=split)


def split_as(array: jax.Array, values: jax.Array) -> jax.Array:
    """Splits an array's first axis as the first axis of `values`, where its type tells."""
    spec = jax.typeof(values).sharding.spec
    if not spec or spec[0] is None:
        return array
    return jax.sharding.reshard(
        array, NamedSharding(jax.typeof(values).sharding.mesh, PartitionSpec(spec[0]))
    )


def split_alone(array: jax.Array, position: int, axis: str | None, values: jax.Array) -> jax.Array:
    """Splits one axis of an array over a mesh axis, or over none, if types of the two name a mesh."""
    meshes = [jax.typeof(x).sharding.mesh for x in (array, values) if any(jax.typeof(x).sharding.spec)]
    if not meshes:
        return array
    spec = PartitionSpec(*[None] * position, axis)
    return jax.sharding.reshard(array, NamedSharding(meshes[0], spec))


def check_split(name: str, values: jax.Array, axis: str | None) -> None:
    """Raises where types tell that `values [..., heads, head_dim]` are split otherwise than the pool's heads.

    The pool's are split over `axis`, from `axis_of_types`.
    """
    spec = jax.typeof(values).sharding.spec
    *others, heads, head_dim = (*spec, *[None] * (values.ndim - len(spec)))
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


def check_in_mesh(name: str, axis: str) -> None:
    """Raises unless the current mesh has the axis, an option of the `name`."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        raise ValueError(
            f"{name} is {axis!r} and the current mesh has the axes {mesh.axis_names}, expected it among "
            "them: run inside `with jax.set_mesh(mesh)`"
        )


def as_varied[T](arrays: T, *others: Any) -> T:
    """Types `arrays` (a pytree) as varying between devices wherever one of them or of `others` varies.

    Inside `jax.shard_map` an array's type has the mesh axes over which it varies. Loop carries and the
    gradients of a `jax.custom_vjp` must keep their input types. So where a replicated array meets a
    per-device one, both are typed as varying. In reverse, the gradient of a replicated array is the sum of
    the devices' gradients.
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


def put(tree: Any, shardings: Any) -> Any:
    """Puts arrays, the same in all processes, where `shardings`, a prefix of their tree, have them."""

    def put_one(leaf: Any, sharding: Sharding) -> jax.Array:
        if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(
        lambda sharding, part: jax.tree.map(lambda leaf: put_one(leaf, sharding), part), shardings, tree
    )


class OnHost(NamedTuple):
    """An array's shards of this process in host memory, by device, and what it was."""

    shape: tuple[int, ...]
    sharding: Sharding
    shards: Mapping[Any, np.ndarray]


def to_host(array: jax.Array) -> OnHost:
    """Copies what this process has of an array."""
    shards = {shard.device: np.array(jax.device_get(shard.data)) for shard in array.addressable_shards}
    return OnHost(array.shape, array.sharding, shards)


def to_devices(kept: OnHost) -> jax.Array:
    """Puts an array back to where it was."""
    kind = kept.sharding.memory_kind
    shards = [
        jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind))
        for device, data in kept.shards.items()
    ]
    return jax.make_array_from_single_device_arrays(kept.shape, kept.sharding, shards)
