"""Trains a small llama by tunix's `GRPOLearner` with rollouts on a cache.

    python -m tests.integrations.trainer

Needs `google-tunix` in an environment of its own: `make integrations`. Nothing is loaded from elsewhere.
"""

import contextlib
import dataclasses
import io
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}

# A second device, of which the mesh of a refused rollout has need.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama
from tunix.models.qwen3 import model as qwen
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import kvcache_jax as kv
from kvcache_jax.integrations.tunix import Rollout

VOCAB, PAD, BOS, EOS = 32, 0, 1, 2
STEPS, PROMPTS, SAMPLES, NUM_NEW, PROMPT_LEN = 20, 4, 8, 8, 24


class Letters:
    """Tokens 3 to 31 are letters."""

    def encode(self, text, **_):
        return [3 + (ord(letter) - ord("a")) % 29 for letter in text]

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + int(token) - 3) for token in ids if token > EOS)

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


SIZES = dict(num_layers=2, vocab_size=VOCAB, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8)
SIZES |= dict(num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5)


def small_llama():
    return llama.Llama3(llama.ModelConfig(**SIZES), rngs=nnx.Rngs(0))


def small_qwen():
    return qwen.Qwen3(qwen.ModelConfig(**SIZES), rngs=nnx.Rngs(0))


class Watched(Rollout):
    """A rollout engine that keeps its answers, and compares log-probabilities with the learner's forward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def generate(self, prompts, rollout_config, **kwargs):
        output = super().generate(prompts, rollout_config, **kwargs)
        answers = np.full((len(prompts), rollout_config.max_tokens_to_generate), PAD, np.int32)
        for row, tokens in zip(answers, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        own = common.compute_per_token_logps(
            *nnx.split(self.model()),
            prompt_tokens=output.left_padded_prompt_tokens,
            completion_tokens=answers,
            pad_id=PAD,
            eos_id=EOS,
            temperature=rollout_config.temperature,
        )
        if not self.calls:
            again = self.get_per_token_logps(output.left_padded_prompt_tokens, answers)
            np.testing.assert_array_equal(own, again)
        off = max(
            abs(row[: len(got)] - got).max(initial=0)
            for row, got in zip(np.asarray(own), output.logprobs, strict=True)
        )
        self.calls.append((prompts, output, float(off)))
        return output


class OneLayer(nnx.Module):
    """A model whose layer calls `kv.attention`."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.qkv = nnx.Linear(16, 48, rngs=rngs)


def forward(params, tokens, cache, step):
    model = nnx.merge(nnx.graphdef(OneLayer(nnx.Rngs(0))), params)
    x = model.embed(tokens) + jnp.sin(step.positions[..., None].astype(jnp.float32))
    q, k, v = (part.reshape(*tokens.shape, 2, 8) for part in jnp.split(model.qkv(x), 3, axis=-1))
    cache, out = kv.attention(cache, 0, q, k, v, step)
    return model.embed.attend(x + out.reshape(x.shape)), cache


def check_refused(rollout: Rollout, prompts: list[str], config: RolloutConfig, said: str) -> None:
    """Checks that prompts without room, or a wrong option, are refused in a sentence."""
    try:
        rollout.generate(prompts, config)
    except ValueError as refused:
        assert said in str(refused), refused
    else:
        raise SystemExit(f"got an answer, expected: {said}")


def check_own_forward() -> None:
    """Compares answers of a model with a forward of its own, greedy and drawn, with `generate`."""
    sizes = kv.CacheConfig([kv.FullAttention(2, 8)], max_seqs=4, max_seq_len=64)
    greedy = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=8, temperature=0.0)
    tokenizer, model = TokenizerAdapter(Letters()), OneLayer(nnx.Rngs(0))
    rollout = Rollout(model, tokenizer, None, greedy, forward=forward, cache_config=sizes)
    texts = ["abc", "zz", "abc", "q" * 11]
    prompts = [[BOS, *Letters().encode(text)] for text in texts]
    found = kv.generate(forward, nnx.state(model), prompts, sizes, max_new_tokens=6, stop_tokens=[EOS, PAD])
    output = rollout.generate(texts, greedy)
    expected = [[token for token in each.tokens if token != PAD] for each in found.generations]
    assert [each.tolist() for each in output.tokens] == expected and output.logprobs is None
    for row, prompt in zip(output.left_padded_prompt_tokens.tolist(), prompts, strict=True):
        assert row == [PAD] * (12 - len(prompt)) + prompt
    drawn = dataclasses.replace(greedy, temperature=1.0, seed=jax.random.key(5))
    answers = [rollout.generate(["abc"] * 4, drawn).text for _ in range(2)]
    assert answers[0] == answers[1] and len({*answers[0]}) > 1
    other = rollout.generate(["abc"] * 4, dataclasses.replace(drawn, seed=None)).text
    assert other != answers[0] != rollout.generate(["abc"] * 4, dataclasses.replace(drawn, seed=None)).text
    check_refused(rollout, ["a" * 60], greedy, "expected at most max_seq_len + 1 = 65")
    for wrong, said in (
        ({"temperature": float("nan")}, "temperature is nan, expected a finite number"),
        ({"temperature": -1.0}, "temperature is -1.0, expected 0"),
        ({"top_p": 2.0}, "top_p is 2.0, expected above 0"),
        ({"top_p": 0.0}, "top_p is 0.0, expected above 0"),
        ({"max_tokens_to_generate": 0}, "max_new_tokens is 0, expected at least 1"),
    ):
        check_refused(rollout, ["abc"], dataclasses.replace(greedy, **wrong), said)
    check_refused(rollout, [], greedy, "prompts is empty, expected at least one prompt")
    assert rollout.generate(texts, greedy).text == output.text  # as if nothing had been refused
    small = dataclasses.replace(sizes, num_blocks=1, block_size=16)
    rollout = Rollout(model, tokenizer, None, greedy, forward=forward, cache_config=small)
    check_refused(rollout, ["a" * 20], greedy, "a prompt of 21 tokens and its answer need more blocks")
    for wrong, named in (
        ({"forward": forward}, "expected both, or neither"),
        (
            {"mesh": jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))},
            "give the roles ROLLOUT and ACTOR one mesh",
        ),
    ):
        try:
            Rollout(
                **{"rollout_actor": model, "tokenizer": tokenizer, "mesh": None, "rollout_config": greedy}
                | wrong
            )
        except (ValueError, NotImplementedError) as refused:
            assert named in str(refused), refused
        else:
            raise SystemExit(f"got a rollout with {[*wrong]}, expected {named!r}")


