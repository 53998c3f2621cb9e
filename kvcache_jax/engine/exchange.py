"""Blocks of a mesh's shards, for what is attached to an engine: programs that all processes run."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.core.team import Team
from kvcache_jax.operations.transfer import BlockContents, export_blocks, import_making_room

_NONE: Any = PartitionSpec()


class _Layout:
    """The places of a tree's arrays in a row of bytes, by their shapes and dtypes."""

    def __init__(self, tree: Any):
        self._forms, self._structure = jax.tree.flatten(tree)
        self._ends = np.cumsum([0, *(form.dtype.itemsize * form.size for form in self._forms)]).tolist()

    @property
    def num_bytes(self) -> int:
        return self._ends[-1]

    def read(self, row: np.ndarray) -> Any:
        """Finds the tree in a row."""
        places = zip(self._forms, self._ends, self._ends[1:], strict=False)
        leaves = [row[start:end].view(form.dtype).reshape(form.shape) for form, start, end in places]
        return jax.tree.unflatten(self._structure, leaves)

    def write(self, row: np.ndarray, tree: Any) -> None:
        """Writes the tree into a row."""
        for leaf, start, end in zip(jax.tree.leaves(tree), self._ends, self._ends[1:], strict=False):
            row[start:end] = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


class Exchange:
    """Exports and publishes whole blocks of one shard, wherever the mesh has their parts.

    Args:
      mesh: All devices.
      row_axis: The mesh axis of shards; None for one shard.
      config: The caches'.
      specs_of: Gives the `PartitionSpec`s of a stacked cache's arrays.
      team: The processes that call this alike; the leader's contents are what all publish.

    Attributes:
      form: The shapes of one shard's cache, whose heads and tokens are together.
    """

    def __init__(
        self,
        mesh: Mesh,
        row_axis: str | None,
        config: CacheConfig,
        specs_of: Callable[[Cache], Any],
        team: Team,
    ):
        self._mesh, self._row_axis, self._config, self._team = mesh, row_axis, config, team
        self._specs_of, self._everywhere = specs_of, NamedSharding(mesh, _NONE)
        whole = dataclasses.replace(config, head_axis=None, context_axis=None)
        self.form: Cache = jax.eval_shape(lambda: init(whole))
        self._gather = jax.jit(self._rows_of_bytes, out_shardings=self._everywhere)
        self._add_up = jax.jit(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), out_shardings=self._everywhere)
        self._export = jax.jit(self._export_of, out_shardings=self._everywhere)
        self._publish = jax.jit(self._publish_in, donate_argnums=0)

    def controls(self, cache: Cache) -> list[Control]:
        """Reads the control state of each shard, in numpy."""
        with jax.set_mesh(self._mesh):  # the caller may have set another one
            rows = self._read(self._gather(cache.control))
        forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), cache.control)
        return [_Layout(forms).read(row) for row in rows]

    def _rows_of_bytes(self, tree: Any) -> jax.Array:
        """Joins all arrays [shards, ...], for a collective takes as long for each array as for all."""
        rows = []
        for x in jax.tree.leaves(tree):
            x = x.astype(jnp.uint8) if x.dtype == bool else lax.bitcast_convert_type(x, jnp.uint8)
            rows.append(x.reshape(x.shape[0], math.prod(x.shape[1:])))
        return jnp.concatenate(rows, axis=1)

    @explicit_transfers
    def export(self, cache: Cache, shard: int, block_ids: np.ndarray) -> BlockContents:
        """Reads blocks i32[n] of a shard as `export_blocks`, in numpy."""
        with jax.set_mesh(self._mesh):
            return self._read(self._export(cache, np.int32(shard), block_ids))

    @explicit_transfers
    def publish(
        self, cache: Cache, shard: int, num: int, contents: BlockContents | None
    ) -> tuple[Cache, np.ndarray]:
        """Publishes `num` blocks in a shard as `import_making_room`; followers need no contents."""
        shapes = jax.eval_shape(export_blocks, self.form, jax.ShapeDtypeStruct((num,), jnp.int32))
        with jax.set_mesh(self._mesh):
            whole = self._shared(shapes, contents)
            cache, status = self._publish(cache, np.int32(shard), whole)
        return cache, self._read(status)

    def _read(self, tree: Any) -> Any:
        self._team.wait(jax.tree.leaves(tree)[0])
        return jax.device_get(tree)

    def _shared(self, shapes: BlockContents, contents: BlockContents | None) -> BlockContents:
        """Gives all processes the leader's contents, through the devices: the store of orders is slow."""
        if not self._mesh.is_multi_process:
            assert contents is not None
            return contents
        layout = _Layout(shapes)
        own = np.zeros(layout.num_bytes + -layout.num_bytes % 4, np.uint8)
        devices = [*self._mesh.devices.flat]
        source = devices.index(self._mesh.local_devices[0])  # followers have zeros
        if contents is not None:
            layout.write(own, contents)
        words, nothing = own.view(np.uint32), np.zeros(own.size // 4, np.uint32)

        def of_device(at: Any) -> np.ndarray:
            return (words if (at[0].start or 0) == source else nothing)[None]

        spread = jax.make_array_from_callback(
            (len(devices), words.size),
            NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names)),
            of_device,
        )
        return layout.read(self._read(self._add_up(spread)).view(np.uint8))

    def _on_shard(self, function: Callable[..., Any], cache: Cache, args: Any, in_specs: Any, out_specs: Any):
        """Runs `function(cache, is_mine, args)` in each shard."""

        def run(cache: Cache, shard: jax.Array, args: Any) -> Any:
            mine = 0 if self._row_axis is None else lax.axis_index(self._row_axis)
            return function(jax.tree.map(lambda x: x[0], cache), shard == mine, args)

        shard, args = args
        specs = self._specs_of(cache), _NONE, in_specs
        # As for the engine's program: the devices of a shard do alike by themselves.
        return jax.shard_map(run, mesh=self._mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(
            cache, shard, args
        )

    def _export_of(self, cache: Cache, shard: jax.Array, block_ids: jax.Array) -> BlockContents:
        def export(cache: Cache, is_mine: jax.Array, block_ids: jax.Array) -> BlockContents:
            nowhere = cache.control.block_pools[self._config.indexed_group].num_blocks
            contents = export_blocks(cache, jnp.where(is_mine, block_ids, nowhere))
            return jax.tree.map(self._of_any_shard, contents)

        return self._on_shard(export, cache, (shard, block_ids), _NONE, self._contents_specs())

    def _publish_in(self, cache: Cache, shard: jax.Array, contents: BlockContents) -> tuple[Cache, jax.Array]:
        def publish(cache: Cache, is_mine: jax.Array, contents: BlockContents) -> tuple[Cache, jax.Array]:
            contents = jax.tree.map(lambda x: jnp.where(is_mine, x, jnp.zeros_like(x)), contents)
            cache, status = import_making_room(cache, contents)
            status = self._of_any_shard(jnp.where(is_mine, status, 0))
            return jax.tree.map(lambda x: x[None], cache), status

        out_specs = self._specs_of(cache), _NONE
        return self._on_shard(publish, cache, (shard, contents), self._contents_specs(), out_specs)

    def _contents_specs(self) -> BlockContents:
        """Splits the arrays of contents as the pools' are."""
        heads, tokens = self._config.head_axis, self._config.context_axis
        arrays: Any = tuple(
            {name: PartitionSpec(None, None, None, *x.spec(heads, tokens)) for name, x in group.arrays}
            for group in self._config.groups
        )
        return BlockContents(
            tokens=_NONE,
            num_tokens=_NONE,
            namespace=_NONE,
            is_held=tuple(_NONE for _ in self._config.groups),
            arrays=arrays,
        )

    def _of_any_shard(self, x: jax.Array) -> jax.Array:
        """Hands what one shard has, and zeros in the others, to all; as bits, for -0.0 plus 0 is 0."""
        if self._row_axis is None:
            return x
        if x.dtype == bool:
            return lax.psum(x.astype(jnp.uint8), self._row_axis).astype(bool)
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        return lax.bitcast_convert_type(lax.psum(lax.bitcast_convert_type(x, bits), self._row_axis), x.dtype)
