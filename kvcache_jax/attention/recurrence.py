"""Recurrent layers on a cache: what a model calls in place of attention.

A token's output is computed from its row's last point and the entries since; it adds its own entry. Nothing
is read after something was written in the same layer, so that a donated step copies no pool.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import common_bound, get_at, quotient, read_first, remainder, set_at
from kvcache_jax.arrays.same_form import form_of
from kvcache_jax.attention.recurrent_plan import note_call, parts_of
from kvcache_jax.blocks import storage
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import Layer
from kvcache_jax.core.cache_checks import takes_one
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, KVPool, RecurrentPlan, Step
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.recurrent import Arrays, Part, Recurrent
from kvcache_jax.recurrence.convolution import last_of


@takes_one
@jax.named_scope("kvcache.recurrence")
def recurrence(
    cache: Cache, layer: Layer, new: Mapping[str, jax.Array], step: Step, *, weights: Any = None
) -> tuple[Cache, jax.Array]:
    """Computes the new tokens of one recurrent layer and stores its states: what a model's layer calls.

    Each row goes on from the state after the tokens that it held before the step. Go on with the returned
    cache. A step calls every recurrent layer once, in the order of the model's layers: the last layer of a
    kind folds the blocks that the step filled, of all of them, into points. The layer is not differentiable.

    Args:
      cache: Not changed, unless donated.
      layer: Model layer; or (group of its entries, index in it), as for scanned layers.
      new: Inputs of the layer's kind by name, `[n, max_new, ...]`, or `[num_tokens, ...]` for a packed step.
      step: From `extend`; the same for all layers.
      weights: The layer's own arrays, as its kind wants them.

    Returns:
      The cache and the outputs, `[n, max_new, ...]` or packed likewise: 0 for padding and failed rows.

    Raises:
      ValueError, TypeError: the layer is not recurrent, or shapes or dtypes do not fit; the layer is called
        before another one of its kind that comes first. Of scanned layers, and of a step that was an argument
        of a `jit`, the order is not known.
    """
    place, config = arguments.located(cache, layer, step, has_keys=False), cache.config
    kind = config.groups[place.group_id].kind
    if not isinstance(kind, Part):
        raise ValueError(
            f"layer {layer!r} is {kind.label}, expected a recurrent one: one of keys and values is called "
            f"by attention(cache, {layer!r}, q, k, v, step)"
        )
    tokens = step.positions.shape
    if not isinstance(new, Mapping) or not new:
        found = "empty" if isinstance(new, Mapping) else f"a {type(new).__name__}"
        raise ValueError(f"new is {found}, expected {{name: array}}, the inputs of {kind.recurrent.label}")
    for name, values in new.items():
        shape = getattr(values, "shape", None)
        if shape is None or shape[: len(tokens)] != tokens:
            raise ValueError(
                f"{name} has shape {shape}, expected {(*tokens, '...')}: the step's tokens first"
            )
    arguments.refuse_shared_cache("new", jax.tree.leaves(dict(new))[0], cache)
    groups = parts_of(config, place.group_id)
    pools = tuple(cache.pools[g] for g in groups)
    plan, slots = step.plans[place.group_id], step.slots[place.group_id]
    note_call(plan, config.groups[place.group_id], place.layer, layer)
    new, weights = arguments.jax_arrays("new", dict(new)), arguments.jax_arrays("weights", weights)
    found = _advance(config, groups, pools, place.layer, new, weights, plan, slots)
    # The results, which a gradient comes to first: before the loops that jax would name.
    pools, out = storage.refuse_derivatives(config.groups[place.group_id], found)
    for g, pool in zip(groups, pools, strict=True):
        cache = storage.with_pool(cache, g, pool)
    return cache, out


@functools.partial(jax.jit, static_argnames=("config", "groups"), inline=True)
def _advance(
    config: CacheConfig,
    groups: tuple[int, ...],
    pools: tuple[KVPool, ...],
    layer: jax.Array,
    new: dict[str, jax.Array],
    weights: Any,
    plan: RecurrentPlan,
    slots: jax.Array,
) -> tuple[tuple[KVPool, ...], jax.Array]:
    """Advances the rows of a step, then writes entries and points of a layer, by its index in the groups."""
    kinds = tuple(config.groups[g] for g in groups)
    tokens, num_tokens = slots.shape, slots.size
    is_token = plan.token < num_tokens
    flat = {name: x.reshape(num_tokens, *x.shape[len(tokens) :]) for name, x in new.items()}

    def rows_of(x: jax.Array) -> jax.Array:
        if plan.goes_on is None:  # a row of the step is a row of the plan
            mask = lax.broadcast_in_dim(is_token, (*is_token.shape, *x.shape[1:]), (0, 1))
            return jnp.where(mask, x.reshape(mask.shape), 0)
        return get_at(x, plan.token, 0)

    run = _advance_rows if plan.goes_on is None else _scan_trips
    pools, out, entries = run(kinds, pools, layer, jax.tree.map(rows_of, flat), weights, plan)
    group, entry_pool = kinds[0], pools[0]
    slots = get_at(slots.reshape(-1), plan.token, group.num_blocks * group.block_size)
    num_blocks = entry_pool.num_rows // group.num_layers
    rows = storage.block_rows(quotient(slots, group.block_size), layer, num_blocks, entry_pool.num_rows)
    places = rows, remainder(slots, group.block_size)
    stored = {name: set_at(x, places, entries[name]) for name, x in entry_pool.arrays.items()}
    pools = (KVPool(arrays=stored), *pools[1:])
    if plan.goes_on is None:
        if len(pools) > 1:
            pools = (pools[0], _fold_full(kinds, pools, layer, plan))
        mask = lax.broadcast_in_dim(is_token, out.shape, (0, 1))
        return pools, jnp.where(mask, out, 0).reshape(*tokens, *out.shape[2:])
    zeros = jnp.zeros((num_tokens, *out.shape[2:]), out.dtype)
    return pools, set_at(zeros, plan.token, out).reshape(*tokens, *out.shape[2:])


def _kind_of(groups: tuple[LayerGroup, ...]) -> Recurrent:
    part = groups[0].kind
    assert isinstance(part, Part)
    return part.recurrent


def _cast(group: LayerGroup, values: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Checks that a kind returned its arrays, of one row, and casts them as they are stored."""
    arrays, label = dict(group.arrays), group.kind.label
    if not isinstance(values, Mapping):
        raise TypeError(f"{label} are {form_of(values)}, expected arrays by the names {sorted(arrays)}")
    if {*values} != {*arrays}:
        raise ValueError(f"{label} are {sorted(values)}, expected {sorted(arrays)}")
    for name, shape in shapes.items():
        if getattr(values[name], "shape", None) != shape:
            raise ValueError(f"{label} have {form_of(values[name])} as {name!r}, expected {list(shape)}")
    return {name: values[name].astype(array.dtype) for name, array in arrays.items()}


