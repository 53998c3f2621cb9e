"""Question: what do keys and values in few bits save, and what do they cost?

Command: python -m experiments.quantised [--json] [--picture FILE] [--checkpoint DIR]
Machine: 2 virtual cores of an Intel Xeon, busy with other work; jax 0.12.0.1
Answer:  int8 holds 1.83 times the rows of bfloat16 in the same bytes and is 1.9e-5 nats a byte off float32;
  fp8 1.88 times, 6.5e-4; int4 3.37 times, 5.2e-3, rotated 3.6e-3, and costs 0.003 bits per byte. A step takes
  0.86 times float32's with int8, 0.88 with fp8, 0.93 with int4, 0.91 rotated (8 rows of 512 tokens). Keys per
  channel would cost half of what keys per token do at 4 bits, and a third at 2.
Record:  experiments/results/quantised.json, docs/quantised.png.

Every key and value of every layer is stored in a format, through the cache. Keys per channel are not a format
of the library: a step for a group of tokens needs these in full precision until the group is full, beside the
blocks, and a copy of them at each fork. What that would gain is measured by rounding what dense attention
reads. A group is rounded at once, so its first tokens are read as rounded with the ones after them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from experiments.common import command, log_axes, quality, timing
from experiments.common.report import at_least, at_most, figure, framed
from experiments.common.timing import ms_columns, show_records
from experiments.decode_speed import dense_decoder
from experiments.decode_speed.__main__ import Timing
from experiments.decode_speed.sides import NUM_STEPS, Case, make_contexts, paged_side
from models.decoder import Decoder, DecoderConfig, cache_config

BLOCK_SIZE = 16
GROUP = 16  # tokens that share a step where keys are rounded per channel
FLOAT32, BFLOAT16, ROTATED = "float32", "bfloat16", "int4 rotated"
NUM_FILES, SKIPPED, LENGTH = 6, 1000, 1024
NUM_ROUNDS = 12
CASE = Case("8 rows of 512 tokens", 512, (512,) * 8)


@dataclasses.dataclass(frozen=True)
class Storage:
    """A way to store keys and values: the cache's dtype, and from a layer's kind to one of fewer bits."""

    name: str
    quantise: Callable[[kv.LayerKind], kv.LayerKind] | None = None
    dtype: Any = jnp.float32

    @property
    def options(self) -> dict[str, Any]:
        return {"quantise": self.quantise, "dtype": self.dtype}


STORAGES = (
    Storage(FLOAT32),
    Storage(BFLOAT16, dtype=jnp.bfloat16),
    *(Storage(name, functools.partial(kv.Quantised, format=name)) for name in ("int8", "fp8", "int4")),
    Storage(ROTATED, functools.partial(kv.Quantised, format="int4", rotate=True)),
)


def token_bytes(config: DecoderConfig, storage: Storage) -> int:
    """Bytes of a token in the cache, of all layers, scales included."""
    sizes = cache_config(config, num_blocks=1, block_size=BLOCK_SIZE, **storage.options)
    num_bytes, rest = divmod(kv.memory_bytes(sizes), BLOCK_SIZE)
    assert not rest
    return num_bytes


def stored_log_p(decoder: Decoder, windows: np.ndarray, storage: Storage) -> np.ndarray:
    """Log-probabilities f32[n, T, vocab_size] of what follows each token of the windows i32[n, T + 1].

    All tokens are appended in one step, and every layer reads from the cache what that stored of them.
    """
    num_rows, length = windows[:, :-1].shape
    sizes = dict(max_seqs=num_rows, block_size=BLOCK_SIZE, max_seq_len=length)
    cache = kv.init(cache_config(decoder.config, **sizes, **storage.options))
    return np.asarray(quality.read(decoder, quality.started(cache), windows[:, :-1])[1])


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A way to round keys and values without a cache.

    Attributes:
      num_bits: Of a number.
      keys: "per token" and head, or "per channel": per head and place in a vector, for `GROUP` tokens.
      values: "per token", or "as they are".
    """

    num_bits: int
    keys: str
    values: str = "per token"


ROUNDINGS = (
    Rounding(4, "per token"),
    Rounding(4, "per channel"),
    Rounding(2, "per token"),
    Rounding(2, "per channel"),
    Rounding(2, "per token", "as they are"),
    Rounding(2, "per channel", "as they are"),
)


def rounded_log_p(decoder: Decoder, windows: np.ndarray, rounding: Rounding) -> np.ndarray:
    """`stored_log_p` of rounded keys and values in dense attention; one program for all roundings."""
    ways = [way for way, _ in _WAYS]
    found = ways.index(rounding.keys), ways.index(rounding.values), 2**rounding.num_bits - 1
    return np.asarray(_rounded_log_p(decoder, jnp.asarray(windows[:, :-1]), *map(jnp.int32, found)))


