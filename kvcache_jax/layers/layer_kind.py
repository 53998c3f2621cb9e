"""The layer kind: the arrays that a layer keeps of a token, and how attention reads them.

A new kind is a subclass in one file, here or in any program. It defines which positions stay (`span`),
which arrays a block has (`arrays`), how a slot stores the arrays that a model passes (`encode`), and how
attention reads stored arrays (`keys_values`); also which stored features a position rotates
(`rotated_features`). Every other method is that of plain keys and values.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.layers.block_array import BlockArray
from kvcache_jax.layers.span import Span

MAX_INDEX = 2**31
"""One past the largest index that 32 bits reach."""
STORAGE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that keys and values may be stored and multiplied in."""


class KeysValues(NamedTuple):
    """Stored tokens as attention multiplies them.

    Attributes:
      k: `[..., heads, tokens, key_dim]`, in the dtype to multiply in.
      v: `[..., heads, tokens, value_dim]`, in the same dtype.
      k_scale: `[..., heads, tokens]`, multiplies the logits; None for 1.
      v_scale: `[..., heads, tokens]`, multiplies the weights of values; None for 1.
      k_offset: `[..., heads, tokens]`, added to every number of a scaled key; None for 0.
      v_offset: `[..., heads, tokens]`, the same for a scaled value; None for 0.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    k_offset: jax.Array | None = None
    v_offset: jax.Array | None = None

    def in_float32(self) -> tuple[jax.Array, jax.Array]:
        """Computes the keys and values that are meant, f32, scaled and with their offsets."""

        def meant(x: jax.Array, scale: jax.Array | None, offset: jax.Array | None) -> jax.Array:
            x = x.astype(jnp.float32)
            x = x if scale is None else x * scale[..., None].astype(jnp.float32)
            return x if offset is None else x + offset[..., None].astype(jnp.float32)

        return meant(self.k, self.k_scale, self.k_offset), meant(self.v, self.v_scale, self.v_offset)


_kinds: dict[str, type["LayerKind"]] = {}


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The contents of one model layer per token; equal kinds share a block table and a pool.

    Subclasses are frozen dataclasses, and override what differs from keys and values in the cache's dtype.
    They are known to `jax.export` by their names: a program that loads an export imports them first.

    Attributes:
      num_kv_heads: Key and value heads (query heads are a multiple of it).
      head_dim: Width of a key and of a value.
      num_blocks: Blocks of this kind's pool, in place of the config's.
      block_size: Tokens of a block of this kind, in place of the config's.
      dtype: Of keys and values, in place of the config's: float32, bfloat16 or float16.
    """

    num_kv_heads: int
    head_dim: int
    num_blocks: int | None = dataclasses.field(default=None, kw_only=True)
    block_size: int | None = dataclasses.field(default=None, kw_only=True)
    dtype: Any = dataclasses.field(default=None, kw_only=True)

    is_differentiable = True
    """Whether a gradient passes through `encode` and `keys_values`; else it is refused by the kind's name."""
    has_scaled_numbers = False
    """Whether "k" and "v" hold numbers in a byte each, int8 or the bits of float8_e4m3fn, which stand for
    `scale * number + offset`, with arrays "k_scale", "v_scale" and maybe "k_offset", "v_offset" as
    `pallas_kernels.eight_bits.Scaling` has them: the GPU's kernels read these."""
    is_causal = True
    """Whether a query sees no token after its own; else all queries see the row's first `length` tokens."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        _kinds[kind_name(cls)] = cls

    def __post_init__(self):
        check_positive(self, "num_kv_heads", "head_dim")
        check_positive_or_none(self, "num_blocks", "block_size")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", storage_dtype(self.dtype))

    @property
    def span(self) -> Span:
        """The positions that stay. Default: all."""
        return Span()

    @property
    def parts(self) -> tuple["LayerKind", ...]:
        """The kinds of the layer's groups, each with a block table and a pool. Default: itself."""
        return (self,)

    @property
    def shared_layer(self) -> int | None:
        """The layer whose keys and values are read by one that stores none; None for a layer with its own."""
        return None

    @property
    def source_len_limit(self) -> int | None:
        """Most tokens of the source that the layer reads; None for a layer that reads its row's tokens."""
        return None

    @property
    def label(self) -> str:
        """Name and options as plans and pictures show them."""
        return type(self).__name__

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a model's inputs per token, as arguments of `encode`; among "k" and "v"."""
        return dict.fromkeys(("k", "v"), (self.num_kv_heads, self.head_dim))

    def arrays(self, block_size: int, dtype: Any) -> Mapping[str, BlockArray]:
        """Returns the arrays of a block by name.

        Args:
          block_size: Tokens of a block.
          dtype: The kind's own, else the config's.
        """
        array = BlockArray((self.num_kv_heads, block_size, self.head_dim), dtype)
        return dict.fromkeys(("k", "v"), array)

    def encode(self, **new: jax.Array) -> Mapping[str, jax.Array]:
        """Computes the arrays to store for new tokens; floats are cast to the arrays' dtypes afterwards.

        The result for a token must depend on nothing but that token, bit for bit.

        Args:
          new: `[..., *inputs[name]]` by name.

        Returns:
          `[..., *token_shape]` by the names of `arrays`.
        """
        return new

    def keys_values(self, tile: Mapping[str, jax.Array], weights: Any = None) -> KeysValues | tuple[Any, ...]:
        """Computes keys and values of stored tokens, as attention multiplies them.

        Slots without a token may hold anything, NaN too, and may give anything.

        Args:
          tile: By name `[heads, tokens, ...]`, 1 head for an array without an axis of heads.
          weights: The layer's own, as `attention(weights=)` got them; differentiable.

        Returns:
          `KeysValues`, or a tuple of its first fields, such as `(k, v)` or `(k, v, k_scale, v_scale)`.
        """
        self.refuse_weights(weights)
        return KeysValues(tile["k"], tile["v"])

    def queries(self, q: jax.Array) -> jax.Array:
        """Computes the factors of the keys of `keys_values` from queries `[..., heads, key_dim]`."""
        return q

    def outputs(self, out: jax.Array) -> jax.Array:
        """Computes the results of sums `[..., heads, value_dim]` of the values of `keys_values`."""
        return out

    def row_len(self, context_len: jax.Array, source_len: jax.Array | None) -> jax.Array:
        """Returns the tokens that rows hold in layers of this kind, i32 like both arguments.

        Args:
          context_len: Tokens of the rows.
          source_len: Tokens of their sources; None in a cache without layers that read one.
        """
        return context_len

    @property
    def rotated_features(self) -> Mapping[str, slice] | None:
        """The features of stored tokens that their position rotates, by the names of `arrays`.

        None where stored tokens cannot be moved to another position. Default: all of plain keys.
        """
        return {"k": slice(None)} if self.is_plain else None

    @property
    def is_plain(self) -> bool:
        """Whether blocks hold keys and values as they are multiplied: all that the library's kernels read."""
        parts = "arrays", "encode", "keys_values", "queries", "outputs", "row_len", "is_causal"
        is_own = self.shared_layer is None and self.source_len_limit is None
        return is_own and all(getattr(type(self), part) is getattr(LayerKind, part) for part in parts)

    def refuse_weights(self, weights: Any) -> None:
        """Raises for weights that the kind has no use for."""
        if weights is not None:
            raise ValueError(f"weights are given and {self.label} layers take none, expected weights=None")


