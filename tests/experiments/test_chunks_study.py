"""The study of composed passages and its gate: what they compare, what the bars say, and bad input."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from experiments.chunks import __main__ as chunks
from experiments.chunks import check, quality, rows, times, trace
from experiments.common import corpus
from experiments.common.command import InputError
from models import checkpoint
from models.decoder import Decoder, DecoderConfig
from models.rope import Rope, rotate, rotation
from models.tokenizer import ByteTokenizer
from tests.experiments import tiny

TINY = tiny.config(use_qk_norm=False)


def test_the_command_reports_what_it_measured(monkeypatch, report_of, recorded):
    record = recorded("chunks")
    monkeypatch.setattr(chunks, "_studied", lambda decoder: record)
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: None)
    assert report_of(chunks)["bars"] == record["bars"]


def test_prompts_are_passages_of_held_out_files():
    same, mixed = rows.read_prompts(3, chunk_len=40)
    text = np.concatenate([same.tokens, same.question], axis=1)
    files = [file for file in corpus.held_out_files().values() if len(file) > 5800]
    assert [bytes(row.tolist()) for row in text] == [file[2500:2700] for file in files[:3]]
    assert (mixed.question == mixed.chunks[:, 1]).all() and mixed.first_scored == 10
    assert same.starts.tolist() == [[0, 40, 80, 120]] * 3
    assert len({row.tobytes() for row in [*mixed.chunks.reshape(12, 40), *mixed.others]}) >= 12


@pytest.mark.slow
def test_requests_are_of_popular_files_more_often():
    requests = trace.make_requests(num_requests=50, num_files=8)
    firsts = [bytes(request.prompt[start:end]) for request in requests for start, end in request.spans]
    counts = sorted((firsts.count(passage) for passage in set(firsts)), reverse=True)
    assert len(counts) == 8 and counts[0] > 2 * counts[-1] and sum(counts) == 200
    for request in requests:
        assert [start for start, _ in request.spans] == [0, *(end for _, end in request.spans[:-1])]
        assert 16 <= len(request.prompt) - request.spans[-1][1] < 48
        assert len({*request.spans}) == 4


@pytest.mark.slow
def test_what_each_side_computes_of_requests():
    """Counted by hand: each passage once and its share, the text that prompts begin with alike once."""
    a, b = list(range(100, 130)), list(range(40))
    spans = [(0, 30), (30, 70)]
    requests = [
        trace.Request([*a, *b, 7, 8], spans),
        trace.Request([*a, *b, 7, 8], spans),
        trace.Request([*b, *a, 9], [(0, 40), (40, 70)]),
    ]
    found = {(r["side"], r["share"]): r["computed"] for r in trace.measure(requests)}
    assert found["no cache", None] == 72 + 72 + 71
    assert found["prefix cache, memory for all", None] == 72 + 8 + 71  # of blocks that are full
    questions, again = 2 + 2 + 1, {0.0: 0, 0.2: 8 + 8 + 6, 0.5: 20 + 20 + 15}
    for share in trace.SHARES:
        assert found["chunk cache", share] == 70 + questions + again[share]


@pytest.mark.slow
def test_a_study_of_a_tiny_model(decoder, monkeypatch):
    """First passages are a prefill's bit for bit, everything computed again is the prefill."""
    monkeypatch.setattr(quality, "SHARES", (0.2,))
    same, _ = rows.read_prompts(2, chunk_len=20)
    study = quality.Study(decoder, same)
    found = quality.measure(study)
    kl = {(record["selector"], record["share"]): record["kl"] for record in found["records"]}
    assert found["different_bits_of_first"] == 0 and found["difference_of_all"] < 1e-4
    assert abs(kl[quality.ALL, 1.0]) < 1e-6 < kl[quality.NONE, 0.0] < kl[quality.UNTURNED, 0.0]
    assert {name for name, _ in kl} == {
        *(quality.EARLIER, quality.SEEN, "key deviation", "value deviation", "first", "random"),
        *(quality.ALL, quality.NONE, quality.UNTURNED),
    }
    # Without repair a deviation is what full prefill has otherwise, for the first layer is right.
    _, metadata = study.candidates()["key deviation"]
    right, stored = (
        np.stack([kv.gather(cache, row, 1)[0][:80] for row in range(2)])
        for cache in (study.full, study.composed)
    )
    np.testing.assert_allclose(
        metadata.k_deviation[:, :80], ((right - stored) ** 2).sum((2, 3)), rtol=1e-3, atol=1e-7
    )
    places = study.chosen("first", metadata, 0.2)
    assert places.tolist() == [[20, 21, 22, 23, 40, 41, 42, 43, 60, 61, 62, 63]] * 2
    # Attention, of this prompt and of an earlier one: in front of a passage is less than everything.
    _, seen = study.candidates()[quality.SEEN]
    for attention in (seen.attention, metadata.attention):
        attention = np.asarray(attention)
        assert (attention[:, :20] == 0).all() and (attention[:, 20:80] > 0).all() and attention.max() < 1
    by_hand = attention_by_hand(decoder, same.tokens)
    np.testing.assert_allclose(seen.attention[:, :80], by_hand, rtol=1e-3, atol=1e-5)
    earlier = np.concatenate([same.others, *same.chunks.swapaxes(0, 1)[:0:-1]], axis=1)
    by_hand = np.split(attention_by_hand(decoder, earlier), 4, axis=1)
    by_hand = np.concatenate([by_hand[0], *by_hand[:0:-1]], axis=1)
    np.testing.assert_allclose(metadata.attention[:, :80], by_hand, rtol=1e-3, atol=1e-5)


