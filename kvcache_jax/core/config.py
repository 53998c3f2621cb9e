"""The config of a cache: layer kinds, sizes and the memory plan. Plain Python, no arrays."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kvcache_jax.arrays.number_checks import as_list, static_flag
from kvcache_jax.arrays.pytree import FORMAT_VERSION, require_format
from kvcache_jax.core.backends import require_name
from kvcache_jax.core.context_axis import check_context_axis
from kvcache_jax.core.eviction_policy import LRU, InBatches, policies
from kvcache_jax.core.extras import (
    Extra,
    Hooks,
    Keeper,
    check_extras,
    extra_class,
    extra_from_json,
    extra_to_json,
)
from kvcache_jax.core.memory_plan import check_indices, spend
from kvcache_jax.core.snapshots import NUM_MARKS, Snapshots, check_snapshots
from kvcache_jax.layers.block_array import check_arrays
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.layer_kind import (
    LayerKind,
    check_kind,
    check_positive,
    check_positive_or_none,
    kind_from_json,
    kind_to_json,
    storage_dtype,
)
from kvcache_jax.layers.span import Span, ceil_div
from kvcache_jax.layers.token_index import TokenIndex


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Kinds, sizes and options of a cache; hashable, the static part of its pytree.

    Attributes:
      layers: One entry per model layer, in the model's order. Equal entries form one layer group,
        which has one block table and one pool.
      num_blocks: Blocks of each group's pool. Default: as many as `memory_budget` pays for, else enough
        for `max_seqs` rows of `max_seq_len` tokens.
      block_size: Tokens per block.
      max_seqs: Rows, that is sequences held at the same time.
      max_seq_len: Most tokens of one row.
      max_query_len: Most new tokens of one row in one `extend`; bounds the blocks that a window group holds.
        Default: `max_seq_len`.
      dtype: Storage of keys and values: float32, bfloat16 or float16.
      memory_budget: Bytes for the keys and values of all groups together, in place of `num_blocks`.
      enable_prefix_caching: Keep blocks that `commit` published findable by their tokens, also without
        owner, until their place is needed. `allocate` and `extend` then want the tokens.
      partial_hits: With prefix caching, `allocate` also shares the published block whose first tokens alone
        are the prompt's; the next `extend` copies it. All layer groups then have one block size.
      snapshots: The states of recurrent layers that prefix caching keeps.
      extras: Features that keep something in the cache, one of each; see `core/extras.py`. No program knows
        of a feature that is not here.
      eviction_policy: Cached blocks evicted first: "lru", "lfu" (fewest uses), "fifo" (published first),
        "priority" (of the row that used it last), "hyperbolic" (fewest uses for the time since it was
        published), "retention" and "tail lru" (see `policies.Conversations`), or a name registered with
        `eviction_policy`. Ties: the block released longest ago.
        A block is evicted before the block it continues. Every policy but "lru" scans all blocks;
        `policies.InBatches(name, batch_size)` scans them less often.
      implementation: The backend of attention, writing, and whole blocks that are copied, exported or
        imported: "xla", "mosaic_gpu" (NVIDIA GPUs from Ampere on; bfloat16, float16, from Hopper on 8 bits),
        "mosaic_tpu", either with "_cascade" (columns that rows have in common are read once for up to 8), a
        name registered with `register_backend`, or None for what the environment's
        `KVCACHE_JAX_IMPLEMENTATION` names, else for kernels that support the call where a verdict of
        `experiments.first_gpu_run` passed, else "xla" (docs/devices.md). What it lacks is XLA's.
      head_axis: Mesh axis over which the key/value heads are split, so that kernels run on each device's
        own heads; `init` then splits the pools so. XLA's attention does not need to know.
      context_axis: Mesh axis over which the tokens of every block are split: of `n` devices each has a run of
        `block_size / n` tokens, and a row's runs are dealt to the devices in turns. `init` splits the pools
        so. All else is on every device alike. XLA's attention alone knows how.
      tile_tokens: Tokens of a row that XLA's attention reads at a time. Default: on accelerators 2,048,
        or fewer of so many rows that a tile's keys would take more than 256 MiB; on CPUs as many as stay
        in a core's cache, 256 at least, of as many rows as fit there. There rows that decode after
        the same first blocks, 4 of them at least, read these together, in layers that keep all tokens. With a
        number each row reads its own tiles, whichever rows are beside it.

    Raises:
      ValueError, TypeError: for absurd sizes and unknown options; names got, expected and the fix.

    Example:
      >>> import kvcache_jax as kv
      >>> layer = kv.FullAttention(num_kv_heads=2, head_dim=64)
      >>> config = kv.CacheConfig(layers=[layer] * 4, memory_budget=2**20, block_size=16)
      >>> config.groups[0].num_blocks, config.groups[0].block_bytes
      (16, 65536)
    """

    layers: Sequence[LayerKind]
    num_blocks: int | None = None
    block_size: int = 16
    max_seqs: int = 16
    max_seq_len: int = 8192
    max_query_len: int | None = None
    dtype: Any = jnp.float32
    memory_budget: int | None = None
    enable_prefix_caching: bool = False
    partial_hits: bool = False
    snapshots: Snapshots = Snapshots()
    extras: Sequence[Extra] = ()
    eviction_policy: str | InBatches = LRU
    implementation: str | None = None
    head_axis: str | None = None
    context_axis: str | None = None
    tile_tokens: int | None = None

    def __hash__(self) -> int:
        """Computed once: jit asks at every call."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached properties: strings hash differently in another process."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "format_version": FORMAT_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = dict(state)
        require_format(values.pop("format_version", None))
        self.__dict__.update(values)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))

    def __post_init__(self):
        if isinstance(self.layers, LayerKind):
            raise TypeError(
                f"layers is one {self.layers!r}, expected one per model layer: write [kind] * num_layers"
            )
        layers = as_list("layers", self.layers, "layer kinds, one per model layer")
        object.__setattr__(self, "layers", tuple(layers))
        if not self.layers:
            raise ValueError("layers is empty, expected one entry per model layer")
        for i, kind in enumerate(self.layers):
            check_kind(f"layers[{i}]", kind)
        check_positive(self, "block_size", "max_seqs", "max_seq_len")
        for name in ("enable_prefix_caching", "partial_hits"):
            object.__setattr__(self, name, static_flag(name, getattr(self, name)))
        check_positive_or_none(self, "num_blocks", "max_query_len", "memory_budget")
        check_snapshots(self.snapshots)
        object.__setattr__(self, "extras", check_extras(self.extras))
        object.__setattr__(self, "dtype", storage_dtype(self.dtype))
        if self.max_query_len is not None and self.max_query_len > self.max_seq_len:
            raise ValueError(
                f"max_query_len is {self.max_query_len}, expected at most max_seq_len = {self.max_seq_len}"
            )
        if self.num_blocks is not None and self.memory_budget is not None:
            raise ValueError(
                f"got num_blocks = {self.num_blocks} and memory_budget = {self.memory_budget}, "
                "expected one of them: drop the other"
            )
        require_name(self.implementation)
        if self.head_axis is not None and not isinstance(self.head_axis, str):
            raise TypeError(f"head_axis is {self.head_axis!r}, expected the name of a mesh axis, or None")
        if self.eviction.policy != LRU:
            self._check_policy(policies.find(self.eviction.policy).options["extra"])
        if self.eviction.policy != LRU and not self.enable_prefix_caching:
            raise ValueError(
                f"eviction_policy is {self.eviction_policy!r} and there is no prefix cache to evict from, "
                "expected enable_prefix_caching=True with it"
            )
        _check_shared(self.layers)
        self._check_sources()
        self._check_partial_hits()
        self._check_states()
        for group in self.groups:
            check_indices(group)
        check_context_axis(self.context_axis, self.head_axis, self.groups, self.keeper)
        for extra in self.extras:
            extra.check(self)

    @property
    def eviction(self) -> InBatches:
        """The eviction policy, and the blocks that it evicts at a time."""
        policy = self.eviction_policy
        return policy if isinstance(policy, InBatches) else InBatches(policy, 1)

    @property
    def num_layers(self) -> int:
        """Model layers."""
        return len(self.layers)

    @functools.cached_property
    def own_layers(self) -> tuple[int, ...]:
        """The model layers that store keys and values of new tokens."""
        kinds = self.layers
        return tuple(i for i in self._storing_layers if kinds[i].source_len_limit is None and kinds[i].inputs)

    @functools.cached_property
    def source_layers(self) -> tuple[int, ...]:
        """The model layers that store keys and values of sources, see `write_source`."""
        return tuple(i for i in self._storing_layers if self.layers[i].source_len_limit is not None)

    @property
    def _storing_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.layers) if kind.shared_layer is None]

    @property
    def query_len_limit(self) -> int:
        """Most new tokens of one row in one `extend`."""
        return self.max_query_len or self.max_seq_len

    def piece_len(self, most: int) -> int:
        """Returns the longest piece of a prompt, of at most `most` tokens, that ends on the grid of states.

        States differ in their last bits where other tokens are computed together. In pieces of whole blocks,
        or of equal parts of one, a row that starts from a hit computes what it computes from its beginning.
        """
        sizes = (group.block_size for group in self.row_groups.values() if group.span.is_read_later)
        unit = math.lcm(*sizes)  # 1 without states
        return most // unit * unit or max(n for n in range(1, most + 1) if unit % n == 0)

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return any(group.span.is_read_later for group in self.row_groups.values())

    @property
    def drop_unit(self) -> int:
        """Tokens whose blocks a row releases from within itself together: whole blocks of every group."""
        return math.lcm(*(group.block_size for group in self.row_groups.values()))

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups, in the order of their first layers."""
        layer_ids: dict[LayerKind, list[int]] = {}
        for i in self._storing_layers:
            kind = self.layers[i]
            kind = kind if kind.dtype is not None else dataclasses.replace(kind, dtype=self.dtype)
            for part in kind.parts:
                layer_ids.setdefault(part, []).append(i)
        plans = [self._plan_group(kind, tuple(ids)) for kind, ids in layer_ids.items()]
        if self.enable_prefix_caching and not any(plan.span.keeps_all for plan in plans):
            plans.append(self._plan_group(TokenIndex(dtype=self.dtype), ()))
        plans = self._with_snapshots(plans)
        if self.memory_budget is not None:
            plans = spend(self.memory_budget, plans)
        return tuple(plans)

    @functools.cached_property
    def row_groups(self) -> dict[int, LayerGroup]:
        """The layer groups that store their rows' tokens, not sources, by their ids."""
        return {g: group for g, group in enumerate(self.groups) if not group.holds_sources}

    @functools.cached_property
    def snapshot_groups(self) -> dict[int, LayerGroup]:
        """The layer groups of which prefixes need blocks just before snapshots, by their ids.

        They are the states, and windows beside them.
        """
        return {g: group for g, group in self.row_groups.items() if self._has_snapshots(group.span)}

    @functools.cached_property
    def prefix_unit(self) -> int:
        """Tokens of which cached prefixes are multiples: whole blocks of every group that prefixes need."""
        return math.lcm(*(group.block_size for group in self.groups if group.span.is_in_prefix))

    @property
    def hooks(self) -> Hooks:
        """The extras, as operations ask them."""
        return Hooks(self.extras)

    @property
    def keeper(self) -> Keeper:
        """The extra that keeps the contents of blocks, or one that keeps nothing."""
        return next((extra for extra in self.extras if isinstance(extra, Keeper)), Keeper())

    @property
    def hides_tokens(self) -> bool:
        """Whether rows may have tokens that no query sees."""
        return any(extra.hides_tokens for extra in self.extras)

    @property
    def indexed_group(self) -> int:
        """The layer group by whose blocks prefixes are found: the first that keeps all positions, else 0."""
        return next((g for g, group in self.row_groups.items() if group.span.keeps_all), 0)

    def locate(self, layer: int, part: int = 0) -> tuple[int, int]:
        """Returns a layer's group, of one with several parts the given one's, and its index in that group.

        Of a shared layer these are the other layer's.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}, expected 0 <= layer < {self.num_layers}")
        shared_layer = self.layers[layer].shared_layer
        owner = layer if shared_layer is None else shared_layer
        g, group = [(g, group) for g, group in enumerate(self.groups) if owner in group.layer_ids][part]
        return g, group.layer_ids.index(owner)

    def _check_sources(self) -> None:
        if not self.row_groups:
            raise ValueError(
                "all layers read sources, expected one that stores its row's tokens, too: FullAttention"
            )
        if self.enable_prefix_caching and self.source_layers:
            layer = self.source_layers[0]
            raise ValueError(
                f"enable_prefix_caching is True and layers[{layer}] is {self.layers[layer].label}, expected "
                "False: what tokens compute depends on their row's source, and prefixes are found by tokens "
                "alone"
            )

    def _check_policy(self, needed: str | None) -> None:
        if needed is not None and needed not in [extra.name for extra in self.extras]:
            raise ValueError(
                f"eviction_policy is {self.eviction_policy!r} and no extra is named {needed!r}, expected "
                f"{extra_class(needed)}() among extras: the policy reads what it keeps"
            )

    def refuse_states(self, what: str) -> None:
        """Refuses a feature that changes tokens within rows where layers keep states of all tokens before."""
        for group in self.row_groups.values():
            if group.span.is_read_later:
                layer = group.layer_ids[0]
                raise NotImplementedError(
                    f"got {what} and layers[{layer}] is {self.layers[layer].label}, expected layers of "
                    "keys and values: a state stands for all tokens before it, and none of them can change"
                )

    def _check_states(self) -> None:
        if self.partial_hits:
            self.refuse_states("partial_hits=True")
        if not self.enable_prefix_caching:
            if self.snapshots != Snapshots():
                raise ValueError(
                    f"snapshots is {self.snapshots} and there is no prefix cache to keep them, expected "
                    "enable_prefix_caching=True with it"
                )
            return
        every = self.snapshots.every
        if every is not None and self.snapshot_groups and every % self.prefix_unit:
            raise ValueError(
                f"snapshots.every is {every}, expected a multiple of {self.prefix_unit}: cached prefixes are "
                "whole blocks of every layer group"
            )
        block_size = self.groups[self.indexed_group].block_size
        for group in self.snapshot_groups.values():
            if group.span.is_read_later and block_size % group.block_size:
                raise ValueError(
                    f"{group.kind.label} layers have blocks of {group.block_size} tokens, and the blocks by "
                    f"which prefixes are found have {block_size}, expected a multiple: lower the kind's "
                    "block_size"
                )

    def _check_partial_hits(self) -> None:
        if self.partial_hits and not self.enable_prefix_caching:
            raise ValueError(
                "partial_hits is True and there is no prefix cache to hit, expected "
                "enable_prefix_caching=True with it"
            )
        sizes = {group.block_size for group in self.groups}
        if self.partial_hits and len(sizes) > 1:
            raise ValueError(
                f"partial_hits is True and blocks have {sorted(sizes)} tokens, expected one block size: what "
                "is shared of a block is the same tokens in every layer group"
            )

    def _with_snapshots(self, plans: list[LayerGroup]) -> list[LayerGroup]:
        """Adds blocks for snapshots to the pools of states, beside the rows' own."""
        if not self.enable_prefix_caching:
            return plans
        sized = [plan for plan in plans if _is_state(plan.span) and plan.kind.num_blocks is None]
        snapshot_bytes = sum(
            plan.block_bytes * plan.span.num_prefix_blocks(plan.block_size) for plan in sized
        )

        def with_room(plan: LayerGroup) -> LayerGroup:
            if plan not in sized:
                return plan
            more, most = plan.num_blocks, self.snapshots.max_bytes
            if most is not None:
                num_snapshots = most // snapshot_bytes
                if not num_snapshots:
                    raise ValueError(
                        f"snapshots.max_bytes is {most}, expected at least {snapshot_bytes}: a snapshot "
                        "of all layers takes so many; to keep none: Snapshots(at_junctions=False, "
                        "at_prompt_end=False, at_end=False)"
                    )
                more = num_snapshots * plan.span.num_prefix_blocks(plan.block_size)
            return dataclasses.replace(plan, num_blocks=plan.num_blocks + more)

        return [with_room(plan) for plan in plans]

    def _has_snapshots(self, span: Span) -> bool:
        parts = (part.span for i in self._storing_layers for part in self.layers[i].parts)
        return span.is_in_prefix and not span.keeps_all and any(map(_is_state, parts))

    def _plan_group(self, kind: LayerKind, layer_ids: tuple[int, ...]) -> LayerGroup:
        block_size = kind.block_size or self.block_size
        max_len = self.max_seq_len if kind.source_len_limit is None else kind.source_len_limit
        max_held_blocks = kind.span.max_held_blocks(max_len, self.query_len_limit, block_size)
        num_blocks = kind.num_blocks or self.num_blocks
        if self.enable_prefix_caching and kind.source_len_limit is None and self._has_snapshots(kind.span):
            # What is to be published stays until it is; the tokens of its last step are in a window anyway.
            num_marked = NUM_MARKS
            if kind.span.is_read_later:
                num_marked = self.snapshots.max_per_step(self.query_len_limit)
            max_held_blocks += num_marked * kind.span.num_prefix_blocks(block_size)
            max_held_blocks = min(max_held_blocks, ceil_div(max_len, block_size))
        if kind.span.is_read_later:
            num_blocks = kind.num_blocks
            if num_blocks is not None and num_blocks < self.max_seqs * max_held_blocks:
                raise ValueError(
                    f"{kind.label} layers have num_blocks = {num_blocks}, expected at least "
                    f"{self.max_seqs * max_held_blocks}: {max_held_blocks} for each of max_seqs = "
                    f"{self.max_seqs} rows, so that no row waits for a state"
                )
        arrays = kind.arrays(block_size, kind.dtype)
        if layer_ids:
            check_arrays(kind.label, arrays, block_size)
        return LayerGroup(
            kind=kind,
            layer_ids=layer_ids,
            num_blocks=num_blocks or self.max_seqs * max_held_blocks,
            block_size=block_size,
            max_blocks_per_seq=ceil_div(max_len, block_size),
            max_held_blocks=max_held_blocks,
            max_len=max_len,
            arrays=tuple(sorted(arrays.items())),
        )