def _advanced(groups: tuple[LayerGroup, ...], *inputs: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Advances one row, and checks what its kind returned; `inputs` as `Recurrent.advance` has them."""
    kind, (_, held, _, new, _) = _kind_of(groups), inputs
    found, num_tokens = kind.advance(*inputs), next(iter(new.values())).shape[0]
    if not isinstance(found, tuple) or len(found) != 2 or getattr(found[0], "shape", ())[:1] != (num_tokens,):
        got = [*map(form_of, found)] if isinstance(found, tuple) else form_of(found)
        raise TypeError(
            f"{kind.label}.advance() returned {got}, expected outputs [{num_tokens}, ...] and entries by name"
        )
    return found[0], _cast(
        groups[0], found[1], {name: (num_tokens, *x.shape[1:]) for name, x in held.items()}
    )


def _folded(groups: tuple[LayerGroup, ...], point: Arrays, entries: Arrays) -> dict[str, jax.Array]:
    """Folds one row's full block into its point, and checks what the kind returned."""
    shapes = {name: x.shape for name, x in point.items()}
    return _cast(groups[1], _kind_of(groups).fold(point, entries), shapes)


def _points(
    pools: tuple[KVPool, ...], group: LayerGroup, layer: jax.Array, ids: jax.Array
) -> dict[str, jax.Array]:
    """Reads points by their blocks i32[...] of one layer; 0 for nowhere."""
    pool = pools[1]
    rows = storage.block_rows(ids, layer, pool.num_rows // group.num_layers, pool.num_rows)
    return {name: get_at(x, rows, 0) for name, x in pool.arrays.items()}


def _held(pool: KVPool, group: LayerGroup, layer: jax.Array, plan: RecurrentPlan) -> dict[str, jax.Array]:
    """Reads the entries that count, `[r, W or reach, ...]`; 0 for the others."""
    rows = storage.block_rows(plan.held_ids, layer, pool.num_rows // group.num_layers, pool.num_rows)
    if plan.held_offsets is not None:
        return {name: get_at(x, (rows, plan.held_offsets), 0) for name, x in pool.arrays.items()}
    is_entry = jnp.arange(group.block_size, dtype=jnp.int32)[None] < plan.count[:, None]

    def masked(x: jax.Array) -> jax.Array:  # an unwritten entry may be anything
        return jnp.where(lax.broadcast_in_dim(is_entry, x.shape, (0, 1)), x, 0)

    return {name: masked(get_at(x, rows, 0)) for name, x in pool.arrays.items()}


def _advance_rows(
    groups: tuple[LayerGroup, ...],
    pools: tuple[KVPool, ...],
    layer: jax.Array,
    new: dict[str, jax.Array],
    weights: Any,
    plan: RecurrentPlan,
) -> tuple[tuple[KVPool, ...], jax.Array, dict[str, jax.Array]]:
    """Advances all rows at once; returns the pools, to be written then, outputs and entries `[n, T, ...]`."""
    point = {} if plan.point_ids is None else _points(pools, groups[1], layer, plan.point_ids)
    held = _held(pools[0], groups[0], layer, plan)
    advance = jax.vmap(functools.partial(_advanced, groups), in_axes=(0, 0, 0, 0, None))
    # Fenced here, and not where the pools are read: a kind's products are fused with these gathers.
    (out, entries), pools = read_first(advance(point, held, plan.count, new, weights), pools)
    return pools, out, entries


def _fold_full(
    groups: tuple[LayerGroup, ...], pools: tuple[KVPool, ...], layer: jax.Array, plan: RecurrentPlan
) -> KVPool:
    """Folds the blocks that the step filled into points, after the group's last layer: a row's layers a trip.

    Most rows of a step fill none: folded in each layer, masked, they would take longer than all the rest.
    """
    entry_pool, point_pool = pools
    assert plan.is_full is not None
    places = plan.point_ids, plan.full_ids, plan.new_point_ids
    order = jnp.argsort(~plan.is_full, stable=True)
    is_last = layer == groups[1].num_layers - 1
    num_trips = jnp.where(is_last, jnp.sum(plan.is_full, dtype=jnp.int32), 0)

    def fold_row(nth: jax.Array, pool: KVPool) -> KVPool:
        point_id, full_id, new_point_id = jax.tree.map(lambda ids: ids[order[nth]], places)
        at = storage.rows_of_all_layers(pool, groups[1], point_id)
        point = {name: get_at(x, at, 0) for name, x in pool.arrays.items()}
        at = storage.rows_of_all_layers(entry_pool, groups[0], full_id)
        entries = {name: get_at(x, at, 0) for name, x in entry_pool.arrays.items()}
        folded = jax.vmap(functools.partial(_folded, groups))(point, entries)
        folded, pool = read_first(folded, pool)
        at = storage.rows_of_all_layers(pool, groups[1], new_point_id)
        return KVPool(arrays={name: set_at(x, at, folded[name]) for name, x in pool.arrays.items()})

    return lax.fori_loop(0, common_bound(num_trips), fold_row, point_pool)


def _scan_trips(
    groups: tuple[LayerGroup, ...],
    pools: tuple[KVPool, ...],
    layer: jax.Array,
    new: dict[str, jax.Array],
    weights: Any,
    plan: RecurrentPlan,
) -> tuple[tuple[KVPool, ...], jax.Array, dict[str, jax.Array]]:
    """Advances the trips of a wide step one after the other, and writes the points that they pass.

    Returns the pools, the entries' one to be written after this, and outputs and entries `[trips, W, ...]`.
    """
    has_points = plan.point_ids is not None
    held = _held(pools[0], groups[0], layer, plan)
    held, pools = read_first(held, pools)

    def trip(carry, x):
        (point, entries, pool), (plan, held, new) = carry, x
        num = plan.num_tokens
        held = _choose(plan.goes_on, entries, held)
        if has_points:
            start = _points((pools[0], pool), groups[1], layer, plan.point_ids)
            start, pool = read_first(start, pool)
            point = _choose(plan.goes_on, point, start)
        out, added = _advanced(groups, point, held, plan.count, new, weights)
        if not has_points:
            return (point, _last(held, added, num), pool), (out, added)
        entries = {name: _placed(held[name], added[name], plan.count, num) for name in held}
        folded = _folded(groups, point, entries)
        point = _choose(plan.is_full, folded, point)
        entries = _choose(plan.is_full, jax.tree.map(jnp.zeros_like, entries), entries)
        rows = storage.block_rows(
            plan.new_point_ids, layer, pool.num_rows // groups[1].num_layers, pool.num_rows
        )
        pool = KVPool(arrays={name: set_at(x, rows, folded[name]) for name, x in pool.arrays.items()})
        return (point, entries, pool), (out, added)

    point_pool = pools[1] if has_points else KVPool(arrays={})
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), (point_pool.arrays, held))
    (_, _, point_pool), (out, added) = lax.scan(trip, (*zeros, point_pool), (plan, held, new))
    return (pools[0], point_pool)[: len(pools)], out, added


def _choose(mask: jax.Array, chosen: Arrays, other: Arrays) -> dict[str, jax.Array]:
    return {name: jnp.where(mask, chosen[name], other[name]) for name in other}


def _placed(held: jax.Array, added: jax.Array, count: jax.Array, num: jax.Array) -> jax.Array:
    """Puts `num` new entries after the `count` of a block, `[W, ...]`."""
    order = jnp.arange(held.shape[0], dtype=jnp.int32)
    is_new = (order >= count) & (order < count + num)
    shifted = get_at(added, order - count, 0)
    return jnp.where(lax.broadcast_in_dim(is_new, held.shape, (0,)), shifted, held)


def _last(held: Arrays, added: Arrays, num: jax.Array) -> dict[str, jax.Array]:
    """Takes the last entries, as many as `held` has, after `num` of `added` follow them."""
    return {name: last_of(held[name], added[name], num) for name in held}
