"""Frozen dataclasses as pytrees: how every state of this library is declared."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.export
from jax.core import Tracer

T = TypeVar("T", bound=type)

FORMAT_VERSION = 4
"""Format of saved and exported states: each change of a state's fields, or of their meaning, adds 1."""


class Static(NamedTuple):
    """A field that is metadata: hashable, compared when jit looks up a compiled program."""

    field: str
    to_bytes: Callable[[Any], bytes]  # of its value, for `jax.export`
    from_bytes: Callable[[bytearray], Any]


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
def pytree_dataclass(static: Static | None = None) -> Callable[[T], T]:
    """Makes a class a frozen, keyword-only dataclass, a pytree, and known to `jax.export`."""

    def decorate(cls: T) -> T:
        prints_itself = "__repr__" in vars(cls)
        cls = dataclasses.dataclass(frozen=True, eq=False, kw_only=True)(cls)
        if not prints_itself:
            made: Any = cls
            made.__repr__ = _showing_deleted(made.__repr__)
        meta = [static.field] if static else []
        data = [f.name for f in dataclasses.fields(cls) if f.name not in meta]
        jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"kvcache_jax.{cls.__name__}",
            serialize_auxdata=lambda aux: static.to_bytes(aux[0]) if static else _version_to_json(),
            deserialize_auxdata=lambda data: (
                (static.from_bytes(data),) if static else _version_from_json(data)  # type: ignore
            ),
        )
        return cls

    return decorate


def _showing_deleted(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """Names arrays that a step was given, where jax would raise an error."""

    def name(leaf: Any) -> Any:
        is_deleted = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
        return f"deleted {leaf.dtype.name}{[*leaf.shape]}" if is_deleted else leaf

    return functools.wraps(show)(lambda state: show(jax.tree.map(name, state)))


def require_format(version: Any) -> None:
    """Refuses states that were saved or exported in another format."""
    if version != FORMAT_VERSION:
        got = "no format_version" if version is None else f"format_version {version!r}"
        raise ValueError(
            f"what was saved or exported has {got}, expected {FORMAT_VERSION}: export it again with this "
            "kvcache_jax, or load it with the one that wrote it"
        )


def _version_to_json() -> bytes:
    return json.dumps({"format_version": FORMAT_VERSION}).encode()


def _version_from_json(data: bytes | bytearray) -> tuple[()]:
    require_format(json.loads(bytes(data)).get("format_version") if data else None)
    return ()
