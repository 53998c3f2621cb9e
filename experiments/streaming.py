"""Question: what does a text of any length cost in the memory of 512 tokens?

Command: python -m experiments.streaming [--json] [--picture FILE] [--checkpoint DIR]
Machine: 2 virtual cores of an Intel Xeon; jax 0.12.0.1
Answer:  35 blocks of 16 tokens, and as many bits per byte as by a mask over all tokens, within 0.04 %. A step
  of the last tenth takes 1.05 times one of the first. Attention to all tokens spends 4.7 bits per byte
  where its table of 8,192 tokens ends.
Record:  experiments/results/streaming.json, docs/streaming.png.

The small model reads held-out files, one after the other, in one row. Before each step
`kv.compression.drop` hides what is neither among the first 4 tokens nor among the last 508: the windows of
all tokens of a step begin where the first one's does. (`kv.generate(retention=)` has each token see its own.)
Beside it: the same with the first tokens as near as the window is long, as StreamingLLM has them; layers of
`SlidingWindow(512)`; full attention, as far as its table goes; and a mask by which each token sees the first
4 and the last 508, without a cache, for three of the tenths.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from experiments.chunks.rows import rotations_of
from experiments.common import command, corpus, timing
from experiments.common.quality import run_study
from experiments.common.report import at_most, figure, framed
from experiments.common.timing import show_records, show_table
from experiments.decode_speed import dense_decoder
from kvcache_jax.blocks.key_rotation import Rotate
from models.decoder import Decoder, forward

BLOCK_SIZE = 16
STEP_LEN = 32  # tokens of a step
TILE_TOKENS = 576  # read at a time on all sides: by default XLA on a CPU reads more than the window has
_time = timing.with_spread(unit_us=1e3, digits=1)
DENSE = {"bytes": "{start:,} - {end:,}", "bits per byte": "{bits_per_byte:.4f}", "step": _time}
BLOCKS = {"": "{side}", "tokens read": "{num_read:,}", "most blocks held": "{most_blocks:,}"}
LENGTH, NUM_PARTS, MASKED_PARTS = 100_000, 10, (0, 4, 9)
STREAMING = kv.compression.Streaming(window=508, num_sink_tokens=4)
WINDOW, DENSE_LEN = 512, 8192


def read_text(length: int) -> np.ndarray:
    """i32[length + 1], held-out files one after the other."""
    data = b"".join(corpus.with_end(file) for file in corpus.held_out_files().values())
    if len(data) <= length:
        raise ValueError(f"the held-out files have {len(data)} bytes, expected more than {length}")
    return np.frombuffer(data[: length + 1], np.uint8).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Side:
    """A cache of one row that reads a text.

    Of one that is `streaming` some tokens stay as the text goes on; `rotate` has its sinks stay as near as
    the window is long; `window` is of every layer.
    """

    name: str
    max_seq_len: int
    streaming: kv.compression.Streaming | None = None
    rotate: tuple[Rotate, ...] | None = None
    window: int | None = None

    def config(self, decoder: Decoder) -> kv.CacheConfig:
        heads = decoder.config.num_kv_heads, decoder.config.head_dim
        layer = kv.SlidingWindow(*heads, window=self.window) if self.window else kv.FullAttention(*heads)
        extras = []
        if self.streaming is not None:
            extras.append(kv.compression.Dropping(self.streaming.num_sink_tokens if self.rotate else None))
        return kv.CacheConfig(
            [layer] * decoder.config.num_layers,
            block_size=BLOCK_SIZE,
            max_seqs=1,
            max_seq_len=self.max_seq_len,
            max_query_len=STEP_LEN,
            extras=extras,
            tile_tokens=TILE_TOKENS,
        )


def streaming_side(streaming: kv.compression.Streaming, rotate: tuple[Rotate, ...] | None = None) -> Side:
    """A row that streams, in a cache whose blocks hold its sinks, window and step, and two are left."""
    kept = streaming.num_sink_tokens + streaming.window + STEP_LEN
    max_seq_len = (-(-kept // BLOCK_SIZE) + 2) * BLOCK_SIZE
    name = f"{streaming.num_sink_tokens} + {streaming.window}"
    return Side(name if rotate is None else f"{name}, sinks move", max_seq_len, streaming, rotate)


class Reading(NamedTuple):
    """What came of a text: bits f32[tokens] of each next byte, seconds f64[steps], blocks held i32[steps]."""

    bits: np.ndarray
    seconds: np.ndarray
    blocks: np.ndarray


def read(side: Side, decoder: Decoder, text: np.ndarray) -> Reading:
    """Feeds a text i32[n + 1] step by step; the time of a step ends when its losses are on the host."""
    cache, _ = kv.allocate(kv.init(side.config(decoder)), [0], [0])
    # Compiled before the clock starts, on a step of nothing.
    cache, *_ = _step(cache, decoder, text[None, : STEP_LEN + 1], np.zeros(1, np.int32), side)
    bits, seconds, blocks = [], [], []
    for start in range(0, len(text) - 1, STEP_LEN):
        tokens = text[start : start + STEP_LEN + 1]
        num_new = np.array([len(tokens) - 1], np.int32)
        tokens = np.pad(tokens, (0, STEP_LEN + 1 - len(tokens)))
        begin = time.perf_counter()
        cache, found, held, status = _step(cache, decoder, tokens[None], num_new, side)
        found = np.asarray(found)
        if int(status[0]) == kv.Status.TOO_LONG and side.streaming is None:
            break
        kv.raise_for_status(status, f"a step of {side.name}")
        seconds.append(time.perf_counter() - begin)
        bits.append(found[0, : num_new[0]])
        blocks.append(int(held))
    return Reading(np.concatenate(bits), np.array(seconds), np.array(blocks))


@functools.partial(jax.jit, static_argnames="side", donate_argnames="cache")
def _step(
    cache: kv.Cache, decoder: Decoder, tokens: jax.Array, num_new: jax.Array, side: Side
) -> tuple[kv.Cache, jax.Array, jax.Array, jax.Array]:
    """Reads i32[1, STEP_LEN + 1]: bits of each next byte, blocks held, status."""
    if (streaming := side.streaming) is not None:
        holes = cache.control.holes
        assert holes is not None
        text_len = cache.context_len + holes.num_dropped
        start = jnp.full_like(text_len, streaming.num_sink_tokens)
        length = jnp.maximum(text_len + 1 - streaming.window - start, 0)
        positions = "text" if side.rotate is None else "cache"
        row = jnp.zeros(1, jnp.int32)
        cache, _ = kv.compression.drop(cache, row, start, length, positions=positions, rotate=side.rotate)
    cache, step = kv.extend(cache, num_new, max_new=STEP_LEN)
    logits, cache = forward(decoder, tokens[:, :-1], cache, step)
    pool = cache.control.block_pools[0]
    held = jnp.sum(pool.ref_count > 0, dtype=jnp.int32)
    return cache, _bits(logits, tokens[:, 1:]), held, step.status


def _bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0] / math.log(2)


def masked_bits(
    decoder: Decoder, text: np.ndarray, streaming: kv.compression.Streaming, start: int, end: int
) -> np.ndarray:
    """Bits f32[end - start] of the bytes after `start` to `end`, by a mask over all tokens and no cache.

    What a layer computes of a token depends on a window of the layer below. So of the text before `start` the
    sinks and a window per layer count, and nothing else is computed.
    """
    num_sinks, window = streaming.num_sink_tokens, streaming.window
    first = max(num_sinks, start - decoder.config.num_layers * window)
    num_more = -(num_sinks + end - first) % window  # whole runs of queries; no query sees what comes last
    positions = np.concatenate([np.arange(num_sinks), np.arange(first, end + num_more)]).astype(np.int32)
    tokens, targets = (text[np.minimum(places, end)] for places in (positions, positions + 1))
    bits = _masked_bits(decoder, tokens, targets, positions, streaming)
    is_asked = (positions >= start) & (positions < end)
    return np.asarray(bits)[is_asked]


@functools.partial(jax.jit, static_argnames="streaming")
def _masked_bits(
    decoder: Decoder,
    tokens: jax.Array,
    targets: jax.Array,
    positions: jax.Array,
    streaming: kv.compression.Streaming,
) -> jax.Array:
    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return windowed_attention(q[0], k[0], v[0], jnp.asarray(positions), streaming)[None]

    unstacked = dense_decoder.unstacked(decoder)
    logits = dense_decoder.run(unstacked, jnp.asarray(tokens)[None], jnp.asarray(positions)[None], attend)
    return _bits(logits[0], jnp.asarray(targets))


def windowed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, streaming: kv.compression.Streaming
) -> jax.Array:
    """Attends from each token to the first ones and to a window, by position; a run of queries at a time.

    q is `[t, num_q_heads, d]`, `t` a multiple of the window. Positions i32[t] in the text begin with
    the sinks, then others, which follow one another.
    """
    num_sinks, window = streaming.num_sink_tokens, streaming.window
    group_size, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
    # In front of the first run are keys that no query sees; the sinks are in front of each.
    padded = [jnp.pad(x, ((window, 0), (0, 0), (0, 0))) for x in (k, v)]
    places = jnp.pad(positions, (window, 0), constant_values=-1)

    def run(start: jax.Array) -> jax.Array:
        def cut(x: jax.Array, length: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, length)

        keys, values = (
            jnp.repeat(jnp.concatenate([x[:num_sinks], cut(near, 2 * window)]), group_size, axis=1)
            for x, near in zip((k, v), padded, strict=True)
        )
        own, near = cut(positions, window)[:, None], cut(places, 2 * window)[None]
        is_sink = jnp.broadcast_to(positions[None, :num_sinks] <= own, (window, num_sinks))
        is_near = (near >= num_sinks) & (near <= own) & (near > own - window)
        logits = jnp.einsum("thd,shd->hts", cut(q, window), keys, precision="highest") * scale
        logits = jnp.where(jnp.concatenate([is_sink, is_near], axis=1)[None], logits, -1e30)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(logits), values, precision="highest")

    runs: Any = lax.map(run, jnp.arange(0, q.shape[0], window, dtype=jnp.int32))
    return runs.reshape(q.shape)


@functools.partial(framed, digits=4)
def show(report: dict) -> None:
    stream, window, dense, moved = report["sides"]
    header = ["bytes", stream["side"], "sinks move", window["side"], "mask", f"step, {stream['side']}"]
    header += ["step, sinks move", "step, window"]
    rows = []
    for mask, *sides in zip(report["mask"], stream["parts"], moved["parts"], window["parts"], strict=True):
        bits = [f"{side['bits_per_byte']:.4f}" for side in sides]
        place = f"{sides[0]['start']:,} - {sides[0]['end']:,}"
        rows.append([place, *bits, "" if mask is None else f"{mask:.4f}", *map(_time, sides)])
    title = f"bits per byte, and ms for a step of {report['tokens_of_a_step']}: median (p10 - p90)"
    show_table(title, header, rows)
    show_records(f"{dense['side']}, until there is no more room", DENSE, dense["parts"])
    show_records("blocks", BLOCKS, report["sides"])


@figure((10, 4), 1, 2)
def draw(report: dict, losses: Any, times: Any) -> None:
    for i, side in enumerate(report["sides"]):
        middles = [(part["start"] + part["end"]) / 2 for part in side["parts"]]
        style = dict(color=f"C{i}", marker=".", label=side["side"], linestyle="--" if i == 1 else "-")
        losses.plot(middles, [part["bits_per_byte"] for part in side["parts"]], **style)
        times.plot(middles, [part["median_us"] / 1e3 for part in side["parts"]], **style)
        if side["num_read"] < report["sides"][0]["num_read"]:
            for axes, name, scale in ((losses, "bits_per_byte", 1), (times, "median_us", 1e3)):
                end = side["parts"][-1][name] / scale
                axes.annotate("its table ends", (middles[-1], end), xytext=(8, 0), textcoords="offset points")
    masked = [
        (sum(part) / 2, bits) for part, bits in zip(report["parts"], report["mask"], strict=True) if bits
    ]
    losses.plot(*zip(*masked, strict=True), "kx", label="a mask over all tokens")
    losses.set(title="bits per byte", xlabel="bytes of text", ylim=(0, None))
    times.set(
        title=f"a step of {report['tokens_of_a_step']} tokens, ms", xlabel="bytes of text", ylim=(0, None)
    )
    for axes in (losses, times):
        axes.xaxis.set_major_formatter("{x:,.0f}")
    losses.legend(frameon=False)


def measure(
    decoder: Decoder,
    text: np.ndarray,
    streaming: kv.compression.Streaming = STREAMING,
    window: int = WINDOW,
    dense_len: int = DENSE_LEN,
    masked_parts: Sequence[int] = MASKED_PARTS,
) -> dict:
    """Losses, times and blocks of all sides, part by part of the text i32[n + 1]."""
    length = len(text) - 1
    sides = [
        streaming_side(streaming),
        Side(f"SlidingWindow({window})", length, window=window),
        Side("all tokens", dense_len),
        streaming_side(streaming, rotations_of(decoder, length)),
    ]
    edges = np.linspace(0, length, NUM_PARTS + 1).astype(int).tolist()
    parts = list(zip(edges[:-1], edges[1:], strict=True))
    mask = [
        float(masked_bits(decoder, text, streaming, *parts[i]).mean()) if i in masked_parts else None
        for i in range(NUM_PARTS)
    ]
    return {
        "sides": [record_of(side, read(side, decoder, text), parts) for side in sides],
        "mask": mask,
        "parts": parts,
        "most_blocks": -(-(streaming.num_sink_tokens + streaming.window + STEP_LEN) // BLOCK_SIZE) + 2,
    }


def record_of(side: Side, reading: Reading, parts: Sequence[tuple[int, int]]) -> dict:
    """Bits per byte and times of the parts that were read whole; of a side that ends early, of its own."""
    num_read = len(reading.bits)
    if num_read < parts[0][1]:
        edges = np.linspace(0, num_read, NUM_PARTS + 1).astype(int).tolist()
        parts = list(zip(edges[:-1], edges[1:], strict=True))
    starts = np.arange(len(reading.seconds)) * STEP_LEN
    records = []
    for start, end in parts:
        steps = (starts < end) & (starts + STEP_LEN > start)  # that have a token of it
        if end <= num_read:
            times = timing.summary(reading.seconds[steps].tolist())
            bits = float(reading.bits[start:end].mean())
            records.append({"start": start, "end": end, "bits_per_byte": bits, **times})
    most = int(reading.blocks.max())
    return {"side": side.name, "num_read": num_read, "most_blocks": most, "parts": records}


def bars_of(found: dict) -> list[dict]:
    stream, window, *_ = found["sides"]
    bits, of_window = ([part["bits_per_byte"] for part in side["parts"]] for side in (stream, window))
    name, other = stream["side"], window["side"]
    masked = [(a, b) for a, b in zip(bits, found["mask"], strict=True) if b is not None]
    of_mask = max(abs(a / b - 1) for a, b in masked)
    apart = max(abs(a / b - 1) for a, b in zip(bits, of_window, strict=True))
    times = [part["median_us"] for part in stream["parts"]]
    measured = [
        (f"bits per byte of a tenth, {name}, apart from the mask's", of_mask, 0.01),
        (f"bits per byte of a tenth, {name}, apart from {other}'s", apart, 0.01),
        (f"median step of the last tenth, {name}, times the first's", times[-1] / times[0], 1.25),
        (f"blocks held, {name}", stream["most_blocks"], found["most_blocks"]),
    ]
    return [at_most(*each) for each in measured]


def main(arguments: list[str] | None = None) -> int:
    def of_text(decoder: Decoder) -> dict:
        return {"tokens_of_a_step": STEP_LEN, **measure(decoder, read_text(LENGTH))}

    beside = "the mask without a cache"
    return run_study("experiments.streaming", __doc__, arguments, of_text, bars_of, show, draw, beside)


if __name__ == "__main__":
    command.run(main)
