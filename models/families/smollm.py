"""SmolLM 3: Llama, of whose layers some have no rotations."""

from typing import Any

from models.config import DecoderConfig
from models.families.aspects import BIASES, ROPE, UNUSED_WINDOWS, Aspect, compose, heads
from models.families.family import only
from models.json_object import JsonObject


def _read_rotated(values: JsonObject) -> dict[str, Any]:
    num_layers, interval = values.get_field("num_layers", int), values.get("no_rope_layer_interval", int, 4)
    if interval < 1:
        raise values.error("no_rope_layer_interval", "a positive number of layers")
    implied = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    rotated = values.get("no_rope_layers", list, implied)  # has 0 where there is none
    if len(rotated) != num_layers or any(each not in (0, 1) for each in rotated):
        raise values.error("no_rope_layers", f"{num_layers} times 0 or 1")
    return {"rotated": tuple(map(bool, rotated))}


def _write_rotated(config: DecoderConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(is_rotated) for is_rotated in config.rotated] or [1] * config.num_layers}


SMOLLM3 = compose(
    "SmolLM3ForCausalLM",
    heads(),
    UNUSED_WINDOWS,
    ROPE,
    BIASES,
    Aspect(_read_rotated, _write_rotated),
    only=only(
        "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", use_sliding_window=False
    ),
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
)
