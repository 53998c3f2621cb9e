"""Extras: the arrays that a cache keeps for a feature, and the moments at which operations ask it.

A feature is a static value in `CacheConfig(extras=)`, of a subclass of `Extra` in the feature's own room. Its
arrays are `Control.extras[name]`. Operations that concern every cache call the hooks of all extras, through
`CacheConfig.hooks`, and name no feature.

An extra that keeps the contents of blocks outside of the pools is a `Keeper`. It keeps keys and values in
`Cache.kept`, beside the pools. A block that it keeps has an id past nowhere, `num_blocks + 1` plus the id
that the keeper gives it: operations that look for a block skip it as they skip nowhere. Operations on the
control state move no keys and values. A keeper notes the moves, and `settle` makes them: operations that read
or write blocks call it before, and after they evicted.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvcache_jax.arrays.same_form import form_of, same_form
from kvcache_jax.layers.layer_kind import kind_name, require_value

TICKS_PER_SECOND = 16
"""Of the time that `Extra.tick` tells."""
MOST_TICKS = 2**30 - 1
"""Two years. Longer times count as long: a moment and a duration, added, stay below 2**31."""


def ticks_of(seconds: float) -> int:
    """Counts the ticks of seconds, rounded up, from 0 to `MOST_TICKS`."""
    return math.ceil(min(max(seconds, 0), MOST_TICKS / TICKS_PER_SECOND) * TICKS_PER_SECOND)


class Turn(NamedTuple):
    """Facts that the requests that start in rows say of themselves.

    Attributes:
      conversation: i32[n], the number of the conversation that it is a turn of; 0 for none.
      retain: i32[n], ticks for which what it leaves is worth more than what others leave.
    """

    conversation: jax.Array
    retain: jax.Array


class HeldBlocks(NamedTuple):
    """Blocks of one layer group that are held beside the block tables; each entry counts as an owner.

    Attributes:
      holder: Their holder's name in violations and pictures.
      block_ids: i32[n, columns], or nowhere. All their slots are kept.
      namespace: u32[n, 4], whose they are.
      is_of_rows: Whether row `i` holds entry `i`, which is then released with the row.
    """

    holder: str
    block_ids: jax.Array
    namespace: jax.Array
    is_of_rows: bool


_extras: dict[str, type["Extra"]] = {}


@dataclasses.dataclass(frozen=True)
class Extra:
    """A feature that keeps something in a cache. A subclass is a frozen dataclass of the feature's options.

    Every hook gets the control state and returns a new one of the same shapes and dtypes; `rows` i32[n]
    differ, and `max_seqs` is skipped. The default of each does nothing.
    """

    name: ClassVar[str]
    """The key of its arrays in `Control.extras`; a cache has one extra of a name."""
    hides_tokens: ClassVar[bool] = False
    """Whether rows may have tokens that no query sees; the control state then has `Holes`."""
    hears_turns: ClassVar[bool] = False
    """Whether it makes something of a request's `retain`; see `begin`."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        _extras[kind_name(cls)] = cls

    def check(self, config: Any) -> None:
        """Refuses a `CacheConfig` that the feature cannot serve: got, expected and the fix."""

    def empty(self, config: Any, numpy: Any) -> Any:
        """Builds its arrays of an empty cache, a pytree that `numpy` makes; None for none."""

    def inherit(self, control: Any, rows: jax.Array, parent_ids: jax.Array) -> Any:
        """Gives `rows` the feature's arrays of their parents i32[n]; the rows' tables are set already."""
        return control

    def tick(self, control: Any, now: jax.Array) -> Any:
        """Learns the time, i32[] ticks, of what drives the cache; it may stand still."""
        return control

    def begin(self, control: Any, rows: jax.Array, turn: Turn) -> Any:
        """Learns what the requests of `rows`, which have just started, say of themselves."""
        return control

    def note_published(self, control: Any, block_ids: jax.Array) -> Any:
        """Learns of blocks i32[n] of the indexed group that were just published; nowhere is skipped."""
        return control

    def explain_evicted(self, control: Any, block_id: int) -> str:
        """States what it knew of an evicted block of the indexed group, after a space; "" for nothing."""
        return ""

    def forget(self, control: Any, rows: jax.Array) -> Any:
        """Forgets `rows`, which end; their lengths and tables are as before."""
        return control

    def truncate(self, control: Any, rows: jax.Array, new_len: jax.Array) -> Any:
        """Prepares `rows` for their end at `new_len` i32[n]; lengths, holes and tables are as before."""
        return control

    def move(self, control: Any, rows: jax.Array, prefix_len: jax.Array) -> Any:
        """Records that the tokens of `rows` after the first `prefix_len` i32[n] moved to other places."""
        return control

    def prefix_len(self, control: Any, seq_ids: jax.Array, length: jax.Array) -> jax.Array:
        """Counts the first tokens of rows i32[n] that are as computed in their text, at most `length`."""
        return length

    def is_fixed(self, control: Any, seq_ids: jax.Array, places: jax.Array) -> jax.Array:
        """Masks the places i32[n, T] of rows i32[n] that must not be written again, bool[n, T]."""
        return jnp.zeros_like(places, bool)

    def forget_namespace(self, control: Any, namespace: jax.Array) -> Any:
        """Forgets contents that belong to a namespace u32[4] and to no row."""
        return control

    def give_up(self, cache: Any, kept: Sequence[int]) -> tuple[Any, bool]:
        """Gives up the least valuable that it holds and no row does, on the host; False if there is nothing.

        Args:
          cache: With values.
          kept: Parts that stay, by the feature's own ids: a prompt is being put together from them.
        """
        return cache, False

    def held_blocks(self, control: Any, group_id: int) -> HeldBlocks | None:
        """Lists the blocks of a layer group that it holds."""

    def violations(self, cache: Any) -> list[str]:
        """Finds violations in a cache with values, a sentence for each."""
        return []


