"""Samples for training: judged by the rule, drawn and scored behind one prompt, and gone on with later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("optax")

import kvcache_jax as kv
from experiments.rollouts import __main__ as command
from experiments.rollouts import sampling, study, task, training
from experiments.rollouts.partial import Group, Sampler
from experiments.rollouts.sampling import Rollouts, roll_out, score, without_sharing
from experiments.rollouts.study import Sizes
from experiments.rollouts.task import MAX_ANSWER, STOP
from experiments.train.bits_per_byte import empty_cache, losses
from models.decoder import Decoder, cache_config
from tests.experiments import tiny

TINY = tiny.config(**tiny.ONE_LAYER, vocab_size=64)
SIZES = Sizes(prompts=3, group=4, updates=3, seed=5)


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    """Optax raises a float to an integer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def decoder():
    """Says `STOP` more often than other tokens, so that answers end at different places."""
    decoder = Decoder(TINY, rngs=nnx.Rngs(0))
    embedding = 12 * decoder.embedding[...] + 0.5  # what all tokens have in common, and `STOP` more of it
    decoder.embedding[...] = embedding.at[STOP].add(0.3)
    return decoder


@pytest.fixture(scope="module")
def drawn(decoder):
    draw = jax.jit(roll_out, static_argnames="group_size")
    return draw(decoder, SIZES.batch(0), jax.random.key(1), SIZES.group)


def text(tokens):
    return bytes(int(token) for token in tokens).rstrip(b"\0").decode()


# --- the task ---


def test_questions_are_answered_by_their_digits_in_order():
    prompts = task.questions(np.random.default_rng(0), 50)
    assert prompts.tokens.shape == (50, task.MAX_PROMPT) and len(set(prompts.length.tolist())) > 5
    for tokens, length, answer in zip(*prompts, strict=True):
        *examples, question = text(tokens).split(";")
        assert len(text(tokens)) == length and len(examples) == task.NUM_EXAMPLES
        for asked, said in (each.split(">") for each in [*examples, question + text(answer)[:-1]]):
            assert len(asked) in task.NUM_DIGITS and "".join(sorted(asked)) == said
        assert text(answer)[-1] == ";"


def test_texts_to_begin_with_have_the_digits_in_any_order():
    texts = [text(row) for row in task.unsorted_texts(np.random.default_rng(0), 20)]
    assert {len(each) for each in texts} == {task.MAX_PROMPT + MAX_ANSWER}
    pairs = [pair.split(">") for each in texts for pair in each.split(";")[:-1]]
    assert all(sorted(asked) == sorted(said) for asked, said in pairs)
    num_right = sum("".join(sorted(asked)) == said for asked, said in pairs)
    assert 0.2 < num_right / len(pairs) < 0.6


def test_one_answer_is_right():
    """Not what is too short, too long, has no end, or other digits."""
    said = ["024;", "024", "02;", "0245;", "042;", "02;4;", ""]
    tokens = np.zeros((len(said), MAX_ANSWER), np.int32)
    for row, each in zip(tokens, said, strict=True):
        row[: len(each)] = list(each.encode())
    answer = jnp.broadcast_to(jnp.asarray(tokens[0]), tokens.shape)
    assert task.rewards(jnp.asarray(tokens), answer).tolist() == [1, 0, 0, 0, 0, 0, 0]


# --- drawing and scoring ---


