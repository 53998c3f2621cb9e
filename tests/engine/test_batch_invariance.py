"""With `batch_invariant=True` a token's bits depend on its tokens and position alone; without, they do not.

With the trained model: its products are in float32, and XLA's CPU compiler chooses how they are added up.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from experiments.batch_invariance import answers
from experiments.common import corpus
from experiments.train.bits_per_byte import empty_cache, losses
from models import checkpoint
from models.decoder import cache_config, forward
from tests.engine.exact_model import check_idle

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_LEN = 96
TEXT = np.frombuffer(
    b"def __init__(self, name, size=3):\n    self.name = name\n    return size\n" * 4, np.uint8
)


def requests_of_all_lengths(rng, num):
    """Greedy and sampled, of which many begin alike."""
    for i in range(num):
        start, length = int(rng.integers(2)), int(rng.integers(1, 50))
        prompt = TEXT[start : start + length].tolist()
        yield kv.GenerationRequest(
            prompt,
            int(rng.integers(1, 40)),
            id=i,
            sampling=kv.decoding.SamplingParams(temperature=float(i % 2), seed=i),
            num_samples=1,
        )


def as_bits(found):
    return {
        i: (tokens, np.float32(logprobs).view(np.int32).tolist()) for i, (tokens, logprobs) in found.items()
    }


def test_bits_are_those_of_the_request_alone():
    """A pool that rows fight for, hits, prompts in parts of any length: alone the same, and near to dense."""
    decoder = checkpoint.load(corpus.MODEL, dtype=jnp.float32)
    config = cache_config(
        decoder.config,
        num_blocks=20,
        block_size=8,
        max_seqs=5,
        max_seq_len=MAX_LEN,
        enable_prefix_caching=True,
    )
    engine = kv.Engine(forward, decoder, config, token_budget=5 + 40, batch_invariant=True)
    requests = list(requests_of_all_lengths(np.random.default_rng(0), 14))
    together = answers(engine, requests)
    counts = engine.figures().counts
    assert counts[kv.engine.Counter.PREEMPTIONS] > 0 and counts[kv.engine.Counter.CACHED_TOKENS] > 0
    assert as_bits(answers(engine, requests[::-1])) == as_bits(together)
    cache = empty_cache(decoder.config, 1, MAX_LEN)
    for request in requests[:6]:
        engine.set_params(decoder)  # under a namespace of its own: nothing is cached
        tokens, logprobs = together[request.id]
        assert as_bits(answers(engine, [request])) == as_bits({request.id: (tokens, logprobs)})
        window = np.zeros((1, MAX_LEN + 1), np.int32)
        window[0, : len(request.prompt) + len(tokens)] = [*request.prompt, *tokens]
        dense = -np.asarray(losses(decoder, jnp.asarray(window), cache))[0, len(request.prompt) - 1 :]
        np.testing.assert_allclose(dense[: len(tokens)], logprobs, atol=1e-4)
    check_idle(engine)


def test_by_default_a_rows_bits_differ_between_steps_of_1_8_and_64_tokens():
    """In a step of one size they do not, whichever place the row has in it: that is what the mode goes by."""
    decoder = checkpoint.load(corpus.MODEL, dtype=jnp.float32)
    config = cache_config(decoder.config, num_blocks=64, block_size=8, max_seqs=64, max_seq_len=8)
    tokens = TEXT[:64].astype(np.int32)

    @functools.partial(jax.jit, static_argnums=1)
    def logits_of(tokens, num_rows):
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        cache, step = kv.extend(kv.init(config), jnp.ones_like(rows), max_new=1, seq_ids=rows)
        return forward(decoder, tokens[:num_rows, None], cache, step)[0][:, 0]

    first = [np.asarray(logits_of(tokens, num_rows))[0] for num_rows in (1, 8, 64)]
    assert len({bits.tobytes() for bits in first}) == 3
    for logits in first[1:]:
        np.testing.assert_allclose(logits, first[0], atol=1e-4)
    moved = np.asarray(logits_of(np.roll(tokens, 37), 64))[37]
    assert moved.tobytes() == first[2].tobytes()


def test_as_xla_compiles_it_for_users():
    """In a process without the tests' flags; by default the same requests differ, or it shows nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.batch_invariance", "--copies", "16", "--no-cache"]
    done = subprocess.run(
        [*command, "--json"],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=False,  # it also looks at how long it took
    )
    report = json.loads(done.stdout)
    default, invariant = report["modes"]
    assert invariant["num_bits"] == 1 < default["num_bits"]
    assert report["scores"]["num_equal"] == report["scores"]["num_tokens"] > 100
    assert report["scores"]["largest_difference"] <= 1e-5
