"""Inside `jax.shard_map` types tell over which mesh axes an array differs between devices.

A loop's carries and a `jax.custom_vjp`'s gradients must have the types of what goes in. So what all devices
share is typed as what differs, where it meets a cache of each device's own, and the other way round.
"""

from typing import Any

import jax
from jax import lax


def as_varied[T](arrays: T, *others: Any) -> T:
    """`arrays` (a pytree), typed as what differs wherever one of them or of `others` does.

    In reverse, what was shared gets the sum of the devices' gradients.
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
