"""Whole steps of decoding as programs: a small model, and the library's own loops.

The host is waited for by `kv.extend` (see `operation_programs`), once by each layer's attention in XLA, twice
by sampling (does any row draw, does any cut the distribution) and once by the loop around the step. Launches
are about 20 a layer, 40 of `kv.extend`, 20 of sampling and 10 of what the loop carries.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

import kvcache_jax as kv
from kvcache_jax.decoding import beam_search, generate, loop
from kvcache_jax.engine.options import Options, Schedule
from kvcache_jax.engine.program import run_dispatch
from kvcache_jax.engine.requests import TableSizes
from kvcache_jax.engine.state import empty_state, outbox_width
from kvcache_jax.engine.step import Model
from kvcache_jax.engine.table import RequestTable
from models.decoder import Decoder, DecoderConfig, cache_config, forward
from tests.aot.budget import i32
from tests.aot.operation_programs import TILE
from tests.aot.program import Limits, Program, shapes_of

NUM_ROWS, NUM_ENDED, NUM_DRAFTS, NUM_BEAMS, MAX_NEW_TOKENS = 32, 4, 4, 4, 64
NUM_LAYERS = 4
EXTEND, INDEX, SAMPLE, LOOP = 2, 1, 2, 1
"""Waits of `kv.extend` on one group, of its index, of sampling, and of the loop around a step."""
MODEL = DecoderConfig(
    vocab_size=4096,
    hidden_size=512,
    mlp_size=1024,
    num_layers=NUM_LAYERS,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
)
"""Its largest matrix is smaller than an array of keys."""


def config_of(**options) -> kv.CacheConfig:
    """Returns the model's cache; by default without an index, attention by XLA."""
    sizes = dict(num_blocks=16_384, max_seqs=NUM_ROWS, max_seq_len=4096, max_query_len=256)
    return cache_config(MODEL, **sizes | {"implementation": "xla", **options})


def _decoder():
    return jax.eval_shape(lambda: Decoder(MODEL, rngs=nnx.Rngs(0)))


def decode(state, decoder, max_steps, *, num_drafts: int = 0):
    """The loop of `kv.generate`."""
    source = loop.DraftSource(num_drafts) if num_drafts else None
    return loop.decode(forward, decoder, None, state, max_steps, draft_source=source)


def decode_arguments(config: kv.CacheConfig, decoder: Decoder) -> tuple:
    """Shapes for `decode`."""
    greedy = kv.decoding.SamplingParams()

    def state(cache):
        return generate._empty_state(cache, config.max_seq_len, None, jnp.zeros(2, jnp.int32), greedy)

    return jax.eval_shape(state, shapes_of(config)), decoder, i32()


def _decoding(subject: str, detail: str, limits: Limits, num_drafts: int = 0, **options) -> Program:
    """A step of `kv.generate`."""
    config = config_of(**options)
    function = functools.partial(decode, num_drafts=num_drafts)

    def arguments() -> tuple:
        return decode_arguments(config, _decoder())

    is_ordinary = bool(config.extras)
    return Program(
        subject, detail, config, function, arguments, limits, is_loop=True, is_ordinary=is_ordinary
    )


def _searching(limits: Limits) -> Program:
    """A step of `kv.beam_search`."""
    config = config_of()
    num_prompts = NUM_ROWS // NUM_BEAMS
    number = jax.ShapeDtypeStruct((), jnp.float32)

    def begin(cache, logits, stops, penalty):
        return beam_search._begin(
            cache, logits, stops, penalty, num_beams=NUM_BEAMS, max_new_tokens=MAX_NEW_TOKENS
        )

    def function(state, decoder, stops, penalty, max_steps):
        return beam_search._search(forward, decoder, state, stops, penalty, max_steps)

    def arguments() -> tuple:
        logits = jax.ShapeDtypeStruct((num_prompts, MODEL.vocab_size), jnp.float32)
        state = jax.eval_shape(begin, shapes_of(config), logits, i32(2), number)
        return state, _decoder(), i32(2), number, i32()

    detail = f"{num_prompts} prompts of {NUM_BEAMS} beams"
    return Program("beam step", detail, config, function, arguments, limits, is_loop=True)


