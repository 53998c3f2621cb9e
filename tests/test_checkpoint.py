"""Checkpoints: what transformers wrote loads, what is saved comes back, and what does not fit is named."""

import dataclasses
import json
import math
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import checkpoint
from models.checkpoint import CheckpointError
from models.decoder import Decoder, DecoderConfig, Llama3Scaling
from tests.helpers import assert_same, leaf_bytes

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "qwen2_windows")
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
SHARD = "model-00002-of-00003.safetensors"


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


@pytest.fixture
def copy(tmp_path):
    """Copies a fixture's checkpoint to where it may be broken."""

    def copy(family):
        return pathlib.Path(shutil.copytree(FIXTURES / family, tmp_path / family))

    return copy


# --- what loads ---


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives_bit_for_bit(family):
    tensors = read_tensors(FIXTURES / family)
    decoder = checkpoint.load(FIXTURES / family)
    stored_dtype = tensors[EMBEDDING].dtype
    assert decoder.config.dtype == decoder.config.param_dtype == stored_dtype
    first, second = decoder.layers[0].attention, decoder.layers[1].attention
    np.testing.assert_array_equal(decoder.embedding[...], tensors[EMBEDDING])
    np.testing.assert_array_equal(
        first.k.kernel[...], tensors[QUERY.replace("1.self_attn.q", "0.self_attn.k")].T
    )
    np.testing.assert_array_equal(second.q.kernel[...], tensors[QUERY].T)
    num_values = sum(leaf.size for leaf in jax.tree.leaves(decoder))
    assert num_values == sum(tensor.size for tensor in tensors.values())


def test_configs_say_what_the_files_say():
    sizes = DecoderConfig(
        vocab_size=97,
        hidden_size=32,
        mlp_size=48,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_seq_len=256,
    )
    narrow = dataclasses.replace(sizes, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    scaling = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=64)
    wanted = {
        "llama": dataclasses.replace(
            narrow, head_dim=16, rope_theta=500, rope_scaling=scaling, norm_eps=1e-3
        ),
        "qwen2": dataclasses.replace(sizes, num_kv_heads=1, use_qkv_bias=True, tie_embeddings=True),
        "qwen3": dataclasses.replace(sizes, head_dim=16, use_qk_norm=True, rope_theta=1e6),
        "mistral": dataclasses.replace(narrow, num_layers=3, windows=(11, 11, 11)),
        "qwen2_windows": dataclasses.replace(narrow, num_layers=3, windows=(None, 9, 9), use_qkv_bias=True),
    }
    for family, config in wanted.items():
        assert checkpoint.load_config(FIXTURES / family) == config


def test_dtypes_may_be_chosen(copy):
    decoder = checkpoint.load(FIXTURES / "qwen2", dtype=jnp.bfloat16)
    assert decoder.config.param_dtype == decoder.config.dtype == decoder.embedding[...].dtype == jnp.bfloat16
    wanted = checkpoint.load(FIXTURES / "qwen2").embedding[...].astype(jnp.bfloat16)
    assert jnp.array_equal(decoder.embedding[...], wanted)
    decoder = checkpoint.load(FIXTURES / "qwen2", param_dtype=jnp.bfloat16)
    assert (decoder.config.dtype, decoder.embedding[...].dtype) == (jnp.float32, jnp.bfloat16)
    folder = copy("qwen2")
    edit_json(folder, dtype="float16")
    assert checkpoint.load(folder, dtype=jnp.float32).embedding[...].dtype == jnp.float32


def test_the_spelling_of_published_configs_is_read(copy):
    folder = copy("llama")
    config = checkpoint.load_config(folder)
    scaling = read_json(folder)["rope_parameters"]
    theta, rope_type = scaling.pop("rope_theta"), scaling.pop("rope_type")
    left_out = (
        "rope_parameters",
        "dtype",
        "tie_word_embeddings",
        "architectures",
        "attention_bias",
        "hidden_act",
    )
    old = dict(rope_theta=theta, torch_dtype="bfloat16", rope_scaling=scaling | {"rope_type": rope_type})
    edit_json(folder, remove=left_out, **old)
    assert checkpoint.load_config(folder) == config
    edit_json(folder, rope_scaling=scaling | {"type": rope_type})
    assert checkpoint.load_config(folder) == config
    edit_json(folder, rope_scaling=None)
    assert checkpoint.load_config(folder) == dataclasses.replace(config, rope_scaling=None)
    edit_json(folder, remove=("rope_theta",))
    assert checkpoint.load_config(folder).rope_theta == 10_000