@pytest.mark.slow
def test_answers_are_drawn_behind_their_prompt_and_end(decoder, drawn):
    """Log-probabilities are those of the same tokens read at once, without forks, in rows of their own."""
    prompts, mask = SIZES.batch(0), np.asarray(drawn.mask)
    length = mask.sum(axis=1)
    assert len(set(length.tolist())) >= 3
    assert (mask == (np.arange(MAX_ANSWER) < length[:, None])).all()
    is_stop = np.asarray(drawn.tokens) == STOP
    assert (
        is_stop.sum(axis=1) == (is_stop & (np.arange(MAX_ANSWER) == length[:, None] - 1)).sum(axis=1)
    ).all()
    assert ((length == MAX_ANSWER) | is_stop.any(axis=1)).all()
    assert (np.asarray(drawn.tokens)[~mask] == 0).all() and (np.asarray(drawn.logprobs)[~mask] == 0).all()
    windows = np.zeros((SIZES.rows, task.MAX_PROMPT + MAX_ANSWER + 1), np.int32)
    for row, window in enumerate(windows):
        i = row // SIZES.group
        end = prompts.length[i] + length[row]
        window[:end] = [
            *prompts.tokens[i, : prompts.length[i]],
            *np.asarray(drawn.tokens)[row, : length[row]],
        ]
    cache = empty_cache(TINY, SIZES.rows, windows.shape[1] - 1)
    nats = np.asarray(jax.jit(losses)(decoder, jnp.asarray(windows), cache))
    for row in range(SIZES.rows):
        begin = prompts.length[row // SIZES.group] - 1
        expected = -nats[row, begin : begin + length[row]]
        np.testing.assert_allclose(np.asarray(drawn.logprobs)[row, : length[row]], expected, atol=1e-5)


@pytest.mark.slow
def test_shared_and_apart_are_the_same(decoder, drawn):
    """Answers, their scores, and the gradient, through forks and copies or not."""
    prompts = SIZES.batch(0)
    each = without_sharing(prompts, SIZES.group)
    alone = jax.jit(roll_out, static_argnames="group_size")(decoder, each, jax.random.key(1), 1)
    assert (alone.tokens == drawn.tokens).all() and (alone.mask == drawn.mask).all()
    found = []
    # Other advantages than the rule gives, for all of its answers are wrong here.
    weight = jax.random.normal(jax.random.key(2), (SIZES.rows,))
    for read in (prompts, each):
        np.testing.assert_allclose(jax.jit(score)(decoder, read, drawn), drawn.logprobs, atol=1e-5)

        def loss(decoder, read=read):
            return training.grpo_loss(score(decoder, read, drawn), drawn, weight)[0]

        found.append(jax.tree.leaves(jax.jit(jax.grad(loss))(decoder)))
    for shared, apart in zip(*found, strict=True):
        np.testing.assert_allclose(shared, apart, atol=1e-5 * float(jnp.abs(apart).max()))
        assert float(jnp.abs(apart).max()) > 0


@pytest.mark.slow
def test_a_pool_that_is_short_makes_no_numbers(decoder, monkeypatch):
    def short(config, prompts, group_size):
        return cache_config(config, block_size=16, max_seqs=SIZES.rows, max_seq_len=112, num_blocks=18)

    monkeypatch.setattr(sampling, "cache_sizes", short)
    found = roll_out(decoder, SIZES.batch(0), jax.random.key(1), SIZES.group)
    assert np.isnan(np.asarray(found.logprobs)[np.asarray(found.mask)]).all()


# --- the loss ---


def test_the_loss_is_clipped_and_counts_tokens_of_answers_alone():
    mask = jnp.array([[True, True, False], [True, False, False]])
    rollouts = Rollouts(jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3)), mask)
    logprobs = jnp.log(jnp.array([[1.5, 0.5, 9.0], [1.5, 9.0, 9.0]]))
    loss, (difference, share) = training.grpo_loss(logprobs, rollouts, jnp.array([2.0, -1.0]))
    # The gain of what is better stops at 1.2 times; what is worse counts whole.
    assert float(loss) == pytest.approx(-(2 * 1.2 + 2 * 0.5 - 1.5) / 3)
    assert float(difference) == pytest.approx(np.log(2)) and float(share) == 1
    slope = jax.grad(lambda x: training.grpo_loss(x, rollouts, jnp.array([2.0, -1.0]))[0])(logprobs)
    np.testing.assert_allclose(slope, [[0, -1 / 3, 0], [0.5, 0, 0]], atol=1e-6)


def test_an_answer_counts_by_what_it_is_above_its_group():
    found = training.advantages(jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), 2)
    np.testing.assert_allclose(found, [1, -1, -1, 1, 0, 0], atol=1e-3)


# --- the engine beside ---


def test_a_group_takes_answers_as_they_come():
    group = Group(SIZES.batch(0), 2)
    said = [(0, [1, 2], None, 0), (1, [3], "stop", 0), (0, [4], "length", 1)]
    for sample, tokens, reason, version in said:
        event = kv.engine.TokenEvent("a", sample, tokens, [-0.5] * len(tokens), [], reason)
        group.add(event, version)
    assert group.tokens[:, :3].tolist() == [[1, 2, 4], [3, 0, 0]] and group.num_ended == 2
    assert group.version[:, :3].tolist() == [[0, 0, 1], [0, -1, -1]] and group.num_tokens.tolist() == [3, 1]
    with pytest.raises(RuntimeError, match="ended by 'refused'"):
        group.add(kv.engine.TokenEvent("a", 1, [], [], [], "refused"), 1)


