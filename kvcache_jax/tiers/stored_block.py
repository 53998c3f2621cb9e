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
_MAGIC = b"kvblocks"
# Magic, format, bytes of the header, bytes after it; then a CRC-32 of these and of all that follows. It is
# there for faults of disks and networks, of which it misses one in 2**32: who forges a value could compute a
# longer sum too, and other keys' values are known by the digest that a key is.
_FIXED = struct.Struct("<8sIIQ")
_SUM_BYTES = 4
# What a block's key is a digest of ends here in its header: in JSON no text within quotes looks so.
_ARRAYS = b', "arrays": '

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
    def header(self) -> dict[str, Any]:
        """As a value's header has it."""
        return {
            **self.scope._asdict(),
            "parent": self.parent,
            "tokens": self.tokens,
            "group": self.group_id,
            "slot": self.slot,
        }

    @property
    def key(self) -> str:
        """The key in stores."""
        return _key_of("block", json.dumps(self.header).encode())


def key_of(what: str, words: Mapping[str, Any]) -> str:
    """Computes the key of a value from all that it depends on, as 64 hexadecimal digits."""
    return _key_of(what, json.dumps(words, sort_keys=True).encode())


def _key_of(what: str, text: bytes) -> str:
    person = f"kvcache_jax {_FORMAT}".encode()
    return hashlib.blake2b(what.encode() + text, digest_size=32, person=person).hexdigest()


def digest(*values: Any) -> str:
    """Computes the digest of weights, and of whatever else keys and values depend on, for `save` and `load`.

    Args:
      values: Pytrees of arrays and numbers, such as a model's parameters; bytes and str, such as a
        tokenizer's file or an adapter's name.

    Returns:
      64 hexadecimal digits. It reads every byte once, on the host.

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
    text = json.dumps(header).encode()
    fixed = _FIXED.pack(_MAGIC, _FORMAT, len(text), sum(map(len, parts)))
    return b"".join((fixed, _checksum(fixed, text, *parts), text, *parts))


def unpack(data: Data) -> tuple[dict[str, Any], memoryview]:
    """Reads a value's header, and the bytes after it without a copy; raises `BadValueError`."""
    header, _, rest = _unpack(data)
    return header, rest


def _unpack(data: Data) -> tuple[dict[str, Any], bytes, memoryview]:
    """Reads a value's header, the text of it, and the bytes after it."""
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
    text = bytes(view[start : start + header_bytes])
    try:
        header = json.loads(text)
    except ValueError as error:
        raise BadValueError("no header") from error
    if not isinstance(header, dict):
        raise BadValueError("no header")
    return header, text, view[start + header_bytes :]


def pack_block(name: BlockName, arrays: Arrays) -> bytes:
    """Builds the value of a block."""
    specs = [[array, x.dtype.name, list(x.shape)] for array, x in arrays.items()]
    parts = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in arrays.values()]
    return pack({**name.header, "arrays": specs}, parts)


def unpack_block(
    data: Data, key: str, scope: Scope, parent: str, place: tuple[int, int], specs: list[list[Any]]
) -> tuple[BlockName, memoryview]:
    """Reads a block that was asked for by `key`; raises `BadValueError` where it is anything else.

    Args:
      data: The value.
      key: Of the block.
      scope: Who asks.
      parent: Key of the block before.
      place: Layer group and slot.
      specs: Of the arrays, see `array_specs`.

    Returns:
      The block's name, whose tokens the key was computed from; and the bytes of its arrays, one after the
      other, whose number is still to be compared.
    """
    header, text, rest = _unpack(data)
    expected = BlockName(scope, parent, (), *place).header | {"arrays": specs}
    for field, value in expected.items():
        if field != "tokens" and header.get(field) != value:
            raise BadValueError(
                f"of other {field}" if field in ("weights", "arrays") else f"of another {field}"
            )
    tokens = header.get("tokens")
    if not (isinstance(tokens, list) and {*map(type, tokens)} <= {int}):
        raise BadValueError("no header")
    if _key_of("block", text.partition(_ARRAYS)[0] + b"}") != key:
        raise BadValueError("of other tokens")
    return BlockName(scope, parent, tuple(tokens), *place), rest


def _checksum(*parts: Any) -> bytes:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total.to_bytes(_SUM_BYTES, "little")
