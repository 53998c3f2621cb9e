"""The sides: how requests are scheduled, on the same model, rows, blocks and forward; what programs cost."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from experiments.common.compiled_programs import nothing_kept, watched
from experiments.serve.server import Clock, Server
from experiments.serve.workload import Job
from models import decoder as models
from models.decoder import Decoder

STATIC = "static batches"
CONTINUOUS = "continuous"
PREFIX = "continuous, prefix cache"
HOST = "a dispatch per token"
TABLE = "a table for the model"
BLOCK_SIZE = 16
STEPS_PER_DISPATCH = 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all sides have alike; by default the pool has as many blocks as all rows may hold."""

    rows: int
    max_seq_len: int
    num_blocks: int | None = None
    steps_per_dispatch: int = STEPS_PER_DISPATCH
    token_budget: int | None = None

    def engine(self, forward: Any, params: Any, layers: Any, has_prefix_cache: bool) -> kv.Engine:
        """Makes an engine; engines of equal sizes share one program."""
        max_seq_len = -(-self.max_seq_len // BLOCK_SIZE) * BLOCK_SIZE
        config = kv.CacheConfig(
            layers,
            block_size=BLOCK_SIZE,
            max_seqs=self.rows,
            max_seq_len=max_seq_len,
            num_blocks=self.num_blocks or self.rows * (max_seq_len // BLOCK_SIZE),
            enable_prefix_caching=has_prefix_cache,
        )
        options: Any = dict(steps_per_dispatch=self.steps_per_dispatch, token_budget=self.token_budget)
        return kv.Engine(forward, params, config, **options)


def look_up(
    table: jax.Array, tokens: jax.Array, cache: kv.Cache, step: kv.Step
) -> tuple[jax.Array, kv.Cache]:
    """A model that is a table f32[vocab, vocab] of what follows each token."""
    return table[tokens], cache


def table_of(vocab_size: int) -> jax.Array:
    """A table in which token i + 1 follows token i."""
    return jax.nn.one_hot((jnp.arange(vocab_size) + 1) % vocab_size, vocab_size)


def make_engine(name: str, decoder: Decoder, sizes: Sizes) -> kv.Engine:
    layers = models.cache_config(decoder.config).layers
    if name == TABLE:
        return sizes.engine(look_up, table_of(decoder.config.vocab_size), layers, True)
    return sizes.engine(models.forward, decoder, layers, name == PREFIX)


def make_server(name: str, engine: kv.Engine, jobs: list[Job], clock: Clock | None = None) -> Server:
    max_steps = 1 if name == HOST else None
    return Server(name, engine, jobs, max_steps=max_steps, is_static=name == STATIC, clock=clock)


def program_cost(engine: kv.Engine) -> dict[str, float]:
    """Compiles an engine's program anew: seconds, and bytes of its temporaries and of the pools."""
    with nothing_kept():
        start = time.perf_counter()
        compiled = engine.lower().compile()
        seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "compile_s": seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "pool_bytes": kv.memory_bytes(engine.config),
    }


def warm_up(engine: kv.Engine) -> int:
    """Serves two requests, so that all is compiled, and counts the programs that were."""
    with watched("an engine") as cost:
        engine.push([kv.GenerationRequest([1, 2, 3], 2), kv.GenerationRequest([4], 1)])
        for _ in engine:
            pass
    return cost.num_programs
