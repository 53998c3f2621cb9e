"""Question: how much of a prompt's keys and values can go, chosen by which scores, and what does that cost?

Command: python -m experiments.compression [--json] [--picture FILE] [--checkpoint DIR]
Machine: 2 virtual cores of Intel(R) Xeon(R) Processor, busy with other work; jax 0.12.0.1
Answer:  SnapKV keeps an eighth of the tokens for 0.015 bits per byte on running text, where random ones cost
  0.097 and nothing kept 0.133; recency, without scores, 0.025. Asked for the prompt itself, it loses
  0.44 of 0.51 bits: what a scorer did not expect is gone.
Record:  experiments/results/compression.json, docs/compression.png.

Of every layer and head a share of the tokens is kept, by each scorer, and the next bytes are scored. The copy
task reads 224 bytes and scores the same bytes again: what is lost there is what the next question would have
asked for. Every layer is a group of its own, so that the budgets of PyramidKV may differ by layer.
"""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import command, quality, timing
from experiments.common.report import at_least, at_most, figure, framed
from experiments.decode_speed import dense_decoder
from kvcache_jax.compression.scorers import scorers as token_scorers
from models.decoder import Decoder
from models.rope import rotate, rotation

NUM_FILES, SKIPPED, PROMPT, REST, COPIED = 12, 2000, 768, 256, 224
SHARES = 0.75, 0.5, 0.25, 0.125
WINDOW = 64  # that SnapKV, and with it PyramidKV, keeps
BLOCK_SIZE = 16
FULL, NONE, PYRAMID = "full", "none", "pyramidkv"
compress = jax.jit(kv.compression.compress)


def empty_cache(decoder: Decoder, num_rows: int) -> kv.Cache:
    """A cache whose layers are a group each, of a block more than the one before."""
    config = decoder.config
    num_blocks = num_rows * (PROMPT + REST) // BLOCK_SIZE
    layers = [
        kv.FullAttention(config.num_kv_heads, config.head_dim, num_blocks=num_blocks + i)
        for i in range(config.num_layers)
    ]
    sizes: Any = dict(max_seqs=num_rows, block_size=BLOCK_SIZE, max_seq_len=PROMPT + REST)
    empty = kv.init(kv.CacheConfig(layers, **sizes, extras=[kv.compression.Dropping()]))
    cache, admission = kv.allocate(empty, np.arange(num_rows), [0] * num_rows)
    kv.raise_for_status(admission.status, "allocate")
    return cache


@functools.partial(jax.jit, static_argnames=("scorers", "width"))
def _read(
    decoder: Decoder,
    cache: kv.Cache,
    tokens: jax.Array,
    num_new: jax.Array,
    scorers: tuple[str, ...],
    width: int,
) -> tuple[kv.Cache, jax.Array, dict[str, jax.Array]]:
    """Appends tokens; returns their log-probabilities, and scores `[n, layers, heads, S]` of all tokens."""
    cache, step = kv.extend(cache, num_new, max_new=width)
    scores: dict[str, list[jax.Array]] = {name: [] for name in scorers}
    is_query = jnp.arange(width)[None] < num_new[:, None]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache

        def turned(x: jax.Array, at: jax.Array) -> jax.Array:
            return rotate(x, rotation(decoder.config.layer_ropes[layer], decoder.config.rope_dim, at))

        cache = kv.write(cache, layer, k, v, step)
        unturned = turned(q, -step.positions)
        for name in scorers:
            queries = kv.compression.future_queries(unturned, is_query, turned, step.context_len)
            more = {"key": jax.random.key(layer), "queries": queries}
            scores[name].append(kv.compression.token_scores(cache, layer, q, step, name, **more))
        cache, out = kv.attend(cache, layer, q, step)
        assert isinstance(out, jax.Array)  # no log-sum-exp was asked for
        return out

    logits = dense_decoder.run(dense_decoder.unstacked(decoder), tokens, step.positions, attend)
    stacked = {name: jnp.stack(layers, axis=1) for name, layers in scores.items()}
    return cache, jax.nn.log_softmax(logits), stacked


