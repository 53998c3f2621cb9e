"""The decoder against transformers, from committed fixtures (tests/fixtures/make_parity_fixtures.py)."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
import models.decoder
from models import attention, checkpoint
from models.config import Experts, Latents
from models.decoder import (
    Decoder,
    DecoderConfig,
    cache_config,
    forward,
    stacked,
    unstacked,
)
from models.rope import LinearScaling, Llama3Scaling, Rope
from tests.models.checkpoint_files import FAMILIES, FIXTURES
from tests.models.driver import ROW, WIDTH, Driver, all_tokens, assert_close, check_packed, expected, load

TINY = DecoderConfig(
    vocab_size=13, hidden_size=12, mlp_size=10, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=6
)


# --- parity ---


@pytest.mark.quick_cases("gemma3", "deepseek_v3_experts")
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3_experts", "gpt_oss"])
def test_logits_of_one_call_are_those_of_transformers(family):
    """Of all families the next test compares the logits, of prompts in pieces and of answers."""
    tokens = all_tokens(family)
    driver = Driver(load(family), {2: 40, ROW: len(tokens)})
    logits = driver.feed({ROW: tokens, 2: tokens[::-1][:40]})
    assert_close(logits[ROW], expected(family)["logits"])


@pytest.mark.quick_cases("llama-16")
@pytest.mark.parametrize(
    ("family", "block_size"),
    # Layers that see all, windows beside these, latents: other blocks.
    [(family, 16) for family in FAMILIES]
    + list(itertools.product(("llama", "gemma3", "deepseek_v3"), (1, 64))),
)
def test_greedy_tokens_through_the_cache_are_those_of_transformers(family, block_size):
    """The prompt in pieces, beside a row of another length; then the model's own choices, one by one."""
    prompt, greedy, want = (expected(family)[name] for name in ("prompt", "greedy", "logits"))
    driver = Driver(load(family), {0: 5, ROW: len(prompt)}, block_size)
    other = prompt[::-1]
    driver.feed({0: other[:5]})
    logits = [
        driver.feed({ROW: prompt[start : start + 9], 0: other[5 + start : 8 + start]})[ROW]
        for start in range(0, len(prompt), 9)
    ]
    assert_close(np.concatenate(logits), want[: len(prompt)])
    # The program of the pieces decodes too; one of width 1 with both kinds of layers.
    width = 1 if block_size == 16 and family == "qwen2_windows" else WIDTH
    last, chosen = logits[-1][-1], []
    for i in range(len(greedy)):
        chosen.append(int(last.argmax()))
        [last] = driver.feed({ROW: np.array(chosen[-1:])}, width)[ROW]
        assert_close(last, want[len(prompt) + i])
    assert chosen == greedy.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_windows", "deepseek_v3", "gpt_oss"])
