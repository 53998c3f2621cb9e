"""The host tier, an extra of a cache: published blocks that the device has no room for, in host memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import Extra, Keeper, KeptArray
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.tiers import (
    check_hosted,
    demote,
    find_hosted,
    forget_hosted,
    hosted_states,
    move_blocks,
    promote,
)
from kvcache_jax.tiers.hosted import NAME, HostTier, empty_tier, tier_of


@dataclasses.dataclass(frozen=True)
class Host(Extra, Keeper):
    """Blocks in host memory, for `CacheConfig(extras=[...])` with prefix caching.

    What would be evicted is demoted: its contents move to the host, the least valuable first, and push out
    what was demoted longest ago. `allocate` finds prefixes that go on there and promotes them: they count as
    cached, and each takes a block of the device, as a new one does. A block is on the device or on the host,
    so that a pool of `C` blocks and a host of `H` find what a pool of `C + H` would under the policy `lru`.
    States of recurrent layers, and windows beside them, are forgotten as by `Snapshots(eviction="unwanted")`:
    with `eviction="tokens saved"` that is which states are demoted alone.

    Contents move with the next call that reads or writes blocks, such as `extend`, before it does: operations
    on the control state touch no keys and values. Until then a block that was just demoted is not found.

    Attributes:
      num_blocks: Blocks on the host, of the group that prefixes are found by; other layer groups have as many
        in proportion to their pools. As many as one row holds come on top in each, for contents on their way;
        of states and windows beside them as many as the device has, for states go where their prefix does.
        Of each array, a head of a block takes whole tiles of 1,024 numbers, all layers of its group together.
      store_after: Only blocks that were used so often since they were published are demoted; 0 for all.
      break_even: Tokens, at least, by which a prefix must go on in host memory, or they are computed; see
        `tiers.break_even`.

    Raises:
      ValueError, TypeError: sizes that are not positive, or a cache without prefix caching.

    Example:
      >>> import numpy as np, kvcache_jax as kv
      >>> config = kv.CacheConfig(
      ...     [kv.FullAttention(1, 8)], num_blocks=4, block_size=2, max_seqs=1, max_seq_len=8,
      ...     enable_prefix_caching=True, extras=[kv.tiers.Host(num_blocks=8)])
      >>> cache = kv.init(config)
      >>> for start in (0, 10, 0):  # of the first prompt the second leaves no block on the device
      ...     tokens = np.arange(start, start + 7)[None]
      ...     cache, admission = kv.allocate(cache, [0], [7], tokens=tokens)
      ...     num_new = 7 - int(admission.num_cached[0])
      ...     cache, _ = kv.extend(cache, [num_new], max_new=7, tokens=np.roll(tokens, num_new - 7))
      ...     cache, _ = kv.free(kv.commit(cache)[0], [0])
      >>> admission.num_cached.tolist(), admission.num_promoted.tolist()
      ([6], [6])

    References:
      Mooncake (Qin et al.; FAST 2025), for prefixes that outlive the device's memory.
    """

    num_blocks: int
    store_after: int = 0
    break_even: int = 0

    name: ClassVar[str] = NAME
    memory_kind: ClassVar[str | None] = move_blocks.HOST_MEMORY

    def __post_init__(self):
        for name, least in (("num_blocks", 1), ("store_after", 0), ("break_even", 0)):
            object.__setattr__(self, name, static_count(name, getattr(self, name), least))

    def check(self, config: CacheConfig) -> None:
        """Refuses a config without prefix caching."""
        if not config.enable_prefix_caching:
            raise ValueError(
                "extras has a tiers.Host and there is no prefix cache to demote from, expected "
                "enable_prefix_caching=True with it"
            )

    def empty(self, config: CacheConfig, numpy: Any) -> HostTier:
        """Builds the state of a host without blocks."""
        return empty_tier(config, self.num_blocks, numpy)

    def arrays(self, config: CacheConfig) -> tuple[dict[str, KeptArray], ...]:
        """Returns the arrays in host memory."""
        return move_blocks.kept_arrays(config, self.num_blocks)

    def find(
        self,
        control: Control,
        tokens: jax.Array,
        most: jax.Array,
        namespace: jax.Array,
        columns: list[jax.Array],
        config: CacheConfig,
    ) -> list[jax.Array]:
        """Adds the host's blocks of a prompt."""
        return find_hosted.find_hosted(control, tokens, most, namespace, columns, self.break_even, config)

    def hold(self, control: Control, hits: Sequence[jax.Array], config: CacheConfig) -> Control:
        """Holds the host's blocks among hits."""
        return promote.hold(control, hits, config)

    def restore(
        self,
        control: Control,
        rows: jax.Array,
        hits: Sequence[jax.Array],
        held: Mapping[int, jax.Array],
        config: CacheConfig,
    ) -> Control:
        """Promotes the host's blocks among hits."""
        return promote.restore(control, rows, hits, held, config)

    def evict(self, control: Control, group_id: int, block_ids: jax.Array, config: CacheConfig) -> Control:
        """Demotes blocks."""
        return demote.demote(control, group_id, block_ids, self.num_blocks, self.store_after, config)

    def num_free(self, control: Control, group_id: int, config: CacheConfig) -> jax.Array:
        """Counts the free blocks for states of both tiers."""
        return hosted_states.num_free(control, group_id, self.num_blocks, config)

    def forget_state(
        self, control: Control, group_id: int, block_id: jax.Array, is_due: jax.Array, config: CacheConfig
    ) -> tuple[Control, jax.Array]:
        """Forgets the host's state of the least value."""
        return hosted_states.forget_state(control, group_id, block_id, is_due, config)

    def link(
        self,
        control: Control,
        group_id: int,
        owners: jax.Array,
        is_wanted: jax.Array | None,
        config: CacheConfig,
    ) -> tuple[Control, jax.Array]:
        """Masks the host's blocks under indexed blocks of the device."""
        return promote.link(control, group_id, owners, is_wanted)

    def publish(self, control: Control, block_ids: jax.Array, config: CacheConfig) -> Control:
        """Forgets the host's blocks with the same contents."""
        return promote.publish(control, block_ids, config)

    def forget_contents(self, control: Control, config: CacheConfig) -> Control:
        """Forgets all blocks."""
        return forget_hosted.forget(control, config)

    def scrub(self, cache: Cache, masks: Sequence[jax.Array], namespace: jax.Array | None) -> Cache:
        """Overwrites what continues the masked blocks, or belongs to a namespace."""
        return forget_hosted.scrub(cache, masks, namespace)

    def is_settled(self, control: Control) -> jax.Array:
        """Tests whether no contents have to move."""
        return tier_of(control).is_settled

    def settle(self, cache: Cache) -> Cache:
        """Moves contents."""
        return move_blocks.settle(cache)

    def violations(self, cache: Cache) -> list[str]:
        """Finds broken invariants of the host's blocks."""
        return check_hosted.violations(cache)
