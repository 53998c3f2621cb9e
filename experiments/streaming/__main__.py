"""Question: what does a text of any length cost in the memory of 512 tokens?

Command: python -m experiments.streaming [--json] [--picture FILE] [--checkpoint DIR]
Machine: 2 virtual cores of an Intel Xeon; jax 0.12.0.1
Answer:  35 blocks of 16 tokens, and as many bits per byte as by a mask over all tokens, within 0.04 %. A step
  of the last tenth takes 1.05 times one of the first. Attention to all tokens spends 4.7 bits per byte
  where its table of 8,192 tokens ends.
Record:  experiments/results/streaming.json, docs/streaming.png.

The small model, float32, reads 100,000 bytes of held-out files, one behind the other, in one row. Before each
step `kv.compression.drop` hides what is neither among the first 4 tokens nor among the last 508, and gives
whole blocks back. A step has 32 tokens, of which the first sees 4 + 508 and the last 31 more: the windows of
all begin where the first one's does. (`kv.generate(retention=)` has each token see its own window.)

Beside it: the same with the first tokens as near as the window is long
(`kv.compression.drop(positions="cache")`), as StreamingLLM has them; layers of `SlidingWindow(512)`; full
attention that holds all, as far as its table goes, 8,192 tokens; and a mask by which each token sees the
first 4 and the last 508, without a cache, for three of the tenths. What a layer computes of a token depends
on a window of the layer below, so a tenth needs no more of the text before it than the sinks and a window
per layer.

The time of a step ends when its losses are on the host. The model was trained on windows of 256 and of 1,024
bytes, which is what full attention beyond them pays for.
"""

from collections.abc import Sequence

import numpy as np

import kvcache_jax as kv
from experiments.chunks.rows import rotations_of
from experiments.common import command, timing
from experiments.common.quality import run_study
from experiments.common.report import at_most
from experiments.streaming.report import draw, show
from experiments.streaming.sides import (
    BLOCK_SIZE,
    STEP_LEN,
    Reading,
    Side,
    masked_bits,
    read,
    read_text,
    streaming_side,
)
from models.decoder import Decoder

LENGTH, NUM_PARTS, MASKED_PARTS = 100_000, 10, (0, 4, 9)
STREAMING = kv.compression.Streaming(window=508, num_sink_tokens=4)
WINDOW, DENSE_LEN = 512, 8192


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
    """What must hold, beside what was measured."""
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
