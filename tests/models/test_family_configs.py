"""config.json of Gemma and DeepSeek: what the published code reads in it, and what is refused by its name."""

import dataclasses
import math
import shutil

import pytest

from models import checkpoint
from models.config import Experts, Latents
from models.rope import LinearScaling, Rope, YarnScaling
from tests.models.checkpoint_files import FIXTURES, SIZES, edit_json, refuses

GEMMA = dict(
    head_dim=8,
    max_seq_len=512,
    norm_eps=1e-3,
    norm_offset=1.0,
    use_post_norms=True,
    mlp_activation="gelu_tanh",
    embedding_scale=32**0.5,
    attention_scale=5**-0.5,
    tie_embeddings=True,
)
LATENTS = dict(latent_dim=16, rope_dim=8, nope_dim=12, value_dim=10)
EXPERTS = dict(
    first_layer=1, num_experts=8, num_used=3, expert_size=12, shared_size=24, num_groups=4, num_used_groups=2
)


def test_configs_of_gemma_and_deepseek_say_what_the_files_say():
    sizes = dataclasses.replace(SIZES, num_layers=5, **GEMMA)
    latents = dataclasses.replace(
        sizes,
        num_layers=3,
        num_kv_heads=4,
        head_dim=20,
        norm_offset=0.0,
        use_post_norms=False,
        mlp_activation="silu",
        embedding_scale=1.0,
        attention_scale=None,
        tie_embeddings=False,
        latents=Latents(**LATENTS, q_rank=20),
        rope=Rope(is_interleaved=True),
    )
    yarn = YarnScaling(
        factor=8.0, original_max_seq_len=64, beta_fast=16.0, beta_slow=0.5, mscale=0.9, mscale_all_dim=0.6
    )
    wanted = {
        "gemma2": dataclasses.replace(
            sizes, windows=(9, None, 9, None, 9), attention_soft_cap=2.0, final_soft_cap=5.0
        ),
        "gemma3": dataclasses.replace(
            sizes,
            num_layers=6,
            windows=(11, 11, None) * 2,
            use_qk_norm=True,
            rope=Rope(theta=500.0, scaling=LinearScaling(factor=8.0)),
            window_rope=Rope(theta=20.0),
        ),
        "deepseek_v2": dataclasses.replace(
            latents,
            num_layers=2,
            latents=Latents(**LATENTS),
            rope=Rope(theta=500.0, scaling=yarn, is_interleaved=True),
            attention_scale=20**-0.5 * (1 + 0.06 * math.log(8)) ** 2,
        ),
        "deepseek_v3": latents,
        "deepseek_v2_experts": dataclasses.replace(latents, experts=Experts(**EXPERTS, weight_scale=3.0)),
        "deepseek_v3_experts": dataclasses.replace(
            latents,
            latents=Latents(**LATENTS),
            experts=Experts(**EXPERTS, weight_scale=2.5, is_sigmoid=True, normalizes=True),
            rope=Rope(theta=500.0, scaling=yarn, is_interleaved=True),
            attention_scale=20**-0.5 * (1 + 0.06 * math.log(8)) ** 2,
        ),
    }
    for family, config in wanted.items():
        assert checkpoint.load_config(FIXTURES / family) == config


def test_gemmas_as_they_were_published_are_read(copy_checkpoint):
    """What their files leave out, and rotations in the older spelling."""
    folder = copy_checkpoint("gemma2")
    given = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "head_dim")
    given += ("sliding_window", "layer_types", "tie_word_embeddings", "rope_parameters", "hidden_activation")
    edit_json(folder, remove=given, hidden_act="gelu", cache_implementation="hybrid")
    config = checkpoint.load_config(folder)
    assert (config.attention_soft_cap, config.final_soft_cap, config.attention_scale) == (50, 30, 1 / 16)
    assert (config.head_dim, config.windows, config.tie_embeddings) == (
        256,
        (4096, None, 4096, None, 4096),
        True,
    )
    edit_json(folder, attn_logit_softcapping=None, tie_word_embeddings=False)
    config = checkpoint.load_config(folder)
    assert (config.attention_soft_cap, config.tie_embeddings) == (None, False)

    folder = copy_checkpoint("gemma3")
    config = checkpoint.load_config(folder)
    old = dict(
        rope_theta=500.0, rope_local_base_freq=20.0, rope_scaling={"factor": 8.0, "rope_type": "linear"}
    )
    edit_json(folder, remove=("rope_parameters", "layer_types"), **old)
    assert checkpoint.load_config(folder) == config
    edit_json(folder, remove=("sliding_window_pattern", *old), num_hidden_layers=8)
    config = checkpoint.load_config(folder)
    assert config.windows == (11, 11, 11, 11, 11, None, 11, 11)
    assert (config.rope, config.window_rope) == (Rope(theta=1e6), Rope(theta=1e4))


