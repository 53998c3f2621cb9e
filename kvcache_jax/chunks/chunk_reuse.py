"""The options of chunk reuse in `generate` and `score`, and the spans of prompts that are chunks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvcache_jax.arrays.number_checks import as_integer, as_list, finite_number, static_count
from kvcache_jax.blocks.key_rotation import Rotate
from kvcache_jax.chunks.chunk_selector import selectors
from kvcache_jax.chunks.chunk_store import require_store
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.decoding.prefill import one_call_len
from kvcache_jax.decoding.prompts import PromptCall
from kvcache_jax.layers.span import ceil_div

Span = tuple[int, int]
"""First place of a chunk in its prompt, and one past its last."""

Observe = Callable[[Any, jax.Array, Cache, Step], tuple[jax.Array, Cache]]
"""`(params, tokens i32[n, T], cache, step) -> (queries [n, T, num_q_heads, key_dim], cache)`.

The first layers of a model, which write their keys and values as the whole model does. The queries are those
of the last of these layers, as `kv.attention` takes them with its own scale; its output is not asked for.
"""

_OBSERVED = frozenset({"attention", "k_deviation", "v_deviation"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkReuse:
    """The way in which chunks of prompts are reused: passages at any position.

    Each chunk is computed once, alone, and is kept in the cache's store of chunks. In a prompt its keys are
    rotated to their new positions, and some of its tokens are computed again, with all tokens before them.

    Attributes:
      rotate: Rotates keys to another position, as in `compose`: a `key_rotation` of the model's frequencies.
        None for a model whose keys know no position. A list has one of these per layer.
      selector: Name of the function that says which tokens those are; see `select_tokens`.
      share: Part of each chunk's tokens that is computed again, 0 to 1. With 1 a prompt is computed exactly,
        and so is a chunk at the beginning of its prompt with any.
      seed: Of a selector that draws, below 2**32.
      observe: The model's first layers, an `Observe` function, for a selector that looks at attention or at
        deviations. They compute all tokens of chunks again, and their keys and values stay (CacheBlend).
      observed_layer: The last of these layers, whose keys, values and queries are looked at.

    Raises:
      ValueError, TypeError: a share outside 0 to 1, an unknown selector, a `rotate` that is no function.

    Example:
      >>> import kvcache_jax as kv
      >>> rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=100)
      >>> kv.chunks.Reuse(rotate=rotate, share=0.5).selector
      'first'

    References:
      EPIC (Hu et al.; arXiv:2410.15332), for chunks that are computed alone, and then in part again.
      CacheBlend (Yao et al.; arXiv:2405.16444), for the choice by the keys and values of first layers.
    """

    rotate: Rotate | Sequence[Rotate | None] | None
    selector: str = "first"
    share: float = 0.2
    seed: int = 0
    observe: Observe | None = None
    observed_layer: int = 1

    def __post_init__(self):
        rotations = self.rotate if isinstance(self.rotate, Sequence) else [self.rotate]
        if isinstance(self.rotate, str) or not all(one is None or callable(one) for one in rotations):
            raise TypeError(
                f"rotate is {self.rotate!r}, expected a function of keys and distances, None, or a list "
                "of them"
            )
        if isinstance(self.rotate, Sequence):  # programs go by it
            object.__setattr__(self, "rotate", tuple(self.rotate))
        share = finite_number("share", self.share)
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}, expected 0 to 1, the part of a chunk that is computed again")
        object.__setattr__(self, "share", share)
        object.__setattr__(self, "seed", static_count("seed", self.seed, 0, 2**32 - 1, "2**32 - 1"))
        if self.observe is not None and not callable(self.observe):
            raise TypeError(f"observe is {self.observe!r}, expected a function as a model's, or None")
        layer = static_count("observed_layer", self.observed_layer, least=0)
        object.__setattr__(self, "observed_layer", layer)
        if self.is_observed and self.observe is None:
            needs = ", ".join(sorted(selectors.find(self.selector).needs & _OBSERVED))
            raise ValueError(
                f"selector is {self.selector!r}, which needs {needs}, expected observe=, the first layers of "
                "the model: chunks are computed alone"
            )

    @property
    def is_observed(self) -> bool:
        """Whether the selector looks at more than places and chance."""
        return bool(selectors.find(self.selector).needs & _OBSERVED)


def prompt_spans(
    call: PromptCall, spans: Any, reuse: Any, least_answer_len: int | None = None
) -> list[list[Span]]:
    """Checks the chunks of prompts; leaves out those that the cache has no room for, whatever it holds.

    `spans` has for each prompt pairs `(start, end)`, in any order; they are returned in order. With a
    `least_answer_len` they are answers, and what is kept of them is returned.
    """
    caller, prompts, config = call.caller, call.tokens, call.config
    if call.retention.max_held_len(config, 1) is not None:
        raise ValueError(
            f"{caller} got chunks and a retention that drops tokens, expected one of them: a row that "
            "dropped tokens takes no chunks"
        )
    if not isinstance(reuse, ChunkReuse):
        raise TypeError(f"reuse is {reuse!r}, expected kv.chunks.Reuse(rotate=..., share=...)")
    layer, num_layers = reuse.observed_layer, config.num_layers
    if reuse.observe is not None and layer >= num_layers:
        raise ValueError(
            f"observed_layer is {layer}, expected one of the cache's {num_layers} layers, from 0 on"
        )
    store = require_store(caller, config)
    of_prompts = as_list("spans", spans, "spans of each prompt, pairs (start, end)")
    if len(of_prompts) != len(prompts):
        raise ValueError(
            f"spans has {len(of_prompts)} lists of spans, expected {len(prompts)}, one per prompt"
        )
    found: list[list[Span]] = []
    for i, (of_prompt, prompt) in enumerate(zip(of_prompts, prompts, strict=True)):
        name = f"spans[{i}]"
        ordered = _ordered(name, of_prompt, len(prompt), store.max_chunk_len, least_answer_len)
        ordered = _within_windows(name, ordered, len(prompt), config)
        found.append(_with_room(ordered, prompt, len(prompt), config, store.num_chunks))
    return found


def request_spans(
    prompt: np.ndarray,
    parts: Any,
    num_tokens: int,
    config: CacheConfig,
    least_answer_len: int | None = None,
) -> list[Span]:
    """Checks the chunks of a request's prompt, whose row comes to hold `num_tokens`, as `prompt_spans`."""
    store = require_store("Engine", config)
    ordered = _ordered("parts", parts, len(prompt), store.max_chunk_len, least_answer_len)
    ordered = _within_windows("parts", ordered, len(prompt), config)
    return _with_room(ordered, prompt, num_tokens, config, store.num_chunks)


