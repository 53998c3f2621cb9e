"""Checks and conversions of token ids, and of the multimodal items among them.

Values from the host stay in numpy, as in `arguments`.
"""

from typing import Any

import numpy as np
from jax.core import Tracer

from kvcache_jax.core.arguments import INT32, Array, as_array, integers, saturated
from kvcache_jax.core.state import Cache


def _words(name: str, values: Any) -> Array:
    """Converts token ids to i32 so that different ids stay different: u32 is taken bit by bit."""
    values = integers(name, values)
    if values.dtype == np.uint32:
        return values.view(np.int32)
    if values.dtype.itemsize > 4:
        fix = "give each position 32 bits, of a digest for example the first ones"
        if isinstance(values, Tracer):
            cast = f"cast ids, {name}.astype(jnp.int32)"
            raise TypeError(f"{name} is traced and {values.dtype}, expected at most 32 bits: {cast}; {fix}")
        values = np.asarray(values)
        for id_ in (values.min(), values.max()):
            if not INT32.min <= id_ <= INT32.max:
                raise ValueError(
                    f"{name} has the token id {id_}, expected {INT32.min} to {INT32.max}, or uint32: {fix}"
                )
    return values.astype(np.int32)


def token_ids(values: Any, *shape: int | None) -> Array:
    """Converts token ids to i32 of the given shape; None in the shape accepts any length."""
    values = as_array("tokens", values)
    has_no_columns = values.size == 0 and len(values) > 0
    values = np.zeros(values.shape, np.int32) if has_no_columns else _words("tokens", values)
    fits = len(values.shape) == len(shape)
    fits = fits and all(want in (None, got) for got, want in zip(values.shape, shape, strict=True))
    if not fits:
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"tokens has shape {values.shape}, expected ({expected})")
    return values


def host_tokens(name: str, values: Any) -> np.ndarray:
    """Converts the tokens of one sequence to numpy, i32[n]; n may be 0."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is {values!r}, expected integer token ids: encode the text first")
    tokens = np.asarray(as_array(name, values))
    if tokens.ndim != 1:
        got = f"a {type(values).__name__} of shape {tokens.shape}"
        raise ValueError(f"{name} is {got}, expected a list of token ids or an array [n]")
    return np.asarray(_words(name, tokens)) if len(tokens) else np.zeros(0, np.int32)


def require_tokens(operation: str, tokens: Any, cache: Cache) -> None:
    """Refuses missing tokens with prefix caching, where the content of each block must be known."""
    if tokens is None and cache.config.enable_prefix_caching:
        raise TypeError(
            f"{operation} got no tokens and the cache has enable_prefix_caching=True, "
            "expected tokens=, the ids by which blocks are found again"
        )


def item_spans(values: Any, num_rows: int) -> Array | None:
    """Checks the multimodal items of every row, i32[num_rows, I, 2]; None stays None."""
    if values is None:
        return None
    values = as_array("items", values)
    if values.ndim != 3 or values.shape[0] != num_rows or values.shape[2] != 2:
        raise ValueError(
            f"items has shape {values.shape}, expected ({num_rows}, any, 2): the first position and the end "
            "of each item, equal ones where a row has fewer"
        )
    if values.size == 0:
        return None
    for first, end in [] if isinstance(values, Tracer) else np.asarray(values).reshape(-1, 2).tolist():
        if not 0 <= first <= end:
            raise ValueError(
                f"items has [{first}, {end}], expected [first position, end] with 0 <= first <= end"
            )
    return saturated("items", values)


def item_spans_of_one(values: Any) -> Array | None:
    """Converts the items of a single prompt, i32[I, 2], to i32[1, I, 2]."""
    values = None if values is None else as_array("items", values)
    if values is None or values.size == 0:
        return None
    if values.ndim != 2 or values.shape[1] != 2:
        raise ValueError(
            f"items has shape {values.shape}, expected (any, 2): the first position and the end of each item"
        )
    return item_spans(values[None], 1)
