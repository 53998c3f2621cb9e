"""Checks and conversions of callers' arguments; every refusal names got, expected and the fix.

Values from the host stay in numpy, for they go to the device with the call of the operation's program:
making arrays of it here would be a program each, and checks that look at values would wait for a device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import as_integer, finite_number
from kvcache_jax.arrays.sharding import axis_of_types, check_split
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, KVPool, Step
from kvcache_jax.layers.layer_group import LayerGroup

IntRows = ArrayLike | Sequence[int]
"""Types that row operations accept for an i32[n]."""

Layer = int | jax.Array | tuple[int, int | jax.Array]
"""A model layer; or a traced index if all layers form one group; or (group, index in the group)."""


class Place(NamedTuple):
    """A layer's keys and values in a cache."""

    group_id: int
    layer: jax.Array | np.int32  # i32[], index in the group
    pool: KVPool  # of the group


Array = jax.Array | np.ndarray
"""An array of jax, or of numpy if the values came from the host."""

INT32 = np.iinfo(np.int32)
_LEAST, _MOST = int(INT32.min), int(INT32.max)


def int_column(name: str, values: Any, num_rows: int | None = None) -> Array:
    """Converts `values` to i32[n]. Integers beyond 32 bits saturate instead of wrapping into a valid id."""
    values = saturated(name, values)
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}, expected one integer per row, [n]")
    if num_rows is not None and values.shape[0] != num_rows:
        raise ValueError(
            f"{name} has {values.shape[0]} rows, expected {num_rows}, as many as the call's other arguments"
        )
    return values


def priorities(values: Any, num_rows: int) -> Array:
    """Converts priorities to i32[num_rows]; integers beyond 32 bits are refused.

    A saturated id or length is still out of range. A saturated priority would be another valid one.
    """
    given = integers("priority", values)
    column = int_column("priority", given, num_rows)
    is_taken = np.can_cast(given.dtype, np.int32) or isinstance(given, Tracer)
    for value in [] if is_taken else np.asarray(given).tolist():
        one_priority(value)
    return column


def one_priority(value: Any) -> int:
    """Converts a priority that the host knows to a Python int; one beyond 32 bits is refused."""
    value = as_integer("priority", value)
    if not _LEAST <= value <= _MOST:
        raise ValueError(f"priority is {value}, expected {_LEAST} to {_MOST}")
    return value


def hashable_id[T](name: str, value: T) -> T:
    """Refuses an id by which nothing could be found again."""
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} is {value!r} ({error}), expected one that can be hashed, such as a string or a number"
        ) from None
    if value != value:
        raise ValueError(
            f"{name} is {value!r}, which does not equal itself and could not be found again, expected one "
            "that does, such as a string or a number"
        )
    return value


def int_scalar(name: str, value: Any) -> Array:
    """Converts `value` to i32[], saturated as in `int_column`."""
    value = as_array(name, value)
    if value.shape:
        raise ValueError(f"{name} has shape {value.shape}, expected one integer, []")
    return int_column(name, value[None])[0]


def owned(arrays: Any) -> Any:
    """Copies the numpy arrays of a pytree, so that callers may overwrite theirs.

    A program may read a numpy array in place after the call returned. `jax.numpy.array` is no help: it copies
    when the device comes to it.
    """
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, arrays)


def as_array(name: str, values: Any) -> Array:
    """Passes jax arrays through and copies the host's values into numpy; a list may hold traced numbers."""
    if isinstance(values, jax.Array):
        if not isinstance(values.dtype, np.dtype):
            raise TypeError(f"{name} has dtype {values.dtype}, expected numbers: keys of jax.random are none")
        return values
    try:
        return np.array(values)
    except jax.errors.TracerArrayConversionError:
        pass  # some of a list's numbers are traced
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"{name} is no array ({error}), expected rows of one length: pad them") from None
    try:
        return jnp.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise TypeError(
            f"{name} is no array ({error}), expected numbers of 32 bits in rows of one length"
        ) from None


def jax_arrays(name: str, tree: Any) -> Any:
    """Converts the leaves of a pytree to jax arrays; refuses what is none."""

    def converted(leaf: Any) -> jax.Array:
        try:
            return jnp.asarray(leaf)
        except (ValueError, TypeError, OverflowError) as error:
            raise TypeError(f"{name} has {leaf!r} ({error}), expected arrays of numbers") from None

    return jax.tree.map(converted, tree)


