"""Checkpoints that are saved: the files they came from, models of one's own, what no family has."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from models import checkpoint
from models.checkpoint import CheckpointError
from models.config import ATTENTION, RECURRENCE, Experts, Latents
from models.decoder import Decoder, DecoderConfig
from models.rope import LinearScaling, Rope, YarnScaling
from tests.models.checkpoint_files import (
    FAMILIES,
    FIXTURES,
    read_json,
    read_tensors,
)
from tests.support.helpers import assert_same, leaf_bytes

FLOAT32 = "e_score_correction_bias", ".A_log", ".dt_bias", ".D"


SAVED_AS = {
    "deepseek_v3": ("deepseek_v2", "DeepseekV2ForCausalLM"),  # with dense MLPs it is the layout of V2
    "glm4_moe_lite": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3_whole"])
def test_a_saved_model_is_the_file_it_came_from(family, tmp_path):
    decoder = checkpoint.load(FIXTURES / family)
    checkpoint.save(tmp_path / "deep" / family, decoder)
    stored = read_tensors(FIXTURES / family)
    for name in stored:
        if name.endswith(FLOAT32):  # wherever it comes from
            stored[name] = stored[name].astype(np.float32)
    assert leaf_bytes(read_tensors(tmp_path / "deep" / family)) == leaf_bytes(stored)
    again = checkpoint.load(tmp_path / "deep" / family)
    assert again.config == decoder.config
    assert_same(decoder, again)
    # Every entry that we write is the one that transformers wrote, where it wrote one.
    theirs, ours = read_json(FIXTURES / family), read_json(tmp_path / "deep" / family)
    if family == "mixtral":  # null is what they share of `hidden_size`
        theirs |= {"head_dim": 8}
    if family in SAVED_AS:  # the first of families is taken
        model_type, architecture = SAVED_AS[family]
        theirs |= {"model_type": model_type, "architectures": [architecture]}
    if family == "lfm2":  # what follows from these is written
        theirs |= {"intermediate_size": 40, "block_auto_adjust_ff_dim": False}
    if decoder.config.rope is not None:
        rope = theirs.pop("rope_parameters")
        if "full_attention" in rope:  # a set for each kind of layer
            theirs["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        for name in ("rope_theta", "partial_rotary_factor"):
            theirs |= {name: rope.pop(name)} if name in rope else {}
        # We write defaults too.
        assert (ours.pop("rope_scaling") or {"rope_type": "default"}).items() >= rope.items()
    assert {name: ours[name] for name in ours if name in theirs} == {
        name: theirs[name] for name in theirs if name in ours
    }
    added = {"head_dim", "num_hidden_layers", "num_experts", "first_k_dense_replace", "sliding_window"}
    assert ours.keys() - theirs.keys() <= added


OWN = DecoderConfig(
    vocab_size=13, hidden_size=12, mlp_size=10, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=6
)


def own_shapes(**options):
    """A model without numbers, for which nothing is compiled."""
    config = dataclasses.replace(OWN, **options)
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def own_model(**options):
    """A model of random numbers."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), own_shapes(**options))


GEMMA = dict(
    windows=(5, None),
    norm_offset=1.0,
    use_post_norms=True,
    mlp_activation="gelu_tanh",
    embedding_scale=12**0.5,
    attention_scale=24**-0.5,
)
LATENTS = dict(
    num_kv_heads=4, head_dim=7, latents=Latents(latent_dim=9, rope_dim=4, nope_dim=3, value_dim=5, q_rank=8)
)
EXPERTS = dict(first_layer=1, num_experts=4, num_used=2, expert_size=3, shared_size=3, weight_scale=1.5)
YARN = YarnScaling(factor=4.0, original_max_seq_len=8, attention_factor=1.5, truncate=False)
WEIGHED = YarnScaling(factor=4.0, original_max_seq_len=8, mscale=0.5, mscale_all_dim=0.7)
WEIGHT = 7**-0.5 * (1 + 0.07 * math.log(4)) ** 2


