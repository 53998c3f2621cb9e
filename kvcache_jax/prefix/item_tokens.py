"""Multimodal items in a prompt's tokens."""

import hashlib

import numpy as np

from kvcache_jax.arrays.number_checks import static_count


def item_tokens(item: bytes, num_tokens: int) -> np.ndarray:
    """Makes the words that represent a multimodal item in a prompt's `tokens`: a digest in place of ids.

    Every position has a word of its own, below 0, so that no token id looks like one. The same item in
    another number of positions has other words: its keys and values are others too.

    Args:
      item: Identity of the item, such as the image's bytes; any caller with the digest may reuse its blocks.
      num_tokens: Positions that the item takes in the sequence.

    Returns:
      i32[num_tokens].

    Example:
      >>> import kvcache_jax as kv
      >>> kv.item_tokens(b"an image", 2).tolist() == kv.item_tokens(b"an image", 2).tolist()
      True
      >>> kv.item_tokens(b"an image", 2).tolist() == kv.item_tokens(b"an image", 3).tolist()[:2]
      False
    """
    num_tokens = static_count("num_tokens", num_tokens, least=0)
    if not isinstance(item, bytes | bytearray | memoryview):
        raise TypeError(f"item is a {type(item).__name__}, expected the item's bytes")
    digest = hashlib.shake_128(num_tokens.to_bytes(8, "little"))
    digest.update(item)
    words = np.frombuffer(digest.digest(4 * num_tokens), "<u4")
    return (words | np.uint32(1 << 31)).view(np.int32)