def integers(name: str, values: Any) -> Array:
    """Converts `values` to an array of integers of any width; refuses none at all, and other dtypes."""
    values = as_array(name, values)
    if values.size == 0:
        raise ValueError(f"{name} is empty, expected at least one row")
    if values.dtype == object:
        for value in values.flat:
            if isinstance(value, int) and abs(value) >> 63:
                raise TypeError(f"{name} has {value}, expected integers of at most 64 bits")
    if not jnp.issubdtype(values.dtype, np.integer):
        fix = ""
        if values.dtype == bool and name.endswith("_ids"):
            fix = ": of a mask, jnp.where(mask, jnp.arange(max_seqs), max_seqs)"
        elif values.dtype == bool and name.startswith("num_"):
            fix = ": of a mask, mask.astype(jnp.int32)"
        raise TypeError(f"{name} has dtype {values.dtype}, expected integers{fix}")
    return values


def saturated(name: str, values: Any) -> Array:
    """Converts integers to i32; larger ones become the largest, smaller ones the smallest."""
    values = integers(name, values)
    if values.dtype == np.int32:
        return values
    numpy = jnp if isinstance(values, jax.Array) else np
    if values.dtype.itemsize >= 4:
        values = numpy.clip(values, max(INT32.min, np.iinfo(values.dtype).min), INT32.max)
    return values.astype(np.int32)


def namespace_words(values: Any, num_rows: int) -> Array:
    """Repeats a namespace per row, u32[num_rows, 4]; None is the namespace 0."""
    if values is None:
        return np.zeros((num_rows, 4), np.uint32)
    values = as_array("namespace", values)
    if values.dtype != np.uint32 or values.shape not in ((4,), (num_rows, 4)):
        raise ValueError(
            f"namespace is {values.dtype}{values.shape}, expected uint32 (4,) or ({num_rows}, 4): "
            "make one of names with kvcache_jax.namespace(tenant=...)"
        )
    return _broadcast_to(values, num_rows, 4)


def flags(name: str, values: Any, num_rows: int) -> Array:
    """Converts one flag for all rows, or one per row, to bool[num_rows]."""
    values = as_array(name, values)
    if values.dtype != bool or values.shape not in ((), (num_rows,)):
        raise ValueError(f"{name} is {values.dtype}{values.shape}, expected bool () or ({num_rows},)")
    return _broadcast_to(values, num_rows)


def _broadcast_to(values: Array, *shape: int) -> Array:
    numpy = jnp if isinstance(values, jax.Array) else np
    return values if values.shape == shape else numpy.broadcast_to(values, shape)


def fraction(name: str, value: Any) -> Array:
    """Converts a number from 0 to 1 to f32[]; the value of a traced one is not checked."""
    value = as_array(name, value)
    if value.shape or not jnp.isdtype(value.dtype, ("real floating", "integral")):
        raise TypeError(f"{name} is {value.dtype}{list(value.shape)}, expected one number from 0 to 1")
    if not isinstance(value, Tracer) and not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, expected 0 <= {name} <= 1")
    return value.astype(np.float32)


def locate_layer(config: CacheConfig, layer: Any) -> tuple[int, jax.Array | np.int32]:
    """Returns the group and the i32[] index in the group of a layer.

    `layer` is an int, a traced index, or `(group, index)`.
    """
    if isinstance(layer, tuple):
        if len(layer) != 2:
            raise ValueError(f"layer is {layer!r}, expected two integers: (group, index in the group)")
        group_id, index = checked_group(config, layer[0]), layer[1]
    elif isinstance(layer, int | np.integer) and not isinstance(layer, bool):
        group_id, index = config.locate(int(layer))
    else:
        group_id, index = 0, layer
        _require_index(layer, index)
        num_shared = sum(kind.shared_layer is not None for kind in config.layers)
        if len(config.groups) > 1 or num_shared:
            has = f"{len(config.groups)} layer groups" if not num_shared else f"{num_shared} shared layers"
            raise ValueError(
                f"layer is an array and the config has {has}, "
                "expected a Python int or (group, index in the group)"
            )
    num_layers = config.groups[group_id].num_layers
    if isinstance(index, int | np.integer) and not 0 <= index < num_layers:
        raise ValueError(f"index in group {group_id} is {index}, expected 0 <= index < {num_layers}")
    _require_index(layer, index)
    if not isinstance(index, jax.Array):
        return group_id, np.int32(index if 0 <= index < num_layers else num_layers)
    index = index.astype(jnp.int32)
    # A traced index out of range must not reach another layer: past the end, writes are dropped and
    # reads are NaN. A `checkify.debug_check` would say more, and no program with one can be exported.
    is_layer = (index >= 0) & (index < num_layers)
    return group_id, jnp.where(is_layer, index, num_layers)


def _require_index(layer: Any, index: Any) -> None:
    """Refuses anything but one integer."""
    array = as_array("layer", index)
    if array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
        is_array = isinstance(index, jax.Array | np.ndarray)
        kind = f"{array.dtype}{list(array.shape)}" if is_array else repr(layer)
        raise TypeError(f"layer is {kind}, expected an integer, or (group, index in the group)")


