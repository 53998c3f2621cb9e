"""Question: what does continuous batching inside one program give, beside batches and beside a host's loop?

Command: python -m experiments.serve [--data DIR] [--interference] [--simulate] [--demo] [--json]
  [--picture FILE] [--metrics FILE] [--markdown RECORD]
Machine: 2 cores of an AMD EPYC; jax 0.12.0.1
Answer:  continuous batching makes 1.33 times the tokens a second of static batches with 192 requests, the
         prefix cache 3.9 times those without on eight-shot questions; the scheduler takes 7% of a step.
Record:  experiments/results/serve.json (--interference --requests 192), serve_simulated.json (--simulate),
         docs/serve.png; docs/measured.md tells of the workloads.

On the same requests, model, rows and compiled forward:
  static batches            as many requests as there are rows, of the shortest prompts that are there; the
                            next batch comes when all have ended
  continuous                a row is another request's as soon as it is free
  continuous, prefix cache  and what the cache has is not computed again
  a dispatch per token      continuous, but the host dispatches each step and reads its tokens
  a table for the model     continuous, prefix cache, with a look-up in place of the forward: the scheduler
They take turns of as many tokens, and a side's clock stops while it is not its turn. Answers go on to the
length that a trace says, which no side knows. A token comes when the host has it.

--interference measures what is between two deliveries while a thread of the process runs Python and another
process burns a core. --simulate is about a machine that is only named: the forward is a table, and the clock
goes by bytes and FLOPs. --demo is a short run of an engine that lacks blocks. Without --data or
KVCACHE_DATA_DIR requests are made up, to be like the trace's.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import kvcache_jax as kv
from experiments.common import command
from experiments.common.command import InputError
from experiments.common.corpus import MODEL
from experiments.common.report import add_options, deliver
from experiments.serve import report as reports
from experiments.serve.compare import compare, serve
from experiments.serve.server import Server
from experiments.serve.sides import BLOCK_SIZE, PREFIX, Sizes
from experiments.serve.simulate import MACHINES, holds_one, simulate
from experiments.serve.workload import Workload, alike, few_shot, human_eval
from models import checkpoint
from models.decoder import Decoder

FEW_SHOT_LENGTHS = 0.25  # of answers, beside prompts of 4,400 bytes
SIMULATED = dict(rows=10_000, requests=2_000, arrivals=0.001, lengths=1.0)
MEASURED = dict(rows=8, requests=48, arrivals=0.25, lengths=3.0)  # tokens are bytes here
DEMO = dict(rows=8, requests=32, arrivals=0.5, lengths=0.5)
DEMO_POOL = 2.0  # of the longest request's blocks


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.markdown:
        try:
            print(reports.markdown(json.loads(options.markdown.read_text())), end="")
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"got --markdown {options.markdown}, expected what --json printed: {error!r}")
        return 0
    defaults = SIMULATED if options.simulate else DEMO if options.demo else MEASURED
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    with parser.refusing(checkpoint.CheckpointError):
        servers, found = run(options)
    report = {"load": os.getloadavg()[0], "model": options.checkpoint.name, **found}
    deliver(report, options, reports.show, reports.draw)
    for server in servers:
        if options.metrics and server.name == PREFIX:
            from experiments.common import prometheus

            names = {"model_name": options.checkpoint.name, "engine": server.name}
            prometheus.write(options.metrics, server.engine.metrics(), **names)
    return 0


def make_parser() -> command.Parser:
    parser = command.Parser("experiments.serve", __doc__)
    command.add_data_folder(parser, "text/ and traces/, see experiments/serve/workload.py")
    parser.add_argument(
        "--trace", type=command.name, metavar="FILE", help="of Azure (.csv) or Mooncake (.jsonl)"
    )
    parser.add_argument("--checkpoint", type=command.name, default=MODEL, metavar="DIR")
    parser.count("--rows", None, "of the cache")
    parser.count("--requests", None, "of the first workload")
    parser.count("--few-shot", 16, "of the second", most=1000)
    parser.add_argument("--arrivals", type=command.number(0), metavar="F", help="factor on the trace's")
    parser.add_argument(
        "--lengths", type=command.number(0, is_above=True), metavar="F", help="factor on the trace's answers"
    )
    parser.add_argument("--interference", action="store_true", help="also measure with a busy host")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--demo", action="store_true", help="one engine, a short pool, a minute")
    modes.add_argument(
        "--simulate",
        nargs="?",
        const="H200",
        choices=[*MACHINES],
        metavar="MACHINE",
        help=f"by a cost model alone: {', '.join(MACHINES)}; default: H200",
    )
    parser.count("--chips", 8, "of that machine")
    add_options(parser)
    parser.add_argument(
        "--markdown", type=command.name, metavar="RECORD", help="print a record's tables and measure nothing"
    )
    parser.add_argument("--metrics", type=metrics_file, metavar="FILE", help="also write Prometheus text")
    return parser


def metrics_file(text: str) -> Path:
    """An argparse `type`: a file for metrics, where there is what writes them."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise argparse.ArgumentTypeError("metrics need prometheus-client: pip install 'kvcache_jax[metrics]'")
    path = command.name(text)
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"got {text!r}, but there is no folder {path.parent}: make it first")
    return path


def run(options: Any) -> tuple[list[Server], dict[str, Any]]:
    factors = options.arrivals, options.lengths
    if options.demo:
        return demo(alike(options.requests, *factors), load(options), options.rows)
    problems = human_eval(options.data, options.trace, options.requests, *factors)
    if options.simulate:
        machine = dataclasses.replace(MACHINES[options.simulate], num_chips=options.chips)
        if not holds_one(problems, machine):
            raise InputError(f"{options.chips} {machine.name} hold no model and request: raise --chips")
        return [], {"simulated": simulate(problems, machine, options.rows)}
    questions = few_shot(options.data, options.trace, options.few_shot, options.arrivals, FEW_SHOT_LENGTHS)
    return compare(problems, questions, load(options), options.rows, options.interference)


def load(options: Any) -> Decoder:
    return checkpoint.load(options.checkpoint, dtype=jnp.float32)


def demo(work: Workload, decoder: Decoder, rows: int) -> tuple[list[Server], dict[str, Any]]:
    """Serves by one engine, in a pool that cannot hold what its rows want."""
    num_blocks = math.ceil(DEMO_POOL * -(-work.longest // BLOCK_SIZE))
    [server], sides = serve(work, (PREFIX,), decoder, Sizes(rows, work.longest, num_blocks))
    if problems := kv.check_invariants(server.engine.state.cache):
        raise RuntimeError("; ".join(problems))
    workload = {"name": work.name, "source": work.source, "sides": sides}
    return [server], {"rows": rows, "workloads": [workload]}


if __name__ == "__main__":
    command.run(main)
