"""config.json of a checkpoint to `DecoderConfig` and back.

A `model_type` stands for the code that its family is published with; `models.families` knows it. What that
code does not read is not read here. Both spellings are understood: `rope_theta` and `rope_scaling`, or
`rope_parameters`; `torch_dtype` or `dtype`.
"""

import dataclasses
import pathlib
from typing import Any

from models.checks import float_dtype
from models.config import DecoderConfig
from models.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    kimi,
    lfm2,
    llama,
    mixtral,
    nemotron,
    olmo,
    phi,
    qwen_moe,
    qwen_next,
    smollm,
)
from models.families.family import Family
from models.json_object import CheckpointError, JsonObject

FAMILIES = {
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "qwen2": llama.QWEN2,
    "qwen3": llama.QWEN3,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "ministral": llama.MINISTRAL,
    "seed_oss": llama.SEED_OSS,
    "smollm3": smollm.SMOLLM3,
    "granite": granite.GRANITE_3,
    "gemma3": gemma.GEMMA3_WHOLE,
    "glm4_moe_lite": deepseek.GLM_4_LITE,
    "glm": glm.GLM,
    "glm4": glm.GLM_4,
    "mixtral": mixtral.MIXTRAL,
    "qwen2_moe": qwen_moe.QWEN2_MOE,
    "qwen3_moe": qwen_moe.QWEN3_MOE,
    "gpt_oss": gpt_oss.GPT_OSS,
    "phi3": phi.PHI_3,
    "olmo2": olmo.OLMO_2,
    "olmo3": olmo.OLMO_3,
    "qwen3_5_text": qwen_next.QWEN3_5,
    "qwen3_next": qwen_next.QWEN3_NEXT,
    "kimi_linear": kimi.KIMI_LINEAR,
    "granitemoehybrid": granite.GRANITE_4,
    "nemotron_h": nemotron.NEMOTRON_H,
    "lfm2": lfm2.LFM2,
}
_SIZES = {
    "vocab_size",
    "hidden_size",
    "mlp_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "max_seq_len",
    "norm_eps",
    "dtype",
    "param_dtype",
    "matmul_dtype",
}


def read_config(path: pathlib.Path, dtype: Any = None, param_dtype: Any = None) -> DecoderConfig:
    """What `checkpoint.load_config` does."""
    for name, given in (("dtype", dtype), ("param_dtype", param_dtype)):
        if given is not None:
            float_dtype(name, given)
    return read_values(JsonObject(path), dtype, param_dtype)


def find_family(path: pathlib.Path) -> Family:
    """Returns the family of a config.json."""
    return family_of(JsonObject(path))


def family_of(values: JsonObject) -> Family:
    """Returns the family of the entries of a config.json."""
    model_type = values.get("model_type", str)
    if model_type not in FAMILIES:
        raise values.error("model_type", f"one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def read_values(values: JsonObject, dtype: Any = None, param_dtype: Any = None) -> DecoderConfig:
    """Reads the entries of a config.json, as `read_config`."""
    family = family_of(values)
    if values.get("architectures", list, [family.architecture]) != [family.architecture]:
        raise values.error("architectures", f"{[family.architecture]}")
    whole, values = values, values.part(family.part) if family.part else values
    values = values.with_defaults(family.defaults).with_entries(family.entries)
    for name, only in family.only.items():
        if values.get(name, object, only) != only:
            raise values.error(name, f"{only!r}: nothing else is implemented")
    options = family.read(values)
    dtype = _dtype(whole) if dtype is None else dtype
    param_dtype = dtype if param_dtype is None else param_dtype
    return values.make(DecoderConfig, **options, dtype=dtype, param_dtype=param_dtype)


def write_config(config: DecoderConfig) -> tuple[dict[str, Any], Family]:
    """Returns the entries of config.json for a model, and the first family that has its options.

    Raises:
      CheckpointError: no family has them.
    """
    wanted = dataclasses.replace(config, matmul_dtype=None)
    for model_type, family in FAMILIES.items():
        entries = family.write(config)
        if entries is None:
            continue
        entries = {"architectures": [family.architecture], "model_type": model_type, **entries}
        entries["dtype"] = config.param_dtype.name
        try:
            again = read_values(
                JsonObject(pathlib.Path("config.json"), entries), config.dtype, config.param_dtype
            )
        except CheckpointError:
            continue
        if again == wanted:
            return entries, family
    raise CheckpointError(
        f"the model has {_own_options(config)}, expected the options that one of {', '.join(FAMILIES)} has: "
        "a config.json says no others"
    )


def _own_options(config: DecoderConfig) -> str:
    """The options, sizes aside, that are not as they are where nothing is said."""
    options = (field for field in dataclasses.fields(config) if field.name not in _SIZES)
    values = ((field, getattr(config, field.name)) for field in options)
    return ", ".join(f"{field.name}={value}" for field, value in values if value != field.default)


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