def test_deepseeks_as_they_were_published_are_read(copy_checkpoint):
    folder = copy_checkpoint("deepseek_v3")
    config = checkpoint.load_config(folder)
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0}
    edit_json(
        folder,
        remove=("rope_parameters", "num_key_value_heads"),
        rope_theta=10_000,
        rope_scaling=scaling | {"mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    )
    stretched = checkpoint.load_config(folder)
    assert stretched.num_kv_heads == 4 and stretched.rope.amplitude == 1
    assert stretched.attention_scale == pytest.approx(20**-0.5 * (1 + 0.1 * math.log(40)) ** 2)
    edit_json(folder, rope_interleave=False, rope_scaling=None)
    assert checkpoint.load_config(folder) == dataclasses.replace(config, rope=Rope())
    left_out = "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob", "topk_method"
    sizes = dict(num_experts=64, num_used=2, expert_size=1407, shared_size=2814)
    folder = copy_checkpoint("deepseek_v2")
    edit_json(folder, remove=left_out, num_experts_per_tok=2)
    assert checkpoint.load_config(folder).experts == Experts(first_layer=0, **sizes)
    shutil.copy(FIXTURES / "deepseek_v3" / "config.json", folder)
    edit_json(folder, remove=left_out, num_hidden_layers=4)
    experts = checkpoint.load_config(folder).experts
    assert experts == Experts(
        first_layer=3,
        num_experts=256,
        num_used=8,
        expert_size=2048,
        shared_size=2048,
        is_sigmoid=True,
        num_groups=8,
        num_used_groups=4,
        normalizes=True,
        weight_scale=2.5,
    )


CONFIG_ERRORS = [
    ("gemma2", dict(hidden_activation="gelu"), r"hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
    (
        "gemma2",
        dict(use_bidirectional_attention=True),
        r"use_bidirectional_attention is True, expected False",
    ),
    ("gemma2", dict(attention_bias=True), r"attention_bias is True, expected False"),
    ("gemma2", dict(query_pre_attn_scalar=0), r"query_pre_attn_scalar is 0, expected a positive number"),
    (
        "gemma2",
        dict(attn_logit_softcapping=-1.0),
        r"json: attn_logit_softcapping is -1.0, expected a positive",
    ),
    (
        "gemma2",
        dict(final_logit_softcapping=0.0),
        r"json: final_logit_softcapping is 0.0, expected a positive",
    ),
    (
        "gemma2",
        dict(sliding_window=None),
        r"sliding_window is None, expected the tokens in reach .* 2\*\*31 - 1$",
    ),
    (
        "gemma2",
        dict(layer_types=["chunked_attention"] * 5),
        r"layer_types is .*expected 5 times full_attention",
    ),
    ("gemma2", dict(head_dim=7), r"json: head_dim is 7, expected an even number: halves are rotated"),
    ("gemma2", dict(hidden_size=0), r"json: hidden_size is 0, expected a positive, finite number"),
    (
        "gemma2",
        dict(rope_parameters={"sliding_attention": {"rope_type": "default"}}),
        r"rope_parameters is .*, expected one set for all layers",
    ),
    (
        "gemma3",
        dict(attn_logit_softcapping=5.0),
        r"attn_logit_softcapping is 5.0, expected None: nothing else",
    ),
    (
        "gemma3",
        dict(rope_parameters={"rope_type": "default"}),
        r"rope_parameters is .*, expected one set for full_attention and one for sliding_attention",
    ),
    (
        "gemma3",
        dict(rope_parameters={"sliding_attention": {"rope_type": "proportional"}}),
        r"rope_parameters.sliding_attention.rope_type is 'proportional', expected default, linear",
    ),
    (
        "gemma3",
        dict(layer_types=None, sliding_window_pattern=0),
        r"sliding_window_pattern is 0, expected a positive number of layers",
    ),
    ("deepseek_v2", dict(first_k_dense_replace=1), r"config.json has no num_experts_per_tok"),
    (
        "deepseek_v2_experts",
        dict(first_k_dense_replace=-1),
        r"first_k_dense_replace is -1, expected 0 to num_hid",
    ),
    (
        "deepseek_v2_experts",
        dict(topk_method="noaux_tc"),
        r"topk_method is 'noaux_tc', expected greedy or group",
    ),
    (
        "deepseek_v2_experts",
        dict(n_routed_experts=9),
        r"n_routed_experts is 9, expected a multiple of n_group = 4",
    ),
    (
        "deepseek_v3_experts",
        dict(n_routed_experts=4),
        r"n_routed_experts is 4, expected .* n_group = 4, at least 8",
    ),
    ("deepseek_v3_experts", dict(topk_group=5), r"topk_group is 5, expected at most n_group = 4"),
    (
        "deepseek_v3_experts",
        dict(num_experts_per_tok=5),
        r"num_experts_per_tok is 5, expected at most the 4 of",
    ),
    ("deepseek_v3_experts", dict(n_shared_experts=0), r"n_shared_experts is 0, expected a positive, finite"),
    (
        "deepseek_v3_experts",
        dict(moe_layer_freq=2),
        r"moe_layer_freq is 2, expected 1: nothing else is implem",
    ),
    ("deepseek_v3", dict(attention_bias=True), r"attention_bias is True, expected False"),
    (
        "deepseek_v3",
        dict(quantization_config={"quant_method": "fp8"}),
        r"quantization_config is .*'fp8'.*, expected None",
    ),
    (
        "deepseek_v3",
        dict(qk_rope_head_dim=7),
        r"qk_rope_head_dim is 7, expected an even number: pairs are rot",
    ),
    ("deepseek_v3", dict(kv_lora_rank=0), r"json: kv_lora_rank is 0, expected a positive, finite number"),
    ("deepseek_v3", dict(q_lora_rank=0), r"json: q_lora_rank is 0, expected a positive, finite number"),
    ("deepseek_v3", dict(kv_lora_rank=None), r"config.json has no kv_lora_rank"),
    ("deepseek_v3", dict(rope_interleave="yes"), r"rope_interleave is 'yes', expected bool"),
    (
        "deepseek_v3",
        dict(num_key_value_heads=2),
        r"json: num_key_value_heads is 2 with latents, expected num_attention_heads = 4",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONFIG_ERRORS)
def test_an_option_of_a_family_that_is_not_implemented_is_named(copy_checkpoint, family, changes, message):
    folder = copy_checkpoint(family)
    edit_json(folder, **changes)
    refuses(folder, message)
