"""config.json of hybrids: what the published code reads in it, and what is refused by its name."""

import dataclasses

import pytest

import kvcache_jax as kv
from models import checkpoint
from models.config import ATTENTION, RECURRENCE, Experts, Latents
from models.rope import Rope
from tests.models.checkpoint_files import FIXTURES, SIZES, edit_json, read_json, refuses

R, A = RECURRENCE, ATTENTION
FOUR = dataclasses.replace(SIZES, num_layers=4, norm_eps=1e-3)
DELTA = kv.GatedDeltaNet(4, 12, key_dim=8, num_key_heads=2, kernel=4)
QWEN = dict(head_dim=16, recurrence=DELTA, norm_offset=1.0, use_qk_norm=True, use_attention_gate=True)
EXPERTS = dict(first_layer=0, num_experts=6, num_used=2, expert_size=12, shared_size=20, normalizes=True)


def test_configs_of_hybrids_say_what_the_files_say():
    wanted = {
        "qwen3_5": dict(**QWEN, num_layers=6, mixers=(R, R, A) * 2, rope=Rope(theta=500.0, share=0.5)),
        "qwen3_next": dict(
            **QWEN,
            num_layers=3,
            mixers=(R, A, R),
            rope=Rope(share=0.25),
            experts=Experts(**EXPERTS, use_shared_gate=True),
        ),
        "kimi_linear": dict(
            num_kv_heads=4,
            head_dim=12,
            mixers=(R, R, A, R),
            recurrence=kv.GatedDeltaNet(3, 8, key_dim=8, kernel=4, decay="channel"),
            latents=Latents(latent_dim=16, rope_dim=4, nope_dim=8, value_dim=10),
            rope=None,
            experts=Experts(
                **EXPERTS | dict(first_layer=1, shared_size=12),
                is_sigmoid=True,
                num_groups=3,
                num_used_groups=2,
                weight_scale=2.446,
            ),
        ),
        "granite_4": dict(
            mlp_size=20,
            mixers=(R, R, A, R),
            recurrence=kv.Mamba2(8, 8, state_dim=6, num_groups=2, kernel=4),
            rope=None,
            experts=Experts(**EXPERTS | dict(num_experts=5)),
            embedding_scale=3.0,
            residual_scale=0.7,
            attention_scale=0.3,
            logits_divisor=0.5,
            tie_embeddings=True,
        ),
        "nemotron_h": dict(
            num_layers=6,
            mixers=(R, None, A, R, R, None),
            has_split_layers=True,
            recurrence=kv.Mamba2(8, 6, state_dim=10, num_groups=2, kernel=4),
            rope=None,
            mlp_activation="relu2",
        ),
        "lfm2": dict(
            mlp_size=40,
            mixers=(R, R, A, R),
            recurrence=kv.ShortConvolution(num_channels=32, kernel=3),
            use_qk_norm=True,
            rope=Rope(theta=1e6),
            tie_embeddings=True,
        ),
    }
    wanted["nemotron_h_experts"] = wanted["nemotron_h"] | dict(
        num_layers=4, mixers=(R, None, A, None), experts=Experts(**EXPERTS, is_sigmoid=True, weight_scale=2.5)
    )
    for family, options in wanted.items():
        assert checkpoint.load_config(FIXTURES / family) == dataclasses.replace(FOUR, **options), family


def test_qwens_as_they_were_published_are_read(copy_checkpoint):
    folder = copy_checkpoint("qwen3_next")
    given = "layer_types", "rope_parameters", "mlp_only_layers", "norm_topk_prob"
    edit_json(folder, remove=given, num_hidden_layers=8, rope_theta=1e7, partial_rotary_factor=0.5)
    config = checkpoint.load_config(folder)
    assert config.mixers == (R, R, R, A) * 2
    assert config.rope == Rope(theta=1e7, share=0.5) and config.experts.normalizes
    edit_json(folder, full_attention_interval=2, mlp_only_layers=[0, 1, 2], partial_rotary_factor=None)
    config = checkpoint.load_config(folder)
    assert config.mixers == (R, A) * 4 and config.experts.first_layer == 3 and config.rope.share == 0.25
    edit_json(folder, mlp_only_layers=list(range(8)))
    assert checkpoint.load_config(folder).experts is None
    folder = copy_checkpoint("qwen3_5")
    config, rope = checkpoint.load_config(folder), read_json(folder)["rope_parameters"]
    edit_json(folder, rope_parameters=rope | {"mrope_section": [1, 1, 2], "mrope_interleaved": True})
    assert checkpoint.load_config(folder) == config  # of texts all positions are the same
    edit_json(folder, layer_types=["full_attention"] * 6)
    config = checkpoint.load_config(folder)
    assert config.mixers == () and config.recurrence is None