def test_windows_are_those_of_the_published_code(copy):
    def windows(remove=(), **changes):
        shutil.copy(FIXTURES / family / "config.json", folder)
        edit_json(folder, remove=remove, **changes)
        return checkpoint.load_config(folder).windows

    family, folder = "qwen2_windows", copy("qwen2_windows")
    assert windows(layer_types=None) == (None, 9, 9)
    assert windows(layer_types=None, max_window_layers=2) == (None, None, 9)
    assert windows(layer_types=["sliding_attention", "full_attention", "sliding_attention"]) == (9, None, 9)
    for changes in (dict(max_window_layers=28), dict(use_sliding_window=False), dict(sliding_window=None)):
        assert windows(layer_types=None, **changes) == ()
    assert windows(remove=["layer_types", "use_sliding_window"]) == ()
    assert windows(remove=["layer_types", "sliding_window"]) == (None, 4096, 4096)
    deep = ["layer_types", "max_window_layers"]
    assert windows(remove=deep) == () and windows(remove=deep, num_hidden_layers=30)[27:] == (None, 9, 9)
    family = "mistral"
    assert windows(sliding_window=None) == ()
    assert windows(remove=["sliding_window"]) == (4096, 4096, 4096)


def test_the_width_of_heads_has_a_default(copy):
    folder = copy("qwen2")
    assert checkpoint.load_config(folder).head_dim == 32 // 4
    folder = copy("qwen3")
    edit_json(folder, head_dim=None)
    assert checkpoint.load_config(folder).head_dim == 128


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tied_matrix_may_be_stored_twice(copy, dtype):
    folder = copy("qwen2")
    embedding = load_file(folder / "model.safetensors")[EMBEDDING].astype(dtype)
    embedding[3, 4] = math.nan
    edit_tensors(folder, {EMBEDDING: embedding})
    before = checkpoint.load(folder)
    edit_tensors(folder, {UNEMBEDDING: embedding})
    assert_same(before, checkpoint.load(folder))


# --- what is saved ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_the_file_it_came_from(family, tmp_path):
    decoder = checkpoint.load(FIXTURES / family)
    checkpoint.save(tmp_path / "deep" / family, decoder)
    assert leaf_bytes(read_tensors(tmp_path / "deep" / family)) == leaf_bytes(read_tensors(FIXTURES / family))
    again = checkpoint.load(tmp_path / "deep" / family)
    assert again.config == decoder.config
    assert_same(decoder, again)
    # Every entry that we write is the one that transformers wrote, where it wrote one.
    theirs, ours = read_json(FIXTURES / family), read_json(tmp_path / "deep" / family)
    rope = theirs.pop("rope_parameters")
    theirs["rope_theta"] = rope.pop("rope_theta")
    assert (ours.pop("rope_scaling") or {"rope_type": "default"}) == rope
    assert {name: ours[name] for name in ours if name in theirs} == {
        name: theirs[name] for name in theirs if name in ours
    }
    assert ours.keys() - theirs.keys() <= {"head_dim"}


OWN = DecoderConfig(
    vocab_size=13, hidden_size=12, mlp_size=10, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=6
)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", dict(tie_embeddings=True, param_dtype=jnp.bfloat16, rope_theta=123.0, norm_eps=0.5)),
        ("mistral", dict(windows=(5, 5))),
        ("qwen2", dict(use_qkv_bias=True, windows=(5, 5))),
        ("qwen2", dict(use_qkv_bias=True, dtype=jnp.bfloat16)),
        ("qwen3", dict(use_qk_norm=True, windows=(5, None), max_seq_len=7)),
    ],
)
def test_an_own_model_comes_back(tmp_path, model_type, options):
    config = dataclasses.replace(OWN, **options)
    decoder = Decoder(config, rngs=nnx.Rngs(3))
    checkpoint.save(tmp_path, decoder)
    assert read_json(tmp_path)["model_type"] == model_type
    again = checkpoint.load(tmp_path, dtype=config.dtype, param_dtype=config.param_dtype)
    assert again.config == config
    assert jax.tree.structure(again) == jax.tree.structure(decoder)
    assert_same(decoder, again)