def check_kind(name: str, kind: Any) -> None:
    """Refuses what is no layer kind, and a kind that is no value or has another span."""
    if not isinstance(kind, LayerKind):
        raise TypeError(f"{name} is {kind!r}, expected a layer kind such as FullAttention or SlidingWindow")
    require_value(name, kind)
    if not isinstance(kind.span, Span):
        raise TypeError(f"{name}.span is {kind.span!r}, expected a property that is a kvcache_jax.Span")
    if not isinstance(kind.inputs, Mapping) or not {*kind.inputs} <= {"k", "v"}:
        raise TypeError(f"{name}.inputs is {kind.inputs!r}, expected a property: shapes by the names k and v")


def require_value(name: str, value: Any) -> None:
    """Refuses a part of a config that is no value: programs are found by the config."""
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} is {value!r} ({error}), expected a frozen dataclass of numbers, texts and tuples"
        ) from None
    cls = type(value)
    if "__eq__" in vars(cls) or cls.__eq__ is object.__eq__:
        return
    # The fields of a class above decide then what is equal, and two that differ elsewhere had one program.
    others = vars(value).keys() - {field.name for field in dataclasses.fields(value)}
    for other in sorted(others):
        if not isinstance(getattr(cls, other, None), functools.cached_property):
            raise TypeError(
                f"{name} is a {cls.__name__} with {other!r} beside its fields, expected a frozen dataclass "
                "that has it as a field: decorate the class"
            )


