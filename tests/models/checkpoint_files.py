"""Checkpoints of fixtures, copied to where they may be broken: what the tests of loading share."""

import json
import pathlib

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from models import checkpoint
from models.checkpoint import CheckpointError
from models.config import DecoderConfig

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
BY_ASPECTS = (
    "ministral",
    "glm4_moe_lite",
    "gemma3_whole",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "gpt_oss",
    "phi3",
    "glm4",
    "glm",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "llama_biases",
    "seed_oss",
)
"""Families that differ from Llama in a few aspects."""
LONG = ("gemma2", "gemma3", "deepseek_v2", "deepseek_v3", *BY_ASPECTS)
"""Families with prompts of 1 and of 300 tokens too."""
EXPERTS = ("deepseek_v2_experts", "deepseek_v3_experts")
HYBRIDS = (
    "qwen3_5",
    "qwen3_next",
    "kimi_linear",
    "granite_4",
    "nemotron_h",
    "nemotron_h_experts",
    "lfm2",
)
"""Families with recurrent layers."""
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen2_windows", *LONG, *EXPERTS, *HYBRIDS)
SIZES = DecoderConfig(
    vocab_size=97,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=256,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)
"""What fixtures have where their options say nothing."""


def read_json(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def edit_json(folder, name="config.json", remove=(), **changes):
    values = read_json(folder, name) | changes
    (folder / name).write_text(json.dumps({key: values[key] for key in values if key not in remove}))


def read_tensors(folder):
    paths = sorted(path for path in folder.glob("model*.safetensors"))
    return {name: value for path in paths for name, value in load_file(path).items()}


def edit_tensors(folder, changes, file="model.safetensors", remove=()):
    tensors = load_file(folder / file) | changes
    save_file({name: tensors[name] for name in tensors if name not in remove}, folder / file)


def refuses(folder, message, load=checkpoint.load):
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert isinstance(error.value, ValueError)
    assert str(folder) in str(error.value)  # the checkpoint is named
