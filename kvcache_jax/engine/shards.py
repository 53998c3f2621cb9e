"""The engine's program on its devices: on one, or on a mesh with one scheduler per shard of rows.

On a mesh every array of the state has one more first axis, of shards, split over `row_axis`; the pools'
heads are split over `config.head_axis`, and the tokens of blocks over `config.context_axis`. Within
`jax.shard_map` each shard is an engine of its own, and the devices of one shard, which differ in their heads
and tokens alone, schedule alike.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kvcache_jax.arrays.sharding import put
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.context_axis import check_heads_divide, check_tokens_divide
from kvcache_jax.core.extras import KeptArray
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache, KVPool
from kvcache_jax.core.team import ALONE
from kvcache_jax.decoding.arguments import committed_shardings
from kvcache_jax.engine.exchange import Exchange
from kvcache_jax.engine.options import Options, Placement, require_axis
from kvcache_jax.engine.program import Inbox, run_dispatch
from kvcache_jax.engine.requests import TableSizes
from kvcache_jax.engine.state import EngineState, empty_state
from kvcache_jax.engine.step import Model
from kvcache_jax.layers.block_array import BlockArray


class Shards:
    """The shards of an engine, on a mesh or one device.

    Without a `placement` the engine lives where its first parameters are committed, else on the default
    device.

    Attributes:
      team: The processes that have the devices.
      home: Where all arrays are without a mesh; None on one.
      exchange: Programs for what is attached; None without a mesh, where the cache is at hand.
    """

    def __init__(self, placement: Placement | None, config: CacheConfig, params: Any):
        mesh = _automatic(placement.mesh) if placement else None
        require_axis("config.head_axis", config.head_axis, mesh)
        require_axis("config.context_axis", config.context_axis, mesh)
        if mesh is not None and config.head_axis is not None:
            check_heads_divide(config.groups, config.head_axis, mesh.shape[config.head_axis])
        if mesh is not None and config.context_axis is not None:
            check_tokens_divide(config.groups, config.context_axis, mesh.shape[config.context_axis])
        axes = (placement.row_axis if placement else None, config.head_axis, config.context_axis)
        if twice := {axis for axis in axes if axis is not None and axes.count(axis) > 1}:
            raise ValueError(
                f"row_axis, config.head_axis and config.context_axis are {axes}, expected different axes: "
                f"{twice.pop()!r} cannot split two of rows, heads and tokens"
            )
        self.home: Sharding | None = None
        self._mesh, self._row_axis, self._config = mesh, placement.row_axis if placement else None, config
        spec = placement.params_spec if placement else None
        self._params_spec = PartitionSpec() if spec is None else spec
        self.team = placement.team if placement else ALONE
        self.exchange: Exchange | None = None
        self._latest: Inbox | None = None
        self._placed: Any = None
        self._apart: tuple[Any, list, _Structure] | None = None
        if mesh is None:
            self._home = self.home = _home_of(params)
            around = jax.sharding.get_mesh()
            lives_there = self._home.device_set == {*around.devices.flat}
            self._own_mesh = around if lives_there else Mesh(np.empty((), object), ())
            self._program = _program_at(self._home, config)
            self._params_at = jax.tree.map(lambda x: x.sharding if _is_committed(x) else self._home, params)
        else:
            self._own_mesh = mesh
            self._program = self._program_on(mesh)
            self.exchange = Exchange(mesh, self._row_axis, config, self._cache_specs, self.team)
            self._params_at = _places_of(self._params_spec, params, mesh)

    def place_params(self, params: Any) -> Any:
        """Commits parameters to where the first ones were, so that one program serves all."""
        return put(params, self._params_at)

    @property
    def num_shards(self) -> int:
        """Schedulers, each with `max_seqs` rows."""
        return 1 if self._mesh is None or self._row_axis is None else self._mesh.shape[self._row_axis]

    @explicit_transfers
    def place(self, sizes: TableSizes, outbox_shape: tuple[int, int], counters: np.ndarray) -> EngineState:
        """Makes the state of an engine without requests, where it will live.

        Its `counters` are u32[shards, len(EngineCounter)].
        """
        mesh = self._mesh
        if mesh is None:
            with jax.default_device(next(iter(self._home.device_set))):
                state = empty_state(init(self._config), sizes, outbox_shape, counters[0])
            return jax.device_put(state, _homes(self._home, self._config))
        config = dataclasses.replace(self._config, head_axis=None, context_axis=None)
        states = [empty_state(init(config, storage=False), sizes, outbox_shape, own) for own in counters]
        stacked = jax.tree.map(lambda *shards: np.stack(shards), *states)
        rows = NamedSharding(mesh, PartitionSpec(self._row_axis))
        shapes = jax.eval_shape(lambda: init(config).pools)
        make_pools = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros((self.num_shards, *x.shape), x.dtype), shapes),
            out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), self._pool_specs()),
        )
        with self.own_mesh():
            pools = make_pools()
        state = put(stacked, rows)
        kept = jax.tree.map(self._empty_kept, config.keeper.arrays(config))
        cache = Cache(control=state.cache.control, pools=pools, config=self._config, kept=kept)
        return dataclasses.replace(state, cache=cache)

    def _pool_specs(self) -> tuple[KVPool, ...]:
        """Splits the pools of all shards over the mesh, array by array."""
        heads, tokens = self._config.head_axis, self._config.context_axis

        def spec(array: BlockArray) -> PartitionSpec:
            return PartitionSpec(self._row_axis, None, *array.spec(heads, tokens))

        return tuple(
            KVPool(arrays={name: spec(array) for name, array in group.arrays})
            for group in self._config.groups
        )

    def _cache_specs(self, cache: Cache) -> Cache:
        """Splits a cache of all shards over the mesh."""
        rows = PartitionSpec(self._row_axis)
        kept = jax.tree.map(
            lambda array: PartitionSpec(self._row_axis, *array.spec(self._config.head_axis)),
            self._config.keeper.arrays(self._config),
        )
        control = jax.tree.map(lambda _: rows, cache.control)
        return Cache(control=control, pools=self._pool_specs(), config=self._config, kept=kept)

    def _empty_kept(self, array: KeptArray) -> jax.Array:
        """Makes an array of what the config's keeper keeps, for all shards."""
        assert self._mesh is not None
        spec = PartitionSpec(self._row_axis, *array.spec(self._config.head_axis))
        sharding = NamedSharding(self._mesh, spec, memory_kind=self._config.keeper.memory_kind)
        return put(np.zeros((self.num_shards, *array.shape), array.dtype), sharding)

    @explicit_transfers
    def run(
        self,
        model: Model,
        options: Options,
        params: Any,
        state: EngineState,
        inboxes: Sequence[Inbox],
        length: np.ndarray | jax.Array,
    ) -> tuple[EngineState, jax.Array]:
        """Runs a dispatch on all shards; the reports are i32[shards, any]."""
        news = self._joined(inboxes)
        with self.own_mesh():
            return self._program(*self._passed(params), state, news, length, model, options)

    def lower(
        self,
        model: Model,
        options: Options,
        params: Any,
        state: EngineState,
        inboxes: Sequence[Inbox],
        length: np.ndarray,
    ) -> jax.stages.Lowered:
        """Lowers the program that `run` runs."""
        news = self._joined(inboxes)
        with self.own_mesh():
            return self._program.lower(*self._passed(params), state, news, length, model, options)

    def own_mesh(self) -> contextlib.AbstractContextManager:
        """Sets the mesh of the placement, else the one in which the engine was made if it lives there.

        The caller may have set another one since, or the same with axes of other types.
        """
        return jax.set_mesh(self._own_mesh)

    def _passed(self, params: Any) -> tuple[Any, "_Structure | None"]:
        """Takes parameters apart once: of a module that would be most of what a dispatch costs the host."""
        if self._mesh is not None:
            return params, None
        if self._apart is None or self._apart[0] is not params:
            leaves, structure = jax.tree.flatten(params)
            self._apart = params, leaves, _Structure(structure)
        return self._apart[1:]

    def _joined(self, inboxes: Sequence[Inbox]) -> Inbox:
        if self._mesh is None:
            if inboxes[0] is not self._latest:
                self._latest = self._placed = inboxes[0]
            elif self._placed is self._latest and len(self._home.device_set) == 1:
                # One that comes again, as it does without news, is copied to the device once.
                self._placed = jax.device_put(inboxes[0], self._home)
            return self._placed
        return jax.tree.map(lambda *columns: np.stack(columns), *inboxes)

    def _program_on(self, mesh: Mesh) -> Any:
        """Makes the program on a mesh."""
        rows = PartitionSpec(self._row_axis)

        def run(params, _, state, inbox, length, model, options):
            def on_shard(params, state, inbox, length):
                state, inbox = jax.tree.map(lambda x: x[0], (state, inbox))
                state, report = run_dispatch(model, params, state, inbox, length, options)
                return jax.tree.map(lambda x: x[None], (state, report))

            specs = jax.tree.map(lambda _: rows, state)
            specs = dataclasses.replace(specs, cache=self._cache_specs(state.cache))
            # Types do not follow which arrays differ: a shard's devices schedule alike by themselves.
            state, reports = jax.shard_map(
                on_shard,
                mesh=mesh,
                in_specs=(self._params_spec, specs, rows, PartitionSpec()),
                out_specs=(specs, rows),
                check_vma=False,
            )(params, state, inbox, length)
            if mesh.is_multi_process:  # each process reads the reports of all
                everywhere = NamedSharding(mesh, PartitionSpec())
                reports = lax.with_sharding_constraint(reports, everywhere)
            return state, reports

        return jax.jit(run, static_argnames=("_", "model", "options"), donate_argnames="state")


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.committed


