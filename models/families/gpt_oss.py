"""gpt-oss: mixtures with biases and bounded gates, sink logits, windows in every second layer."""

from typing import Any

import numpy as np

from models.config import DecoderConfig
from models.families.aspects import Aspect, compose, experts, fields, heads, listed_windows
from models.families.family import only
from models.families.mixtral import EXPERTS
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject
from models.layers import GATE_LIMIT, GATE_SLOPE
from models.tensor_names import Names, Stored

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _read_rope(values: JsonObject) -> dict[str, Any]:
    given = values.values.get("rope_scaling") or values.values.get("rope_parameters")
    return {"rope": read_rope(values if given else values.with_defaults({"rope_scaling": _YARN}))}


def _read_format(values: JsonObject) -> dict[str, Any]:
    method = values.part("quantization_config").get("quant_method", str, None)
    if method is not None:
        raise values.error("quantization_config", f"null: {method} is not read; convert it to bfloat16 first")
    return {}


def _names(config: DecoderConfig) -> Names:
    gate, up = np.arange(2 * config.mlp_size).reshape(-1, 2).T  # as wide as an expert
    stacked = "mlp.experts.gate_up_proj"
    return {
        "attention.sink_logits": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.router.bias": "mlp.router.bias",
        "mlp.expert_gate.kernel": Stored((stacked,), gate, is_in_out=True),
        "mlp.expert_gate.bias": Stored((f"{stacked}_bias",), gate),
        "mlp.expert_up.kernel": Stored((stacked,), up, is_in_out=True),
        "mlp.expert_up.bias": Stored((f"{stacked}_bias",), up),
        "mlp.expert_down.kernel": Stored(("mlp.experts.down_proj",), is_in_out=True),
        "mlp.expert_down.bias": "mlp.experts.down_proj_bias",
    }


GPT_OSS = compose(
    "GptOssForCausalLM",
    heads(64),
    Aspect(_read_format, lambda config: {}),
    listed_windows(2),
    Aspect(_read_rope, lambda config: write_rope(config.rope)),
    fields({"use_qkv_bias": "attention_bias", "use_out_bias": "attention_bias"}, bool, True),
    experts(EXPERTS, use_biases=True, normalizes=True),
    options={"use_sink_logits": True, "mlp_activation": "clamped_silu"},
    only=only("attention_bias", "quantization_config", swiglu_limit=GATE_LIMIT, swiglu_alpha=GATE_SLOPE),
    entries=EXPERTS,
    defaults={"rope_theta": 150_000.0, "sliding_window": 128},
    names=_names,
)
