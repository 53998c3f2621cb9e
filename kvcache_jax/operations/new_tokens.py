"""The layout of new tokens in a call of `extend`: padded, a row of an array each, or packed end to end."""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The new tokens as the caller laid them out, flat.

    Attributes:
      row: i32[tokens], index of the token's row in the call, `n` for padding.
      offset: i32[tokens], place among the row's new tokens.
      starts: i32[n + 1], the row's tokens are `[starts[i], starts[i + 1])`.
      shape: Shape of the caller's token arrays.
      is_packed: True if rows lie end to end.
    """

    row: jax.Array
    offset: jax.Array
    starts: jax.Array
    shape: tuple[int, ...]
    is_packed: bool

    def spread(self, per_row: jax.Array, fill: int) -> jax.Array:
        """Repeats each row's entry of `per_row`, i32[n] or bool[n], for its tokens; `fill` for padding."""
        if self.is_packed:
            return get_at(per_row, self.row, fill)
        return jnp.broadcast_to(per_row[:, None], self.shape).reshape(-1)

    def first(self, per_token: jax.Array) -> jax.Array:
        """Reads `per_token` [tokens] at each row's first token, [n]; any for a row without."""
        if self.is_packed:
            return get_at(per_token, self.starts[:-1])
        return per_token.reshape(self.shape)[:, 0]

    def count(self, mask: jax.Array) -> jax.Array:
        """Counts each row's tokens for which `mask bool[tokens]` is true, i32[n]."""
        if self.is_packed:
            before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(mask, dtype=jnp.int32)])
            return jnp.diff(get_at(before, self.starts))
        return jnp.sum(mask.reshape(self.shape), axis=1, dtype=jnp.int32)


def padded_tokens(num_rows: int, max_new: int) -> NewTokens:
    """Lays tokens out in `[num_rows, max_new]` arrays."""
    order = jnp.arange(num_rows * max_new, dtype=jnp.int32)
    starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * max_new
    return NewTokens(
        quotient(order, max_new), remainder(order, max_new), starts, (num_rows, max_new), is_packed=False
    )


def packed_tokens(num_new: jax.Array, num_tokens: int) -> NewTokens:
    """Lays tokens out end to end in `[num_tokens]` arrays, `num_new[i]` of row `i`."""
    ends = jnp.cumsum(jnp.clip(num_new, 0, num_tokens + 1), dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    order = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(ends, order, side="right").astype(jnp.int32)
    return NewTokens(row, order - starts[row], starts, (num_tokens,), is_packed=True)