@jax.jit
def _rounded_log_p(
    decoder: Decoder, tokens: jax.Array, keys: jax.Array, values: jax.Array, most: jax.Array
) -> jax.Array:
    unstacked, functions = dense_decoder.unstacked(decoder), [function for _, function in _WAYS]

    def of_row(row: jax.Array) -> jax.Array:
        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k, v = (lax.switch(way, functions, x, most) for way, x in ((keys, k), (values, v)))
            return dense_decoder.causal_attention(layer, q, k, v)

        positions = jnp.arange(len(row))
        return jax.nn.log_softmax(dense_decoder.run(unstacked, row[None], positions[None], attend)[0])

    return lax.map(of_row, tokens)  # one at a time, for the memory of their scores


def per_token(x: jax.Array, most: jax.Array, axis: int = -1) -> jax.Array:
    """Rounds `[b, t, h, d]` to steps 0 to `most` between the least and the greatest number of each vector."""
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    step = jnp.maximum((high - low) / most.astype(x.dtype), 1e-6)
    return jnp.round((x - low) / step) * step + low


def per_channel(x: jax.Array, most: jax.Array) -> jax.Array:
    """Rounds `[b, t, h, d]` to such steps, a place in the vectors of `GROUP` tokens at a time.

    The least number is kept as it is. Tokens that fill no group stay as they are, as in KIVI.
    """
    num_tokens = x.shape[1] - x.shape[1] % GROUP
    groups = x[:, :num_tokens].reshape(x.shape[0], -1, GROUP, *x.shape[2:])
    rounded = per_token(groups, most, axis=2).reshape(x[:, :num_tokens].shape)
    return jnp.concatenate([rounded, x[:, num_tokens:]], axis=1)


_WAYS = (("as they are", lambda x, most: x), ("per token", per_token), ("per channel", per_channel))


def compared(log_p: np.ndarray, exact: np.ndarray, windows: np.ndarray) -> dict[str, Any]:
    """Compares log-probabilities with exact ones: bits per byte added, of each window too, and KL."""
    targets = windows[:, 1:]
    added = (quality.bits(log_p, targets) - quality.bits(exact, targets)).mean(axis=1)
    kl = quality.kl(log_p, exact).mean()
    return {"bits_added": float(added.mean()), "of_each": added.tolist(), "kl": float(kl)}


STORED = {
    "storage": "{storage}",
    "bytes a token": "{bytes_per_token:,}",
    "rows in bf16's bytes": "{rows_in_bytes_of_bfloat16:.2f}x",
    "KL to float32": "{kl:.1e}",
    "bits per byte": "{bits_added:+.4f}",
    "of files": lambda record: f"{min(record['of_each']):+.4f} - {max(record['of_each']):+.4f}",
}
ROUNDED = {
    "": "{num_bits} bits, keys {keys}, values {values}",
    "KL to float32": "{kl:.1e}",
    "bits per byte": "{bits_added:+.4f}",
}
STEPS = {
    "storage": "{side}",
    **ms_columns(2),
    "of float32": "{times_float32[1]:.2f}x",
    "rounds": "{times_float32[0]:.2f} - {times_float32[2]:.2f}",
    "first call (compiles)": "{first_call_s:.1f} s",
}


@framed
def show(report: dict) -> None:
    print(f"{report['model']}, {report['bits_per_byte']:.3f} bits per byte in float32")
    show_records("keys and values of all layers in the cache", STORED, report["storages"])
    show_records("rounded without a cache", ROUNDED, report["roundings"])
    name, num_calls = report["steps"][0]["case"]["name"], report["steps"][0]["num_calls"]
    title = f"a decode step, {name}, ms; {num_calls} rounds of {report['steps_in_a_loop']} steps"
    show_records(title, STEPS, report["steps"])


