"""What a family of models is, and what most of them write alike in config.json."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models.config import DecoderConfig
from models.json_object import JsonObject

NUMBER = (int, float)
FULL, SLIDING = "full_attention", "sliding_attention"
_MOST_LAYERS = 1024  # ten times as many as the largest models have: more would only take long to refuse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What a `model_type` stands for: the code that the family is published with.

    Attributes:
      architecture: Of the causal model.
      read: Options of `DecoderConfig` from the entries; the dtypes are not among them.
      write: Entries for a model; None where it has what the family never has. Whether they say all of it is
        found out by reading them.
      only: What that code can do and `models.decoder` cannot: entries and the one value that is implemented.
      defaults: What missing entries stand for, where that is not an error; null ones stay null.
    """

    architecture: str
    read: Callable[[JsonObject], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any] | None]
    only: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_sizes(values: JsonObject) -> dict[str, Any]:
    """Reads the sizes that all families call by the same names."""
    num_layers = values.get("num_hidden_layers", int)
    if not 1 <= num_layers <= _MOST_LAYERS:
        raise values.error("num_hidden_layers", f"1 to {_MOST_LAYERS}")
    return dict(
        vocab_size=values.get("vocab_size", int),
        hidden_size=values.get("hidden_size", int),
        mlp_size=values.get("intermediate_size", int),
        num_layers=num_layers,
        num_q_heads=values.get("num_attention_heads", int),
        max_seq_len=values.get("max_position_embeddings", int),
        norm_eps=values.get("rms_norm_eps", NUMBER),
        tie_embeddings=values.get("tie_word_embeddings", bool, False),
    )


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """Computes the inverse of `read_sizes`."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def read_windows(
    values: JsonObject, window: int | None, implied: Sequence[str], needs: str = ""
) -> tuple[int | None, ...]:
    """Reads which layers have the window, from `layer_types`, else from what is `implied` without it.

    Args:
      values: The entries.
      window: The tokens in reach of layers that have a window.
      implied: Per layer `FULL` or `SLIDING`.
      needs: What else a window needs, to be said where it is missing.
    """
    layer_types = values.get("layer_types", list, list(implied))
    num_layers = len(implied)
    if len(layer_types) != num_layers or any(kind not in (FULL, SLIDING) for kind in layer_types):
        raise values.error("layer_types", f"{num_layers} times {FULL} or {SLIDING}")
    if SLIDING in layer_types and (window is None or not 1 <= window < 2**31):
        raise values.error("sliding_window", f"the tokens in reach of {SLIDING}, 1 to 2**31 - 1{needs}")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """Computes the inverse of `read_windows`; of windows of several widths it writes the widest."""
    windows = config.layer_windows
    return {
        "sliding_window": max((window for window in windows if window is not None), default=None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }
