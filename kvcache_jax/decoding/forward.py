"""A model as decoding sees it: one step function, for prefill and decode alike."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvcache_jax.core.cache_checks import same_cache
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.decoding.arguments import require_arrays

Forward = Callable[[Any, jax.Array, Cache, Step], tuple[jax.Array, Cache]]
"""`(params, tokens i32[n, T], cache, step) -> (logits [n, T, vocab], cache)`.

While tokens are decoded, the `n` rows of a step are rows of the cache, each once. While prompts are computed,
they are pieces: a row of the cache may have several, one after the other, as `step.seq_ids` tells. A layer
that carries a state along a row's tokens, beside `kv.attention`, must join them.

A model with a parameter `logits_at` says with it that it reads what is stored by `kv.attention` and
`kv.attend` alone. Where no layer has a state, the engine then computes pieces and next tokens in
one call: each token is a row, and logits are wanted of the tokens `logits_at` i32[m], `[m, 1, vocab]`, or of
all where it is None. See `for_logits`.
"""


@dataclasses.dataclass(frozen=True)
class PreparedForward:
    """Calls a model whose parameters are prepared once, before a loop of steps.

    `generate`, `score`, `beam_search` and `Engine` prepare them; for a loop of your own `prepared` does.

    Attributes:
      forward: The model. It takes what `prepare` returns, and for loops that do not prepare, parameters as
        they are too.
      prepare: `params -> params`, outside of compiled programs. For example it takes layers out of a stack,
        from which every step would copy them. What is prepared already it returns as it is.

    Raises:
      TypeError: no function.

    Example:
      >>> import jax.numpy as jnp, kvcache_jax as kv
      >>> def forward(params, tokens, cache, step):
      ...     return sum(params) * jnp.eye(8)[tokens + 1], cache
      >>> model = kv.decoding.PreparedForward(forward, tuple)
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=32)
      >>> kv.generate(model, jnp.ones(2), [[4]], config, max_new_tokens=2).generations[0].tokens
      [5, 6]
    """

    forward: Forward
    prepare: Callable[[Any], Any]

    def __post_init__(self):
        for name in ("forward", "prepare"):
            if not callable(function := getattr(self, name)):
                raise TypeError(f"{name} is {function!r}, expected a function")

    def __call__(
        self, params: Any, tokens: jax.Array, cache: Cache, step: Step, **more: Any
    ) -> tuple[jax.Array, Cache]:
        """Calls the model; `more` is what it asks for by the names of its parameters."""
        return self.forward(params, tokens, cache, step, **more)

    @property
    def __wrapped__(self) -> Forward:
        """The model, for `inspect`."""
        return self.forward


def prepared(forward: Forward, params: Any) -> Any:
    """Prepares parameters for a loop of steps where the model is a `PreparedForward`; else returns them.

    Raises:
      TypeError: parameters that are no arrays.
    """
    params = forward.prepare(params) if isinstance(forward, PreparedForward) else params
    require_arrays(params)
    return params


def for_logits(hidden: jax.Array, logits_at: jax.Array | None) -> jax.Array:
    """Selects the tokens of `hidden [n, T, width]` whose logits are wanted, `[m, 1, width]`; all for None."""
    return hidden if logits_at is None else hidden.reshape(-1, 1, hidden.shape[-1])[logits_at]


def width_of(result: Any, cache: Cache, num_rows: int, num_tokens: int) -> int:
    """Finds the logits' width in what `forward` returned for a cache and a padded step, or in its shapes."""
    parts = result if isinstance(result, tuple) else (result,)
    is_array = [isinstance(part, jax.ShapeDtypeStruct | jax.Array) for part in parts]
    kinds = [
        f"{part.dtype}{list(part.shape)}" if is_one else type(part).__name__
        for part, is_one in zip(parts, is_array, strict=True)
    ]
    if not (len(parts) == 2 and is_array[0] and isinstance(parts[1], Cache)):
        raise TypeError(f"forward returned ({', '.join(kinds)}), expected (logits, cache)")
    same_cache("forward", parts[1], cache)
    logits, shape = parts[0], (num_rows, num_tokens)
    if logits.ndim != 3 or logits.shape[:2] != shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"forward returned logits {kinds[0]} for tokens int32{list(shape)}, expected floats "
            "[n, T, vocab] for tokens [n, T]"
        )
    return logits.shape[2]