@explicit_transfers
def _home_of(params: Any) -> Sharding:
    """Finds where an engine without a mesh lives: where its parameters are, else on the default device."""
    committed = committed_shardings(", or Engine(placement=)", params=params)
    if not committed:
        return jnp.zeros(()).sharding
    if len(committed[0].device_set) == 1:
        return SingleDeviceSharding(*committed[0].device_set)
    meshes = [sharding.mesh for sharding in committed if isinstance(sharding, NamedSharding)]
    if not meshes:
        raise ValueError(
            f"params has arrays with {committed[0]}, expected one device, or NamedShardings over a mesh"
        )
    return NamedSharding(meshes[0], PartitionSpec())


def _homes(home: Any, config: CacheConfig) -> EngineState:
    """Returns where a state's arrays are: at home, and a keeper's in memory of another kind there."""
    kind = config.keeper.memory_kind
    kept = None if kind is None else home.with_memory_kind(kind)
    parts = {field.name: home for field in dataclasses.fields(EngineState)}
    parts["cache"] = Cache(control=home, pools=home, config=config, kept=kept)
    return EngineState(**parts)


def _automatic(mesh: Mesh) -> Mesh:
    """Makes a mesh's axes automatic; explicit ones refuse inboxes, and within `shard_map` say nothing."""
    return Mesh(mesh.devices, mesh.axis_names)