@dataclasses.dataclass(frozen=True)
class KeptArray:
    """An array of keys and values that a keeper keeps.

    Attributes:
      shape: Of all.
      dtype: Any dtype of jax.
      head_axis: The axis of key/value heads, over which a mesh may split the array; None for none.
    """

    shape: tuple[int, ...]
    dtype: Any
    head_axis: int | None

    def spec(self, axis: Any) -> PartitionSpec:
        """Splits the heads over a mesh axis, or several; None for none."""
        return PartitionSpec(*[axis if i == self.head_axis else None for i in range(len(self.shape))])


class Keeper:
    """A feature that keeps the contents of blocks outside of the pools; these methods keep nothing.

    Every method gets the config of the cache, and returns a new control state where it gets one.
    """

    memory_kind: ClassVar[str | None] = None
    """The kind of memory of what it keeps, as jax calls it; None for nothing."""

    def arrays(self, config: Any) -> Any:
        """Returns what it keeps, a pytree of `KeptArray`; None for nothing."""

    def find(
        self,
        control: Any,
        tokens: jax.Array,
        most: jax.Array,
        namespace: jax.Array,
        columns: list[jax.Array],
        config: Any,
    ) -> list[jax.Array]:
        """Adds what it keeps of a prompt to the blocks that were found.

        Args:
          control: The state.
          tokens: i32[P], the prompt.
          most: i32[], how many of the tokens may be reused.
          namespace: u32[4].
          columns: Per group i32[any], the blocks found by column, or nowhere.
          config: The cache's.
        """
        return columns

    def hold(self, control: Any, hits: Sequence[jax.Array], config: Any) -> Any:
        """Holds what rows start from, per group i32[n, C], before blocks are evicted for them."""
        return control

    def restore(
        self,
        control: Any,
        rows: jax.Array,
        hits: Sequence[jax.Array],
        held: Mapping[int, jax.Array],
        config: Any,
    ) -> Any:
        """Gives blocks of the pools what it keeps, once they are taken, and publishes them.

        Args:
          control: The state.
          rows: i32[n], the rows that start; `max_seqs` for none.
          hits: Per group i32[n, C], what they start from.
          held: Per group i32[n, C], the blocks in their place.
          config: The cache's.
        """
        return control

    def evict(self, control: Any, group_id: int, block_ids: jax.Array, config: Any) -> Any:
        """Keeps what it can of cached blocks i32[n] of a group, which differ and are evicted next."""
        return control

    def num_free(self, control: Any, group_id: int, config: Any) -> jax.Array:
        """Counts the blocks for states of a group, i32[], that are free here or there."""
        return control.block_pools[group_id].num_free

    def forget_state(
        self, control: Any, group_id: int, block_id: jax.Array, is_due: jax.Array, config: Any
    ) -> tuple[Any, jax.Array | bool]:
        """Forgets the state of the least value that it keeps, if `is_due` bool[], and tells whether it did.

        Not if the state of `block_id` i32[], the least of the pool, is worth less; nowhere for none.
        """
        return control, False

    def link(
        self, control: Any, group_id: int, owners: jax.Array, is_wanted: jax.Array | None, config: Any
    ) -> tuple[Any, jax.Array | bool]:
        """Masks the blocks of a group under indexed blocks `owners` i32[E], bool[E, slots], that it keeps.

        These need not be published again. Of states, and windows beside them, it notes which of them prompts
        asked for, in `is_wanted` like them.
        """
        return control, False

    def publish(self, control: Any, block_ids: jax.Array, config: Any) -> Any:
        """Learns of indexed blocks i32[n] that were just published; nowhere is skipped."""
        return control

    def forget_contents(self, control: Any, config: Any) -> Any:
        """Forgets all contents."""
        return control

    def scrub(self, cache: Any, masks: Sequence[jax.Array], namespace: jax.Array | None) -> Any:
        """Overwrites what it keeps that continues blocks to overwrite, per group bool[num_blocks].

        With a `namespace` u32[4], all that is of it or of no namespace.
        """
        return cache

    def is_settled(self, control: Any) -> jax.Array | bool:
        """Tests whether no keys and values have to move, bool[]."""
        return True

    def settle(self, cache: Any) -> Any:
        """Moves the keys and values that have to move."""
        return cache


