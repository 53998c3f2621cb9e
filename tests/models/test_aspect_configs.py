"""config.json of families by aspects: what the published code reads in it, and what is refused by name."""

import dataclasses
import shutil

import jax.numpy as jnp
import pytest

from models import checkpoint
from models.config import Experts, Latents
from models.layers import activated
from models.rope import LinearScaling, Rope, YarnScaling
from tests.models.checkpoint_files import FIXTURES, SIZES, edit_json, read_json, refuses

WIDE = dataclasses.replace(SIZES, max_seq_len=512, norm_eps=1e-3)
EXPERTS = dict(first_layer=0, num_experts=6, num_used=2, expert_size=12)
YARN = YarnScaling(factor=8.0, original_max_seq_len=64)
GLM = Rope(share=0.5, is_interleaved=True)
OLMO = dict(use_pre_norms=False, use_post_norms=True, use_qk_norm=True, qk_norm_spans_heads=True)


def test_configs_say_what_the_files_say():
    wanted = {
        "ministral": dict(num_layers=3, head_dim=16, windows=(9, None, 9), norm_eps=1e-6),
        "glm4_moe_lite": dict(
            num_layers=3,
            num_kv_heads=4,
            head_dim=20,
            latents=Latents(latent_dim=16, rope_dim=8, nope_dim=12, value_dim=10, q_rank=20),
            experts=Experts(
                **EXPERTS | dict(first_layer=1, num_experts=8, num_used=3),
                shared_size=24,
                is_sigmoid=True,
                normalizes=True,
                weight_scale=1.8,
            ),
            rope=Rope(is_interleaved=True),
        ),
        "gemma3_whole": dict(
            num_layers=3,
            windows=(11, 11, None),
            norm_offset=1.0,
            use_post_norms=True,
            use_qk_norm=True,
            mlp_activation="gelu_tanh",
            embedding_scale=32**0.5,
            attention_scale=5**-0.5,
            rope=Rope(theta=1e6),
            window_rope=Rope(),
            tie_embeddings=True,
        ),
        "qwen3_moe": dict(
            num_layers=3,
            head_dim=16,
            use_qk_norm=True,
            experts=Experts(**EXPERTS | dict(first_layer=1), normalizes=True),
        ),
        "qwen2_moe": dict(
            num_layers=3,
            use_qkv_bias=True,
            experts=Experts(**EXPERTS, shared_size=20, use_shared_gate=True),
        ),
        "mixtral": dict(
            mlp_size=12,
            num_layers=3,
            windows=(9, 9, 9),
            experts=Experts(**EXPERTS | dict(num_experts=5), normalizes=True),
            rope=Rope(theta=1e6),
        ),
        "gpt_oss": dict(
            mlp_size=12,
            num_layers=4,
            head_dim=16,
            windows=(9, None, 9, None),
            use_qkv_bias=True,
            use_out_bias=True,
            use_sink_logits=True,
            mlp_activation="clamped_silu",
            experts=Experts(**EXPERTS, use_biases=True, normalizes=True),
            rope=Rope(theta=500.0, scaling=dataclasses.replace(YARN, truncate=False)),
        ),
        "phi3": dict(windows=(11, 11), rope=Rope(share=0.5)),
        "glm4": dict(head_dim=16, rope=GLM, use_qkv_bias=True, use_post_norms=True),
        "glm": dict(head_dim=16, rope=GLM),
        "olmo2": OLMO,
        "olmo3": dict(
            **OLMO,
            num_layers=4,
            windows=(9, 9, 9, None),
            rope=Rope(theta=500.0, scaling=YARN),
            window_rope=Rope(theta=500.0),
        ),
        "smollm3": dict(
            num_layers=4,
            rotated=(True, False) * 2,
            rope=Rope(theta=2e6),
            norm_eps=1e-6,
            tie_embeddings=True,
        ),
        "granite": dict(
            embedding_scale=3.0, residual_scale=0.7, attention_scale=0.3, logits_divisor=0.5, norm_eps=1e-6
        ),
        "llama_biases": dict(use_qkv_bias=True, use_out_bias=True, use_mlp_bias=True, norm_eps=1e-6),
        "seed_oss": dict(head_dim=16, use_qkv_bias=True, use_mlp_bias=True, norm_eps=1e-6),
    }
    for family, options in wanted.items():
        assert checkpoint.load_config(FIXTURES / family) == dataclasses.replace(WIDE, **options), family