def _ordered(
    name: str, spans: Any, num_tokens: int, max_chunk_len: int, least_answer_len: int | None
) -> list[Span]:
    """Checks the spans of a prompt and sorts them; of answers, it returns what is kept."""
    pairs = []
    for span in as_list(name, spans, "spans, pairs (start, end)"):
        pair = as_list(name, span, "spans, pairs (start, end)")
        if len(pair) != 2:
            raise ValueError(f"{name} has the span {span!r}, expected a pair (start, end)")
        start, end = (as_integer(name, place) for place in pair)
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"{name} has the span {(start, end)}, expected 0 <= start < end <= {num_tokens}, the "
                "prompt's length"
            )
        if end - start > max_chunk_len and least_answer_len is None:
            raise ValueError(
                f"{name} has the span {(start, end)} of {end - start} tokens, expected at most "
                f"max_chunk_len = {max_chunk_len}; raise max_chunk_len, or name two spans"
            )
        pairs.append((start, end))
    pairs.sort()
    for before, behind in zip(pairs, pairs[1:], strict=False):
        if before[1] > behind[0]:
            raise ValueError(
                f"{name} has the spans {before} and {behind}, expected spans that do not overlap"
            )
    if least_answer_len is not None:  # the row that ended did not hold the last token
        pairs = [(start, min(end - 1, start + max_chunk_len)) for start, end in pairs]
        return [(start, end) for start, end in pairs if end - start >= least_answer_len]
    return pairs


def _within_windows(name: str, spans: list[Span], num_tokens: int, config: CacheConfig) -> list[Span]:
    """Refuses spans of which a window layer has too little left when tokens are computed again.

    A last one that ends its prompt is left out where such layers cannot take the last token back.
    """
    windows = [group for group in config.groups if not group.span.keeps_all]
    if spans and spans[-1][1] == num_tokens and any(group.span.rollback_limit == 0 for group in windows):
        spans = spans[:-1]
    reach = spans[-1][1] - spans[0][0] if spans else 0
    if windows and one_call_len(reach) > config.query_len_limit:
        raise ValueError(
            f"{name} has spans from {spans[0][0]} to {spans[-1][1]} and layers[{windows[0].layer_ids[0]}] is "
            f"{windows[0].kind.label}, expected at most max_query_len = {config.query_len_limit} tokens "
            "from the first to the last, which window layers hold at once; raise max_query_len"
        )
    return spans


def _with_room(
    spans: list[Span], prompt: np.ndarray, num_tokens: int, config: CacheConfig, num_chunks: int
) -> list[Span]:
    """Leaves out the spans of a prompt that do not fit beside its row and the others, in order.

    It does not depend on the contents of the cache: the rest can be evicted, and chunks be forgotten.
    """
    names: set[bytes] = set()
    fitting = []
    # A prompt that was found in part copies a block; while chunks are computed it holds none yet.
    num_left = [
        group.num_blocks - min(ceil_div(num_tokens, group.block_size), group.max_held_blocks) - 1
        for group in config.groups
    ]
    for start, end in spans:
        name = prompt[start:end].tobytes()
        if name not in names:
            needs = [ceil_div(end - start, group.block_size) for group in config.groups]
            left = [num - need for num, need in zip(num_left, needs, strict=True)]
            if min(left) < 0 or len(names) == num_chunks:
                continue
            num_left = left
            names.add(name)
        fitting.append((start, end))
    return fitting