def test_packed_tokens_give_the_same_logits(family):
    """With full layers and windows, with latents, which are read as they are, and with experts."""
    check_packed(load(family), family, [[7, 0, 13], [1, 14, 6], [11, 8, 1]], 23, block_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_forward_computes_the_same_however_tokens_reach_the_cache(family):
    decoder = load(family)
    config = cache_config(decoder.config, max_seqs=3, max_seq_len=32, block_size=4)
    step = functools.partial(forward, decoder)
    kv.testing.check_forward(step, config, vocab_size=decoder.config.vocab_size)


@pytest.mark.slow
def test_stacked_layers_compute_what_single_ones_do():
    """Two periods of a window and a full layer, and a window that is left over."""
    config = dataclasses.replace(TINY, num_layers=5, windows=(3, None, 3, None, 3))
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    assert [len(run.layer_ids) for run in config.runs] == [4, 1]
    cache = kv.init(cache_config(config, max_seqs=2, max_seq_len=16, block_size=4))
    cache, _ = kv.allocate(cache, [0, 1], [9, 6])
    tokens = np.arange(18, dtype=np.int32).reshape(2, 9) % 13

    @jax.jit
    def step_fn(decoder, cache):
        cache, step = kv.extend(cache, [9, 6], max_new=9)
        logits, cache = forward(decoder, tokens, cache, step)
        return logits, cache.pools

    got, want = jax.device_get((step_fn(decoder, cache), step_fn(unstacked(decoder), cache)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.std() > 0.01
        np.testing.assert_allclose(a, b, atol=1e-5)
    is_scan = ["scan" in str(jax.make_jaxpr(step_fn)(each, cache)) for each in (decoder, unstacked(decoder))]
    assert is_scan == [True, False]


def test_layers_leave_their_stacks_and_go_back_bit_for_bit():
    config = dataclasses.replace(TINY, num_layers=5, windows=(3, None, 3, None, 3))
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    singles = unstacked(decoder)
    assert len(singles.layers) == 5 and singles.embedding[...] is decoder.embedding[...]
    for i, place in enumerate([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]):
        want = decoder.layers[place[0]].mlp.up.kernel[...][place[1]]
        np.testing.assert_array_equal(singles.layers[i].mlp.up.kernel[...], want)
    back = stacked(singles)
    assert jax.tree.structure(back) == jax.tree.structure(decoder)
    jax.tree.map(np.testing.assert_array_equal, back, decoder)
    assert unstacked(singles) is singles and stacked(decoder) is decoder and decoder.is_stacked


def test_only_gpus_get_single_layers(monkeypatch):
    decoder = Decoder(TINY, rngs=nnx.Rngs(0))
    assert kv.decoding.prepared(forward, decoder) is decoder
    monkeypatch.setattr(models.decoder, "is_on_gpu", lambda x: True)
    singles = kv.decoding.prepared(forward, decoder)
    assert not singles.is_stacked and len(singles.layers) == TINY.num_layers
    assert kv.decoding.prepared(forward, singles) is singles


@pytest.mark.slow
def test_a_cache_whose_layers_do_not_repeat_like_the_model_is_refused():
    decoder, full = Decoder(TINY, rngs=nnx.Rngs(0)), kv.FullAttention(2, 6)
    config = kv.CacheConfig(
        [full, kv.SlidingWindow(2, 6, window=3)], num_blocks=4, max_seqs=1, max_seq_len=16
    )

    def logits(tokens):
        cache, step = kv.extend(kv.allocate(kv.init(config), [0], [1])[0], [1], max_new=1)
        return forward(decoder, tokens, cache, step)

    with pytest.raises(ValueError, match=r"repeat every 1 like .* from layer 0 on; use cache_config"):
        jax.eval_shape(logits, jax.ShapeDtypeStruct((1, 1), jnp.int32))


# --- dtypes ---


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_bfloat16_runs_and_stays_near(family):
    decoder, tokens = load(family, jnp.bfloat16), all_tokens(family)
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder)} == {jnp.dtype(jnp.bfloat16)}
    driver = Driver(decoder, {ROW: len(tokens)})
    assert {leaf.dtype for leaf in jax.tree.leaves(driver.cache.pools)} == {jnp.dtype(jnp.bfloat16)}
    logits, want = driver.feed({ROW: tokens})[ROW], expected(family)["logits"]
    assert logits.dtype == np.float32
    # One rounding is 2**-9 = 0.2% of a value; measured: 1.3 to 1.6% of the logits' spread.
    assert 1e-4 < np.sqrt(np.mean((logits - want) ** 2)) / want.std() < 0.03


@pytest.mark.slow
def test_parameters_may_be_wider_or_narrower_than_the_computation():
    tokens = all_tokens("llama")
    stored = checkpoint.load(FIXTURES / "llama", dtype=jnp.float32, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype(jnp.bfloat16)}
    logits = Driver(stored, {ROW: len(tokens)}).feed({ROW: tokens})[ROW]
    assert_close(logits, expected("llama")["logits"])  # the file's bfloat16 are the reference's weights
    master = checkpoint.load(FIXTURES / "llama", dtype=jnp.bfloat16, param_dtype=jnp.float32)
    driver, narrow = Driver(master, {ROW: 27}), Driver(load("llama", jnp.bfloat16), {ROW: 27})
    assert driver.cache.pools[0].k.dtype == jnp.bfloat16
    for a, b in zip(*(d.feed({ROW: tokens[:9]}).values() for d in (driver, narrow)), strict=True):
        np.testing.assert_array_equal(a, b)


# --- a pytree, a config ---


def test_two_models_of_one_config_share_a_program_and_a_structure(tmp_path):
    config = dataclasses.replace(TINY, num_layers=1)
    models = [Decoder(config, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    checkpoint.save(tmp_path, models[0])
    models.append(checkpoint.load(tmp_path))
    assert len({jax.tree.structure(model) for model in models}) == 1
    assert not jnp.array_equal(models[0].embedding[...], models[1].embedding[...])
    jitted = jax.jit(lambda model: model.embedding[...].sum())
    for model in models:
        jitted(model)
    assert jitted._cache_size() == 1  # pyright: ignore


@pytest.mark.slow
def test_a_new_model_predicts_about_evenly():
    config = dataclasses.replace(
        TINY, num_layers=1, tie_embeddings=True, use_qkv_bias=True, param_dtype=jnp.bfloat16
    )
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder)} == {jnp.dtype(jnp.bfloat16)}
    logits = Driver(decoder, {ROW: 12}).feed({ROW: np.arange(12)}, 12)[ROW]
    loss = (np.log(np.exp(logits).sum(axis=-1, keepdims=True)) - logits).mean()
    assert abs(loss - math.log(config.vocab_size)) < 0.1


GEMMA = dict(
    windows=(3, None),
    rope=Rope(theta=100.0, scaling=LinearScaling(factor=2.0)),
    window_rope=Rope(theta=20.0),
    norm_offset=1.0,
    use_post_norms=True,
    use_qk_norm=True,
    mlp_activation="gelu_tanh",
    embedding_scale=12**0.5,
    attention_scale=0.3,
    attention_soft_cap=1.5,
    final_soft_cap=2.0,
)
SINKS = dict(
    windows=(3, None),
    use_qkv_bias=True,
    use_out_bias=True,
    use_sink_logits=True,
    mlp_activation="clamped_silu",
    experts=Experts(
        first_layer=0, num_experts=5, num_used=3, expert_size=7, use_biases=True, normalizes=True
    ),
)
OLMO = dict(
    rotated=(True, False),
    use_pre_norms=False,
    use_post_norms=True,
    use_qk_norm=True,
    qk_norm_spans_heads=True,
    use_mlp_bias=True,
)
EXPERTS = Experts(first_layer=0, num_experts=5, num_used=2, expert_size=7, shared_size=9, weight_scale=2.0)
LATENTS = dict(
    num_kv_heads=4,
    head_dim=7,
    latents=Latents(latent_dim=9, rope_dim=4, nope_dim=3, value_dim=5, q_rank=8),
    rope=Rope(is_interleaved=True),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_parameters", "most_absorbed"),
    [
        (GEMMA | dict(use_qkv_bias=True), 16, 0),
        (LATENTS, 12, 128),
        (LATENTS, 12, 0),
        (dict(experts=EXPERTS), 13, 0),
        (SINKS, 19, 0),
        (OLMO, 14, 0),
    ],
    ids=["gemma", "absorbed", "expanded", "experts", "sinks", "olmo"],
)
def test_gradients_reach_every_parameter(monkeypatch, options, num_parameters, most_absorbed):
    """Through the cache, with two kinds of layers: the slope along the gradient is its squared length."""
    monkeypatch.setattr(attention, "MOST_ABSORBED", most_absorbed)
    config = dataclasses.replace(TINY, **options)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    # As they are made, scores are so small that the rotations, queries and keys hardly matter.
    decoder = jax.tree.map(
        lambda leaf: (
            np.asarray(leaf)
            + np.float32(0.3) * np.sin(np.arange(1, leaf.size + 1, dtype=np.float32)).reshape(leaf.shape)
        ),
        decoder,
    )
    cache = kv.init(cache_config(config, max_seqs=2, max_seq_len=16, block_size=4))
    cache, _ = kv.allocate(cache, [0, 1], [7, 4])
    tokens = np.array([[1, 5, 2, 8, 3, 11, 0], [4, 4, 9, 12, 0, 0, 0]], np.int32)
    num_new = np.array([7, 4], np.int32)

    def loss(decoder):
        new_cache, step = kv.extend(cache, num_new, max_new=7)
        logits, _ = forward(decoder, tokens, new_cache, step)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]
        is_target = jnp.arange(1, 7)[None] < num_new[:, None]
        return -jnp.where(is_target, chosen, 0).mean()

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    gradient = jax.device_get(loss_and_gradient(decoder)[1])
    assert jax.tree.structure(gradient) == jax.tree.structure(decoder)
    squared = {
        jax.tree_util.keystr(path): float(np.vdot(leaf, leaf))
        for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]
    }
    assert len(squared) == 3 + len(config.runs) * num_parameters
    # A bias added to all keys moves all scores of a query alike, but for its rotation and norm here.
    assert min(squared.values()) > 1e-8, min(squared, key=lambda name: squared[name])
    rate = 1e-3 / sum(squared.values())

    def moved(rate):
        return jax.tree.map(lambda leaf, slope: leaf + np.float32(rate) * slope, decoder, gradient)

    slope = (float(loss_and_gradient(moved(rate))[0]) - float(loss_and_gradient(moved(-rate))[0])) / 2e-3
    assert abs(slope - 1) < 0.01


