"""config.json of a checkpoint to `DecoderConfig` and back.

A `model_type` stands for the code that its family is published with: what that code does without asking is
in `_FAMILIES`, what it can do and `models.decoder` cannot is in `_ONLY`, and what it does not read is not
read here. Both spellings are understood: `rope_theta` and `rope_scaling`, or `rope_parameters`; `torch_dtype`
or `dtype`.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from models.decoder import DecoderConfig, Llama3Scaling, float_dtype


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, or a model that cannot be saved; names what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` implies without saying so."""

    architecture: str
    use_qkv_bias: bool = False
    use_qk_norm: bool = False
    windowed_layers: str = "none"  # "none", "all" or "some"
    head_dim: int | None = None  # where config.json is silent; None: hidden_size / num_attention_heads
    kv_heads_follow: bool = False  # where it is silent there are as many of them as of query heads


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", kv_heads_follow=True),
    "mistral": _Family("MistralForCausalLM", windowed_layers="all"),
    "qwen2": _Family("Qwen2ForCausalLM", use_qkv_bias=True, windowed_layers="some"),
    "qwen3": _Family("Qwen3ForCausalLM", use_qk_norm=True, windowed_layers="some", head_dim=128),
}
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_mrope": False,
    "is_causal": True,
}
_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}  # what a missing key stands for; null is read
_NUMBER = (int, float)
_PLAIN_ROPE = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}  # says nothing of a scaling
_FULL, _SLIDING = "full_attention", "sliding_attention"

# Where a `DecoderConfig` calls an entry of config.json by another name.
_JSON_NAMES = {
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "original_max_seq_len": "original_max_position_embeddings",
}
_MOST_LAYERS = 1024  # ten times as many as the largest models have: more would only take long to refuse


