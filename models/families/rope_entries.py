"""Rotations in config.json: `rope_theta` and `rope_scaling`, or what transformers 5 writes for both."""

from collections.abc import Mapping
from typing import Any

from models.families.family import FULL, NUMBER, SLIDING
from models.json_object import JsonObject
from models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

# Says nothing of a scaling; what divides rotations among times and places is of no effect in texts.
_PLAIN = {"rope_theta", "partial_rotary_factor", "rope_type", "type", "mrope_section", "mrope_interleaved"}
_ORIGINAL = "original_max_position_embeddings"


def read_rope(values: JsonObject, **options: Any) -> Rope:
    """Reads the rotations of a model whose layers all have the same; `options` are `Rope`'s."""
    part = values.part("rope_scaling" if values.values.get("rope_scaling") else "rope_parameters")
    if any(isinstance(value, dict) for value in part.values.values()):
        name = part.prefix.removesuffix(".")
        raise values.error(name, "one set for all layers: nothing else is implemented")
    theta, original = values.get("rope_theta", NUMBER, 10_000.0), values.get(_ORIGINAL, int, None)
    return read_rope_part(values, part, theta, original, **options)


def read_ropes(values: JsonObject, theta: float, window_theta: float) -> tuple[Rope, Rope]:
    """Reads the rotations of layers that see all tokens, which may be scaled, and of layers with a window."""
    part = values.part("rope_parameters")
    if not {FULL, SLIDING}.issuperset(part.values):
        raise values.error("rope_parameters", f"one set for {FULL} and one for {SLIDING}")
    full, sliding = part.part(FULL), part.part(SLIDING)
    scaling = values.part("rope_scaling")
    if scaling.values:
        full = scaling.with_defaults(full.values)
    return read_rope_part(values, full, theta), read_rope_part(values, sliding, window_theta)


def read_rope_part(
    values: JsonObject, part: JsonObject, theta: float, original: int | None = None, **options: Any
) -> Rope:
    """Reads the rotations that `part` of the entries describes; `theta` unless it has its own.

    Families whose heads are rotated in part give a `share` for where nothing is said. `original` is the
    context length that the whole config names: it replaces the scaling's own. None where each kind of layer
    has rotations of its own.
    """
    if "share" in options:
        share = values.get("partial_rotary_factor", NUMBER, options["share"])
        options["share"] = part.get("partial_rotary_factor", NUMBER, share)
    elif part.get("partial_rotary_factor", object, 1.0) != 1.0:
        raise part.error("partial_rotary_factor", "1.0: nothing else is implemented")
    theta = part.get("rope_theta", NUMBER, theta)
    is_old = part.values.get("rope_type") is None and part.values.get("type") is not None
    type_name = "type" if is_old else "rope_type"
    is_plain = _PLAIN.issuperset(part.values)
    rope_type = part.get(type_name, str, "default" if is_plain else ...)
    if rope_type not in _SCALINGS:
        *most, last = _SCALINGS
        raise part.error(type_name, f"{', '.join(most)} or {last}: nothing else is implemented")
    return part.make(Rope, theta=theta, scaling=_SCALINGS[rope_type](part, original), **options)


def write_rope(rope: Rope | None) -> dict[str, Any]:
    """Computes the inverse of `read_rope`; None, which it never returns, is as if nothing were said."""
    if rope is None:
        return {}
    return {"rope_theta": rope.theta, "rope_scaling": _written(rope.scaling)}


def _plain(part: JsonObject, original: int | None) -> None:
    return None


def _linear(part: JsonObject, original: int | None) -> LinearScaling:
    return part.make(LinearScaling, factor=part.get("factor", NUMBER))


def _llama3(part: JsonObject, original: int | None) -> Llama3Scaling:
    return part.make(
        Llama3Scaling,
        factor=part.get("factor", NUMBER),
        low_freq_factor=part.get("low_freq_factor", NUMBER),
        high_freq_factor=part.get("high_freq_factor", NUMBER),
        original_max_seq_len=part.get(_ORIGINAL, int) if original is None else original,
    )


def _yarn(part: JsonObject, original: int | None) -> YarnScaling:
    return part.make(
        YarnScaling,
        factor=part.get("factor", NUMBER),
        original_max_seq_len=part.get(_ORIGINAL, int) if original is None else original,
        # 0 stands for nothing here.
        beta_fast=part.get("beta_fast", NUMBER, None) or 32.0,
        beta_slow=part.get("beta_slow", NUMBER, None) or 1.0,
        mscale=part.get("mscale", NUMBER, None) or None,
        mscale_all_dim=part.get("mscale_all_dim", NUMBER, None) or None,
        attention_factor=part.get("attention_factor", NUMBER, None),
        truncate=part.get("truncate", bool, True),
    )


_SCALINGS = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def _written(scaling: Any) -> Mapping[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                _ORIGINAL: scaling.original_max_seq_len,
            }
        case YarnScaling():
            values = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                _ORIGINAL: scaling.original_max_seq_len,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "mscale": scaling.mscale,
                "mscale_all_dim": scaling.mscale_all_dim,
                "attention_factor": scaling.attention_factor,
                "truncate": scaling.truncate,
            }
            return {name: value for name, value in values.items() if value is not None}
    raise TypeError(f"scaling is {scaling!r}, expected one of models.rope")
