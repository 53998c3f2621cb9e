"""The operation `copy_prompts`: blocks go from one cache of this process to another one's devices."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import as_list
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core import token_arguments
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status
from kvcache_jax.operations.transfer import BlockContents, export_blocks
from kvcache_jax.tiers.catalogue import StoreReport
from kvcache_jax.tiers.load_blocks import import_with_room, on_device
from kvcache_jax.tiers.published import read_blocks
from kvcache_jax.tiers.save_blocks import batch_size, namespace_digits, require_stored
from kvcache_jax.tiers.stored_block import config_digest


@explicit_transfers
def copy_prompts(
    source: Cache,
    cache: Cache,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    namespace: ArrayLike | None = None,
) -> tuple[Cache, StoreReport]:
    """Publishes what another cache of this process has of prompts, so that they find it.

    Keys and values go by `jax.device_put`, from device to device and not through the host: the caches may be
    on other devices or meshes, and split their heads in other ways. All tokens are compared, and what the
    cache has does not travel. Both caches are of the same weights: arrays do not say of which they are.

    Args:
      source: Not changed; outside of jit. What its host has stays there: `prefetch` it first.
      cache: Donated. What it holds stays; cached blocks make room.
      prompts: Texts, of which all tokens but the last can be found.
      namespace: u32[4], the prompts'. Default: 0.

    Returns:
      The cache; what was copied, and what was not and why, such as "OUT_OF_BLOCKS".

    Raises:
      ValueError, TypeError: caches without values or prefix caching, or of other layers, dtypes or block
        sizes; no token ids.
    """
    for each in (source, cache):
        require_stored("copy_prompts", each)
    digests = [config_digest(each.config) for each in (source, cache)]
    if digests[0] != digests[1]:
        raise ValueError(
            f"the source is of config {digests[0][:12]}, expected {digests[1][:12]} as the cache: "
            "caches of the same layers, dtypes and block sizes"
        )
    words = namespace_digits(namespace) or "0" * 32
    prompts = as_list("prompts", prompts, "prompts, each a list of token ids")
    texts = [token_arguments.host_tokens("prompts", prompt).tolist() for prompt in prompts]
    source = source.config.keeper.settle(source)
    cache = on_device(cache, texts, words)
    chains = zip(_chains(source, texts, words), _chains(cache, texts, words), strict=True)
    ids = [*dict.fromkeys(block for theirs, ours in chains for block in theirs[len(ours) :])]
    group_id, num_loaded, reasons = source.config.indexed_group, 0, collections.Counter[str]()
    size, nowhere = min(map(batch_size, (source, cache))), source.config.groups[group_id].num_blocks
    # An export of no block has the shapes and the places of what the cache takes.
    form = (
        export_blocks(cache, np.full(size, cache.config.groups[group_id].num_blocks, np.int32))
        if ids
        else None
    )
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        contents = export_blocks(source, np.array(some + [nowhere] * (size - len(some)), np.int32))
        contents = _placed_as(contents, form)
        num_blocks = np.sum([np.asarray(held).sum(axis=1) for held in contents.is_held], axis=0)
        cache, status = import_with_room(cache, contents)
        for code, count in zip(np.asarray(status)[: len(some)].tolist(), num_blocks, strict=False):
            if code == Status.OK:
                num_loaded += int(count)
            else:
                reasons[Status(code).name] += int(count)
    return cache, StoreReport(num_loaded=num_loaded, reasons=reasons)


def _chains(cache: Cache, texts: Sequence[list[int]], words: str) -> list[list[int]]:
    """Lists the blocks on the device that have each text's beginning, its last token left out."""
    blocks, group = read_blocks(cache), cache.config.groups[cache.config.indexed_group]
    published = np.flatnonzero(blocks.is_published[: group.num_blocks]).tolist()
    start = len(blocks.parents)
    following = {
        (blocks.parents[at], *blocks.tokens[at].tolist()): at
        for at in published
        if blocks.namespace(at) == words
    }
    chains = []
    for text in texts:
        chain, block = [], start
        for end in range(group.block_size, len(text), group.block_size):
            found = following.get((block, *text[end - group.block_size : end]))
            if found is None:
                break
            block = found
            chain.append(block)
        chains.append(chain)
    return chains


def _placed_as(contents: BlockContents, form: Any) -> BlockContents:
    """Puts contents where a cache has its own, with the tokens of as long a text as it may have."""
    width, wanted = contents.tokens.shape[1], form.tokens.shape[1]
    tokens = jnp.pad(contents.tokens, ((0, 0), (0, max(wanted - width, 0))))[:, :wanted]
    contents = dataclasses.replace(contents, tokens=tokens)
    return jax.device_put(contents, jax.tree.map(lambda x: x.sharding, form))