def test_kimis_as_they_were_published_are_read(copy_checkpoint):
    folder = copy_checkpoint("kimi_linear")
    config = checkpoint.load_config(folder)
    linear = dict(
        num_heads=3, head_dim=8, short_conv_kernel_size=4, kda_layers=[1, 2, 4], full_attn_layers=[3]
    )
    given = "layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"
    edit_json(folder, remove=given, linear_attn_config=linear, first_k_dense_replace=1, mla_use_nope=True)
    assert checkpoint.load_config(folder) == config
    edit_json(folder, remove=("linear_attn_config", "first_k_dense_replace"), num_hidden_layers=9)
    config = checkpoint.load_config(folder)
    assert config.mixers == (R, R, R, R, A, R, R, R, A) and config.experts.first_layer == 1
    assert config.recurrence == kv.GatedDeltaNet(32, 128, key_dim=128, decay="channel")
    edit_json(folder, mlp_layer_types=["dense"] * 9)
    assert checkpoint.load_config(folder).experts is None


def test_mambas_as_they_were_published_are_read(copy_checkpoint):
    folder = copy_checkpoint("granite_4")
    config = checkpoint.load_config(folder)
    types = ["mamba", "mamba", "attention", "mamba"]
    edit_json(folder, layer_types=types, time_step_limit=[0.0, float("inf")], position_embedding_type=None)
    assert checkpoint.load_config(folder) == config
    edit_json(folder, position_embedding_type="rope", num_local_experts=0)
    assert checkpoint.load_config(folder) == dataclasses.replace(config, rope=Rope(), experts=None)
    for family, pattern in ("nemotron_h", "M-*MM-"), ("nemotron_h_experts", "ME*E"):
        folder = copy_checkpoint(family)
        config = checkpoint.load_config(folder)
        edit_json(
            folder,
            remove=("layers_block_type",),
            hybrid_override_pattern=pattern,
            num_hidden_layers=len(pattern),
        )
        assert checkpoint.load_config(folder) == config


def test_lfms_as_they_were_published_are_read(copy_checkpoint):
    folder = copy_checkpoint("lfm2")
    config = checkpoint.load_config(folder)
    left_out = "layer_types", "tie_word_embeddings", "rope_parameters", "conv_L_cache"
    edit_json(folder, remove=left_out, full_attn_idxs=[2], tie_embedding=True)
    assert checkpoint.load_config(folder) == config
    edit_json(folder, tie_embedding=False, block_ff_dim=62, block_ffn_dim_multiplier=1.5, rope_theta=5.0)
    config = checkpoint.load_config(folder)
    assert (config.mlp_size, config.tie_embeddings, config.rope) == (80, False, Rope(theta=5.0))
    edit_json(folder, block_auto_adjust_ff_dim=False)
    assert checkpoint.load_config(folder).mlp_size == 62


