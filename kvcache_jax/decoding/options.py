"""Options of decoding, grouped into values: how tokens are drawn, drafts, texts to stop at, callbacks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from kvcache_jax.arrays.number_checks import as_list, finite_number, static_count
from kvcache_jax.core.arguments import as_array
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.decoding.arguments import require_functions
from kvcache_jax.decoding.forward import Forward

_NO_LIMIT = np.iinfo(np.int32).max
_STEPS_WHILE_WATCHED = 8


def _one_number(name: str, value: Any) -> Any:
    """Refuses one value per row: the rows are the loop's own. Takes numbers out of arrays."""
    if isinstance(value, Tracer | str | bytes):
        return value
    try:
        shape = np.shape(value)
    except ValueError:  # of lists that differ in length
        raise ValueError(f"{name} is {value!r}, expected one number, for all prompts") from None
    if shape:
        raise ValueError(f"{name} has shape {shape}, expected one number, for all prompts")
    return as_array(name, value).item() if isinstance(value, jax.Array | np.ndarray) else value


def _checked_seed(seed: Any) -> int | tuple[int, ...]:
    is_list = isinstance(seed, Sequence) and not isinstance(seed, str | bytes)
    if not is_list and np.ndim(seed) == 0:
        return static_count("seed", seed, least=0)
    return tuple(static_count(f"seed[{i}]", value, least=0) for i, value in enumerate(seed))


def _require(name: str, value: Any, expected: str, is_valid: bool) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {value!r}, expected {expected}")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters by which the tokens of a call or a request are drawn; checked when they are made.

    Attributes:
      temperature: Divides the logits; 0 takes the most probable token, that is greedy.
      top_k: Keeps that many tokens; 0 keeps all.
      top_p: Keeps the fewest tokens that have this mass; 1 keeps all.
      min_p: Keeps tokens at least this probable relative to the most probable; 0 keeps all.
      seed: Decides the draws; at least 0. For `generate` also one per prompt.

    Raises:
      ValueError, TypeError: a value out of range, or no number.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.decoding.SamplingParams(temperature=0.8, top_p=0.95)
      SamplingParams(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0, seed=0)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] = 0

    def __post_init__(self):
        # As in `sampling_columns`, which makes arrays: there are many requests, and these stay on the host.
        temperature, top_p, min_p = (
            finite_number(name, _one_number(name, getattr(self, name)))
            for name in ("temperature", "top_p", "min_p")
        )
        _require("temperature", temperature, "0 to 8e37", 0 <= temperature <= 8e37)
        _require("top_p", top_p, "above 0, at most 1", 0 < top_p <= 1)
        _require("min_p", min_p, "in [0, 1]", 0 <= min_p <= 1)
        checked = {
            "temperature": temperature,
            "top_k": static_count("top_k", _one_number("top_k", self.top_k), 0, 2**31 - 1, "2**31 - 1"),
            "top_p": top_p,
            "min_p": min_p,
            "seed": _checked_seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


GREEDY = SamplingParams()
"""The most probable token."""


@dataclasses.dataclass
class Draft:
    """A draft model for speculative decoding.

    Attributes:
      forward: As the target's, same vocabulary.
      params: Parameters of the draft model.
      config: The draft cache's; `max_seqs` and `max_seq_len` are the target's.
    """

    forward: Forward
    params: Any
    config: CacheConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Drafts:
    """Drafts of speculative decoding: how many, and by which model.

    Attributes:
      num_drafts: Draft tokens per row and step, at least 1.
      draft: The model that proposes them. Default: none; the tokens after the last occurrence of the text's
        end are proposed (n-gram lookup), which gives the same tokens as no drafts, up to the rounding of the
        logits.

    Raises:
      ValueError, TypeError: no draft, or no draft model.
    """

    num_drafts: int
    draft: Draft | None = None

    def __post_init__(self):
        object.__setattr__(self, "num_drafts", static_count("num_drafts", self.num_drafts))
        if self.draft is not None and not isinstance(self.draft, Draft):
            kind = type(self.draft).__name__
            raise TypeError(f"draft is a {kind}, expected kv.Draft(forward, params, config)")


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Texts that end a continuation; its tokens are cut at the first that completes one.

    Attributes:
      texts: The texts, each of at least one character.
      detokenize: Tokens to text.

    Raises:
      ValueError, TypeError: no list of texts, an empty text, no function.
    """

    texts: Sequence[str]
    detokenize: Callable[[list[int]], str]

    def __post_init__(self):
        if isinstance(self.texts, str):
            raise TypeError(f"texts is {self.texts!r}, expected a list of texts: [{self.texts!r}]")
        texts = as_list("texts", self.texts, "texts")
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"texts has {text!r}, expected texts of at least one character")
        if not callable(self.detokenize):
            raise TypeError(f"detokenize is {self.detokenize!r}, expected a function from tokens to text")
        object.__setattr__(self, "texts", tuple(texts))


@dataclasses.dataclass(frozen=True)
class Watch:
    """Callbacks while decoding runs, and how often they are called.

    Attributes:
      on_tokens: Called with (prompt_id, sample_id, new tokens).
      on_check_in: Called at each check-in of the host, after `on_tokens`, with the timeline's new entry and
        its block tables; by `beam_search` also with the hypotheses so far.
      check_in_every: Most decode steps between two check-ins; one comes also whenever a row ends. Default: 8
        with a callback or stop strings, otherwise no limit.

    Raises:
      ValueError, TypeError: no function, or no number of steps.
    """

    on_tokens: Callable[[int, int, list[int]], None] | None = None
    on_check_in: Callable[..., None] | None = None
    check_in_every: int | None = None

    def __post_init__(self):
        require_functions(on_tokens=self.on_tokens, on_check_in=self.on_check_in)
        if self.check_in_every is not None:
            steps = min(static_count("check_in_every", self.check_in_every), _NO_LIMIT)
            object.__setattr__(self, "check_in_every", steps)


UNWATCHED = Watch()
"""Nothing is called."""


def steps_between_check_ins(watch: Watch, has_stop_strings: bool = False) -> int:
    """Returns `check_in_every`; by default few steps if anything looks at them, else as many as there are."""
    if watch.check_in_every is not None:
        return watch.check_in_every
    is_watched = has_stop_strings or watch.on_tokens is not None or watch.on_check_in is not None
    return _STEPS_WHILE_WATCHED if is_watched else _NO_LIMIT


def require_option(name: str, value: Any, kind: type, or_none: bool = False) -> None:
    """Refuses anything but a value of its kind, a class in the namespace of its room."""
    if not isinstance(value, kind) and not (or_none and value is None):
        room = kind.__module__.split(".")[1]
        options = ", ".join(field.name for field in dataclasses.fields(kind))
        raise TypeError(f"{name} is {value!r}, expected kv.{room}.{kind.__name__}({options})")