def test_defaults_of_the_published_code(tmp_path):
    """What files leave out."""

    def config(family, *remove, **changes):
        shutil.copy(FIXTURES / family / "config.json", tmp_path)
        edit_json(tmp_path, remove=remove, **changes)
        return checkpoint.load_config(tmp_path)

    assert config("ministral", "layer_types").windows == (9, 9, 9)
    assert config("ministral", "layer_types", sliding_window=None).windows == ()
    assert config("glm4_moe_lite", "mlp_layer_types", num_hidden_layers=4).experts.first_layer == 1
    dense = config("glm4_moe_lite", "mlp_layer_types", first_k_dense_replace=2)
    assert dense.experts.first_layer == 2
    moe = config("qwen3_moe", "num_local_experts", "norm_topk_prob", num_experts=9, mlp_only_layers=[])
    assert moe.experts == Experts(**EXPERTS | dict(num_experts=9))
    assert not config("qwen2_moe", qkv_bias=False).use_qkv_bias
    assert config("qwen2_moe", mlp_only_layers=[0, 1, 2]).experts is None
    mixtral = config("mixtral", "sliding_window", "rope_parameters")
    assert (mixtral.windows, mixtral.rope) == ((), Rope(theta=1e6))
    oss = config("gpt_oss", "rope_parameters", "layer_types", "sliding_window", "attention_bias")
    assert oss.windows == (128, None) * 2 and oss.use_out_bias
    assert oss.rope.theta == 150_000 and oss.rope.scaling.factor == 32 and not oss.rope.scaling.truncate
    assert config("phi3", "rope_parameters", partial_rotary_factor=0.75).rope == Rope(share=0.75)
    assert config("glm4", "rope_parameters", "attention_bias").rope == GLM
    assert config("olmo3", "layer_types", num_hidden_layers=5).windows == (9, 9, 9, None, 9)
    scaling = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)
    olmo = config("olmo3", "rope_parameters", rope_theta=9.0, rope_scaling=scaling)
    assert (olmo.rope, olmo.window_rope) == (Rope(theta=9.0, scaling=YARN), Rope(theta=9.0))
    smol = config("smollm3", "no_rope_layers", "layer_types", num_hidden_layers=6)
    assert smol.rotated == (True, True, True, False, True, True)
    assert config("smollm3", no_rope_layers=[1] * 4).rotated == ()
    granite = config("granite", "attention_multiplier", "embedding_multiplier")
    assert (granite.attention_scale, granite.embedding_scale) == (1.0, 1.0)
    assert config("seed_oss", "attention_bias", "mlp_bias", attention_out_bias=True).use_out_bias


def test_a_text_model_within_another_is_read_as_published(copy_checkpoint):
    """Gemma 3 4B's config.json says little of it."""
    folder = copy_checkpoint("gemma3_whole")
    text = dict(
        hidden_size=2560,
        intermediate_size=10240,
        model_type="gemma3_text",
        num_hidden_layers=7,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=1024,
    )
    edit_json(folder, remove=("dtype",), torch_dtype="bfloat16", text_config=text)
    config = checkpoint.load_config(folder)
    assert (config.vocab_size, config.hidden_size, config.mlp_size) == (262_208, 2560, 10240)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows == (1024,) * 5 + (None, 1024) and config.max_seq_len == 131_072
    assert config.rope == Rope(theta=1e6, scaling=LinearScaling(factor=8.0))
    assert config.window_rope == Rope() and config.dtype == jnp.bfloat16 and config.norm_eps == 1e-6
    edit_json(folder, text_config=text | {"attention_bias": True})
    refuses(folder, "json: text_config.attention_bias is True, expected False: nothing else")
    edit_json(folder, text_config=text | {"hidden_size": 0})
    refuses(folder, "json: text_config.hidden_size is 0, expected a positive, finite number")