def test_saving_replaces_the_model_that_was_there(copy):
    folder = copy("qwen3")
    (folder / "tokenizer.json").write_text("of another model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    decoder = Decoder(OWN, rngs=nnx.Rngs(0))
    checkpoint.save(folder, decoder)
    assert_same(decoder, checkpoint.load(folder))
    left = {path.name for path in folder.iterdir()} - {"expected.safetensors"}
    assert {name for name in left if "-of-" not in name} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "options",
    [
        dict(use_qkv_bias=True, use_qk_norm=True),
        dict(windows=(5, None)),
        dict(use_qk_norm=True, windows=(5, 6)),
    ],
)
def test_a_model_that_no_family_has_is_not_saved(tmp_path, options):
    decoder = Decoder(dataclasses.replace(OWN, **options), rngs=nnx.Rngs(0))
    with pytest.raises(CheckpointError, match=r"the model has use_qkv_bias=.*llama, mistral, qwen2, qwen3"):
        checkpoint.save(tmp_path / "new", decoder)
    assert not (tmp_path / "new").exists()


# --- what is refused ---


def refuses(folder, message, load=checkpoint.load):
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert isinstance(error.value, ValueError)
    assert str(folder) in str(error.value)  # the checkpoint is named


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIG_ERRORS = [
    (
        "llama",
        dict(model_type="gemma3"),
        r"model_type is 'gemma3', expected one of llama, mistral, qwen2, qwen3",
    ),
    ("llama", dict(model_type=None), r"config.json has no model_type"),
    ("llama", dict(model_type=["llama"]), r"model_type is \['llama'\], expected str"),
    ("llama", dict(architectures=["LlamaForTokenClassification"]), r"architectures is .*'LlamaForCausalLM'"),
    ("llama", dict(hidden_act="gelu"), r"hidden_act is 'gelu', expected 'silu'"),
    ("llama", dict(attention_bias=True), r"attention_bias is True, expected False"),
    ("qwen3", dict(attention_bias=True), r"attention_bias is True, expected False"),
    ("llama", dict(mlp_bias=True), r"mlp_bias is True, expected False"),
    ("llama", dict(quantization_config={"bits": 4}), r"quantization_config is .*'bits': 4.*, expected None"),
    ("qwen2", dict(use_mrope=True), r"use_mrope is True, expected False"),
    ("llama", dict(partial_rotary_factor=0.5), r"partial_rotary_factor is 0.5, expected 1.0"),
    ("llama", dict(dtype="float16"), r"dtype is 'float16', expected float32 or bfloat16; .*dtype="),
    ("llama", dict(torch_dtype="float8"), r"torch_dtype is 'float8', expected float32 or bfloat16"),
    ("llama", dict(hidden_size="32"), r"hidden_size is '32', expected int"),
    ("llama", dict(hidden_size=True), r"hidden_size is True, expected int"),
    ("llama", dict(rms_norm_eps=-1.0), r"json: rms_norm_eps is -1.0, expected a positive, finite number"),
    ("llama", dict(rms_norm_eps=math.nan), r"json: rms_norm_eps is nan, expected a positive, finite number"),
    ("llama", dict(rms_norm_eps=math.inf), r"json: rms_norm_eps is inf, expected a positive, finite number"),
    ("llama", dict(rope_theta=10**400, rope_parameters=None), r"rope_theta is 10*, expected a positive"),
    ("llama", dict(num_hidden_layers=-1), r"num_hidden_layers is -1, expected 1 to 1024"),
    ("llama", dict(num_hidden_layers=10**19), r"num_hidden_layers is 10*, expected 1 to 1024"),
    ("llama", dict(intermediate_size=0), r"json: intermediate_size is 0, expected a positive"),
    ("llama", dict(max_position_embeddings=-1), r"json: max_position_embeddings is -1, expected a positive"),
    ("llama", dict(rms_norm_eps="1e-5"), r"rms_norm_eps is '1e-5', expected int or float"),
    ("llama", dict(tie_word_embeddings=1), r"tie_word_embeddings is 1, expected bool"),
    ("llama", dict(num_key_value_heads=3), r"json: num_attention_heads is 4, .* num_key_value_heads = 3"),
    (
        "llama",
        dict(num_attention_heads=0),
        r"config.json: num_attention_heads is 0, expected a positive, finite number",
    ),
    (
        "qwen2",
        dict(num_attention_heads=0),
        r"hidden_size is 32, expected a multiple of num_attention_heads = 0",
    ),
    (
        "qwen2",
        dict(num_attention_heads=5),
        r"hidden_size is 32, expected a multiple of num_attention_heads = 5",
    ),
    ("llama", dict(rope_parameters={"rope_type": "yarn"}), r"rope_parameters.rope_type is 'yarn', .*llama3"),
    (
        "llama",
        dict(rope_scaling={"type": "linear"}),
        r"rope_scaling.type is 'linear', expected default or llama3",
    ),
    ("llama", dict(rope_scaling={"rope_type": "llama3"}), r"has no rope_scaling.factor"),
    ("llama", dict(rope_scaling={"factor": 8.0}), r"has no rope_scaling.rope_type"),
    ("llama", dict(rope_scaling=LLAMA3 | {"factor": 0}), r"rope_scaling.factor is 0, expected a positive"),
    ("llama", dict(rope_scaling=LLAMA3 | {"factor": math.nan}), r"rope_scaling.factor is nan, expected"),
    (
        "llama",
        dict(rope_scaling=LLAMA3 | {"high_freq_factor": 1.0}),
        r"config.json: rope_scaling.high_freq_factor is 1.0, expected above low_freq_factor = 1.0",
    ),
    ("llama", dict(rope_parameters=[1]), r"rope_parameters is \[1\], expected dict"),
    (
        "llama",
        dict(rope_parameters={"full_attention": {"rope_type": "default"}}),
        r"rope_parameters is .*, expected one set for all layers",
    ),
    (
        "llama",
        dict(rope_parameters={"partial_rotary_factor": 0.5}),
        r"rope_parameters.partial_rotary_factor is 0.5, expected 1.0",
    ),
    ("llama", dict(sliding_window=8), r"sliding_window is 8, expected null: LlamaForCausalLM has no windows"),
    (
        "llama",
        dict(layer_types=["sliding_attention"] * 2),
        r"layer_types is .*LlamaForCausalLM does not read it",
    ),
    (
        "mistral",
        dict(layer_types=["full_attention"] * 3),
        r"layer_types is .*MistralForCausalLM does not read",
    ),
    ("mistral", dict(sliding_window=0), r"sliding_window is 0, expected the tokens in reach"),
    (
        "qwen2",
        dict(layer_types=["linear_attention"] * 2),
        r"layer_types is .*expected 2 times full_attention or",
    ),
    (
        "qwen2",
        dict(layer_types=[{}, []]),
        r"layer_types is \[\{\}, \[\]\], expected 2 times full_attention or",
    ),
    ("qwen2", dict(layer_types=["full_attention"]), r"layer_types is .*expected 2 times full_attention or"),
    (
        "qwen2",
        dict(layer_types=["sliding_attention"] * 2),
        r"sliding_window is None, .*with use_sliding_window",
    ),
    (
        "qwen2_windows",
        dict(layer_types=None, max_window_layers=None),
        r"config.json has no max_window_layers",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONFIG_ERRORS)
def test_an_option_that_is_not_implemented_is_named(copy, family, changes, message):
    folder = copy(family)
    edit_json(folder, **changes)
    refuses(folder, message)


@pytest.mark.parametrize(
    "name",
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "rms_norm_eps max_position_embeddings".split(),
)
def test_a_missing_size_is_named(copy, name):
    folder = copy("llama")
    edit_json(folder, remove=(name,))
    refuses(folder, f"config.json has no {name}$")


def test_a_broken_json_file_is_named(copy, tmp_path):
    refuses(tmp_path / "nowhere", "nowhere has no config.json")
    folder = copy("qwen3")
    (folder / "model.safetensors.index.json").write_text("[]")
    refuses(folder, "index.json holds a list, expected a JSON object")
    (folder / "model.safetensors.index.json").write_text("{}")
    refuses(folder, "index.json has no weight_map")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[:-9])
    refuses(folder, "config.json is not a whole JSON file")
    for data in (b"\xff\xfe", b"[" * 100_000):
        (folder / "config.json").write_bytes(data)
        refuses(folder, "config.json is not a whole JSON file")


