"""Rollouts for tunix's learners, `rollout_engine=kvcache_jax.integrations.tunix.Rollout`, on `Engine`."""

# pyright: reportMissingImports=false
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.attention.gather import gather
from kvcache_jax.attention.write import write
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.decoding.forward import Forward
from kvcache_jax.decoding.options import SamplingParams
from kvcache_jax.engine.engine import Engine
from kvcache_jax.engine.options import Limits, Schedule
from kvcache_jax.engine.requests import GenerationRequest
from kvcache_jax.layers.plain import FullAttention

try:
    from flax import nnx
    from tunix.rl.common import compute_per_token_logps
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        "kvcache_jax.integrations.tunix needs google-tunix, of the extra `tunix`: pip install "
        "'kvcache_jax[tunix]'"
    ) from error

_PIECES, _PIECE_LEN = 4, 128
"""Of prompts in one step, beside the rows' next tokens."""


def _tempered(logits: jax.Array, state: Any, inputs: dict[str, jax.Array]) -> jax.Array:
    """Divides each row's logits by its temperature; rows without a request have none."""
    temperature = inputs["temperature"][:, None]
    return logits / jnp.where(temperature > 0, temperature, 1)


@dataclasses.dataclass(eq=False)  # some models cannot be hashed
class _DenseForward:
    """A forward of a tunix model as it is, whose layers see their rows' keys and values as dense arrays.

    Attributes:
      graph: The model's; its parameters are an `nnx.State`. It is called as
        `model(tokens, positions, {"layer_0": {"k", "v", "end_index"}, ...}, mask) -> (logits, the same)`.
    """

    graph: Any

    def __call__(self, params: Any, tokens: jax.Array, cache: Cache, step: Step) -> tuple[jax.Array, Cache]:
        """Calls the model on a step in which a row has one entry."""
        num_rows, num_new = tokens.shape
        most, num_layers = cache.config.max_seq_len, cache.config.num_layers
        is_held = jnp.arange(most) < step.held[:, None]
        is_causal = jnp.tril(jnp.ones((num_new, num_new), bool))
        mask = [jnp.broadcast_to(is_held[:, None], (num_rows, num_new, most))]
        mask += [jnp.broadcast_to(is_causal, (num_rows, num_new, num_new))]

        def with_room(held: jax.Array) -> jax.Array:
            # The slots of the new tokens have something else in them still.
            held = jnp.where(is_held[..., None, None], held, 0)
            return jnp.pad(held, ((0, 0), (0, num_new), (0, 0), (0, 0)))

        layers = {}
        for layer in range(num_layers):
            keys, values, _ = jax.vmap(lambda row, layer=layer: gather(cache, row, layer))(step.seq_ids)
            end_index = jnp.full(num_rows, most, jnp.int32)
            layers[f"layer_{layer}"] = {"k": with_room(keys), "v": with_room(values), "end_index": end_index}
        model = nnx.merge(self.graph, params)
        logits, layers = model(tokens, step.positions, layers, jnp.concatenate(mask, axis=2))
        for layer in range(num_layers):
            keys, values = (layers[f"layer_{layer}"][name][:, most:] for name in ("k", "v"))
            cache = write(cache, layer, keys, values, step)
        return logits, cache