class Study:
    """Rows that have read a prompt, and what they make of its continuation once some tokens are gone.

    `scores` are f32[n, layers, heads, S] by scorer, `seconds` what each thing took each time.
    """

    def __init__(self, decoder: Decoder, prompts: np.ndarray, rest: np.ndarray, targets: np.ndarray):
        self.decoder, self.rest, self.targets = decoder, rest, targets
        self.num_rows, self.prompt_len = prompts.shape
        self.seconds: dict[str, list[float]] = {}
        tokens = np.pad(prompts, ((0, 0), (0, PROMPT - self.prompt_len)))
        num_new = np.full(self.num_rows, self.prompt_len, np.int32)
        empty = empty_cache(decoder, self.num_rows)
        self.cache, _, self.scores = _read(decoder, empty, tokens, num_new, token_scorers.names, PROMPT)

    def bits(self, cache: kv.Cache, what: str) -> np.ndarray:
        """Bits per byte of the continuation."""
        num_new = np.full(self.num_rows, self.targets.shape[1], np.int32)
        rest = np.pad(self.rest, ((0, 0), (0, REST - self.rest.shape[1])))
        start = time.perf_counter()
        log_p = _read(self.decoder, cache, rest, num_new, (), REST)[1].block_until_ready()
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)
        return quality.bits(np.asarray(log_p), self.targets).mean(axis=1)

    def without_prompt(self) -> kv.Cache:
        """The cache after all tokens are gone; positions go on."""
        rows, zeros = np.arange(self.num_rows), np.zeros(self.num_rows, np.int32)
        cache, status = kv.compression.drop(self.cache, rows, zeros, zeros + self.prompt_len)
        kv.raise_for_status(status, "drop")
        return cache

    def compressed(self, name: str, share: float) -> kv.Cache:
        """The cache after a scorer kept its share of the tokens in every layer and head."""
        num_layers, num_keep = self.decoder.config.num_layers, round(share * self.prompt_len)
        budgets = np.full((self.num_rows, num_layers), num_keep, np.int32)
        if name == PYRAMID:
            keep, lens = (np.full(self.num_rows, num) for num in (num_keep, self.prompt_len))
            budgets = kv.compression.pyramid_budgets(keep, num_layers, WINDOW, lens)
        scores = self.scores["snapkv" if name == PYRAMID else name]
        start = time.perf_counter()
        cache, status = compress(self.cache, np.arange(self.num_rows), scores, np.asarray(budgets))
        jax.block_until_ready(cache)
        self.seconds.setdefault("compress", []).append(time.perf_counter() - start)
        kv.raise_for_status(status, "compress")
        return cache


def names() -> tuple[str, ...]:
    """Lists the scorers, and PyramidKV's budgets for the first of them."""
    return (*token_scorers.names, PYRAMID)


def measure(study: Study) -> dict[str, Any]:
    """Bits per byte of all scorers and shares, added to what the whole prompt gives."""
    study.bits(study.cache, FULL)  # compiles
    full = study.bits(study.cache, FULL)
    none_added = float((study.bits(study.without_prompt(), NONE) - full).mean())
    records = []
    for name in names():
        for share in SHARES:
            if name == PYRAMID and share * study.prompt_len < WINDOW:
                continue  # below the window there is nothing to spread
            cache = study.compressed(name, share)
            each = study.bits(cache, f"{share}") - full
            num_used = [
                group.num_blocks - int(kv.num_available_blocks(cache, group=g))
                for g, group in enumerate(cache.config.groups)
            ]
            added = {"bits_added": float(each.mean()), "of_each": each.tolist(), "blocks": num_used}
            records.append({"scorer": name, "share": share} | added)
    return {"bits_per_byte": float(full.mean()), "none_added": none_added, "records": records}