CONFIG_ERRORS = [
    ("ministral", dict(layer_types=["chunked"] * 3), "layer_types is .*, expected 3 times full_attention or"),
    ("glm4_moe_lite", dict(mlp_layer_types=["sparse", "dense", "sparse"]), "mlp_layer_types is .*, expected"),
    ("qwen3_moe", dict(use_sliding_window=True), "use_sliding_window is True, expected False: nothing else"),
    ("qwen3_moe", dict(decoder_sparse_step=2), "decoder_sparse_step is 2, expected 1: nothing else"),
    ("qwen3_moe", dict(mlp_only_layers=[1]), r"mlp_only_layers is \[1\], expected the first layers or none"),
    ("qwen3_moe", dict(num_local_experts=None), "config.json has no num_experts$"),
    ("qwen2_moe", dict(layer_types=["sliding_attention"] * 3), "layer_types is .*: qwen2_moe does not read"),
    ("qwen2_moe", dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size is 0, expected"),
    ("mixtral", dict(num_experts_per_tok=6), "num_experts_per_tok is 6, expected at most the 5 of a token's"),
    (
        "gpt_oss",
        dict(quantization_config={"quant_method": "mxfp4"}),
        "quantization_config is .*, expected null: mxfp4 is not read; convert it to bfloat16 first$",
    ),
    ("gpt_oss", dict(swiglu_limit=5.0), "swiglu_limit is 5.0, expected 7.0: nothing else is implemented"),
    ("gpt_oss", dict(num_local_experts=0), "num_local_experts is 0, expected a positive, finite number"),
    (
        "phi3",
        dict(rope_scaling={"type": "longrope"}),
        "rope_scaling is .*, expected none: longrope is refused, ",
    ),
    (
        "phi3",
        dict(rope_parameters={"rope_type": "su"}),
        "rope_parameters is .*, expected none: su is refused, ",
    ),
    (
        "phi3",
        dict(rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 9}),
        "expected none: yarn is refused, for a longer sequence turns all its keys otherwise, and a cache's",
    ),
    (
        "phi3",
        dict(rope_scaling={"type": "linear", "factor": 2.0}),
        "rope_scaling is .*, expected null: rotations that are scaled are not implemented here",
    ),
    ("glm4", dict(head_dim=7), "head_dim is 7 and 0.5 of it are rotated, expected an even number"),
    ("glm", dict(sliding_window=4), "sliding_window is 4, expected null: glm has no windows"),
    ("olmo2", dict(hidden_act="gelu"), "hidden_act is 'gelu', expected 'silu'"),
    ("olmo3", dict(rope_parameters={"rope_type": "default"}), "rope_parameters is .*, expected one set for"),
    ("smollm3", dict(no_rope_layers=[1, 0]), r"no_rope_layers is \[1, 0\], expected 4 times 0 or 1"),
    (
        "smollm3",
        dict(no_rope_layers=None, no_rope_layer_interval=0),
        "no_rope_layer_interval is 0, expected a positive number of layers",
    ),
    ("granite", dict(logits_scaling=0), "logits_scaling is 0, expected a positive, finite number"),
    ("seed_oss", dict(attention_out_bias=1), "attention_out_bias is 1, expected bool"),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONFIG_ERRORS)
def test_an_option_that_is_not_implemented_is_named(copy_checkpoint, family, changes, message):
    folder = copy_checkpoint(family)
    edit_json(folder, **changes)
    refuses(folder, message)


@pytest.mark.parametrize("family", ["granite", "smollm3", "llama_biases", "olmo2"])
def test_another_family_that_calls_itself_llama(copy_checkpoint, family):
    """It is refused by an entry or a tensor, or computes the same."""
    folder = copy_checkpoint(family)
    edit_json(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    if family == "llama_biases":
        assert checkpoint.load(folder).config.use_mlp_bias
    else:
        refuses(folder, "nothing else is implemented|layernorm")
    assert read_json(folder)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rotated=(True, False, True)), "rotated has 3 entries, expected 2 or none"),
        (
            dict(experts=dict(use_shared_gate=True)),
            "shared_size is None with use_shared_gate, expected the width",
        ),
        (
            dict(experts=dict(use_biases=True, is_sigmoid=True)),
            "use_biases is True with is_sigmoid, expected False: a sigmoid's bias is a correction",
        ),
    ],
)
def test_an_impossible_aspect_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        if "experts" in changes:
            Experts(**EXPERTS, **changes["experts"])
        dataclasses.replace(SIZES, **changes)


def test_gates_and_values_of_gpt_oss_are_bounded():
    gate, up = jnp.array([-9.0, 0.5, 7.0, 90.0]), jnp.array([-90.0, 0.5, 7.0, 9.0])
    got = activated("clamped_silu", up, gate)
    want = [(-7 + 1) * -9 / (1 + jnp.exp(9 * 1.702)), 1.5 * 0.5 / (1 + jnp.exp(-0.851)), 8 * 7.0, 8 * 7.0]
    assert jnp.allclose(got, jnp.array(want), rtol=1e-5, atol=1e-6)
