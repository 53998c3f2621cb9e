"""The engine's program on its devices: on one, or on a mesh with one scheduler per shard of rows.

On a mesh every array of the state has one more axis in front, of shards, split over `row_axis`; the pools'
heads are split over `config.head_axis`. Within `jax.shard_map` each shard is an engine of its own, and the
devices of one shard, which differ in their heads alone, schedule alike.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.engine.chunk import Inbox, run_chunk
from kvcache_jax.engine.options import Options
from kvcache_jax.engine.parts import Model
from kvcache_jax.engine.requests import TableSizes
from kvcache_jax.engine.state import EngineState, empty_state
from kvcache_jax.operations.init import init


class Shards:
    """The shards of an engine.

    Args:
      mesh: The devices; None for the default one.
      row_axis: Mesh axis over which rows are split; None with one shard on the mesh, or without a mesh.
      config: Of each shard's cache.
      params_spec: Of the parameters.

    Raises:
      ValueError: an axis that the mesh lacks, or one without a mesh.
    """

    def __init__(self, mesh: Mesh | None, row_axis: str | None, config: CacheConfig, params_spec: Any):
        for name, axis in (("row_axis", row_axis), ("config.head_axis", config.head_axis)):
            if axis is not None and axis not in (() if mesh is None else mesh.axis_names):
                axes = "no mesh" if mesh is None else f"a mesh with the axes {mesh.axis_names}"
                raise ValueError(f"{name} is {axis!r} and there is {axes}, expected it among a mesh's axes")
        self._mesh, self._row_axis, self._config, self._params_spec = mesh, row_axis, config, params_spec
        if params_spec is None:
            self._params_spec = PartitionSpec()
        self._programs: dict[tuple[Model, Options], Any] = {}

    @property
    def num_shards(self) -> int:
        """Schedulers, each with `max_seqs` rows."""
        return 1 if self._mesh is None or self._row_axis is None else self._mesh.shape[self._row_axis]

    def place(self, sizes: TableSizes, outbox_shape: tuple[int, int]) -> EngineState:
        """Makes the state of an engine without requests, where it will live."""
        mesh = self._mesh
        if mesh is None:
            return jax.device_put(empty_state(init(self._config), sizes, outbox_shape))
        config = dataclasses.replace(self._config, head_axis=None)
        control = empty_state(init(config, storage=False), sizes, outbox_shape)
        stacked = jax.tree.map(lambda x: np.stack([np.asarray(x)] * self.num_shards), control)
        rows = NamedSharding(mesh, PartitionSpec(self._row_axis))
        pool = NamedSharding(mesh, PartitionSpec(self._row_axis, None, self._config.head_axis))
        shapes = jax.eval_shape(lambda: init(config).pools)
        pools = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros((self.num_shards, *x.shape), x.dtype), shapes),
            out_shardings=pool,
        )()
        state = jax.device_put(stacked, rows)
        cache = Cache(control=state.cache.control, pools=pools, config=self._config)
        return dataclasses.replace(state, cache=cache)

    def run(
        self,
        model: Model,
        options: Options,
        params: Any,
        state: EngineState,
        inboxes: Sequence[Inbox],
        max_steps: np.int32,
    ) -> tuple[EngineState, jax.Array]:
        """Runs a chunk on all shards; the reports are i32[shards, any]."""
        if self._mesh is None:
            return _run(params, state, inboxes[0], max_steps, model=model, options=options)
        return self._on_mesh(model, options)(params, state, _stacked(inboxes), max_steps)

    def lower(
        self,
        model: Model,
        options: Options,
        params: Any,
        state: EngineState,
        inboxes: Sequence[Inbox],
        max_steps: np.int32,
    ) -> jax.stages.Lowered:
        """Lowers the program that `run` runs."""
        if self._mesh is None:
            return _run.lower(params, state, inboxes[0], max_steps, model=model, options=options)
        return self._on_mesh(model, options).lower(params, state, _stacked(inboxes), max_steps)

    def _on_mesh(self, model: Model, options: Options) -> Any:
        if (model, options) not in self._programs:
            self._programs[model, options] = self._program(model, options)
        return self._programs[model, options]

    def _program(self, model: Model, options: Options) -> Any:
        """Builds the program on the mesh."""
        rows = PartitionSpec(self._row_axis)
        pools = PartitionSpec(self._row_axis, None, self._config.head_axis)

        def on_shard(params, state, inbox, max_steps):
            state, inbox = jax.tree.map(lambda x: x[0], (state, inbox))
            state, report = run_chunk(model, params, state, inbox, max_steps, options)
            return jax.tree.map(lambda x: x[None], (state, report))

        def run(params, state, inbox, max_steps):
            specs = jax.tree.map(lambda _: rows, state)
            cache = dataclasses.replace(specs.cache, pools=jax.tree.map(lambda _: pools, state.cache.pools))
            specs = dataclasses.replace(specs, cache=cache)
            # What is shared and what differs is not followed: a shard's devices schedule alike by themselves.
            return jax.shard_map(
                on_shard,
                mesh=self._mesh,
                in_specs=(self._params_spec, specs, rows, PartitionSpec()),
                out_specs=(specs, rows),
                check_vma=False,
            )(params, state, inbox, max_steps)

        return jax.jit(run, donate_argnums=1)


def _stacked(inboxes: Sequence[Inbox]) -> Inbox:
    return jax.tree.map(lambda *columns: np.stack(columns), *inboxes)


@functools.partial(jax.jit, static_argnames=("model", "options"), donate_argnames="state")
def _run(
    params: Any, state: EngineState, inbox: Inbox, max_steps: jax.Array, model: Model, options: Options
) -> tuple[EngineState, jax.Array]:
    """Runs the program, which engines of equal models, sizes and options share."""
    state, report = run_chunk(model, params, state, inbox, max_steps, options)
    return state, report[None]
