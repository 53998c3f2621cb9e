"""Aspects that families share: heads, windows, rotations, biases, mixtures of experts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from models.config import DecoderConfig, Experts
from models.families.family import (
    FULL,
    ONLY,
    SLIDING,
    Family,
    read_head_dim,
    read_sizes,
    read_windows,
    write_fields,
    write_sizes,
    write_windows,
)
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject


class Aspect(NamedTuple):
    """Options of models that go together.

    Attributes:
      read: Options of `DecoderConfig` from the entries.
      write: Entries for a model; None where it has what the family never has.
    """

    read: Callable[[JsonObject], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any] | None]


def compose(
    architecture: str,
    *aspects: Aspect,
    options: Mapping[str, Any] | None = None,
    only: Mapping[str, Any] = ONLY,
    entries: Mapping[str, str] | None = None,
    **others: Any,
) -> Family:
    """Makes the family whose models differ in sizes and in these aspects.

    Args:
      architecture: As in `Family`.
      *aspects: What is read and written beside the sizes.
      options: Of `DecoderConfig`, the same in all models of the family.
      only: As in `Family`, like all that follows.
      entries: Likewise.
      **others: Likewise.
    """
    entries = entries or {}

    def read(values: JsonObject) -> dict[str, Any]:
        found = read_sizes(values)
        for aspect in aspects:
            found |= aspect.read(values)
        return found | dict(options or {})

    def write(config: DecoderConfig) -> dict[str, Any] | None:
        values = write_sizes(config, entries)
        if "hidden_act" in only:
            values["hidden_act"] = only["hidden_act"]
        for aspect in aspects:
            written = aspect.write(config)
            if written is None:
                return None
            values |= written
        return values

    return Family(architecture=architecture, read=read, write=write, only=only, entries=entries, **others)


def fields(entries: Mapping[str, str], kind: Any, default: Any = ...) -> Aspect:
    """Reads fields of `DecoderConfig` as they are; `entries` by field."""
    return Aspect(
        lambda values: {field: values.get(entry, kind, default) for field, entry in entries.items()},
        lambda config: write_fields(config, entries),
    )


def heads(head_dim: int | None = None, *, kv_heads_follow: bool = False) -> Aspect:
    """Reads the heads and their width, `head_dim` where nothing is said.

    Null means a key and value head for each query head; so does a missing entry with `kv_heads_follow`.
    """

    def read(values: JsonObject) -> dict[str, Any]:
        is_told = "num_key_value_heads" in values.values or kv_heads_follow
        default = values.get_field("num_q_heads", int) if is_told else ...
        num_kv_heads = values.get("num_key_value_heads", int, default)
        return {"num_kv_heads": num_kv_heads, "head_dim": read_head_dim(values, head_dim)}

    return Aspect(read, lambda config: {"head_dim": config.head_dim})


def rope(**options: Any) -> Aspect:
    """Reads the rotations; `options` go to `read_rope`."""

    def write(config: DecoderConfig) -> dict[str, Any]:
        share = {"partial_rotary_factor": config.rope.share} if config.rope and "share" in options else {}
        return write_rope(config.rope) | share

    return Aspect(lambda values: {"rope": read_rope(values, **options)}, write)


ROPE = rope()
BIASES = fields(
    {"use_qkv_bias": "attention_bias", "use_out_bias": "attention_bias", "use_mlp_bias": "mlp_bias"},
    bool,
    False,
)


# --- windows ---


def _read_no_windows(values: JsonObject) -> dict[str, Any]:
    if values.get("sliding_window", int, None) is not None:
        raise values.error("sliding_window", f"null: {values.values.get('model_type')} has no windows")
    return _read_unlisted(values, None)


def _read_all_windows(values: JsonObject) -> dict[str, Any]:
    return _read_unlisted(values, values.get("sliding_window", int, None))


def _read_unlisted(values: JsonObject, window: int | None) -> dict[str, Any]:
    """All layers have the window; the published code does not read `layer_types`, which may not differ."""
    implied = [FULL if window is None else SLIDING] * values.get_field("num_layers", int)
    if values.get("layer_types", list, implied) != implied:
        model_type = values.values.get("model_type")
        raise values.error("layer_types", f"{implied}, or none: {model_type} does not read it")
    return {"windows": read_windows(values, window, implied)}


def listed_windows(period: int | None) -> Aspect:
    """Reads windows from `layer_types`; else every `period`-th layer sees all tokens, or none does."""

    def read(values: JsonObject) -> dict[str, Any]:
        window, layers = values.get("sliding_window", int, None), range(values.get_field("num_layers", int))
        if period is None:
            implied = [FULL if window is None else SLIDING for _ in layers]
        else:
            implied = [SLIDING if (layer + 1) % period else FULL for layer in layers]
        return {"windows": read_windows(values, window, implied)}

    return Aspect(read, write_windows)


NO_WINDOWS = Aspect(_read_no_windows, lambda config: {})
UNUSED_WINDOWS = Aspect(lambda values: _read_unlisted(values, None), lambda config: {})
ALL_WINDOWS = Aspect(
    _read_all_windows, lambda config: {"sliding_window": write_windows(config)["sliding_window"]}
)


# --- mixtures of experts ---


def experts(entries: Mapping[str, str], **options: Any) -> Aspect:
    """Reads the mixtures that all layers have; `entries` by field of `Experts`, `options` are others."""

    def read(values: JsonObject) -> dict[str, Any]:
        return {"experts": values.read(Experts, entries, first_layer=0, **options)}

    def write(config: DecoderConfig) -> dict[str, Any] | None:
        return None if config.experts is None else write_fields(config.experts, entries)

    return Aspect(read, write)