class Hooks(tuple[Extra, ...]):
    """The extras of a config, asked one after the other, with the methods of `Extra`."""

    def _after(self, hook: str, control: Any, *arguments: Any) -> Any:
        """Asks the hook of each for a control state, which must have the form of the one before."""
        for extra in self:
            found = getattr(extra, hook)(control, *arguments)
            control = same_form(_hook(hook, extra), found, control)
        return control

    def empty(self, config: Any, numpy: Any) -> dict[str, Any]:
        """Builds the features' arrays of an empty cache, by their names."""
        made = {extra.name: extra.empty(config, numpy) for extra in self}
        for extra in self:
            for leaf in jax.tree.leaves(made[extra.name]):
                if not hasattr(leaf, "dtype"):
                    raise TypeError(
                        f"{_hook('empty', extra)} returned {form_of(leaf)}, expected arrays of `numpy`"
                    )
        return {name: arrays for name, arrays in made.items() if arrays is not None}

    def inherit(self, control: Any, rows: jax.Array, parent_ids: jax.Array) -> Any:
        """Gives `rows` the features' arrays of their parents."""
        return self._after("inherit", control, rows, parent_ids)

    def tick(self, control: Any, now: jax.Array) -> Any:
        """Tells the features the time."""
        return self._after("tick", control, now)

    def begin(self, control: Any, rows: jax.Array, turn: Turn) -> Any:
        """Tells the features what the requests of `rows` say."""
        return self._after("begin", control, rows, turn)

    def note_published(self, control: Any, block_ids: jax.Array) -> Any:
        """Tells the features of blocks that were just published."""
        return self._after("note_published", control, block_ids)

    def explain_evicted(self, control: Any, block_id: int) -> str:
        """States what the features knew of a block that was evicted."""
        said = ((extra, extra.explain_evicted(control, block_id)) for extra in self)
        return "".join(_typed("explain_evicted", extra, sentence, str) for extra, sentence in said)

    def forget(self, control: Any, rows: jax.Array) -> Any:
        """Forgets `rows`."""
        return self._after("forget", control, rows)

    def truncate(self, control: Any, rows: jax.Array, new_len: jax.Array) -> Any:
        """Prepares `rows` for their end at `new_len`."""
        return self._after("truncate", control, rows, new_len)

    def move(self, control: Any, rows: jax.Array, prefix_len: jax.Array) -> Any:
        """Records that the tokens of `rows` after the first `prefix_len` moved."""
        return self._after("move", control, rows, prefix_len)

    def prefix_len(self, control: Any, seq_ids: jax.Array, length: jax.Array) -> jax.Array:
        """Counts the first tokens of rows that are as computed in their text."""
        for extra in self:
            found = extra.prefix_len(control, seq_ids, length)
            length = same_form(_hook("prefix_len", extra), found, length)
        return length

    def is_fixed(self, control: Any, seq_ids: jax.Array, places: jax.Array) -> jax.Array:
        """Masks the places of rows that must not be written again."""
        fixed = jnp.zeros_like(places, bool)
        for extra in self:
            found = extra.is_fixed(control, seq_ids, places)
            fixed |= same_form(_hook("is_fixed", extra), found, fixed)
        return fixed

    def forget_namespace(self, control: Any, namespace: jax.Array) -> Any:
        """Forgets contents that belong to a namespace and to no row."""
        return self._after("forget_namespace", control, namespace)

    def give_up(self, cache: Any, kept: Sequence[int]) -> tuple[Any, bool]:
        """Gives up the least valuable that the first extra holds which has something."""
        is_less = False
        for extra in self:
            if not is_less:
                cache, is_less = _typed("give_up", extra, extra.give_up(cache, kept), tuple)
        return cache, is_less

    def violations(self, cache: Any) -> list[str]:
        """Finds the features' violations."""
        return [each for extra in self for each in _typed("violations", extra, extra.violations(cache), list)]

    def held_blocks(self, control: Any, group_id: int) -> Iterator[HeldBlocks]:
        """Yields the blocks that each extra holds in a layer group."""
        for extra in self:
            if (held := extra.held_blocks(control, group_id)) is not None:
                yield _typed("held_blocks", extra, held, HeldBlocks)

    def blocks_of_rows(self, control: Any, group_id: int) -> jax.Array:
        """Lists the blocks of each row, i32[max_seqs, any]: its table, and blocks that extras hold for it."""
        tables = [control.block_pools[group_id].block_table]
        tables += [held.block_ids for held in self.held_blocks(control, group_id) if held.is_of_rows]
        return jnp.concatenate(tables, axis=1)