MIXERS = dict(mixers=(RECURRENCE, ATTENTION))
QWEN = MIXERS | dict(
    recurrence=kv.GatedDeltaNet(4, 5, key_dim=3, num_key_heads=2),
    rope=Rope(share=2 / 3),
    norm_offset=1.0,
    use_qk_norm=True,
    use_attention_gate=True,
)
KDA = kv.GatedDeltaNet(3, 5, key_dim=5, decay="channel", kernel=2)
KIMI = MIXERS | LATENTS | dict(recurrence=KDA, rope=None)
MAMBA = MIXERS | dict(
    recurrence=kv.Mamba2(4, 3, state_dim=5, num_groups=2), attention_scale=0.5, embedding_scale=2.0
)
LFM2 = MIXERS | dict(recurrence=kv.ShortConvolution(num_channels=12, kernel=2), use_qk_norm=True)
SOFTMAX = dict(first_layer=0, num_experts=4, num_used=2, expert_size=3)
LATER = SOFTMAX | dict(first_layer=1)
GPT_OSS = dict(
    mlp_size=3,
    windows=(5, None),
    use_qkv_bias=True,
    use_out_bias=True,
    use_sink_logits=True,
    mlp_activation="clamped_silu",
    experts=Experts(**SOFTMAX, use_biases=True, normalizes=True),
)
OLMO = dict(use_pre_norms=False, use_post_norms=True, use_qk_norm=True, qk_norm_spans_heads=True)
NEMOTRON = dict(
    num_layers=3,
    mixers=(RECURRENCE, None, ATTENTION),
    recurrence=kv.Mamba2(2, 3, state_dim=5),
    has_split_layers=True,
    rope=None,
    mlp_activation="relu2",
)


@pytest.mark.quick_cases("qwen2-options3", "qwen3-options6", "gemma3_text-options10", "deepseek_v2-options11")
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", dict(tie_embeddings=True, param_dtype=jnp.bfloat16, rope=Rope(theta=123.0), norm_eps=0.5)),
        ("mistral", dict(windows=(5, 5))),
        ("qwen2", dict(use_qkv_bias=True, windows=(5, 5))),
        ("qwen2", dict(use_qkv_bias=True, dtype=jnp.bfloat16)),
        ("qwen3", dict(use_qk_norm=True, windows=(5, None), max_seq_len=7)),
        ("qwen3", dict(use_qk_norm=True, rope=Rope(scaling=YARN))),
        ("llama", dict(rope=Rope(theta=50.0, scaling=LinearScaling(factor=3.0)))),
        ("gemma2", GEMMA | dict(attention_soft_cap=4.0, final_soft_cap=3.0)),
        ("gemma2", GEMMA | dict(attention_scale=0.25, windows=())),
        (
            "gemma3_text",
            GEMMA | dict(use_qk_norm=True, window_rope=Rope(theta=9.0), tie_embeddings=True),
        ),
        ("deepseek_v2", LATENTS | dict(rope=Rope(is_interleaved=True, scaling=YARN))),
        (
            "deepseek_v2",
            LATENTS | dict(rope=Rope(is_interleaved=True, scaling=WEIGHED), attention_scale=WEIGHT),
        ),
        ("deepseek_v3", LATENTS | dict(param_dtype=jnp.bfloat16)),
        ("deepseek_v2", LATENTS | dict(rope=Rope(is_interleaved=True), experts=Experts(**EXPERTS))),
        ("deepseek_v3", LATENTS | dict(experts=Experts(**EXPERTS, is_sigmoid=True, num_groups=2))),
        ("qwen3_5_text", QWEN),
        ("qwen3_next", QWEN | dict(experts=Experts(**EXPERTS | {"weight_scale": 1.0}, use_shared_gate=True))),
        ("kimi_linear", KIMI),
        ("granitemoehybrid", MAMBA | dict(rope=Rope(theta=50.0), param_dtype=jnp.bfloat16)),
        ("nemotron_h", NEMOTRON),
        ("lfm2", LFM2 | dict(tie_embeddings=True)),
        ("llama", dict(use_qkv_bias=True, use_out_bias=True, use_mlp_bias=True)),
        ("ministral", dict(windows=(None, 5))),
        ("seed_oss", dict(use_qkv_bias=True, use_mlp_bias=True)),
        ("smollm3", dict(rotated=(True, False), use_mlp_bias=True)),
        ("granite", dict(embedding_scale=3.0, residual_scale=0.5, attention_scale=0.2, logits_divisor=7.0)),
        ("mixtral", dict(mlp_size=3, windows=(5, 5), experts=Experts(**SOFTMAX, normalizes=True))),
        ("qwen2_moe", dict(experts=Experts(**LATER, shared_size=5, use_shared_gate=True))),
        ("qwen3_moe", dict(use_qk_norm=True, experts=Experts(**LATER, normalizes=True))),
        ("gpt_oss", GPT_OSS | dict(param_dtype=jnp.bfloat16)),
        ("phi3", dict(rope=Rope(theta=50.0, share=2 / 3))),
        ("glm", dict(rope=Rope(share=1 / 3, is_interleaved=True))),
        ("glm4", dict(rope=Rope(share=1 / 3, is_interleaved=True), use_qkv_bias=True, use_post_norms=True)),
        ("olmo2", OLMO),
        ("olmo3", OLMO | dict(windows=(5, None), rope=Rope(scaling=YARN), window_rope=Rope())),
    ],
)
def test_an_own_model_comes_back(tmp_path, model_type, options):
    decoder = own_model(**options)
    config = decoder.config
    checkpoint.save(tmp_path, decoder)
    assert read_json(tmp_path)["model_type"] == model_type
    again = checkpoint.load(tmp_path, dtype=config.dtype, param_dtype=config.param_dtype)
    assert again.config == config
    assert jax.tree.structure(again) == jax.tree.structure(decoder)
    assert_same(decoder, again)