@pytest.mark.parametrize("family", ["llama", "deepseek_v3_experts"])
def test_a_token_outside_of_the_vocabulary_spoils_its_own_row_alone(family):
    """Also where tokens of all rows are sorted by their experts."""
    decoder, tokens = load(family), all_tokens(family)[:9]
    clean = Driver(decoder, {0: 9, ROW: 9, 2: 9}).feed({0: tokens, ROW: tokens, 2: tokens})
    for bad in (97, -1):
        broken = np.where(np.arange(9) == 5, bad, tokens)
        logits = Driver(decoder, {0: 9, ROW: 9, 2: 9}).feed({0: tokens, ROW: broken, 2: tokens})
        assert np.isnan(logits[ROW][5]).all()
        for row in (0, 2):
            np.testing.assert_array_equal(logits[row], clean[row])


def test_cache_config_groups_layers_by_window():
    config = dataclasses.replace(TINY, num_layers=4, windows=(None, 8, 8, None), max_seq_len=99)
    sizes = cache_config(config, max_seqs=2, block_size=4, max_rollback=3)
    full, window = kv.FullAttention(2, 6), kv.SlidingWindow(2, 6, window=8, max_rollback=3)
    assert sizes.layers == (full, window, window, full)
    assert (sizes.max_seq_len, sizes.max_seqs, sizes.block_size, sizes.dtype) == (99, 2, 4, jnp.float32)
    small = cache_config(
        config, max_rollback=3, quantise=lambda kind: kv.Quantised(kind, "int4", rotate=True)
    )
    assert small.layers == tuple(kv.Quantised(kind, "int4", rotate=True) for kind in sizes.layers)
    narrow = dataclasses.replace(TINY, dtype=jnp.bfloat16, max_seq_len=100_000)
    assert (cache_config(narrow).dtype, cache_config(narrow).max_seq_len) == (jnp.bfloat16, 8192)
    assert cache_config(narrow, dtype=jnp.float32, max_seq_len=50).max_seq_len == 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dtype=jnp.float16), "dtype is float16, expected float32 or bfloat16"),
        (dict(dtype="junk"), "dtype is junk, expected float32 or bfloat16"),
        (dict(dtype={"names": []}), "dtype is {'names': .*, expected float32 or bfloat16"),
        (dict(param_dtype=jnp.int32), "param_dtype is int32, expected float32 or bfloat16"),
        (dict(num_layers=0), "num_layers is 0, expected a positive, finite number"),
        (dict(num_q_heads=3), "num_q_heads is 3, expected a multiple of num_kv_heads = 2"),
        (dict(head_dim=7), "head_dim is 7, expected an even number"),
        (dict(windows=(4,)), "windows has 1 entries, expected 2 or none"),
        (dict(mlp_activation="relu"), "mlp_activation is 'relu', expected one of silu, gelu_tanh"),
        (dict(attention_soft_cap=0.0), "attention_soft_cap is 0.0, expected a positive, finite number"),
        (dict(final_soft_cap=math.inf), "final_soft_cap is inf, expected a positive, finite number"),
        (
            LATENTS | dict(windows=(4, None)),
            r"windows is \(4, None\) with latents, expected none: no layer kind .*; let all layers see all",
        ),
        (LATENTS | dict(num_kv_heads=2), "num_kv_heads is 2 with latents, expected num_q_heads = 4"),
        (LATENTS | dict(head_dim=6), "head_dim is 6, expected nope_dim \\+ rope_dim = 7"),
        (LATENTS | dict(use_qk_norm=True), "use_qk_norm is True with latents, expected False"),
    ],
)
def test_an_impossible_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_impossible_latents_are_refused():
    with pytest.raises(ValueError, match="rope_dim is 3, expected an even number: pairs are rotated"):
        Latents(latent_dim=9, rope_dim=3, nope_dim=3, value_dim=5)
    with pytest.raises(ValueError, match="value_dim is 0, expected a positive, finite number"):
        Latents(latent_dim=9, rope_dim=4, nope_dim=3, value_dim=0)


def test_impossible_rotations_are_refused():
    with pytest.raises(ValueError, match="rope_theta is 0.0, expected a positive, finite number"):
        Rope(theta=0.0)
    with pytest.raises(ValueError, match="high_freq_factor is 1.0, expected above low_freq_factor = 1.0"):
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=64)
    with pytest.raises(ValueError, match="factor is 0.0, expected a positive, finite number"):
        Llama3Scaling(factor=0.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64)