def attention_by_hand(decoder, tokens):
    """Mean over layers and heads of what each token gives to earlier passages, without a cache."""
    found = []

    def attend(layer, q, k, v):
        logits = jnp.einsum("bthgd,bshd->bhgts", q.reshape(*q.shape[:2], 2, 2, 8), k) / np.sqrt(8)
        is_seen = np.tril(np.ones((80, 80), bool))
        weights = jnp.where(is_seen, jnp.exp(logits - logits.max()), 0)
        weights = weights / weights.sum(-1, keepdims=True)
        is_before = np.arange(80)[None] // 20 < np.arange(80)[:, None] // 20
        found.append(jnp.where(is_before, weights, 0).sum(-1).mean((1, 2)))
        return jnp.einsum("bhgts,bshd->bthgd", weights, v).reshape(q.shape)

    positions = np.tile(np.arange(80), (2, 1))
    rows.dense_decoder.run(decoder, jnp.asarray(tokens), jnp.asarray(positions), attend)
    return np.mean(found, axis=0)


@pytest.mark.slow
def test_ways_are_timed_in_turns(decoder, monkeypatch):
    monkeypatch.setattr(times, "SHARES", (0.0, 0.2))
    same, _ = rows.read_prompts(2, chunk_len=20)
    found = times.measure(decoder, same, num_rounds=2)
    assert [(record["way"], record["share"]) for record in found] == [
        (times.FULL, 1.0),
        *((times.FIRST, share) for share in times.SHARES),
        (times.DEVIATION, 0.2),
    ]
    assert found[0]["times_full"] == [1, 1, 1] and found[1]["times_full"][1] > 0
    assert all(record["num_calls"] == 2 and record["first_call_s"] > 0 for record in found)


