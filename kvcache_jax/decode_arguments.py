"""What `generate`, `score` and `beam_search` are asked for, checked alike."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arguments import host_tokens
from kvcache_jax.config import CacheConfig
from kvcache_jax.integers import static_count

_NO_LIMIT = np.iinfo(np.int32).max
_STEPS_WHILE_WATCHED = 8


def finite_number(name: str, value: Any) -> float:
    """`value` as a Python float that is neither NaN nor infinite."""
    if not isinstance(value, int | float | np.number) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")
    return float(value)


def model_tokens(name: str, values: Any, least: int = 0) -> np.ndarray:
    """The ids of at least `least` tokens in numpy, i32[n], as a model takes them: none below 0."""
    tokens = host_tokens(name, values)
    if len(tokens) < least:
        raise ValueError(f"{name} has {len(tokens)} tokens, expected at least {least}")
    if (tokens < 0).any():
        raise ValueError(f"{name} has the token id {tokens.min()}, expected none below 0")
    return tokens


def prompt_tokens(prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Each prompt as i32[n], n at least 1."""
    return [model_tokens(f"prompt {i}", prompt, least=1) for i, prompt in enumerate(prompts)]


def usable_chunk_len(chunk_len: Any, config: CacheConfig) -> int:
    """Most tokens of a row in one call of the model; no more than the cache takes at once."""
    return min(static_count("chunk_len", chunk_len), config.query_len_limit)


def steps_between_looks(look_every: Any, is_watched: bool) -> int:
    """`look_every`; without it few steps if somebody looks on, else as many as there are."""
    if look_every is None:
        return _STEPS_WHILE_WATCHED if is_watched else _NO_LIMIT
    return min(static_count("look_every", look_every), _NO_LIMIT)


def stop_ids(stop_tokens: Sequence[int]) -> jax.Array:
    """The ids as i32[any]; -1, which no token has, where there is none."""
    ids = model_tokens("stop_tokens", stop_tokens)
    return jnp.asarray(ids if len(ids) else [-1], jnp.int32)


def check_stop_strings(stop_strings: Sequence[str], detokenize: Callable | None) -> None:
    """Texts of at least one character, and a function that makes texts of tokens."""
    if isinstance(stop_strings, str):
        raise TypeError(f"stop_strings is {stop_strings!r}, expected a list of texts: [{stop_strings!r}]")
    for text in stop_strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop_strings has {text!r}, expected texts of at least one character")
    if stop_strings and detokenize is None:
        raise ValueError("stop_strings are given without detokenize, expected a function from tokens to text")