def _ending(limits: Limits) -> Program:
    """The calls of the step in which rows end: what they hold is published, and they are freed."""

    def function(cache, ended):
        cache, committed = kv.commit(cache, ended)
        cache, freed = kv.free(cache, ended)
        return cache, committed, freed

    config = config_of(enable_prefix_caching=True)

    def arguments() -> tuple:
        return shapes_of(config), i32(NUM_ENDED)

    return Program("rows end", f"commit and free of {NUM_ENDED}", config, function, arguments, limits)


def serve(state, decoder, inbox, length):
    """A dispatch of the engine."""
    options = Options(
        policy="fcfs",
        num_pieces=4,
        piece_len=64,
        num_drafts=0,
        num_top_logprobs=0,
        schedule=Schedule(),
        most_admissions=4,
    )
    return run_dispatch(Model(forward), decoder, state, inbox, length, options)


def serve_arguments(config: kv.CacheConfig, decoder: Decoder) -> tuple:
    """Shapes for `serve`."""
    sizes = TableSizes(num_slots=128, num_tokens=2**18, num_stops=4, num_clients=8, num_items=0)
    outbox = 64 * config.max_seqs, outbox_width(0)
    state = jax.eval_shape(lambda cache: empty_state(cache, sizes, outbox), shapes_of(config))
    table = RequestTable(sizes, dataclasses.replace(sizes, num_slots=64), 64, config)
    inbox = jax.eval_shape(lambda: table.pack(False).inbox)
    return state, decoder, inbox, i32(3)


def _engine(kernels: str, limits: Limits, **options_of_cache) -> Program:
    """An ordinary step of the engine: nothing is admitted, ended, preempted, evicted or copied."""
    config = config_of(enable_prefix_caching=True, implementation=kernels, **options_of_cache)

    def arguments() -> tuple:
        return serve_arguments(config, _decoder())

    detail = "ordinary, attention by kernels" + ", host" * bool(config.extras)
    return Program("engine step", detail, config, serve, arguments, limits, is_loop=True, is_ordinary=True)


def _limits(waits: int, launches: int) -> Limits:
    return Limits(waits, launches=launches, temporary_bytes=TILE + 20_000_000)


def step_programs(kernels: str = "mosaic_gpu") -> list[Program]:
    """Returns all of them, in the order of the table; `kernels` are those of one step."""
    step = LOOP + EXTEND + SAMPLE
    by_xla = step + NUM_LAYERS
    # Kernels copy blocks and attend without a loop.
    by_kernels = step - 1
    cascade, drafts = f"{kernels}_cascade", f"{NUM_DRAFTS} drafts from the text"
    ending = Limits(2, known_loops=0, launches=100, temporary_bytes=500_000)
    return [
        _decoding("plain step", "attention by XLA", _limits(by_xla, 210)),
        _decoding("plain step", "attention by kernels", _limits(by_kernels, 200), implementation=kernels),
        _decoding("plain step", "attention by a cascade", _limits(by_kernels, 250), implementation=cascade),
        _decoding("evicting step", "index, lru", _limits(by_xla + INDEX, 220), enable_prefix_caching=True),
        _decoding("speculative step", drafts, _limits(by_xla, 300), num_drafts=NUM_DRAFTS),
        _searching(_limits(by_xla - SAMPLE, 220)),
        _ending(ending),
        # The loop of steps and the one around it, the guard, the call without prompts, greedy or not, the
        # filters of who is not, and the publication: of greedy rows one less, and one more where a block is
        # published.
        _engine(kernels, Limits(7)),
        # As without a host tier.
        _decoding(
            "evicting step",
            "index, lru, host",
            _limits(by_xla + INDEX, 240),
            enable_prefix_caching=True,
            num_blocks=4096,
            extras=[kv.tiers.Host(8192)],
        ),
        _engine(kernels, Limits(7), num_blocks=4096, extras=[kv.tiers.Host(8192)]),
    ]