def check_long_prompts(make_model) -> None:
    """Samples answers to prompts of several pieces, and more answers than there are rows."""
    config = RolloutConfig(
        max_tokens_to_generate=5, max_prompt_length=150, temperature=0.7, return_logprobs=True
    )
    model = make_model()
    rollout = Watched(model, TokenizerAdapter(Letters()), None, config, max_seqs=3)
    rollout.generate(["abcdefghij" * 14, "xyz"] * 4 + ["k" * 33], config)
    [(_, output, off)] = rollout.calls
    assert off < 1e-5 and {len(tokens) for tokens in output.tokens} >= {5}, off
    print(f"{type(model).__name__}: prompts of up to 141 tokens, log-probabilities off by at most {off:.1e}")


def reward(prompts, completions, **_):
    """The share of letters "a" to "g"."""
    return [sum(letter in "abcdefg" for letter in text) / NUM_NEW for text in completions]


def train() -> Watched:
    """Trains, and returns the rollout engine."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rollout_config = RolloutConfig(
        max_tokens_to_generate=NUM_NEW,
        max_prompt_length=PROMPT_LEN,
        temperature=0.9,
        return_logprobs=True,
    )
    cluster = rl_cluster.RLCluster(
        actor=small_llama(),
        reference=small_llama(),
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                role: mesh
                for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
            },
            rollout_engine=Watched,
            rollout_config=rollout_config,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), eval_every_n_steps=1000, max_steps=STEPS
            ),
        ),
    )
    learner = GRPOLearner(
        cluster, GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=0.01), reward_fns=reward
    )
    rng = np.random.default_rng(0)
    texts = [
        "".join(chr(97 + rng.integers(26)) for _ in range(rng.integers(5, 20)))
        for _ in range(PROMPTS * STEPS)
    ]
    data = [{"prompts": np.array(texts[i : i + PROMPTS])} for i in range(0, len(texts), PROMPTS)]
    learner.train(data)
    return cluster.rollout


def main() -> int:
    check_own_forward()
    with contextlib.redirect_stderr(io.StringIO()):
        check_long_prompts(small_qwen)
        rollout = train()
    calls, engine = rollout.calls, rollout.engine
    assert len(calls) == STEPS and all(len(prompts) == PROMPTS * SAMPLES for prompts, *_ in calls)
    rewards = [float(np.mean(reward([], output.text))) for _, output, _ in calls]
    first, last = np.mean(rewards[:4]), np.mean(rewards[-4:])
    assert last > first + 0.2, rewards
    counts = engine.figures().counts
    counter = kv.engine.Counter
    num_computed = counts[counter.PREFILL_TOKENS] + counts[counter.ADMISSIONS]
    num_prompt = sum(1 + len(text) for prompts, *_ in calls for text in {*prompts})
    assert num_computed == num_prompt, (num_computed, num_prompt, counts)
    assert counts[counter.FORKS] == STEPS * PROMPTS * (SAMPLES - 1) and counts[counter.UPDATES] == STEPS - 1
    off = max(off for *_, off in calls)
    assert off < 1e-5, off
    print(
        f"{STEPS} steps of GRPO: reward {first:.2f} to {last:.2f}; {num_computed} tokens of "
        f"{STEPS * PROMPTS} prompts, each computed once for {SAMPLES} answers; "
        f"log-probabilities off by at most {off:.1e}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
