"""Blocks as bytes for stores, and their keys: whatever comes back is compared with what was asked.

A value is one block of one layer group: a fixed part, a header in JSON, then the arrays' bytes. Its key is a
digest of the header up to the arrays' forms, which names all that the contents depend on: weights, config,
namespace, the block's tokens, and those before by the key of the block before. The config says the forms.
"""

import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.layers.layer_kind import kind_to_json
from kvcache_jax.tiers.block_store import Data

_FORMAT = 2
_MAGIC, _PERSON = b"kvblocks", b"kvcache_jax %d" % _FORMAT
# Magic, format, bytes of the header, bytes after it; then a CRC-32 of these and of all that follows. It is
# there for faults of disks and networks, of which it misses one in 2**32: who forges a value could compute a
# longer sum too, and other keys' values are known by the digest that a key is.
_FIXED = struct.Struct("<8sIIQ")
_SUM_BYTES = 4

type Arrays = Mapping[str, np.ndarray]
"""A block's arrays by name, `[num_layers, *shape]`."""


class BadValueError(Exception):
    """A value of a store that is not what was asked; its argument is the reason in a few words."""


class Scope(NamedTuple):
    """The contents that may be shared: of the same weights, config and namespace.

    Attributes:
      weights: Digest of the weights, see `digest`.
      config: Digest of the config, see `config_digest`.
      namespace: u32[4] as 32 hexadecimal digits.
    """

    weights: str
    config: str
    namespace: str


class BlockName(NamedTuple):
    """All that a block's contents depend on.

    Attributes:
      scope: Who may share it.
      parent: Key of the block before it in the group that prefixes are found by; "" at the start of a text.
      tokens: Of the block of that group.
      group_id: Layer group; of blocks of other groups with the same tokens.
      slot: The place among these.
    """

    scope: Scope
    parent: str
    tokens: tuple[int, ...]
    group_id: int
    slot: int = 0

    @property
    def text(self) -> str:
        """Writes the beginning of a value's header, in JSON."""
        tokens = ", ".join(map(str, self.tokens))
        return _start_of(self.scope, self.parent) + tokens + _place_of(self.group_id, self.slot)

    @property
    def key(self) -> str:
        """The key in stores."""
        return _key_of(self.text.encode())


def _start_of(scope: Scope, parent: str) -> str:
    return _scope_text(scope) + parent + '", "tokens": ['


@functools.lru_cache(256)
def _scope_text(scope: Scope) -> str:
    return json.dumps(scope._asdict())[:-1] + ', "parent": "'


@functools.lru_cache(256)
def _place_of(group_id: int, slot: int) -> str:
    return f'], "group": {group_id}, "slot": {slot}'


def key_of(what: str, words: Mapping[str, Any]) -> str:
    """Computes the key of a value from all that it depends on, as 64 hexadecimal digits."""
    return _digest_of(what.encode(), json.dumps(words, sort_keys=True).encode())


def _key_of(text: bytes) -> str:
    return _digest_of(b"block", text + b"}")


def _digest_of(what: bytes, text: bytes) -> str:
    return hashlib.blake2b(what + text, digest_size=32, person=_PERSON).hexdigest()


def digest(*values: Any) -> str:
    """Computes the digest of weights, and of whatever else keys and values depend on, for `save` and `load`.

    Args:
      values: Pytrees of arrays and numbers, such as a model's parameters; bytes and str, such as a
        tokenizer's file or an adapter's name.

    Returns:
      64 hexadecimal digits. It reads every byte once, on the host.

    Raises:
      TypeError: a value is something else.

    Example:
      >>> import numpy as np, kvcache_jax as kv
      >>> params = {"w": np.ones(3, np.float32)}
      >>> kv.tiers.digest(params) == kv.tiers.digest({"w": np.ones(3, np.float16)})
      False
    """
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(values)[0]:
        if isinstance(leaf, str | bytes):
            data = leaf.encode() if isinstance(leaf, str) else leaf
            what = [type(leaf).__name__, len(data)]
        else:
            array = np.ascontiguousarray(leaf)
            if array.dtype.hasobject:
                raise TypeError(f"a value is {leaf!r}, expected arrays, numbers and texts")
            what, data = [array.dtype.name, *np.shape(leaf)], array.reshape(-1).view(np.uint8).data
        total.update(json.dumps([jax.tree_util.keystr(path), *what]).encode())
        total.update(data)
    return total.hexdigest()


