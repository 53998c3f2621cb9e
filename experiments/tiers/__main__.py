"""Question: what are blocks outside of the device's memory worth, and what does a restart cost?

Command: python -m experiments.tiers [--data DIR] [--prompts N] [--demo] [--json] [--picture FILE]
Machine: 2 virtual cores of an Intel Xeon, with nothing else on them; jax 0.12.0.1
Answer:  a restart computes no token again that was cached, and a byte flipped costs one block and no answer.
  The first token of an eight-shot GSM8K prompt comes 18 times sooner from the device, 16 times from host
  memory and 10 times from a directory (60, 68 and 116 ms, not 1,108). Of 4,000 conversations 1,000 blocks
  serve 4.1%, with 4,000 more in host memory 10.8%, as one pool of 5,000, and with a store 32.6%. Saving
  reaches 0.87 of the speed of a directory and 0.78 of ocdbt's, loading 0.46 and 0.50: a directory's misses
  its bar of a half.
Record:  experiments/results/tiers.json, docs/tiers.png

A restart: a process answers prompts that begin alike and saves its cache after each. It is killed by
SIGKILL. Another one loads what is there and answers all prompts, and a third one does so after a byte of the
store was flipped.

Times to first token: a prompt that is computed, and that is found on the device, in host memory and in a
directory (load included). Speeds: `save` and `load` beside the same store's writing and reading of the same
values.

Hit rates: the first `--requests` of Mooncake's conversations (traces/conversation_trace.jsonl in --data), one
after the other, on the device alone, with four times as many blocks in host memory, and with a store that
has all that was published.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import byte_model, command, corpus
from experiments.common.benchmarks import few_shot_prompts
from experiments.common.command import InputError
from experiments.common.report import add_options, at_least, at_most, deliver
from experiments.tiers import restart, times
from experiments.tiers.report import draw, show
from experiments.traces.replay import replay
from experiments.traces.trace import read_trace

TRACE = Path("traces", "conversation_trace.jsonl")
SIZES = (1000, 5000)
HOSTED = 4
NO_TRACE = "skipped, for there is neither --data nor KVCACHE_DATA_DIR; see experiments/traces/trace.py"


def make_prompts(data: Path | None, num_prompts: int) -> list[list[int]]:
    """Makes few-shot prompts of GSM8K, or of held-out source where there is no data."""
    if data is not None:
        return few_shot_prompts(data, num_prompts)
    text = b"".join(corpus.held_out_files().values())
    own = [text[2000 + 64 * i : 2064 + 64 * i] for i in range(num_prompts)]
    return [list(text[:960] + end) for end in own]


def hit_rates(path: Path, num_requests: int) -> dict[str, Any]:
    """Replays a trace on one, two and three tiers."""
    trace = read_trace(path, 512)
    trace = trace._replace(
        ids=trace.ids[:num_requests],
        num_ids=trace.num_ids[:num_requests],
        num_tokens=trace.num_tokens[:num_requests],
    )

    @functools.cache
    def rate(num_blocks: int, num_hosted: int = 0) -> float:
        return replay(trace, num_blocks, "lru", num_hosted=num_hosted)["hit_rate_blocks"]

    records = [
        {
            "num_blocks": size,
            "device": rate(size),
            "host": rate(size, HOSTED * size),
            "both": rate((1 + HOSTED) * size),
            "store": rate(max(trace.num_distinct, int(trace.num_ids.max()))),
        }
        for size in SIZES
    ]
    return {"num_requests": len(trace.ids), "num_ids": int(trace.num_ids.sum()), "records": records}


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.tiers", __doc__)
    command.add_data_folder(parser, "text/gsm8k_test.jsonl and traces/conversation_trace.jsonl")
    byte_model.add_option(parser)
    count = command.integer(2, 1000)
    parser.add_argument("--prompts", type=count, default=6, metavar="N", help="default: 6")
    parser.add_argument(
        "--requests", type=command.integer(1), default=4000, metavar="N", help="default: 4000"
    )
    parser.add_argument("--demo", action="store_true", help="the restart alone")
    add_options(parser)
    options = parser.parse_args(arguments)
    decoder = byte_model.load(parser, options.checkpoint)
    try:
        prompts = make_prompts(options.data, options.prompts)
    except InputError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        restarted = restart.study(options.checkpoint, Path(folder), prompts, len(prompts) // 2)
    report: dict[str, Any] = {"restart": restarted}
    report["bars"] = [
        at_most("tokens computed again that were cached", restarted["computed_again"], 0),
        at_most("blocks dropped of one that was flipped", sum(restarted["dropped"].values()), 1),
        at_least("answers as before", float(restarted["same_answers"]), 1),
    ]
    if not options.demo:
        config = times.config_for(decoder, prompts)
        report["first_token"] = times.first_tokens(decoder, prompts, config)
        report["stores"] = times.store_speeds(decoder, prompts, config)
        for store in report["stores"]:
            for what in ("save", "load"):
                bar = f"{what}, of the speed of {store['store']}"
                report["bars"].append(at_least(bar, store[f"{what}_ratio"], 0.5))
        path = None if options.data is None else options.data / TRACE
        report["hits"] = NO_TRACE
        if path is not None and path.exists():
            report["hits"] = hit_rates(path, options.requests)
            gap = [abs(record["host"] - record["both"]) for record in report["hits"]["records"]]
            report["bars"].append(at_most("hit rate with a host, against one pool", float(np.max(gap)), 0))
    deliver(report, options, show, draw)
    return 0


if __name__ == "__main__":
    command.run(main)