def pool_of(cache: Cache, group_id: int) -> KVPool:
    """Returns the group's pool; raises for a cache without storage."""
    if not cache.pools:
        raise ValueError(
            "the cache was built with storage=False and holds no keys and values; build it with storage=True"
        )
    return jax.tree.map(jnp.asarray, cache.pools[group_id])


def located(cache: Cache, layer: Any, step: Any, *, has_keys: bool = True) -> Place:
    """Finds a layer in a cache, for a step of that cache; of keys and values, unless told otherwise."""
    group_id, index = locate_layer(cache.config, layer)
    if has_keys:
        require_keys(cache.config, layer, group_id)
    pool = pool_of(cache, group_id)
    require_step(step, cache)
    return Place(group_id, index, pool)


def located_to_store(cache: Cache, layer: Any, step: Any) -> Place:
    """Finds a layer as `located`, for new keys and values; refuses one that stores none."""
    place = located(cache, layer, step)
    require_own(cache.config, layer, place.group_id)
    return place


def require_keys(config: CacheConfig, layer: Any, group_id: int) -> None:
    """Refuses a layer that keeps states."""
    kind = config.groups[group_id].kind
    if not kind.inputs:
        raise ValueError(
            f"layer {layer!r} is of {kind.label}, expected a layer of keys and values: a recurrent one is "
            f"called by recurrence(cache, {layer!r}, new, step)"
        )


def require_own(config: CacheConfig, layer: Any, group_id: int) -> None:
    """Refuses new keys and values of a layer that reads the keys and values of another, or of a source."""
    is_named = isinstance(layer, int | np.integer)
    shared_layer = config.layers[int(layer)].shared_layer if is_named else None
    if shared_layer is not None:
        raise ValueError(
            f"got k and v for layer {layer}, which reads those of layer {shared_layer} and stores none, "
            f"expected none: call attend(cache, {layer}, q, step)"
        )
    group = config.groups[group_id]
    if group.holds_sources:
        raise ValueError(
            f"got k and v for layer {layer}, {group.kind.label}, whose rows read a source, expected none: "
            f"write_source stores it once, then call attend(cache, {layer}, q, step)"
        )


def group_ids(config: CacheConfig, group: int | None) -> list[int]:
    """Lists the given layer group, or all of them for None."""
    num_groups = len(config.groups)
    return list(range(num_groups)) if group is None else [checked_group(config, group)]


def checked_group(config: CacheConfig, group: Any) -> int:
    """Checks the number of a layer group and returns it as an int."""
    group, num_groups = as_integer("group", group), len(config.groups)
    if group not in range(num_groups):
        raise ValueError(f"group is {group}, expected 0 <= group < {num_groups}; see config.groups")
    return group


def refuse_shared_cache(name: str, values: jax.Array, cache: Cache) -> None:
    """Raises under a `vmap` that maps `values` and not the cache: all elements would use the same slots."""

    @custom_vmap
    def check(values: jax.Array, clock: jax.Array) -> jax.Array:
        return clock

    @check.def_vmap
    def _(axis_size: int, in_batched: list[bool], values: jax.Array, clock: jax.Array):
        is_mapped, is_cache_mapped = in_batched
        if is_mapped and not is_cache_mapped:
            raise ValueError(
                f"vmap maps {name} over {axis_size} elements and got one cache, expected one per element: "
                "every element would write the same slots; use rows of one cache (seq_ids), "
                "or map over stacked caches too, jax.tree.map(lambda x: jnp.stack([x] * n), cache)"
            )
        return check(values, clock), is_cache_mapped

    check(jax.lax.stop_gradient(values), cache.control.clock)


def require_step(step: Any, cache: Cache) -> None:
    """Refuses anything but a `Step` of a cache of this config."""
    if not isinstance(step, Step):
        raise TypeError(
            f"step is a {type(step).__name__}, expected the Step that extend returns beside the cache"
        )
    if len(step.slots) != len(cache.config.groups):
        raise ValueError(
            f"step has {len(step.slots)} layer groups, expected {len(cache.config.groups)}, those of the "
            "cache: pass the step that extend returned with it"
        )
    if step.config != cache.config:
        names = [field.name for field in dataclasses.fields(CacheConfig)]
        differing = [name for name in names if getattr(step.config, name) != getattr(cache.config, name)]
        got, expected = (
            ", ".join(f"{name} = {getattr(config, name)!r}" for name in differing)
            for config in (step.config, cache.config)
        )
        raise ValueError(
            f"step is of a cache with {got}, expected {expected}: pass the step that extend returned with "
            "this cache"
        )


def require_floats(name: str, values: Any) -> None:
    """Refuses anything but an array of floating dtype."""
    if not isinstance(values, jax.Array | np.ndarray):
        raise TypeError(f"{name} is a {type(values).__name__}, expected an array")
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {values.dtype}, expected a floating dtype")