@pytest.mark.slow
def test_answers_go_on_under_new_weights_and_none_is_lost(decoder):
    """Every question is answered once; what is asked after an update is drawn under it alone."""
    sampler, seen, partial = Sampler(decoder, 5, SIZES.group, 6, 6), [], 0
    other = jax.tree.map(lambda x: 0.9 * x, decoder)
    weights = [decoder, other, decoder, other]
    check = jax.jit(score)
    for number, params in enumerate(weights):
        if number:
            sampler.engine.set_params(params)
        num_asked = sampler.num_asked
        for _ in range(4):
            batch = sampler.collect(SIZES.prompts)
            seen += batch.ids
            partial += batch.num_partial
            drawn_at, mask = batch.version, np.asarray(batch.rollouts.mask)
            assert ((drawn_at >= 0) == mask).all() and drawn_at.max() <= number
            assert (np.diff(drawn_at, axis=1)[mask[:, 1:]] >= 0).all()
            scores = np.asarray(check(params, batch.prompts, batch.rollouts))
            rows = np.repeat(np.array(batch.ids) >= num_asked, SIZES.group)
            assert (drawn_at[rows][mask[rows]] == number).all()
            np.testing.assert_allclose(scores[rows], batch.rollouts.logprobs[rows], atol=1e-5)
        assert rows.any()
    assert len(set(seen)) == len(seen) and partial > 0
    counts = sampler.engine.figures().counts
    assert counts[kv.engine.Counter.UPDATES] == 3 and counts[kv.engine.Counter.FORKS] > 0
    assert counts[kv.engine.Counter.PREFILL_TOKENS] < 0.7 * SIZES.group * sampler.num_prompt_tokens


# --- the command ---


def test_the_command_says_what_holds(monkeypatch, report_of, recorded):
    record, sizes = recorded("rollouts"), []
    step, engine = record["ways"]
    monkeypatch.setattr(command, "teach", lambda seed, num_steps: None)
    monkeypatch.setattr(study, "compile_steps", lambda decoder, given: sizes.append(given))
    monkeypatch.setattr(study, "train_in_step", lambda *_: step)
    monkeypatch.setattr(study, "train_beside_engine", lambda *_: engine)
    monkeypatch.setattr(study, "compare_sharing", lambda *_: record["sharing"])
    assert report_of(command, "--seed", "3", "--updates", "7")["bars"] == record["bars"]
    assert sizes == [Sizes(prompts=16, group=8, updates=7, seed=3)]


@pytest.mark.slow
def test_a_step_trains_and_is_compared_with_one_that_does_not_share(decoder, monkeypatch):
    monkeypatch.setattr(study, "NUM_ROUNDS", 1)
    steps = study.compile_steps(decoder, SIZES)
    way = study.train_in_step(decoder, SIZES, steps)
    assert len(way["rewards"]) == 3 and way["difference"] < 1e-5 and way["clipped"] == 0
    found = study.compare_sharing(decoder, SIZES, steps)
    assert found["same_answers"] == 1 and found["gradient_difference"] < 1e-4
    shared, apart = found["ways"]
    assert apart["prompt_tokens"] == SIZES.group * shared["prompt_tokens"] and len(apart["ms"]) == 1
    assert shared["temporary_bytes"] < apart["temporary_bytes"]
    assert shared["pool_bytes"] < apart["pool_bytes"]


@pytest.mark.slow
def test_training_beside_the_engine_ends_with_answers_under_the_last_weights(decoder):
    way = study.train_beside_engine(decoder, SIZES)
    assert len(way["rewards"]) == 3 and way["difference"] < 1e-5
    assert way["updates_told"] == 3 and 0 < way["partial"] < 1 and way["oldest"] >= 1


@pytest.mark.slow
def test_texts_are_learned_from(monkeypatch):
    monkeypatch.setattr(training, "CONFIG", TINY)
    decoder = training.teach(0, 30)
    windows = jnp.asarray(task.unsorted_texts(np.random.default_rng(9), 4))
    nats = losses(decoder, windows, empty_cache(TINY, 4, windows.shape[1] - 1))
    assert float(nats.mean()) < np.log(64) - 0.5