def test_a_missing_tensor_is_named(copy):
    folder = copy("llama")
    edit_tensors(folder, {}, remove=(QUERY,))
    refuses(folder, f"llama has no tensor {QUERY}$")
    edit_tensors(
        folder, {}, remove=(UNEMBEDDING, "model.norm.weight", "model.layers.0.input_layernorm.weight")
    )
    refuses(folder, f"no tensor {UNEMBEDDING}, model.layers.0.input_layernorm.weight, {QUERY} and 1 more$")
    folder = copy("qwen2")
    edit_tensors(folder, {}, remove=("model.layers.0.self_attn.k_proj.bias",))
    refuses(folder, "no tensor model.layers.0.self_attn.k_proj.bias$")
    folder = copy("qwen3")
    edit_json(folder, num_hidden_layers=3, layer_types=None)
    refuses(folder, "no tensor model.layers.2.input_layernorm.weight, .* and 8 more$")


def test_an_unknown_tensor_is_named(copy):
    folder = copy("llama")
    edit_tensors(folder, {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)})
    refuses(folder, "unknown tensor model.layers.0.self_attn.q_proj.bias$")
    folder = copy("mistral")
    edit_json(folder, num_hidden_layers=2)
    refuses(folder, "unknown tensor model.layers.2.input_layernorm.weight, .* and 6 more$")