def require_key(name: str, key: Any) -> None:
    """Refuses anything but one key of `jax.random`, which may be a raw one."""
    dtype, shape = getattr(key, "dtype", np.dtype(bool)), getattr(key, "shape", ())
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != () if is_typed else dtype != np.uint32 or len(shape) != 1:
        got = f"{dtype}{list(shape)}" if hasattr(key, "dtype") else repr(key)
        raise TypeError(f"{name} is {got}, expected one key of jax.random, such as jax.random.key(0)")


def layer_inputs(
    cache: Cache, place: Place, given: Mapping[str, Any], tokens: tuple[int, ...]
) -> dict[str, jax.Array]:
    """Checks the inputs of a model for one layer, by the names of the kind's inputs, and returns them.

    Those `given` are `[*tokens, *inputs[name]]`, None where the kind takes nothing; `tokens` is the shape of
    a step's tokens, or of a source's.
    """
    group, inputs = cache.config.groups[place.group_id], {}
    expected = group.kind.inputs
    axis = axis_of_types(place.pool.arrays, group.head_positions)
    num_shards = _num_shards(place.pool, group)  # inside `shard_map` a device has some of the heads
    for name, values in given.items():
        if (values is None) != (name not in expected):
            raise TypeError(
                f"{name} is a {type(values).__name__}, expected {'an array' if name in expected else None}: "
                f"{group.kind.label} layers take {' and '.join(expected)}"
            )
        if values is None:
            continue
        require_floats(name, values)
        num_heads, *width = expected[name]
        shape = (*tokens, num_heads // num_shards, *width)
        if values.shape != shape:
            raise ValueError(
                f"{name} has shape {values.shape}, expected {shape}: the tokens, num_kv_heads, head_dim"
            )
        check_split(name, values, axis)
        refuse_shared_cache(name, values, cache)
        inputs[name] = owned(values)
    return inputs


def _num_shards(pool: KVPool, group: LayerGroup) -> int:
    for name, array in group.arrays:
        if array.head_axis is not None:
            return array.shape[array.head_axis] // pool.arrays[name].shape[1 + array.head_axis]
    return 1


def check_layers(name: str, values: Any, num_layers: int) -> None:
    """Refuses anything but an array of all layers' keys or values, or a sequence of one per layer."""
    is_sequence = isinstance(values, Sequence) and not hasattr(values, "shape")
    rank = 4 if is_sequence else 5
    for each in values if is_sequence else [values]:
        shape = getattr(each, "shape", None)
        if shape is None or len(shape) != rank:
            what = f"{type(each).__name__} of shape {shape}" if shape is not None else type(each).__name__
            raise TypeError(
                f"{name} {'has, for a layer,' if is_sequence else 'is'} {what}, expected an array "
                "[num_layers, n, T, num_kv_heads, head_dim] or a sequence of such arrays, one per layer, "
                "without the first axis"
            )
    if len(values) != num_layers:
        raise ValueError(
            f"{name} has {len(values)} layers, expected {num_layers}, those that store keys and values"
        )


def check_queries(q: jax.Array, step: Step, num_kv_heads: int, key_dim: int) -> None:
    """Refuses queries of another shape than the step's tokens and the layer's keys ask for."""
    tokens = step.positions.shape
    heads_divide = q.ndim >= 2 and q.shape[-2] > 0 and q.shape[-2] % num_kv_heads == 0
    if q.shape[:-2] != tokens or q.shape[-1] != key_dim or not heads_divide:
        raise ValueError(
            f"q has shape {q.shape}, expected {(*tokens, 'num_q_heads', key_dim)} "
            f"with num_q_heads a multiple of num_kv_heads = {num_kv_heads}"
        )


def check_options(scale: Any, soft_cap: Any, sink_logits: Array | None, num_q_heads: int) -> None:
    """Refuses options of attention that are no numbers, or traced where they are part of the program."""
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if isinstance(value, Tracer):
            raise TypeError(f"{name} is traced, expected a Python number; multiply q by it instead")
        if value is None:
            continue
        number = np.asarray(as_array(name, value))
        if number.ndim or not jnp.isdtype(number.dtype, ("real floating", "integral")):
            raise TypeError(f"{name} is {value!r}, expected a Python number or None")
        finite_number(name, number[()])
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, expected a positive number or None")
    if sink_logits is None:
        return
    if sink_logits.shape != (num_q_heads,):
        raise ValueError(
            f"sink_logits has shape {sink_logits.shape}, expected ({num_q_heads},), one per query head"
        )
    if not jnp.isdtype(sink_logits.dtype, ("real floating", "integral")):
        raise TypeError(f"sink_logits has dtype {sink_logits.dtype}, expected real numbers")
