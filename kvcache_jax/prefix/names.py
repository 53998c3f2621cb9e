"""The words by which content is kept apart: namespaces, and the digests of multimodal items."""

import hashlib

import numpy as np

from kvcache_jax.arrays.number_checks import static_count

_PERSON = b"kvcache_jax"


def namespace(*, tenant: str = "", adapter: str = "", weights: str = "") -> np.ndarray:
    """Makes the namespace in which rows share cached blocks: a 128-bit digest, compared exactly.

    Args:
      tenant: Name of the client. Sharing across tenants would tell one which prompts another has sent, by the
        time that an answer takes.
      adapter: Name of a change of keys and values on top of the weights, such as a LoRA.
      weights: The weights, by a name or a digest.

    Returns:
      u32[4], for `allocate` and `lookup`. All empty is the default namespace, 0.

    Example:
      >>> import kvcache_jax as kv
      >>> (kv.namespace(tenant="a") == kv.namespace(adapter="a")).all().item()
      False
    """
    fields = {"tenant": tenant, "adapter": adapter, "weights": weights}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, expected a str")
    if not any(fields.values()):
        return np.zeros(4, np.uint32)
    digest = hashlib.blake2b(digest_size=16, person=_PERSON)
    for name, value in fields.items():
        data = value.encode()
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return np.frombuffer(digest.digest(), np.uint32).copy()


def namespace_within(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Makes the namespace of `inner` within `outer`, such as a request's within the weights', u32[4] all.

    It is a digest of both, so that no two pairs share one, a pair of equals included. Within the default
    namespace, 0, `inner` is itself.
    """
    if not outer.any():
        return inner.astype(np.uint32)
    words = np.concatenate([outer, inner]).astype("<u4")
    digest = hashlib.blake2b(words.tobytes(), digest_size=16, person=_PERSON, salt=b"within")
    return np.frombuffer(digest.digest(), np.uint32).copy()


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