def test_saving_replaces_the_model_that_was_there(copy_checkpoint):
    folder = copy_checkpoint("qwen3")
    (folder / "tokenizer.json").write_text("of another model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    decoder = own_model()
    checkpoint.save(folder, decoder)
    assert_same(decoder, checkpoint.load(folder))
    left = {path.name for path in folder.iterdir()} - {"expected.safetensors"}
    assert {name for name in left if "-of-" not in name} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("num_files", [0, 1])
def test_an_interruption_of_saving_leaves_no_mixture_of_two_models(copy_checkpoint, monkeypatch, num_files):
    """It comes when so many files have taken their place."""
    folder, replace, done = copy_checkpoint("llama"), pathlib.Path.replace, []
    (folder / "tokenizer.json.part").write_text("of an earlier interruption")

    def interrupt(path, target):
        if len(done) == num_files:
            raise KeyboardInterrupt
        done.append(replace(path, target))

    monkeypatch.setattr(pathlib.Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(folder, own_model())
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        checkpoint.load(folder)
    monkeypatch.undo()
    checkpoint.save(folder, own_model())
    assert checkpoint.load(folder).config == OWN and not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        dict(use_qkv_bias=True, use_qk_norm=True),
        dict(windows=(5, 6)),
        dict(use_qk_norm=True, windows=(5, 6)),
        dict(use_sink_logits=True),
        dict(rotated=(True, False), use_qk_norm=True),
        dict(use_pre_norms=False),
        GEMMA | dict(attention_scale=0.3),  # no whole number's root
        GEMMA | dict(use_qk_norm=True, attention_soft_cap=2.0),
        LATENTS | dict(rope=Rope(scaling=WEIGHED)),  # which has a scale of its own
        LATENTS | dict(experts=Experts(**EXPERTS)),  # as V2 chooses them, with pairs that V3 has
        dict(experts=Experts(**EXPERTS)),
    ],
)
def test_a_model_that_no_family_has_is_not_saved(tmp_path, options):
    decoder = own_model(**options)
    with pytest.raises(CheckpointError, match=r"the model has \w+=.*, expected the options .*llama"):
        checkpoint.save(tmp_path / "new", decoder)
    assert not (tmp_path / "new").exists()