def _places_of(specs: Any, params: Any, mesh: Mesh) -> Any:
    """Makes the shardings of parameters on a mesh, a prefix of their tree; refuses specs that do not fit."""
    is_leaf = lambda spec: spec is None or isinstance(spec, PartitionSpec)  # noqa: E731

    def place(path: Any, spec: Any, part: Any) -> NamedSharding:
        name = f"params_spec{jax.tree_util.keystr(path)}"
        if not is_leaf(spec):
            raise TypeError(f"{name} is {spec!r}, expected a PartitionSpec")
        spec = spec or PartitionSpec()
        axes = [axis for each in spec for axis in (each if isinstance(each, tuple) else (each,)) if axis]
        if len({*axes}) < len(axes) or not {*axes} <= {*mesh.axis_names}:
            raise ValueError(
                f"{name} is {spec}, expected each of the mesh's axes {mesh.axis_names} once at most"
            )
        sharding = NamedSharding(mesh, spec)
        for shape in map(np.shape, jax.tree.leaves(part)):
            try:
                sharding.shard_shape(shape)
            except (ValueError, IndexError) as error:
                raise ValueError(
                    f"{name} is {spec} for parameters of the shape {shape}, expected dimensions that "
                    f"the mesh {dict(mesh.shape)} divides"
                ) from error
        return sharding

    try:
        jax.tree.map(lambda *_: None, specs, params, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"params_spec is {specs}, expected a prefix of the tree of params, {jax.tree.structure(params)}"
        ) from error
    return jax.tree.map_with_path(place, specs, params, is_leaf=is_leaf)


class _Structure:
    """The structure of parameters; the same one is found equal without a look at what modules hold."""

    def __init__(self, tree: Any):
        self.tree, self._hash = tree, hash(tree)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Structure) and self.tree == other.tree)


@functools.cache
def _program_at(home: Sharding, config: CacheConfig) -> Any:
    """Makes the program at one place, which engines of equal models, sizes and options share there."""

    def run(
        leaves: list[jax.Array],
        structure: _Structure,
        state: EngineState,
        inbox: Inbox,
        length: jax.Array,
        model: Model,
        options: Options,
    ) -> tuple[EngineState, jax.Array]:
        params = jax.tree.unflatten(structure.tree, leaves)
        state, report = run_dispatch(model, params, state, inbox, length, options)
        return state, report[None]

    # A state that comes out as it went in has the next dispatch run the same program.
    return jax.jit(
        run,
        static_argnames=("structure", "model", "options"),
        donate_argnames="state",
        # On a mesh jax compiles a second program for an inbox that is there already.
        in_shardings=(None, None, home, home) if len(home.device_set) == 1 else None,
        out_shardings=(_homes(home, config), home),
    )


def with_same_shapes(params: Any, like: Any) -> Any:
    """Refuses parameters that the program was not compiled for, and returns them as it wants them."""
    new, old = jax.tree.structure(params), jax.tree.structure(like)
    if new != old:
        raise ValueError(f"params has the structure {new}, expected that of the engine's, {old}")

    def same(path: Any, leaf: Any, old_leaf: Any) -> Any:
        types = [jax.typeof(x) for x in (leaf, old_leaf)]
        found, expected = (f"{x.dtype}{list(x.shape)}" for x in types)
        if found == expected and types[1].weak_type and not types[0].weak_type:
            expected = f"a Python number, {expected} of a weak type,"
        if found != expected:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {found}, expected {expected} like the engine's: its "
                "program is compiled for these"
            )
        is_weaker = types[0].weak_type and not types[1].weak_type
        numpy = jnp if isinstance(leaf, jax.Array) else np
        return numpy.asarray(leaf, types[1].dtype) if is_weaker else leaf

    return jax.tree.map_with_path(same, params, like)