@figure((10, 4), 1, 2, grid="y")
def draw(report: dict, formats: Any, keys: Any) -> None:
    records = [record for record in report["storages"] if record["kl"] > 0]
    formats.plot([r["bytes_per_token"] for r in records], [r["kl"] for r in records], "o", color="C0")
    for record in records:
        place = record["bytes_per_token"], record["kl"]
        is_below = record["storage"].endswith("rotated")  # beside its neighbour of the same bytes
        offset = (7, -12) if is_below else (7, 4)
        formats.annotate(record["storage"], place, xytext=offset, textcoords="offset points")
    formats.set(yscale="log", xlabel="bytes a token, all layers", ylabel="nats a byte")
    formats.set_title("KL divergence to float32")
    formats.set_xlim(0, 1.25 * max(record["bytes_per_token"] for record in records))
    formats.margins(y=0.15)

    groups: dict[str, dict[str, float]] = {}
    for record in report["roundings"]:
        name = f"{record['num_bits']} bits" + ("" if record["values"] == "per token" else ",\nkeys alone")
        groups.setdefault(name, {})[record["keys"]] = record["bits_added"]
    for i, way in enumerate(("per token", "per channel")):
        places = [x + 0.38 * (i - 0.5) for x in range(len(groups))]
        heights = [group[way] for group in groups.values()]
        bars = keys.bar(places, heights, width=0.36, color=f"C{i}", label=f"keys {way}")
        keys.bar_label(bars, [f"{height:+.3f}" for height in heights], fontsize=8, padding=2)
    keys.set_xticks(range(len(groups)), groups)
    keys.set(yscale="log", ylabel="bits per byte added", title="rounding keys per token and per channel")
    keys.set_ylim(top=3 * keys.get_ylim()[1])  # for the legend
    keys.legend(frameon=False, loc="upper left")
    log_axes.label(keys.yaxis)


def measure_quality(decoder: Decoder, windows: np.ndarray) -> dict:
    exact = stored_log_p(decoder, windows, STORAGES[0])
    bits_per_byte = float(quality.bits(exact, windows[:, 1:]).mean())
    num_bytes = {storage.name: token_bytes(decoder.config, storage) for storage in STORAGES}
    storages = [
        {
            "storage": storage.name,
            "bytes_per_token": num_bytes[storage.name],
            "rows_in_bytes_of_bfloat16": num_bytes[BFLOAT16] / num_bytes[storage.name],
            **compared(stored_log_p(decoder, windows, storage) if i else exact, exact, windows),
        }
        for i, storage in enumerate(STORAGES)
    ]
    roundings = [
        {**vars(rounding), **compared(rounded_log_p(decoder, windows, rounding), exact, windows)}
        for rounding in ROUNDINGS
    ]
    return {"bits_per_byte": bits_per_byte, "storages": storages, "roundings": roundings}


def measure_steps(decoder: Decoder, case: Case = CASE, num_rounds: int = NUM_ROUNDS) -> list[dict]:
    """Times a decode step with each storage, as a part of the step in float32, round by round."""
    contexts = make_contexts(decoder, length=case.table_len).cut(case)
    sides = [paged_side(storage.name, **storage.options) for storage in STORAGES]
    timings = [Timing(side, case, decoder, contexts) for side in sides]
    for timed in timings:
        if not bool(jnp.isfinite(timed.logits).all()):  # a row that failed must not look fast
            raise RuntimeError(f"{timed.side.name}: a step gave logits that are not finite")
    for _ in range(num_rounds):
        for timed in timings:
            timed.round()
    of_float32 = timings[0].seconds
    return [each.record() | {"times_float32": timing.ratios(each.seconds, of_float32)} for each in timings]


def bars_of(found: dict) -> list[dict]:
    storages = {record["storage"]: record for record in found["storages"]}
    added = {
        (record["num_bits"], record["keys"]): record["bits_added"]
        for record in found["roundings"]
        if record["values"] == "per token"
    }
    bars = []
    for name, least in (("int8", 1.8), ("int4", 3.3)):
        what = f"rows in the bytes of bfloat16, {name}, head_dim {found['head_dim']}"
        bars.append(at_least(what, storages[name]["rows_in_bytes_of_bfloat16"], least))
    for name, most in (("int8", 1e-4), ("fp8", 2e-3)):
        bars.append(at_most(f"KL to float32, {name}", storages[name]["kl"], most))
    bars.append(at_most(f"bits per byte added, {ROTATED}", storages[ROTATED]["bits_added"], 0.01))
    for num_bits in (4, 2):
        channel, token = added[num_bits, "per channel"], added[num_bits, "per token"]
        what = f"bits per byte added, {num_bits} bits: keys per channel / per token"
        bars.append(at_most(what, channel / token, 1.0))
    (times,) = (record["times_float32"] for record in found["steps"] if record["side"] == "int8")
    bars.append(at_most(f"a step, times {FLOAT32}'s, int8, {CASE.lens[0]} tokens a row", times[1], 1.3))
    return bars


def main(arguments: list[str] | None = None) -> int:
    def measure(decoder: Decoder) -> dict:
        windows = quality.held_out_windows(NUM_FILES, SKIPPED, LENGTH + 1)
        sizes = {"steps_in_a_loop": NUM_STEPS, "head_dim": decoder.config.head_dim}
        return sizes | measure_quality(decoder, windows) | {"steps": measure_steps(decoder)}

    beside = "dense attention to rounded keys"
    run = quality.run_study
    return run("experiments.quantised", __doc__, arguments, measure, bars_of, show, draw, beside)


if __name__ == "__main__":
    command.run(main)
