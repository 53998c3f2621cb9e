"""config.json of a checkpoint: what the published code reads in it, and what is refused by its name."""

import dataclasses
import math
import shutil

import jax.numpy as jnp
import pytest

from models import checkpoint
from models.families.family import UNSCALED
from models.rope import Llama3Scaling, Rope
from tests.models.checkpoint_files import (
    FIXTURES,
    SIZES,
    edit_json,
    read_json,
    refuses,
)


def test_configs_say_what_the_files_say():
    narrow, sizes = SIZES, dataclasses.replace(SIZES, dtype=jnp.float32, param_dtype=jnp.float32)
    scaling = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=64)
    wanted = {
        "llama": dataclasses.replace(
            narrow, head_dim=16, rope=Rope(theta=500, scaling=scaling), norm_eps=1e-3
        ),
        "qwen2": dataclasses.replace(sizes, num_kv_heads=1, use_qkv_bias=True, tie_embeddings=True),
        "qwen3": dataclasses.replace(sizes, head_dim=16, use_qk_norm=True, rope=Rope(theta=1e6)),
        "mistral": dataclasses.replace(narrow, num_layers=3, windows=(11, 11, 11)),
        "qwen2_windows": dataclasses.replace(narrow, num_layers=3, windows=(None, 9, 9), use_qkv_bias=True),
    }
    for family, config in wanted.items():
        assert checkpoint.load_config(FIXTURES / family) == config


def test_dtypes_may_be_chosen(copy_checkpoint):
    decoder = checkpoint.load(FIXTURES / "qwen2", dtype=jnp.bfloat16)
    assert decoder.config.param_dtype == decoder.config.dtype == decoder.embedding[...].dtype == jnp.bfloat16
    wanted = checkpoint.load(FIXTURES / "qwen2").embedding[...].astype(jnp.bfloat16)
    assert jnp.array_equal(decoder.embedding[...], wanted)
    decoder = checkpoint.load(FIXTURES / "qwen2", param_dtype=jnp.bfloat16)
    assert (decoder.config.dtype, decoder.embedding[...].dtype) == (jnp.float32, jnp.bfloat16)
    folder = copy_checkpoint("qwen2")
    edit_json(folder, dtype="float16")
    assert checkpoint.load(folder, dtype=jnp.float32).embedding[...].dtype == jnp.float32


def test_a_dtype_that_is_asked_for_is_not_blamed_on_the_file():
    for asked in ({"dtype": "float16"}, {"dtype": "junk"}, {"param_dtype": "int32"}):
        [(name, value)] = asked.items()
        with pytest.raises(ValueError, match=f"^{name} is {value}, expected float32 or bfloat16$"):
            checkpoint.load(FIXTURES / "llama", **asked)


def test_the_spelling_of_published_configs_is_read(copy_checkpoint):
    folder = copy_checkpoint("llama")
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
    assert checkpoint.load_config(folder) == dataclasses.replace(config, rope=Rope(theta=theta))
    edit_json(folder, remove=("rope_theta",))
    assert checkpoint.load_config(folder).rope.theta == 10_000


def test_windows_are_those_of_the_published_code(copy_checkpoint):
    def windows(remove=(), **changes):
        shutil.copy(FIXTURES / family / "config.json", folder)
        edit_json(folder, remove=remove, **changes)
        return checkpoint.load_config(folder).windows

    family, folder = "qwen2_windows", copy_checkpoint("qwen2_windows")
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


def test_the_width_of_heads_has_a_default(copy_checkpoint):
    folder = copy_checkpoint("qwen2")
    assert checkpoint.load_config(folder).head_dim == 32 // 4
    folder = copy_checkpoint("qwen3")
    edit_json(folder, head_dim=None)
    assert checkpoint.load_config(folder).head_dim == 128