def _hook(name: str, extra: Extra) -> str:
    return f"{name} of the extra {extra.name!r}"


def _typed[T](hook: str, extra: Extra, found: Any, expected: type[T]) -> T:
    """Returns what a hook returned, or refuses another type."""
    if not isinstance(found, expected):
        raise TypeError(f"{_hook(hook, extra)} returned {form_of(found)}, expected a {expected.__name__}")
    return found


def check_extras(extras: Any) -> Hooks:
    """Returns the extras as a config keeps them; refuses anything else."""
    if isinstance(extras, Extra) or not isinstance(extras, tuple | list):
        raise TypeError(f"extras is {extras!r}, expected a list of extras: {', '.join(_extras)}")
    for i, extra in enumerate(extras):
        if not isinstance(extra, Extra):
            raise TypeError(f"extras[{i}] is {extra!r}, expected an extra: {', '.join(_extras)}")
        if not isinstance(getattr(extra, "name", None), str):
            raise TypeError(
                f"extras[{i}] is a {type(extra).__name__} without a name, expected a str, its class's `name`"
            )
        require_value(f"extras[{i}]", extra)
    names = [extra.name for extra in extras]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"extras has {names.count(name)} of the name {name!r}, expected one of each")
    if sum(isinstance(extra, Keeper) for extra in extras) > 1:
        raise ValueError(f"extras has several that keep contents of blocks, expected one at most: {extras!r}")
    return Hooks(extras)


def extra_class(name: str) -> str:
    """Returns the class of extras of a name, or the name itself of one that is not defined."""
    return next((label for label, cls in _extras.items() if cls.name == name), name)


def extra_to_json(extra: Extra) -> dict[str, Any]:
    """Returns an extra as an object of JSON."""
    return {"extra": kind_name(type(extra)), **dataclasses.asdict(extra)}


def extra_from_json(values: dict[str, Any]) -> Extra:
    """Computes the inverse of `extra_to_json`; refuses the name of a class that is not defined."""
    options = dict(values)
    name = options.pop("extra")
    if name not in _extras:
        raise ValueError(
            f"the extra is {name!r}, expected one of {', '.join(map(repr, _extras))}: import the module that "
            "defines it first"
        )
    return _extras[name](**options)