@pytest.fixture(scope="module")
def folder(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint.save(folder, decoder)
    return folder


@pytest.mark.slow
def test_windows_and_several_rotations_are_checked_too():
    """With everything computed again a prompt is the prefilled one, in each layer."""
    options = {"windows": (5, None), "window_rope": Rope(theta=100.0)}
    decoder = Decoder(DecoderConfig(**{**vars(TINY), **options}), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    pieces = [rng.integers(256, size=length).astype(np.int32) for length in (13, 7, 9, 4)]
    prompt = check.Prompt(pieces[:-1], pieces[-1])
    rotations, keys = rows.rotations_of(decoder, 29), jnp.asarray(rng.standard_normal((1, 2, 8), np.float32))
    for rope, turn in zip(decoder.config.layer_ropes, rotations, strict=True):
        want = rotate(keys, rotation(rope, 8, jnp.array([7])))
        np.testing.assert_allclose(turn(keys, jnp.array([7])), want, rtol=1e-5, atol=1e-6)
    reuse = kv.chunks.Reuse(rotate=rotations, share=0.5)
    found = check.measure(decoder, [prompt], reuse, most_kl=1.0, least_agreement=0.0)
    assert [bar["holds"] for bar in found["bars"]] == [True] * 4
    [record] = found["prompts"]
    assert record["off_when_all"] < 1e-4 and 0 < record["with"]["kl"] < record["without"]["kl"]


def prompts_file(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


PROMPT = {"chunks": ["def f(x):\n", "    return x + 1\n", "def f(x):\n"], "question": "print(f(2))"}


@pytest.mark.slow
def test_the_gate_passes_and_fails(folder, tmp_path, capsys, report_of, monkeypatch):
    """Prompts of different lengths, one with a passage twice; then with a rotation that is wrong."""
    path = prompts_file(tmp_path, PROMPT, {"chunks": ["import os, sys\n"], "question": "os"})
    arguments = ["--check", str(folder), str(path)]
    found = report_of(chunks, *arguments, "--least-agreement", "0")
    assert [bar["holds"] for bar in found["bars"]] == [True] * 4
    one, two = found["prompts"]
    assert (one["tokens"], one["question"], one["again"]) == (37, 11, 4 + 2)
    # A prompt of one passage is a prefix: nothing is computed again, and nothing is off.
    assert (two["tokens"], two["question"], two["again"]) == (15, 2, 0) and two["without"]["kl"] < 1e-6
    assert 0 < one["with"]["kl"] < one["without"]["kl"]
    assert chunks.main([*arguments, "--most-kl", "0", "--least-agreement", "0"]) == 1
    said = capsys.readouterr().out
    assert "1 of 4 bars do not hold" in said and "may not be composed so" in said

    other = DecoderConfig(**{**vars(TINY), "rope": Rope(theta=900.0)})
    rotations = rows.rotations_of(Decoder(other, rngs=nnx.Rngs(0)), 37)
    monkeypatch.setattr(rows, "rotations_of", lambda *_: rotations)
    found = report_of(chunks, *arguments, "--most-kl", "9", "--least-agreement", "0", code=1)
    assert [bar["holds"] for bar in found["bars"]] == [False, True, True, True]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[", "prompt 1 is no prompt (JSONDecodeError("),
        ({"chunks": ["a"]}, "prompt 1 is no prompt (KeyError('question'))"),
        ({"chunks": [], "question": "b"}, 'expected {"chunks": ["text", ...], "question": "text"}'),
        ({"chunks": ["a", ""], "question": "b"}, "none of them empty"),
        ({"chunks": ["a"], "question": ""}, "none of them empty"),
        ({"chunks": ["a", 3], "question": "b"}, "none of them empty"),
        ("", "has no prompt, expected lines of JSON"),
    ],
)
def test_prompts_that_are_none_are_refused(line, said, tmp_path):
    with pytest.raises(InputError, match=re.escape(said)):
        check.read_prompts(prompts_file(tmp_path, line), ByteTokenizer())


def test_what_cannot_be_checked_is_one_sentence(tmp_path, refusal):
    folder, path = corpus.MODEL, prompts_file(tmp_path, PROMPT)
    for arguments, said in [
        ([folder, tmp_path / "none"], "expected lines of JSON"),
        ([tmp_path, path], "config.json"),
        ([folder, path, "--selector", "attention"], "which needs attention"),
        ([folder, path, "--selector", "best"], "selector is 'best', expected one of"),
        ([folder, path, "--picture", tmp_path / "a.png"], "a check has no figure"),
    ]:
        assert said in refusal(chunks, "--check", *arguments)


def test_what_a_tokeniser_puts_in_front_stands_once():
    class Tokenizer:
        def encode(self, text):
            return [1, *text.encode()]

    line = json.dumps({"chunks": ["ab", "c"], "question": "d"})
    prompt = check._prompt("one", line, Tokenizer())
    assert [chunk.tolist() for chunk in prompt.chunks] == [
        [1, 97, 98],
        [99],
    ] and prompt.question.tolist() == [100]
    assert prompt.starts.tolist() == [0, 3, 4]