def test_the_original_length_of_the_whole_goes_before_that_of_the_scaling(copy_checkpoint):
    """As in transformers 5."""
    folder = copy_checkpoint("llama")
    edit_json(folder, rope_scaling=LLAMA3, rope_parameters=None, original_max_position_embeddings=32)
    assert checkpoint.load_config(folder).rope.scaling.original_max_seq_len == 32
    folder = copy_checkpoint("deepseek_v2")
    edit_json(folder, original_max_position_embeddings=32)
    assert checkpoint.load_config(folder).rope.scaling.original_max_seq_len == 32
    folder = copy_checkpoint("olmo3")  # a set for each kind of layer: the whole's is not read
    edit_json(folder, original_max_position_embeddings=32)
    assert checkpoint.load_config(folder).rope.scaling.original_max_seq_len == 64


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
CONFIG_ERRORS = [
    (
        "llama",
        dict(model_type="gemma4"),
        r"model_type is 'gemma4', expected one of llama, .*gemma2, gemma3_text, deepseek_v2, deepseek_v3",
    ),
    ("ministral", dict(model_type="mistral3"), r"model_type is 'mistral3', expected one of llama, mistral, "),
    ("llama", dict(model_type=None), r"config.json has no model_type"),
    ("llama", dict(model_type=["llama"]), r"model_type is \['llama'\], expected str"),
    ("llama", dict(architectures=["LlamaForTokenClassification"]), r"architectures is .*'LlamaForCausalLM'"),
    ("llama", dict(hidden_act="gelu"), r"hidden_act is 'gelu', expected 'silu'"),
    ("mistral", dict(attention_bias=True), r"attention_bias is True, expected False"),
    ("llama", dict(embedding_multiplier=12.0), r"embedding_multiplier is 12.0, expected 1.0: nothing else"),
    ("llama", dict(residual_multiplier=0.22), r"residual_multiplier is 0.22, expected 1.0: nothing else"),
    ("llama", dict(logits_scaling=8), r"logits_scaling is 8, expected 1.0: nothing else"),
    ("llama", dict(attention_multiplier=1.0), r"attention_multiplier is 1.0, expected None: nothing else"),
    ("llama", dict(no_rope_layers=[1, 0]), r"no_rope_layers is \[1, 0\], expected None: nothing else"),
    ("llama", dict(no_rope_layer_interval=4), r"no_rope_layer_interval is 4, expected None: nothing else"),
    ("llama", dict(scale_emb=12), r"scale_emb is 12, expected 1.0: nothing else"),  # MiniCPM's three
    ("llama", dict(scale_depth=1.4), r"scale_depth is 1.4, expected None: nothing else"),
    ("llama", dict(dim_model_base=8), r"dim_model_base is 8, expected None: nothing else"),
    ("llama", dict(logit_scale=0.0625), r"logit_scale is 0.0625, expected 1.0: nothing else"),  # Cohere's
    ("llama", dict(lm_head_multiplier=0.5), r"lm_head_multiplier is 0.5, expected 1.0: nothing else"),
    ("mistral", dict(key_multiplier=0.5), r"key_multiplier is 0.5, expected 1.0: nothing else"),
    (
        "llama",
        dict(mlp_multipliers=[1, 2]),
        r"mlp_multipliers is \[1, 2\], expected \[1.0, 1.0\]: nothing else",
    ),
    ("llama", dict(attn_logit_softcapping=50.0), r"attn_logit_softcapping is 50.0, expected None: nothing"),
    ("qwen3", dict(final_logit_softcapping=30.0), r"final_logit_softcapping is 30.0, expected None: nothing"),
    ("lfm2", dict(logit_scale=2.0), r"logit_scale is 2.0, expected 1.0: nothing else"),
    ("nemotron_h", dict(key_multiplier=2.0), r"key_multiplier is 2.0, expected 1.0: nothing else"),
    ("llama", dict(nope_layer_interval=4), r"nope_layer_interval is 4, expected None: nothing else"),
    ("llama", dict(use_bias=False), r"use_bias is False, expected None: nothing else"),  # Ernie's pairs
    ("qwen3", dict(attention_bias=True), r"attention_bias is True, expected False"),
    ("mistral", dict(mlp_bias=True), r"mlp_bias is True, expected False"),
    ("llama", dict(mlp_bias="yes"), r"mlp_bias is 'yes', expected bool"),
    ("llama", dict(quantization_config={"bits": 4}), r"quantization_config is .*'bits': 4.*, expected None"),
    ("qwen2", dict(use_mrope=True), r"use_mrope is True, expected False"),
    ("llama", dict(is_causal=False), r"is_causal is False, expected True"),
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
    (
        "llama",
        dict(rope_parameters={"rope_type": "longrope"}),
        r"rope_parameters.rope_type is 'longrope', expected default, linear, llama3 or yarn: nothing else",
    ),
    (
        "llama",
        dict(rope_scaling={"type": "dynamic"}),
        r"rope_scaling.type is 'dynamic', expected default, lin",
    ),
    ("llama", dict(rope_scaling={"type": "linear"}), r"has no rope_scaling.factor"),
    (
        "llama",
        dict(rope_scaling={"type": "linear", "factor": -1}),
        r"rope_scaling.factor is -1, expected a pos",
    ),
    (
        "llama",
        dict(rope_scaling={"type": "yarn", "factor": 2}),
        r"no rope_scaling.original_max_position_embed",
    ),
    ("llama", dict(rope_scaling=YARN | {"beta_fast": 1}), r"beta_fast is 1, expected above beta_slow = 1.0"),
    ("llama", dict(rope_scaling=YARN | {"mscale": -1}), r"rope_scaling.mscale is -1, expected a positive"),
    (
        "llama",
        dict(rope_scaling=YARN | {"rope_theta": 1}),
        r"rope_theta is 1, expected above 1 where rotations are scaled",
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
    ("llama", dict(sliding_window=8), r"sliding_window is 8, expected null: llama has no windows"),
    (
        "llama",
        dict(layer_types=["sliding_attention"] * 2),
        r"layer_types is .*llama does not read it",
    ),
    (
        "mistral",
        dict(layer_types=["full_attention"] * 3),
        r"layer_types is .*mistral does not read",
    ),
    ("mistral", dict(sliding_window=0), r"sliding_window is 0, expected the tokens in reach"),
    ("mistral", dict(sliding_window=10**12), r"sliding_window is 1000000000000, .* 1 to 2\*\*31 - 1"),
    (
        "llama",
        dict(
            rope_scaling=None,
            rope_parameters=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=0,
            ),
        ),
        r"config.json: rope_parameters.original_max_position_embeddings is 0",
    ),
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
def test_an_option_that_is_not_implemented_is_named(copy_checkpoint, family, changes, message):
    folder = copy_checkpoint(family)
    edit_json(folder, **changes)
    refuses(folder, message)


def test_multipliers_that_do_nothing_are_read(copy_checkpoint):
    folder = copy_checkpoint("llama")
    config = checkpoint.load_config(folder)
    edit_json(folder, **UNSCALED | dict(scale_emb=1, mlp_multipliers=[1, 1]))
    assert checkpoint.load_config(folder) == config


@pytest.mark.parametrize(
    "name",
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "rms_norm_eps max_position_embeddings".split(),
)
def test_a_missing_size_is_named(copy_checkpoint, name):
    folder = copy_checkpoint("mistral")
    edit_json(folder, remove=(name,))
    refuses(folder, f"config.json has no {name}$")


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_without_a_number_of_key_value_heads_there_is_one_for_each_query_head(copy_checkpoint, family):
    folder = copy_checkpoint(family)
    assert checkpoint.load_config(folder).num_kv_heads == 2
    edit_json(folder, num_key_value_heads=None)
    assert checkpoint.load_config(folder).num_kv_heads == 4
    if family == "llama":  # null is what it has where nothing is said
        edit_json(folder, remove=("num_key_value_heads",))
        assert checkpoint.load_config(folder).num_kv_heads == 4
