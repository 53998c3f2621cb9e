"""Frozen dataclasses as pytrees: how every state of this library is declared."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.export

T = TypeVar("T", bound=type)


class Static(NamedTuple):
    """A field that is metadata: hashable, compared when jit looks up a compiled program.

    Attributes:
      field: Its name.
      to_bytes: Serialises its value for `jax.export`.
      from_bytes: The inverse.
    """

    field: str
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytearray], Any]


@dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
def pytree_dataclass(static: Static | None = None) -> Callable[[T], T]:
    """Makes a class a frozen, keyword-only dataclass, a pytree, and known to `jax.export`."""

    def decorate(cls: T) -> T:
        cls = dataclasses.dataclass(frozen=True, eq=False, kw_only=True)(cls)
        meta = [static.field] if static else []
        data = [f.name for f in dataclasses.fields(cls) if f.name not in meta]
        jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"kvcache_jax.{cls.__name__}",
            serialize_auxdata=lambda aux: static.to_bytes(aux[0]) if static else b"",
            deserialize_auxdata=lambda data: (static.from_bytes(data),) if static else (),  # type: ignore
        )
        return cls

    return decorate