class Rollout(BaseRollout):
    """A rollout engine that computes each prompt once for all its samples, with continuous batching.

    Samples have the log-probabilities of the distribution that they were drawn from, with its temperature, as
    the learner's own. They are drawn under the weights that the actor has when `generate` is called. Between
    rollouts the cache takes no memory.

    A tunix model works as it is (llama3, qwen2, qwen3), on dense copies of its rows' keys and values. One
    whose layers call `kv.attention` needs none: `functools.partial(Rollout, forward=..., cache_config=...)`.

    Args:
      rollout_actor: The model, an `nnx.Module` on the trainer's devices; its `config` has `num_layers`,
        `num_kv_heads` and `head_dim`.
      tokenizer: tunix's adapter of it.
      mesh: The rollout's; it must have the devices of the weights.
      rollout_config: Sizes of rows: `max_prompt_length` and `max_tokens_to_generate`.
      max_seqs: Samples that are decoded at the same time.
      forward: As for `generate`; its parameters are `nnx.state(rollout_actor)`. Default: the model as it is.
      cache_config: Of a model with a forward of its own.

    Attributes:
      engine: The `Engine`; its `figures` tell what was computed. None before the first rollout.

    Raises:
      ValueError, NotImplementedError: a model or devices that do not fit.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: RolloutConfig,
        *,
        max_seqs: int = 32,
        forward: Forward | None = None,
        cache_config: CacheConfig | None = None,
    ):
        if (forward is None) != (cache_config is None):
            raise ValueError("got one of forward and cache_config, expected both, or neither")
        self._actor, self._tokenizer, self._temperature = rollout_actor, tokenizer, rollout_config.temperature
        graph, state = nnx.split(rollout_actor)
        devices = {device for leaf in jax.tree.leaves(state) for device in leaf.devices()}
        if mesh is not None and devices != set(mesh.devices.flat):
            raise NotImplementedError(
                f"the rollout's mesh has {mesh.devices.size} devices and the weights are on {len(devices)}, "
                "expected the same ones: give the roles ROLLOUT and ACTOR one mesh"
            )
        config = getattr(rollout_actor, "config", None)
        if forward is None and (
            not all(hasattr(config, name) for name in ("num_layers", "num_kv_heads", "head_dim"))
            or getattr(config, "sliding_window_size", None)
        ):
            raise NotImplementedError(
                f"{type(rollout_actor).__name__} has sliding windows, or a config without num_layers, "
                "num_kv_heads and head_dim, expected forward= and cache_config= of its own"
            )
        self._forward, self._cache_config = forward or _DenseForward(graph), cache_config
        self._max_seqs, self._sizes = max_seqs, [0, 0, 0]
        self.engine: Engine | None = None
        self._weights, self._num_requests = jax.tree.leaves(state), 0

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Samples an answer to each prompt; equal prompts are one request with several samples.

        Raises:
          ValueError: no prompt; a prompt and its answer are longer than a row, or need more blocks than there
            are; an option of `rollout_config` that is out of range.
          FloatingPointError: logits are no numbers.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        if not ids:
            raise ValueError("prompts is empty, expected at least one prompt")
        places: dict[tuple[int, ...], list[int]] = {}
        for i, prompt in enumerate(ids):
            places.setdefault(prompt, []).append(i)
        prompt_len = max(rollout_config.max_prompt_length, *map(len, ids))
        num_new = rollout_config.max_tokens_to_generate
        temperature = SamplingParams(rollout_config.temperature).temperature  # which checks it
        ends = rollout_config.eos_tokens or [self.eos_id()]
        stops = sorted({*ends, self.pad_id()})
        longest = max(map(len, ids)) + num_new
        if self._cache_config is not None and longest > self._cache_config.max_seq_len + 1:
            raise ValueError(
                f"a prompt and its answer have {longest} tokens, expected at most max_seq_len + 1 = "
                f"{self._cache_config.max_seq_len + 1}: give cache_config longer rows"
            )
        is_greedy, returns_logprobs = temperature == 0, rollout_config.return_logprobs
        base = 0 if rollout_config.seed is None else int(jax.random.bits(rollout_config.seed))
        first = self._num_requests if rollout_config.seed is None else 0
        waiting = []
        for number, (prompt, samples) in enumerate(places.items()):
            drawn = SamplingParams(
                temperature=0.0 if is_greedy else 1.0,
                top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
                top_k=max(rollout_config.top_k or 0, 0),
                seed=int(np.random.SeedSequence([base, first + number]).generate_state(1)[0]),
            )
            options: dict[str, Any] = {"inputs": {"temperature": temperature}, "stop_tokens": stops}
            options |= {"sampling": drawn, "num_samples": len(samples), "id": number}
            waiting.append(GenerationRequest(prompt, num_new, **options))
        self._num_requests += len(waiting)
        # Only now, so that what is refused leaves the trainer its memory, and the engine as it was.
        engine = self._ready_engine(prompt_len + num_new, len(prompts), len(stops))
        try:
            tokens, logprobs = self._drain(engine, waiting, list(places.values()))
        except BaseException:
            self.engine = None  # it has requests still
            raise
        engine.release()  # until the next rollout the trainer has the memory of the cache
        if self.pad_id() not in ends:
            # The learner takes padding for no token, wherever it is, so an answer ends before it.
            for i, answer in enumerate(tokens):
                num = len(answer) - (answer[-1:] == [self.pad_id()])
                tokens[i], logprobs[i] = answer[:num], logprobs[i][:num]
        padded = np.full((len(ids), prompt_len), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[prompt_len - len(prompt) :] = prompt
        return RolloutOutput(
            text=[self._tokenizer.decode([token for token in each if token not in ends]) for each in tokens],
            logits=[],
            tokens=[np.array(each, np.int32) for each in tokens],
            left_padded_prompt_tokens=padded,
            logprobs=[np.array(each, np.float32) for each in logprobs] if returns_logprobs else None,
        )

    @staticmethod
    def _drain(
        engine: Engine, waiting: list[GenerationRequest], places: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Collects tokens and log-probabilities; `places` are of each request's samples."""
        num, prompts = sum(map(len, places)), [request.prompt for request in waiting]
        tokens: list[list[int]] = [[] for _ in range(num)]
        logprobs: list[list[float]] = [[] for _ in range(num)]
        while waiting or engine.num_unfinished:
            del waiting[: engine.push(waiting)]
            engine.drain()
            for event in engine.take_events():
                number: Any = event.id
                i = places[number][event.sample_id]
                tokens[i] += event.tokens
                logprobs[i] += event.logprobs
                if event.finish_reason == "refused":
                    raise ValueError(
                        f"a prompt of {len(prompts[number])} tokens and its answer need more blocks than the "
                        "cache has: give cache_config a larger num_blocks"
                    )
                if event.finish_reason not in (None, "stop", "length"):
                    raise FloatingPointError(
                        f"an answer ended by {event.finish_reason!r}, expected numbers to draw tokens by: "
                        "look for a weight that is not finite"
                    )
        return tokens, logprobs

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Computes the log-probabilities of answers as the learner does, without a cache."""
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        ids = {"pad_id": self.pad_id(), "eos_id": self.eos_id()}
        return compute_per_token_logps(
            *nnx.split(self._actor), **tokens, **ids, temperature=self._temperature
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes over parameters into the model; where it is the trainer's own, they are its already."""
        nnx.update(self._actor, params)

    def pad_id(self) -> int:
        """Returns the token that fills up prompts and answers."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the token that ends an answer."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """Returns the model."""
        return self._actor

    def _encode(self, text: str) -> tuple[int, ...]:
        """Converts a prompt to token ids, with one token of the beginning, as tunix does."""
        first = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return tuple(map(int, self._tokenizer.dedup_bos_ids([*first, *self._tokenizer.encode(text)])))

    def _ready_engine(self, *sizes: int) -> Engine:
        """Returns an engine of these sizes, or larger, that has the model's present weights."""
        state = nnx.state(self._actor)
        weights = jax.tree.leaves(state)
        if self.engine is None or any(size > had for size, had in zip(sizes, self._sizes, strict=True)):
            self._sizes = [max(pair) for pair in zip(sizes, self._sizes, strict=True)]
            self.engine = self._new_engine(state, *self._sizes)
        else:
            self.engine.restore()
            if any(new is not old for new, old in zip(weights, self._weights, strict=True)):
                self.engine.set_params(state)
        self._weights = weights
        return self.engine

    def _new_engine(self, params: Any, max_len: int, num_samples: int, num_stops: int) -> Engine:
        options: dict[str, Any] = {}
        config = self._cache_config
        if config is None:
            of_model = self._actor.config
            config = CacheConfig(
                [FullAttention(of_model.num_kv_heads, of_model.head_dim)] * of_model.num_layers,
                max_seqs=self._max_seqs,
                max_seq_len=max_len,
                dtype=jax.tree.leaves(nnx.state(self._actor, nnx.Param))[0].dtype,
                enable_prefix_caching=True,
            )
            # One piece of a prompt in a step: `_DenseForward` sees what was stored before the step.
            piece_len = min(_PIECE_LEN, max_len)
            options["schedule"] = Schedule(long_prefill_len=piece_len)
            options["token_budget"] = self._max_seqs + _PIECES * piece_len
        num_requests = max(4 * config.max_seqs, num_samples)
        options["limits"] = Limits(num_requests, num_requests * (config.max_seq_len + 1), num_stops)
        options |= {"process_logits": _tempered, "inputs": {"temperature": jnp.float32}}
        return Engine(self._forward, params, config, **options)