class JsonObject:
    """The entries of a JSON file, asked for by type; errors name the file and the entry.

    Raises:
      CheckpointError: the file is missing, no JSON or no object.
    """

    def __init__(self, path: pathlib.Path, values: Mapping[str, Any] | None = None, prefix: str = ""):
        self.path, self.prefix = path, prefix
        if values is None:
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except (FileNotFoundError, NotADirectoryError):
                if path.parent.is_dir():
                    raise CheckpointError(f"{path.parent} has no {path.name}") from None
                what = "is no folder" if path.parent.exists() else "is not there"
                raise CheckpointError(
                    f"{path.parent} {what}, expected the folder that holds {path.name}"
                ) from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{path} is not a whole JSON file: {error}") from error
            if not isinstance(values, dict):
                raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        self.values = values

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The entry; `default` where it is missing or null, which without a default is an error."""
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.path} has no {self.prefix}{name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            raise self.error(name, " or ".join(kind.__name__ for kind in kinds))
        return value

    def part(self, name: str) -> "JsonObject":
        """The object under `name`; empty where it is missing or null."""
        return JsonObject(self.path, self.get(name, dict, {}), f"{self.prefix}{name}.")

    def make[T](self, kind: type[T], **options: Any) -> T:
        """`kind(**options)`, whose options were read here: what it refuses is wrong in the file."""
        try:
            return kind(**options)
        except ValueError as error:
            message = re.sub(r"\w+", lambda word: _JSON_NAMES.get(word[0], word[0]), str(error))
            raise CheckpointError(f"{self.path}: {self.prefix}{message}") from error

    def error(self, name: str, expected: str) -> CheckpointError:
        """To be raised: what the entry is and what it should be."""
        return CheckpointError(
            f"{self.path}: {self.prefix}{name} is {self.values.get(name)!r}, expected {expected}"
        )


def read_config(path: pathlib.Path, dtype: Any = None, param_dtype: Any = None) -> DecoderConfig:
    """What `checkpoint.load_config` does."""
    for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
        if given is not None:
            float_dtype(name, given)
    values = JsonObject(path)
    model_type = values.get("model_type", str)
    if model_type not in _FAMILIES:
        raise values.error("model_type", f"one of {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    if values.get("architectures", list, [family.architecture]) != [family.architecture]:
        raise values.error("architectures", f"{[family.architecture]}")
    _check_only(values)
    hidden_size, num_q_heads = values.get("hidden_size", int), values.get("num_attention_heads", int)
    head_dim = values.get("head_dim", int, family.head_dim)
    if head_dim is None:
        if num_q_heads < 1 or hidden_size % num_q_heads:
            raise values.error("hidden_size", f"a multiple of num_attention_heads = {num_q_heads}")
        head_dim = hidden_size // num_q_heads
    dtype = _dtype(values) if dtype is None else dtype
    return values.make(
        DecoderConfig,
        vocab_size=values.get("vocab_size", int),
        hidden_size=hidden_size,
        mlp_size=values.get("intermediate_size", int),
        num_layers=values.get("num_hidden_layers", int),
        num_q_heads=num_q_heads,
        num_kv_heads=_num_kv_heads(values, family, num_q_heads),
        head_dim=head_dim,
        max_seq_len=values.get("max_position_embeddings", int),
        windows=_windows(values, family),
        norm_eps=values.get("rms_norm_eps", _NUMBER),
        use_qkv_bias=family.use_qkv_bias,
        use_qk_norm=family.use_qk_norm,
        tie_embeddings=values.get("tie_word_embeddings", bool, False),
        dtype=dtype,
        param_dtype=dtype if param_dtype is None else param_dtype,
        **_rope(values),
    )


def _num_kv_heads(values: JsonObject, family: _Family, num_q_heads: int) -> int:
    """Null means one for each query head; what a missing entry means differs, and mostly fits no model."""
    is_told = "num_key_value_heads" in values.values or family.kv_heads_follow
    return values.get("num_key_value_heads", int, num_q_heads if is_told else ...)


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """The entries of config.json for a model, as the first family that has its options.

    Raises:
      CheckpointError: no family has them.
    """
    windows = config.windows or (None,) * config.num_layers
    widths = {window for window in windows if window is not None}
    windowed_layers = "none" if not widths else "some" if None in windows else "all"
    fitting = [
        model_type
        for model_type, family in _FAMILIES.items()
        if (family.use_qkv_bias, family.use_qk_norm) == (config.use_qkv_bias, config.use_qk_norm)
        and family.windowed_layers in (windowed_layers, "some")
    ]
    if not fitting or len(widths) > 1:
        raise CheckpointError(
            f"the model has use_qkv_bias={config.use_qkv_bias}, use_qk_norm={config.use_qk_norm} and "
            f"windows={config.windows}, expected what one of {', '.join(_FAMILIES)} has: not both options, "
            "one width of windows, and an option where only some layers have windows"
        )
    model_type = fitting[0]
    family, scaling = _FAMILIES[model_type], config.rope_scaling
    values = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _ONLY["hidden_act"],
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": config.param_dtype.name,
    }
    if family.windowed_layers != "none":
        values["sliding_window"] = max(widths, default=None)
    if family.windowed_layers == "some":
        values["use_sliding_window"] = bool(widths)
        values["layer_types"] = [_FULL if window is None else _SLIDING for window in windows]
    return values


def _check_only(values: JsonObject) -> None:
    for name, only in _ONLY.items():
        if values.get(name, object, only) != only:
            raise values.error(name, f"{only!r}: nothing else is implemented")


def read_dtype(path: pathlib.Path) -> str:
    """What `checkpoint.stored_dtype` does."""
    return _named_dtype(JsonObject(path))[1]


def _named_dtype(values: JsonObject) -> tuple[str, str]:
    name = "torch_dtype" if "torch_dtype" in values.values else "dtype"
    return name, values.get(name, str, "float32")


def _dtype(values: JsonObject) -> str:
    name, dtype = _named_dtype(values)
    if dtype not in ("float32", "bfloat16"):
        raise values.error(name, "float32 or bfloat16; or choose one, load(folder, dtype=...)")
    return dtype


def _rope(values: JsonObject) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; transformers 5 writes both into `rope_parameters`."""
    part = values.part("rope_scaling" if values.values.get("rope_scaling") else "rope_parameters")
    if any(isinstance(value, dict) for value in part.values.values()):
        name = part.prefix.removesuffix(".")
        raise values.error(name, "one set for all layers: nothing else is implemented")
    if part.get("partial_rotary_factor", object, 1.0) != 1.0:
        raise part.error("partial_rotary_factor", "1.0: nothing else is implemented")
    theta = part.get("rope_theta", _NUMBER, values.get("rope_theta", _NUMBER, 10_000.0))
    is_old = part.values.get("rope_type") is None and part.values.get("type") is not None
    type_name = "type" if is_old else "rope_type"
    is_plain = _PLAIN_ROPE.issuperset(part.values)
    rope_type = part.get(type_name, str, "default" if is_plain else ...)
    if rope_type not in ("default", "llama3"):
        raise part.error(type_name, "default or llama3: nothing else is implemented")
    scaling = None
    if rope_type == "llama3":
        original = "original_max_position_embeddings"
        above = values.get(original, int, None)  # goes before what stands with the scaling
        scaling = part.make(
            Llama3Scaling,
            factor=part.get("factor", _NUMBER),
            low_freq_factor=part.get("low_freq_factor", _NUMBER),
            high_freq_factor=part.get("high_freq_factor", _NUMBER),
            original_max_seq_len=part.get(original, int) if above is None else above,
        )
    return dict(rope_theta=theta, rope_scaling=scaling)


def _windows(values: JsonObject, family: _Family) -> tuple[int | None, ...]:
    num_layers = values.get("num_hidden_layers", int)
    if not 1 <= num_layers <= _MOST_LAYERS:
        raise values.error("num_hidden_layers", f"1 to {_MOST_LAYERS}")
    if family.windowed_layers != "none":
        values = JsonObject(values.path, {**_WINDOWS, **values.values})
    window = values.get("sliding_window", int, None)
    first = num_layers  # layer with a window
    if family.windowed_layers == "none" and window is not None:
        raise values.error("sliding_window", f"null: {family.architecture} has no windows")
    if family.windowed_layers == "all":
        first = num_layers if window is None else 0
    if family.windowed_layers == "some":
        if not values.get("use_sliding_window", bool, False):
            window = None
        elif window is not None and values.values.get("layer_types") is None:
            first = values.get("max_window_layers", int)
    implied = [_FULL if layer < first else _SLIDING for layer in range(num_layers)]
    layer_types = values.get("layer_types", list, implied)
    if family.windowed_layers != "some" and layer_types != implied:
        raise values.error("layer_types", f"{implied}, or none: {family.architecture} does not read it")
    if len(layer_types) != num_layers or any(kind not in (_FULL, _SLIDING) for kind in layer_types):
        raise values.error("layer_types", f"{num_layers} times {_FULL} or {_SLIDING}")
    if _SLIDING in layer_types and (window is None or not 1 <= window < 2**31):
        reach = f"the tokens in reach of {_SLIDING}, 1 to 2**31 - 1, with use_sliding_window"
        raise values.error("sliding_window", reach)
    return tuple(window if kind == _SLIDING else None for kind in layer_types)