def bars_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    added = {(r["scorer"], r["share"]): r for r in report["continuation"]["records"]}
    snapkv, chance = (added[name, 0.125]["bits_added"] for name in ("snapkv", "random"))
    expected = report["num_rows"] * -(-round(PROMPT / 8) // BLOCK_SIZE)
    held = added["snapkv", 0.125]["blocks"]
    return [
        at_most("bits per byte added, SnapKV, 1/8", snapkv, 0.03),
        at_least("random / SnapKV, 1/8 (SnapKV at least 0.001)", chance / max(snapkv, 1e-3), 3),
        {
            "bar": "blocks of a layer, 1/8",
            "measured": max(held),
            "exactly": expected,
            "holds": {*held} == {expected},
        },
    ]


@framed
def show(report: dict[str, Any]) -> None:
    for what, title in (
        ("continuation", f"{PROMPT} bytes read, {REST} scored"),
        ("copy", f"{COPIED} bytes read, the same {COPIED} scored"),
    ):
        found = report[what]
        by_name: dict[str, dict[float, float]] = {}
        for record in found["records"]:
            by_name.setdefault(record["scorer"], {})[record["share"]] = record["bits_added"]
        rows = [
            [name, *(f"{of[share]:+.3f}" if share in of else "-" for share in SHARES)]
            for name, of in by_name.items()
        ]
        rows.append([NONE, *[""] * (len(SHARES) - 1), f"{found['none_added']:+.3f}"])
        header = ["bits per byte added, kept", *(f"{share:g}" for share in SHARES)]
        show_title = f"{title}: {found['bits_per_byte']:.3f} bits per byte with all of it"
        timing.show_table(show_title, header, rows)
    rows = [[name, f"{median:.2f} s"] for name, median in report["times"].items()]
    timing.show_table(f"time, {report['num_rows']} rows, all layers", ["", "median"], rows)


@figure((10, 4), 1, 2)
def draw(report: dict[str, Any], *panels: Any) -> None:
    titles = f"the next {REST} bytes after {PROMPT}", f"{COPIED} bytes again"
    for axes, what, title in zip(panels, ("continuation", "copy"), titles, strict=True):
        for i, name in enumerate(names()):
            points = [(r["share"], r["bits_added"]) for r in report[what]["records"] if r["scorer"] == name]
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{i}", markersize=4, label=name)
        axes.axhline(report[what]["none_added"], color="0.4", linestyle=":", label="nothing kept")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SHARES, [f"{share:g}" for share in SHARES])
        axes.set(xlabel="share of the tokens kept", ylabel="bits per byte added", title=title)
    panels[1].legend(frameon=False, fontsize=8)


def measure_all(decoder: Decoder) -> dict[str, Any]:
    """The continuation of prompts and the copy task, and what they took."""
    windows = quality.held_out_windows(NUM_FILES, SKIPPED, PROMPT + REST + 1)
    prompts, rest = windows[:, :PROMPT], windows[:, PROMPT:]
    study = Study(decoder, prompts, rest[:, :-1], rest[:, 1:])
    continuation = measure(study)
    times = {
        "compress": statistics.median(study.seconds["compress"]),
        f"{REST} bytes more, everything kept": study.seconds[FULL][-1],
        f"{REST} bytes more, 1/8 kept": statistics.median(study.seconds["0.125"]),
    }
    passage = windows[:, :COPIED]
    copy = measure(Study(decoder, passage, passage[:, :-1], passage[:, 1:]))
    return {"num_rows": len(windows), "times": times, "continuation": continuation, "copy": copy}


def main(arguments: list[str] | None = None) -> int:
    beside, run = "layers whose attention is scored", quality.run_study
    return run("experiments.compression", __doc__, arguments, measure_all, bars_of, show, draw, beside)


if __name__ == "__main__":
    command.run(main)