def test_a_tied_matrix_stored_twice_must_be_the_same(copy):
    folder = copy("qwen2")
    other = load_file(folder / "model.safetensors")[EMBEDDING] + 1
    edit_tensors(folder, {UNEMBEDDING: other})
    refuses(folder, f"{UNEMBEDDING} differs from {EMBEDDING}, expected them equal: tie_word_embeddings")
    edit_tensors(folder, {UNEMBEDDING: other[1:]})
    refuses(folder, rf"{UNEMBEDDING} has shape \(96, 32\), expected \(97, 32\)")
    edit_tensors(folder, {EMBEDDING: other[1:], UNEMBEDDING: other[1:]})
    refuses(folder, rf"{EMBEDDING} has shape \(96, 32\), expected \(97, 32\)")
    edit_tensors(folder, {EMBEDDING: other.astype(jnp.float8_e4m3fn), UNEMBEDDING: other})
    refuses(folder, f"{EMBEDDING} has dtype F8_E4M3, expected one of F32, BF16, F16")


def test_a_misshapen_tensor_is_named(copy):
    folder = copy("llama")
    tensor = load_file(folder / "model.safetensors")[QUERY]
    for broken in (np.ascontiguousarray(tensor.T), tensor[:-1], tensor[None]):
        edit_tensors(folder, {QUERY: broken})
        refuses(folder, re.escape(f"{QUERY} has shape {broken.shape}, expected (64, 32)"))
    folder = copy("qwen3")
    edit_json(folder, vocab_size=98)
    refuses(folder, rf"{EMBEDDING} has shape \(97, 32\), expected \(98, 32\)")


def test_a_tensor_of_integers_is_named(copy):
    folder = copy("llama")
    edit_tensors(folder, {QUERY: np.zeros((64, 32), np.int8)})
    refuses(folder, f"{QUERY} has dtype I8, expected one of F32, BF16, F16")


@pytest.mark.parametrize("num_bytes", [0, 5, 100, 20_000, -1])
def test_a_truncated_file_is_named(copy, num_bytes):
    folder = copy("llama")
    data = (folder / "model.safetensors").read_bytes()[:num_bytes]
    (folder / "model.safetensors").write_bytes(data)
    refuses(folder, rf"model.safetensors \({len(data)} bytes\) is not a whole safetensors file: .+")
    folder = copy("qwen3")
    data = (folder / SHARD).read_bytes()[:num_bytes]
    (folder / SHARD).write_bytes(data)
    refuses(folder, rf"{SHARD} \({len(data)} bytes\) is not a whole safetensors file: .+")


def test_a_missing_file_is_named(copy):
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    refuses(folder, "llama has no model.safetensors and no model.safetensors.index.json")
    folder = copy("qwen3")
    (folder / SHARD).unlink()
    refuses(folder, f"qwen3 has no {SHARD}, which model.safetensors.index.json names")


def test_shards_and_index_must_agree(copy):
    folder = copy("qwen3")
    [lost, *_] = load_file(folder / SHARD)
    edit_tensors(folder, {}, SHARD, remove=(lost,))
    refuses(
        folder, f"{SHARD} and model.safetensors.index.json differ: only one of them has {re.escape(lost)}$"
    )
    edit_tensors(folder, {"extra": np.zeros(3, np.float32), lost: np.zeros(3, np.float32)}, SHARD)
    refuses(folder, f"{SHARD} and .* differ: only one of them has extra$")


@pytest.mark.parametrize("shard", ["../model.safetensors", "sub/model.safetensors", "", "model.bin", 3])
def test_an_index_names_files_of_its_own_folder(copy, shard):
    folder = copy("qwen3")
    edit_json(folder, "model.safetensors.index.json", weight_map={EMBEDDING: shard})
    refuses(folder, f"index.json names '{shard}', expected a safetensors file beside it")
