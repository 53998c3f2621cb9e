"""What a family of models is, and what most of them write alike in config.json."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from models.config import DecoderConfig
from models.json_object import ENTRIES, JsonObject
from models.tensor_names import NAMES, Names

NUMBER = (int, float)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
UNSCALED = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "scale_emb": 1.0,
    "scale_depth": None,
    "dim_model_base": None,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Multipliers and caps that no tensor shows: entries, and the value of each that does nothing."""
ONLY = UNSCALED | {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": None,
    "partial_rotary_factor": 1.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "nope_layer_interval": None,
    "quantization_config": None,
    "use_mrope": False,
    "is_causal": True,
}
"""Options that most families do not have: entries and the value that says so."""
# Buffers that older programs stored; they follow from config.json.
_FREQUENCIES = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
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
      entries: What config.json calls fields of `DecoderConfig` and its parts, where most call them otherwise.
      names: Tensors of a model, where most call them otherwise.
      part: The entry that holds the text model's own, in a file of a model that also sees; else empty.
      skipped: Tensors that are left out: patterns of their names, and what they are, by the entries.
    """

    architecture: str
    read: Callable[[JsonObject], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any] | None]
    only: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    entries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Callable[[DecoderConfig], Names] = lambda config: {}
    part: str = ""
    skipped: Callable[[JsonObject], Mapping[str, str]] = lambda values: {}

    def tensor_names(self, config: DecoderConfig) -> Names:
        """Returns the names of all tensors of a model."""
        return {**NAMES, **self.names(config)}

    def left_out(self, names: Iterable[str], values: JsonObject) -> dict[str, str]:
        """Returns which tensors of the files a model is read without, and what they are."""
        skipped = {_FREQUENCIES: "rotary frequencies", **self.skipped(values)}
        return {name: what for name in names for rule, what in skipped.items() if re.fullmatch(rule, name)}


def only(*read: str, **others: Any) -> dict[str, Any]:
    """Computes `Family.only` for code that reads some entries of `ONLY`, and other entries of its own."""
    return {name: value for name, value in ONLY.items() if name not in read} | others


_SIZES = "vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads", "max_seq_len"


def read_sizes(values: JsonObject) -> dict[str, Any]:
    """Reads the sizes that all families have."""
    num_layers = values.get_field("num_layers", int)
    if not 1 <= num_layers <= _MOST_LAYERS:
        raise values.error(values.entry("num_layers"), f"1 to {_MOST_LAYERS}")
    return {field: values.get_field(field, int) for field in _SIZES} | dict(
        norm_eps=values.get_field("norm_eps", NUMBER),
        tie_embeddings=values.get_field("tie_embeddings", bool, False),
    )


def write_sizes(config: DecoderConfig, entries: Mapping[str, str] = ENTRIES) -> dict[str, Any]:
    """Computes the inverse of `read_sizes`; `entries` as in `Family`."""
    fields = *_SIZES, "num_kv_heads", "norm_eps", "tie_embeddings"
    return write_fields(config, {field: entries.get(field, ENTRIES.get(field, field)) for field in fields})


def write_fields(owner: Any, entries: Mapping[str, str]) -> dict[str, Any]:
    """Computes the inverse of `JsonObject.read`."""
    return {entry: getattr(owner, field) for field, entry in entries.items()}


def read_head_dim(values: JsonObject, default: int | None = None) -> int:
    """Reads the width of heads; without a default they share `hidden_size` where nothing is said."""
    head_dim = values.get("head_dim", int, default)
    if head_dim is not None:
        return head_dim
    hidden_size, num_q_heads = values.get("hidden_size", int), values.get("num_attention_heads", int)
    if num_q_heads < 1 or hidden_size % num_q_heads:
        raise values.error("hidden_size", f"a multiple of num_attention_heads = {num_q_heads}")
    return hidden_size // num_q_heads


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