CONFIG_ERRORS = [
    (
        "qwen3_5",
        dict(layer_types=["mamba"] * 6),
        "layer_types is .*, expected linear_attention, full_attention",
    ),
    (
        "qwen3_5",
        dict(layer_types=["linear_attention"]),
        "json: layer_types has 1 entries, expected 6 or none",
    ),
    (
        "qwen3_5",
        dict(layer_types=None, full_attention_interval=0),
        "full_attention_interval is 0, expected a",
    ),
    ("qwen3_5", dict(linear_conv_kernel_dim=None), "config.json has no linear_conv_kernel_dim"),
    ("qwen3_5", dict(linear_key_head_dim="8"), "linear_key_head_dim is '8', expected int"),
    ("qwen3_5", dict(attention_bias=True), "attention_bias is True, expected False"),
    (
        "qwen3_5",
        dict(rope_parameters={"partial_rotary_factor": 1.5}),
        "partial_rotary_factor is 1.5, expected above 0 and at most 1",
    ),
    (
        "qwen3_5",
        dict(rope_parameters={"partial_rotary_factor": 0.35}),
        r"json: head_dim is 16 and 0.35 of it are rotated, expected an even number",
    ),
    ("qwen3_next", dict(mlp_only_layers=[1]), r"mlp_only_layers is \[1\], expected the first layers or none"),
    ("qwen3_next", dict(decoder_sparse_step=2), "decoder_sparse_step is 2, expected 1: nothing else is impl"),
    (
        "qwen3_next",
        dict(num_experts_per_tok=7),
        "num_experts_per_tok is 7, expected at most the 6 of a token's",
    ),
    (
        "qwen3_next",
        dict(shared_expert_intermediate_size=0),
        "shared_expert_intermediate_size is 0, expected a positive, finite number",
    ),
    (
        "kimi_linear",
        dict(mlp_layer_types=["sparse", "dense"] * 2),
        "mlp_layer_types is .*, expected dense, then",
    ),
    (
        "kimi_linear",
        dict(num_shared_experts=0),
        "num_shared_experts is 0, expected a positive, finite number",
    ),
    (
        "kimi_linear",
        dict(num_expert_group=4),
        "num_experts is 6, expected a multiple of num_expert_group = 4",
    ),
    ("kimi_linear", dict(mla_use_nope=False), "mla_use_nope is False, expected True: nothing else is implem"),
    (
        "kimi_linear",
        dict(model_max_length=0),
        "json: model_max_length is 0, expected a positive, finite number",
    ),
    ("granite_4", dict(layer_types=None), "config.json has no layer_types"),
    ("granite_4", dict(mamba_proj_bias=True), "mamba_proj_bias is True, expected False"),
    (
        "granite_4",
        dict(position_embedding_type="alibi"),
        "position_embedding_type is 'alibi', expected nope or r",
    ),
    (
        "granite_4",
        dict(time_step_limit=[0.0, 1.0]),
        r"time_step_limit is \[0.0, 1.0\], expected 0 to infinity",
    ),
    (
        "granite_4",
        dict(residual_multiplier=0),
        "residual_multiplier is 0, expected a positive, finite number",
    ),
    ("granite_4", dict(logits_scaling=None), "config.json has no logits_scaling"),
    ("granite_4", dict(shared_intermediate_size=0), "shared_intermediate_size is 0, expected a positive"),
    ("nemotron_h", dict(hybrid_override_pattern="MX"), "hybrid_override_pattern is 'MX', expected of M "),
    ("nemotron_h", dict(layers_block_type=None), "config.json has no layers_block_type"),
    (
        "nemotron_h",
        dict(layers_block_type=["mlp", "moe"]),
        "layers_block_type is .*: both in one model are not",
    ),
    ("nemotron_h", dict(num_hidden_layers=5), "layers_block_type has 6 entries, expected 5 or none"),
    ("nemotron_h", dict(mlp_hidden_act="silu"), "mlp_hidden_act is 'silu', expected 'relu2'"),
    ("nemotron_h", dict(layer_norm_epsilon=-1.0), "json: layer_norm_epsilon is -1.0, expected a positive"),
    ("nemotron_h_experts", dict(moe_latent_size=8), "moe_latent_size is 8, expected None: nothing else is"),
    ("nemotron_h_experts", dict(n_group=4), "n_routed_experts is 6, expected a multiple of n_group = 4"),
    ("lfm2", dict(conv_bias=True), "conv_bias is True, expected False"),
    ("lfm2", dict(block_multiple_of=0), "block_multiple_of is 0, expected a positive number"),
    ("lfm2", dict(norm_eps=0.0), "json: norm_eps is 0.0, expected a positive, finite number"),
]


@pytest.mark.parametrize(("family", "changes", "message"), CONFIG_ERRORS)
def test_an_option_of_a_hybrid_that_is_not_implemented_is_named(copy_checkpoint, family, changes, message):
    folder = copy_checkpoint(family)
    edit_json(folder, **changes)
    refuses(folder, message)
