"""Checkpoints: what transformers wrote loads, and what does not fit is named."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models import checkpoint
from models.decoder import single_layers
from tests.models.checkpoint_files import (
    FAMILIES,
    FIXTURES,
    HYBRIDS,
    edit_json,
    edit_tensors,
    read_json,
    read_tensors,
    refuses,
)
from tests.support.helpers import assert_same, leaf_bytes

QUERY = "model.layers.1.self_attn.q_proj.weight"
SHARD = "model-00002-of-00003.safetensors"
OTHERS = "gemma3_whole", "phi3"  # whose queries are in other tensors
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"


# --- what loads ---


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*HYBRIDS, *OTHERS)])
def test_every_tensor_arrives_bit_for_bit(family):
    tensors = read_tensors(FIXTURES / family)
    decoder = checkpoint.load(FIXTURES / family)
    stored_dtype = tensors[EMBEDDING].dtype
    assert decoder.config.dtype == decoder.config.param_dtype == stored_dtype
    first, second = (layer.attention for layer in single_layers(decoder)[:2])
    np.testing.assert_array_equal(decoder.embedding[...], tensors[EMBEDDING])
    has_latents = decoder.config.latents is not None
    keys, name = (first.kv, "kv_b") if has_latents else (first.k, "k")
    np.testing.assert_array_equal(keys.kernel[...], tensors[f"model.layers.0.self_attn.{name}_proj.weight"].T)
    query = QUERY if QUERY in tensors else QUERY.replace("q_proj", "q_b_proj")
    np.testing.assert_array_equal(second.q.kernel[...], tensors[query].T)
    num_values = sum(leaf.size for leaf in jax.tree.leaves(decoder))
    assert num_values == sum(tensor.size for tensor in tensors.values())


@pytest.mark.quick_cases("gemma3", "gpt_oss", "deepseek_v2_experts", "kimi_linear", "nemotron_h")
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_load_one_by_one_and_are_saved_as_they_were(family, tmp_path, monkeypatch):
    stack = checkpoint.load(FIXTURES / family)
    monkeypatch.setattr(checkpoint, "is_on_gpu", lambda x: True)
    decoder = checkpoint.load(FIXTURES / family)
    assert [stack.is_stacked, decoder.is_stacked] == [True, False]
    assert len(decoder.layers) == decoder.config.num_layers
    for layer, want in zip(decoder.layers, single_layers(stack), strict=True):
        jax.tree.map(np.testing.assert_array_equal, layer, want)
    assert checkpoint.load(FIXTURES / family, is_stacked=True).is_stacked
    for name, each in (("stack", stack), ("single", decoder)):
        checkpoint.save(tmp_path / name, each)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("stack", "single")]
    assert files[0] == files[1]


def test_corrections_of_routers_stay_float32(copy_checkpoint):
    """What tells experts apart is less than what bfloat16 does."""
    folder = copy_checkpoint("deepseek_v3_experts")
    tensors = read_tensors(folder)
    name = max(name for name in tensors if name.endswith("e_score_correction_bias"))
    stored = np.linspace(0.999, 1.001, tensors[name].size, dtype=np.float32)
    edit_tensors(folder, {name: stored})
    router = single_layers(checkpoint.load(folder, dtype=jnp.bfloat16))[-1].mlp.router
    assert router.kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(router.bias[...], stored, strict=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tied_matrix_may_be_stored_twice(copy_checkpoint, dtype):
    folder = copy_checkpoint("qwen2")
    embedding = load_file(folder / "model.safetensors")[EMBEDDING].astype(dtype)
    embedding[3, 4] = math.nan
    edit_tensors(folder, {EMBEDDING: embedding})
    before = checkpoint.load(folder)
    edit_tensors(folder, {UNEMBEDDING: embedding})
    assert_same(before, checkpoint.load(folder))


def test_a_tied_matrix_may_be_stored_as_the_other_one(copy_checkpoint):
    folder = copy_checkpoint("qwen2")
    before, embedding = checkpoint.load(folder), read_tensors(folder)[EMBEDDING]
    edit_tensors(folder, {UNEMBEDDING: embedding}, remove=(EMBEDDING,))
    assert_same(before, checkpoint.load(folder))


@pytest.mark.parametrize(
    ("family", "entries", "extra"),
    [
        ("deepseek_v3", dict(num_nextn_predict_layers=1), ["model.layers.3.eh_proj.weight"]),
        (
            "glm4_moe_lite",
            dict(num_nextn_predict_layers=2),
            ["model.layers.3.x", "model.layers.4.norm.weight"],
        ),
        ("qwen3_next", {}, ["mtp.fc.weight", "mtp.layers.0.norm.weight"]),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(copy_checkpoint, caplog, family, entries, extra):
    folder = copy_checkpoint(family)
    before = checkpoint.load(folder)
    edit_json(folder, **entries)
    edit_tensors(folder, {name: np.ones(4, np.float32) for name in extra})
    assert not caplog.records
    assert_same(before, checkpoint.load(folder))
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: {len(extra)} tensors of extra prediction layers are left out"
    ]
    edit_tensors(folder, {"model.layers.9.norm.weight": np.ones(4, np.float32)})
    refuses(folder, "unknown tensor model.layers.9.norm.weight$")
    if entries:
        edit_json(folder, num_nextn_predict_layers=0)
        refuses(folder, f"unknown tensor {extra[0]}, ")


def test_a_model_that_also_sees_is_its_text_model(tmp_path, caplog):
    folder = FIXTURES / "gemma3_whole"
    decoder, tensors = checkpoint.load(folder), read_tensors(folder)
    [record] = caplog.records
    assert record.getMessage() == f"{folder}: 34 tensors of the part that sees are left out"
    prefix = "language_model."
    checkpoint.save(tmp_path, decoder)
    assert read_json(tmp_path)["model_type"] == "gemma3_text"
    text = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    assert leaf_bytes(read_tensors(tmp_path)) == leaf_bytes(text)
    assert_same(decoder, checkpoint.load(tmp_path))


def test_stored_frequencies_are_not_read(copy_checkpoint):
    folder = copy_checkpoint("llama")
    before = checkpoint.load(folder)
    edit_tensors(folder, {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(2)})
    assert_same(before, checkpoint.load(folder))
    edit_tensors(folder, {"model.rotary_emb.inv_freq.weight": np.ones(4)})
    refuses(folder, "unknown tensor model.rotary_emb.inv_freq.weight$")


# --- what is refused ---


def test_a_broken_json_file_is_named(copy_checkpoint, tmp_path):
    refuses(tmp_path / "nowhere", "nowhere is not there, expected the folder that holds config.json")
    refuses(tmp_path / ("x" * 300), "config.json cannot be read: File name too long")
    folder = copy_checkpoint("qwen3")
    (folder / "model.safetensors.index.json").write_text("[]")
    refuses(folder, "index.json holds a list, expected a JSON object")
    (folder / "model.safetensors.index.json").write_text("{}")
    refuses(folder, "index.json has no weight_map")
    text = (folder / "config.json").read_text()
    file = folder / "config.json"
    refuses(file, "config.json is no folder, expected the folder that holds config.json")
    file.write_text(text[:-9])
    refuses(folder, "config.json is not a whole JSON file")
    for data in (b"\xff\xfe", b"[" * 100_000):
        (folder / "config.json").write_bytes(data)
        refuses(folder, "config.json is not a whole JSON file")


def test_a_missing_tensor_is_named(copy_checkpoint):
    folder = copy_checkpoint("llama")
    edit_tensors(folder, {}, remove=(QUERY,))
    refuses(folder, f"llama has no tensor {QUERY}$")
    edit_tensors(
        folder, {}, remove=(UNEMBEDDING, "model.norm.weight", "model.layers.0.input_layernorm.weight")
    )
    refuses(folder, f"no tensor {UNEMBEDDING}, model.layers.0.input_layernorm.weight, {QUERY} and 1 more$")
    folder = copy_checkpoint("qwen2")
    edit_tensors(folder, {}, remove=("model.layers.0.self_attn.k_proj.bias",))
    refuses(folder, "no tensor model.layers.0.self_attn.k_proj.bias$")
    folder = copy_checkpoint("qwen3")
    edit_json(folder, num_hidden_layers=3, layer_types=None)
    refuses(folder, "no tensor model.layers.2.input_layernorm.weight, .* and 8 more$")


def test_an_unknown_tensor_is_named(copy_checkpoint):
    folder = copy_checkpoint("llama")
    edit_tensors(folder, {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)})
    refuses(folder, "unknown tensor model.layers.0.self_attn.q_proj.bias$")
    folder = copy_checkpoint("mistral")
    edit_json(folder, num_hidden_layers=2)
    refuses(folder, "unknown tensor model.layers.2.input_layernorm.weight, .* and 6 more$")


def test_a_tied_matrix_stored_twice_must_be_the_same(copy_checkpoint):
    folder = copy_checkpoint("qwen2")
    other = load_file(folder / "model.safetensors")[EMBEDDING] + 1
    edit_tensors(folder, {UNEMBEDDING: other})
    refuses(folder, f"{UNEMBEDDING} differs from {EMBEDDING}, expected them equal: tie_word_embeddings")
    edit_tensors(folder, {UNEMBEDDING: other[1:]})
    refuses(folder, rf"{UNEMBEDDING} has shape \(96, 32\), expected \(97, 32\)")
    edit_tensors(folder, {EMBEDDING: other[1:], UNEMBEDDING: other[1:]})
    refuses(folder, rf"{EMBEDDING} has shape \(96, 32\), expected \(97, 32\)")
    edit_tensors(folder, {EMBEDDING: other.astype(jnp.float8_e4m3fn), UNEMBEDDING: other})
    refuses(folder, f"{EMBEDDING} has dtype F8_E4M3, expected one of F32, BF16, F16")


def test_a_misshapen_tensor_is_named(copy_checkpoint):
    folder = copy_checkpoint("llama")
    tensor = load_file(folder / "model.safetensors")[QUERY]
    for broken in (np.ascontiguousarray(tensor.T), tensor[:-1], tensor[None]):
        edit_tensors(folder, {QUERY: broken})
        refuses(folder, re.escape(f"{QUERY} has shape {broken.shape}, expected (64, 32)"))
    folder = copy_checkpoint("qwen3")
    edit_json(folder, vocab_size=98)
    refuses(folder, rf"{EMBEDDING} has shape \(97, 32\), expected \(98, 32\)")


def test_a_tensor_of_integers_is_named(copy_checkpoint):
    folder = copy_checkpoint("llama")
    edit_tensors(folder, {QUERY: np.zeros((64, 32), np.int8)})
    refuses(folder, f"{QUERY} has dtype I8, expected one of F32, BF16, F16")


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 20_000, -1])
def test_a_truncated_file_is_named(copy_checkpoint, num_bytes):
    folder = copy_checkpoint("llama")
    data = (folder / "model.safetensors").read_bytes()[:num_bytes]
    (folder / "model.safetensors").write_bytes(data)
    refuses(folder, rf"model.safetensors \({len(data)} bytes\) is not a whole safetensors file: .+")
    folder = copy_checkpoint("qwen3")
    data = (folder / SHARD).read_bytes()[:num_bytes]
    (folder / SHARD).write_bytes(data)
    refuses(folder, rf"{SHARD} \({len(data)} bytes\) is not a whole safetensors file: .+")


def test_a_missing_file_is_named(copy_checkpoint):
    folder = copy_checkpoint("llama")
    (folder / "model.safetensors").unlink()
    refuses(folder, "llama has no model.safetensors and no model.safetensors.index.json")
    folder = copy_checkpoint("qwen3")
    (folder / SHARD).unlink()
    refuses(folder, f"qwen3 has no {SHARD}, which model.safetensors.index.json names")
    long = "x" * 300 + ".safetensors"
    edit_json(folder, "model.safetensors.index.json", weight_map={EMBEDDING: long})
    refuses(folder, f"qwen3 has no {long}, which model.safetensors.index.json names")


def test_shards_and_index_must_agree(copy_checkpoint):
    folder = copy_checkpoint("qwen3")
    [lost, *_] = load_file(folder / SHARD)
    edit_tensors(folder, {}, SHARD, remove=(lost,))
    refuses(
        folder, f"{SHARD} and model.safetensors.index.json differ: only one of them has {re.escape(lost)}$"
    )
    edit_tensors(folder, {"extra": np.zeros(3, np.float32), lost: np.zeros(3, np.float32)}, SHARD)
    refuses(folder, f"{SHARD} and .* differ: only one of them has extra$")


@pytest.mark.parametrize("shard", ["../model.safetensors", "sub/model.safetensors", "", "model.bin", 3])
def test_an_index_names_files_of_its_own_folder(copy_checkpoint, shard):
    folder = copy_checkpoint("qwen3")
    edit_json(folder, "model.safetensors.index.json", weight_map={EMBEDDING: shard})
    refuses(folder, f"index.json names '{shard}', expected a safetensors file beside it")