def kind_name(cls: type) -> str:
    """Returns the name by which a kind is exported: a short one for the library's kinds."""
    is_ours = cls.__module__.startswith("kvcache_jax.")
    return cls.__name__ if is_ours else f"{cls.__module__}.{cls.__qualname__}"


def kind_to_json(kind: LayerKind) -> dict[str, Any]:
    """Returns a kind as an object of JSON, the kinds in its fields too."""

    def to_json(value: Any) -> Any:
        if isinstance(value, LayerKind):
            return kind_to_json(value)
        return value.name if isinstance(value, np.dtype) else value

    values = {f.name: to_json(getattr(kind, f.name)) for f in dataclasses.fields(kind) if f.init}
    return {"layer_kind": kind_name(type(kind)), **values}


def kind_from_json(values: dict[str, Any]) -> LayerKind:
    """Computes the inverse of `kind_to_json`, or raises a ValueError if no kind of that name is defined."""
    fields: dict[str, Any] = {
        name: kind_from_json(value) if isinstance(value, dict) and "layer_kind" in value else value
        for name, value in values.items()
    }
    name = fields.pop("layer_kind")
    if name not in _kinds:
        raise ValueError(
            f"the layer kind is {name!r}, expected one of {', '.join(map(repr, _kinds))}: import the module "
            "that defines it first"
        )
    return _kinds[name](**fields)


def storage_dtype(value: Any) -> np.dtype:
    """Returns a dtype that keys and values may have, or raises."""
    try:
        is_none = value is None or isinstance(value, jax.Array)  # NumPy takes None for float64
        name = repr(value) if is_none else jnp.dtype(value).name
    except (TypeError, ValueError):
        name = repr(value)
    if name not in STORAGE_DTYPES:
        raise ValueError(f"dtype is {name}, expected one of {', '.join(STORAGE_DTYPES)}")
    return jnp.dtype(value)


def check_count(owner: Any, name: str, least: int) -> None:
    """Refuses a field that is no integer of at least `least`, and stores the integer."""
    value = static_count(name, getattr(owner, name), least)
    if value >= MAX_INDEX and name != "memory_budget":
        raise ValueError(f"{name} is {value}, expected below 2**31")
    object.__setattr__(owner, name, value)


def check_positive(owner: Any, *names: str) -> None:
    """Refuses fields that are no integers above 0."""
    for name in names:
        check_count(owner, name, least=1)


def check_positive_or_none(owner: Any, *names: str) -> None:
    """Refuses fields that are neither None nor integers above 0."""
    check_positive(owner, *(name for name in names if getattr(owner, name) is not None))


def check_not_negative(owner: Any, *names: str) -> None:
    """Refuses fields that are no integers of at least 0."""
    for name in names:
        check_count(owner, name, least=0)
