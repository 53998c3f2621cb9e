"""Question: what is it worth that a router knows which replica holds a prompt's prefix?

Command: python -m experiments.fleet --trace FILE [--requests N] [--replicas N] [--arrivals F ...] [--json]
  [--picture FILE]
Machine: 2 virtual cores of an AMD EPYC, shared with other work; jax 0.12.0.1
Answer:  with a router that asks for the longest prefix hits are 2.17 times round robin's, and 1.94 times with
  one that asks for the cost (bar 1.5); 99 of 100 first tokens come within 3.9 and 3.4 s, not 5.0. At twice
  the load it is 2.21 and 1.90 times. At 3.3 times the load, which is more than the replicas can do, it is
  1.53 and 1.33 times (missed): what waits for a minute is evicted before.
Record:  experiments/results/fleet.json, docs/fleet.png.

The first requests of Mooncake's conversations, each at its time times a factor (--arrivals), go to replicas
that compute nothing (`experiments.fleet.simulated`): a chip each, Llama 3.1 8B, seconds by data sheets as in
`experiments.serve --simulate`. The choice is `kvcache_jax.processes.choose_replica`. The router knows at once
what a replica holds. Hits are tokens of prompts; the queue is of requests without a first token, at one
replica.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import command, log_axes
from experiments.common.report import add_options, at_least, deliver, figure, show_bars, show_provenance
from experiments.common.timing import show_records
from experiments.fleet.simulated import Request, SimulatedReplica
from experiments.serve.simulate import LLAMA, MACHINES, Machine
from experiments.serve.workload import read_answers
from experiments.traces.trace import add_trace_options, full_blocks_only, read_trace
from kvcache_jax.processes import choose_replica

COLUMNS = {
    "arrivals": "times {arrivals:g}",
    "policy": "{policy}",
    "hits": "{hit_rate:.1%}",
    "longest queue": "{longest_queue}",
    "first token, median": "{first_token_s[p50]:.2f} s",
    "p99": "{first_token_s[p99]:.2f} s",
    "requests of a replica": "{fewest_requests:,} - {most_requests:,}",
}
MEASURES = {
    "tokens of prompts found, %": lambda record: 100 * record["hit_rate"],
    "longest queue of a replica": lambda record: record["longest_queue"],
    "first token, p99, s": lambda record: record["first_token_s"]["p99"],
}


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as a table."""
    show_provenance(report)
    title = (
        "{num_requests:,} requests of {trace}; {num_replicas} simulated replicas of {model}, each "
        "{chips_per_replica} {chip} with {blocks_per_replica:,} blocks of {tokens_per_block} tokens"
    )
    show_records(title.format(**report), COLUMNS, report["records"], num_text=2)
    show_bars(report)


@figure((9, 3.2), 1, 3, dpi=150, grid="x", sharey=True)
def draw(report: dict[str, Any], *panels: Any) -> None:
    """Writes a picture: hits, longest queue and time to first token by policy and load."""
    records = report["records"]
    factors = list(dict.fromkeys(record["arrivals"] for record in records))
    for ax, (title, measure) in zip(panels, MEASURES.items(), strict=True):
        for i, factor in enumerate(factors):
            chosen = [record for record in records if record["arrivals"] == factor]
            places = [n + 0.8 * (i + 0.5) / len(factors) - 0.4 for n in range(len(chosen))]
            label = f"arrivals times {factor:g}"
            ax.barh(places, [measure(record) for record in chosen], 0.8 / len(factors), label=label)
            ax.set_yticks(range(len(chosen)), [record["policy"] for record in chosen])
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in panels[1:]:
        ax.set_xscale("log")
        log_axes.label(ax.xaxis)
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False, fontsize=8)


POLICIES = ("random", "round robin", "least loaded", "longest prefix", "cost")


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.fleet", __doc__)
    add_trace_options(parser)
    positive = command.number(0, is_above=True)
    parser.count("--requests", 10_000)
    parser.count("--replicas", 4)
    parser.add_argument(
        "--arrivals", type=positive, nargs="+", default=[1, 0.5, 0.3], metavar="F", help="times the trace's"
    )
    parser.add_argument("--machine", choices=[*MACHINES], default="H200", help="of a replica; default: H200")
    parser.count("--chips", 1, "of a replica")
    add_options(parser)
    options = parser.parse_args(arguments)
    machine = dataclasses.replace(MACHINES[options.machine], num_chips=options.chips)
    with parser.refusing(ValueError):
        records, bars = [], []
        requests = read_requests(options.trace, options.tokens_per_id, options.requests)
        for arrivals in options.arrivals:
            sooner = [request._replace(arrival=request.arrival * arrivals) for request in requests]
            found = {policy: serve(sooner, policy, machine, options) for policy in POLICIES}
            records += [{"arrivals": arrivals, "policy": policy} | each for policy, each in found.items()]
            for policy in ("longest prefix", "cost"):
                ratio = found[policy]["num_hit_tokens"] / max(found["round robin"]["num_hit_tokens"], 1)
                name = f"hits of {policy!r}, in times of round robin's, arrivals times {arrivals:g}"
                bars.append(at_least(name, ratio, 1.5))
    deliver(
        {
            "trace": options.trace.name,
            "num_requests": len(requests),
            "num_replicas": options.replicas,
            "chip": options.machine,
            "chips_per_replica": options.chips,
            "blocks_per_replica": LLAMA.num_blocks(machine, options.tokens_per_id),
            "tokens_per_block": options.tokens_per_id,
            "model": LLAMA.name,
            "records": records,
            "bars": bars,
        },
        options,
        show,
        draw,
    )
    return 0


def read_requests(path: Path, tokens_per_id: int, num: int) -> list[Request]:
    """Reads the first requests of a trace, in the order of their arrival."""
    trace, answers = full_blocks_only(read_trace(path, tokens_per_id)), read_answers(path, num)
    return [
        Request(ids[:num_ids].tolist(), int(num_tokens), max(answer.num_tokens, 1), answer.arrival)
        for ids, num_ids, num_tokens, answer in zip(*trace[:3], answers, strict=False)
    ]


def serve(requests: list[Request], policy: str, machine: Machine, options: argparse.Namespace) -> dict:
    """Serves all requests by one policy."""
    replicas = [SimulatedReplica(machine, LLAMA, options.tokens_per_id) for _ in range(options.replicas)]
    for turn, request in enumerate(requests):
        for replica in replicas:
            replica.run(request.arrival)
        known = [replica.known(request) for replica in replicas]
        replicas[choose_replica(known, request.num_tokens, policy, turn=turn)].push(request)
    for replica in replicas:
        replica.run(np.inf)
    seconds = np.concatenate([replica.first_token_s for replica in replicas])
    num_hit_tokens = sum(replica.num_hit_tokens for replica in replicas)
    return {
        "num_hit_tokens": num_hit_tokens,
        "hit_rate": num_hit_tokens / sum(request.num_tokens for request in requests),
        "longest_queue": max(replica.longest_queue for replica in replicas),
        "first_token_s": {f"p{p}": float(np.percentile(seconds, p)) for p in (50, 99)},
        "most_requests": max(replica.num_requests for replica in replicas),
        "fewest_requests": min(replica.num_requests for replica in replicas),
        "served_s": max(replica.clock for replica in replicas),
    }


if __name__ == "__main__":
    command.run(main)