def _is_state(span: Span) -> bool:
    return span.is_read_later and span.is_in_prefix


def require_config(caller: str, config: Any) -> None:
    """Refuses a value that is no `CacheConfig`."""
    if not isinstance(config, CacheConfig):
        raise TypeError(
            f"{caller} got a {type(config).__name__}, expected a CacheConfig; cache.config is one"
        )


def memory_bytes(config: CacheConfig) -> int:
    """Counts the bytes of the pools on all devices; the control state comes on top (see `describe`)."""
    require_config("memory_bytes", config)
    return sum(group.pool_bytes for group in config.groups)


def format_bytes(num_bytes: int) -> str:
    """Writes `num_bytes` with a binary unit, e.g. "16.0 MiB"."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def config_to_json(config: CacheConfig) -> bytes:
    """Writes the config as bytes, for `jax.export`, with the version of their format."""
    values = {"format_version": FORMAT_VERSION} | {
        f.name: getattr(config, f.name) for f in dataclasses.fields(config)
    }
    values["dtype"] = config.dtype.name
    values["snapshots"] = dataclasses.asdict(config.snapshots)
    if isinstance(config.eviction_policy, InBatches):
        values["eviction_policy"] = dataclasses.asdict(config.eviction_policy)
    values["layers"] = [kind_to_json(kind) for kind in config.layers]
    values["extras"] = [extra_to_json(extra) for extra in config.extras]
    return json.dumps(values).encode()


def config_from_json(data: bytes | bytearray) -> CacheConfig:
    """Computes the inverse of `config_to_json`, or raises a ValueError on data of another format version."""
    values = json.loads(bytes(data))
    require_format(values.pop("format_version", None))
    values["layers"] = [kind_from_json(kind) for kind in values["layers"]]
    values["snapshots"] = Snapshots(**values["snapshots"])
    if isinstance(values["eviction_policy"], dict):
        values["eviction_policy"] = InBatches(**values["eviction_policy"])
    values["extras"] = [extra_from_json(extra) for extra in values["extras"]]
    return CacheConfig(**values)


def _check_shared(layers: Sequence[LayerKind]) -> None:
    for i, kind in enumerate(layers):
        owner = kind.shared_layer
        if owner is not None and not (owner < i and layers[owner].shared_layer is None):
            own = [j for j, other in enumerate(layers[:i]) if other.shared_layer is None]
            raise ValueError(
                f"layers[{i}] is {kind.label}, expected one of the layers before it that store keys and "
                f"values, {own or 'of which there are none'}: name the layer whose keys and values it reads"
            )
