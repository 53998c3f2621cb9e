"""Gemma and DeepSeek: prompts of 1 to 300 tokens, windows shorter than they, and what else is theirs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from models.decoder import cache_config, forward
from tests.models.driver import ROW, Driver, all_tokens, assert_close, expected, load

NARROW = 128  # tokens of a row, for which latents are not expanded
# With windows and with latents: what else tells families apart does not depend on the length of a prompt.
FAMILIES = "gemma3", "deepseek_v2"


@pytest.mark.slow
@pytest.mark.parametrize("prompt_len", [1, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_other_lengths(family, prompt_len):
    """In one call, for which latents are expanded; then the model's own choices, for which they are not."""
    prompt, greedy, want = (
        expected(family)[f"{name}_{prompt_len}"] for name in ("prompt", "greedy", "logits")
    )
    driver = Driver(load(family), {0: 140, ROW: prompt_len}, max_seq_len=320)
    pieces = {ROW: prompt, 0: expected(family)["prompt_300"][::-1][:140]}
    logits = driver.feed(pieces, 300)[ROW]
    assert_close(logits, want[:prompt_len])
    last, chosen = logits[-1], []
    for i in range(len(greedy)):
        chosen.append(int(last.argmax()))
        [last] = driver.feed({ROW: np.array(chosen[-1:])}, NARROW)[ROW]
        assert_close(last, want[prompt_len + i])
    assert chosen == greedy.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_in_pieces(family):
    """For whose width latents are read as they are."""
    tokens, want = all_tokens(family, "_300"), expected(family)["logits_300"]
    driver = Driver(load(family), {ROW: len(tokens)}, max_seq_len=320)
    for start in range(0, len(tokens), 121):
        piece = tokens[start : start + 121]
        assert_close(driver.feed({ROW: piece}, NARROW)[ROW], want[start : start + len(piece)])


def test_latents_are_expanded_where_a_row_has_room_for_more_than_128_tokens(monkeypatch):
    """And read as they are elsewhere, also in packed steps of more tokens: each of them is a row there."""
    decoder, expanded, attention = load("deepseek_v3"), {}, kv.attention

    def spy(*args, weights, **options):
        expanded[args[-1].positions.shape].add(weights is not None)
        return attention(*args, weights=weights, **options)

    monkeypatch.setattr(kv, "attention", spy)
    config = cache_config(decoder.config, max_seqs=1, max_seq_len=160)

    def logits(tokens, **room):
        cache, _ = kv.allocate(kv.init(config), [0], [1])
        cache, step = kv.extend(cache, [1], **room)
        return forward(decoder, tokens, cache, step)

    for shape in ((1, 1), (1, 128), (1, 129), (130,)):
        room = {"num_tokens": 130} if shape == (130,) else {"max_new": shape[1]}
        expanded[shape] = set()
        jax.eval_shape(functools.partial(logits, **room), jax.ShapeDtypeStruct(shape, jnp.int32))
    assert expanded == {(1, 1): {False}, (1, 128): {False}, (1, 129): {True}, (130,): {False}}


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_an_implementation_without_soft_caps_says_so(part):
    """Each half of a backend is told of the cap by name, and what it raises comes through."""

    def refuse(*_, soft_cap, **__):
        raise NotImplementedError(f"soft_cap is {soft_cap}, expected None; use implementation 'xla'")

    name = f"without soft caps, {part}"
    kv.backends.register_backend(kv.backends.Backend(name, lambda *_: None, **{part: refuse}))
    decoder, num_new = load("gemma2"), {"decode": 1, "prefill": 9}[part]
    config = cache_config(decoder.config, max_seqs=1, max_seq_len=16, implementation=name)

    def logits(tokens):
        cache, step = kv.extend(kv.allocate(kv.init(config), [0], [9])[0], [num_new], max_new=num_new)
        return forward(decoder, tokens, cache, step)

    with pytest.raises(NotImplementedError, match="soft_cap is 2.0, expected None; use implementation 'xla'"):
        jax.eval_shape(logits, jax.ShapeDtypeStruct((1, num_new), jnp.int32))