@functools.lru_cache(16)
def config_digest(config: CacheConfig) -> str:
    """Computes the digest of what a config says of a block's contents; sizes of pools and tables are not."""

    def without_sizes(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_sizes(each) for name, each in value.items() if name != "num_blocks"}
        return value

    layers = [without_sizes(kind_to_json(kind)) for kind in config.layers]
    groups = [
        [group.layer_ids, group.block_size, array_specs(config, g)] for g, group in enumerate(config.groups)
    ]
    words = {"layers": layers, "dtype": config.dtype.name, "groups": groups, "indexed": config.indexed_group}
    return key_of("config", words)


def array_specs(config: CacheConfig, group_id: int) -> list[list[Any]]:
    """Lists the name, dtype and shape of a block's arrays, all layers of a group."""
    group = config.groups[group_id]
    return [
        [name, jnp.dtype(array.dtype).name, [group.num_layers, *array.shape]] for name, array in group.arrays
    ]


def pack(header: Any, parts: Sequence[Any]) -> bytes:
    """Builds a value of a header and the bytes of `parts`."""
    return _pack(json.dumps(header).encode(), parts)


def _pack(text: bytes, parts: Sequence[Any]) -> bytes:
    fixed = _FIXED.pack(_MAGIC, _FORMAT, len(text), sum(map(len, parts)))
    return b"".join((fixed, _checksum(fixed, text, *parts), text, *parts))


def unpack(data: Data) -> tuple[dict[str, Any], memoryview]:
    """Reads a value's header, and the bytes after it without a copy; raises `BadValueError`."""
    text, rest = _unpack(data)
    return _parsed(text), rest


def _unpack(data: Data) -> tuple[bytes, memoryview]:
    """Reads the text of a value's header, and the bytes after it."""
    view, start = memoryview(data).cast("B"), _FIXED.size + _SUM_BYTES
    if len(view) < start:
        raise BadValueError("cut short")
    magic, version, header_bytes, num_bytes = _FIXED.unpack_from(view)
    if magic != _MAGIC:
        raise BadValueError("no block")
    if version != _FORMAT:
        raise BadValueError("another format")
    if len(view) != start + header_bytes + num_bytes:
        raise BadValueError("another length than its header says")
    if _checksum(view[: _FIXED.size], view[start:]) != view[_FIXED.size : start]:
        raise BadValueError("wrong checksum")
    return bytes(view[start : start + header_bytes]), view[start + header_bytes :]


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:  # of many brackets
        raise BadValueError("no header") from error
    if not isinstance(header, dict):
        raise BadValueError("no header")
    return header


def pack_block(block: BlockName, arrays: Arrays) -> bytes:
    """Builds the value of a block."""
    specs = [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()]
    parts = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in arrays.values()]
    return _pack((block.text + arrays_text(specs)).encode(), parts)


def arrays_text(specs: Sequence[Sequence[Any]]) -> str:
    """Writes the end of a block's header, of its arrays' forms; see `array_specs`."""
    return f', "arrays": {json.dumps(specs)}}}'


def unpack_block(
    data: Data, key: str, scope: Scope, parent: str, place: tuple[int, int], arrays: str
) -> tuple[BlockName, memoryview]:
    """Reads a block that was asked for by `key`; raises `BadValueError` where it is anything else.

    Its header is compared as text: parsing takes longer than all else but the checksum.

    Args:
      data: The value.
      key: Of the block.
      scope: Who asks.
      parent: Key of the block before.
      place: Layer group and slot.
      arrays: The forms, see `arrays_text`.

    Returns:
      The block's name, whose tokens the key was computed from; and the bytes of its arrays, one after the
      other, whose number is still to be compared.
    """
    text, rest = _unpack(data)
    start, end = _start_of(scope, parent).encode(), (_place_of(*place) + arrays).encode()
    if not (text.startswith(start) and text.endswith(end)):
        raise BadValueError(_difference(_parsed(text), scope, parent, place, arrays))
    if _key_of(text[: len(text) - len(arrays.encode())]) != key:
        raise BadValueError("of other tokens")
    try:
        tokens = tuple(map(int, text[len(start) : len(text) - len(end)].split(b", ")))
    except ValueError as error:
        raise BadValueError("no header") from error
    if not -(2**31) <= min(tokens) <= max(tokens) < 2**31:
        raise BadValueError("no header")
    return BlockName(scope, parent, tokens, *place), rest


def _difference(
    header: dict[str, Any], scope: Scope, parent: str, place: tuple[int, int], arrays: str
) -> str:
    """Names the field of a header that is not what was asked."""
    expected = _parsed(BlockName(scope, parent, (), *place).text.encode() + arrays.encode())
    for field, value in expected.items():
        if field != "tokens" and header.get(field) != value:
            return f"of other {field}" if field in ("weights", "arrays") else f"of another {field}"
    return "no header"


def _checksum(*parts: Any) -> bytes:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total.to_bytes(_SUM_BYTES, "little")
