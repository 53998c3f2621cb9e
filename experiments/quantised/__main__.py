"""Question: what do keys and values in few bits save, and what do they cost?

Command: python -m experiments.quantised [--json] [--picture FILE] [--checkpoint DIR]
Machine: 2 virtual cores of an Intel Xeon, busy with other work; jax 0.12.0.1
Answer:  int8 holds 1.83 times the rows of bfloat16 in the same bytes and is 1.9e-5 nats a byte off float32;
  fp8 1.88 times, 6.5e-4; int4 3.37 times, 5.2e-3, rotated 3.6e-3, and costs 0.003 bits per byte. A step takes
  0.86 times float32's with int8, 0.88 with fp8, 0.93 with int4, 0.91 rotated (8 rows of 512 tokens). Keys per
  channel would cost half of what keys per token do at 4 bits, and a third at 2.
Record:  experiments/results/quantised.json, docs/quantised.png.

The small model, float32, reads 1,024 bytes each of six held-out files. What a format costs is measured with
every key and value of every layer stored in it, through the cache: KL divergence to float32 (nats a byte) and
bits per byte added. Bytes per token are those of `kv.memory_bytes`, scales included, and rows in equal bytes
follow from them.

Keys per channel are not a format of the library: a step for a group of tokens needs these in full precision
until the group is full, beside the blocks, and a copy of them at each fork. What that would gain is measured
by rounding what dense attention reads: keys per token, or per channel in groups of 16 tokens; values per
token. A group is rounded at once, so its first tokens are read as rounded with those behind them.

A step is timed as `experiments.decode_speed` does it: 8 steps in a jitted scan, rows of 512 tokens at its
end, the cache donated; the storages take turns.
"""

import jax.numpy as jnp
import numpy as np

from experiments.common import command, quality, timing
from experiments.common.report import at_least, at_most
from experiments.decode_speed.__main__ import Timing
from experiments.decode_speed.sides import LOOP, NUM_STEPS, Case, make_contexts, paged_side
from experiments.quantised.report import draw, show
from experiments.quantised.storages import (
    BFLOAT16,
    FLOAT32,
    ROTATED,
    ROUNDINGS,
    STORAGES,
    compared,
    rounded_log_p,
    stored_log_p,
    token_bytes,
)
from models.decoder import Decoder

NUM_FILES, SKIPPED, LENGTH = 6, 1000, 1024
NUM_ROUNDS = 12
CASE = Case("8 rows of 512 tokens", 512, (512,) * 8)


def measure_quality(decoder: Decoder, windows: np.ndarray) -> dict:
    """Bytes and losses of all storages and roundings."""
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
    """Times a decode step with each storage, and its time in that of float32, round by round."""
    contexts = make_contexts(decoder, length=case.table_len).cut(case)
    sides = [paged_side(storage.name, **storage.options) for storage in STORAGES]
    timings = [Timing(side, case, decoder, contexts, (LOOP,)) for side in sides]
    for timed in timings:
        if not bool(jnp.isfinite(timed.logits).all()):  # a row that failed must not look fast
            raise RuntimeError(f"{timed.side.name}: a step gave logits that are not finite")
    for _ in range(num_rounds):
        for timed in timings:
            timed.round()
    of_float32 = timings[0].seconds[LOOP]
    records = []
    for timed in timings:
        (record,) = timed.records()
        times = timing.ratios(timed.seconds[LOOP], of_float32)
        records.append({**record, "times_float32": times})
    return records


def bars_of(found: dict) -> list[dict]:
    """What must hold, beside what was measured."""
    storages = {record["storage"]: record for record in found["storages"]}
    added = {
        (record["num_bits"], record["keys"]): record["bits_added"]
        for record in found["roundings"]
        if record["values"] == "per token"
    }
    bars = []

    for name, least in (("int8", 1.8), ("int4", 3.3)):
        rows = storages[name]["rows_in_bytes_of_bfloat16"]
        what = f"rows in the bytes of bfloat16, {name}, head_dim {found['head_dim']}"
        bars.append(at_least(what, rows, least))
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
