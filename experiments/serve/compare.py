"""The sides beside each other on the same requests, and what must hold."""

from typing import Any

from experiments.common.report import at_least, at_most
from experiments.serve import interference, sides
from experiments.serve.server import Server, take_turns
from experiments.serve.sides import CONTINUOUS, HOST, PREFIX, STATIC, TABLE, Sizes
from experiments.serve.workload import Workload
from models.decoder import Decoder

NUM_TURNS = 24
NUM_ROUNDS, STEPS_PER_TURN = 6, 96


def serve(
    work: Workload, names: tuple[str, ...], decoder: Decoder, sizes: Sizes
) -> tuple[list[Server], list[dict[str, Any]]]:
    """Serves a workload by all sides, which take turns.

    The table comes at a table's speed: its requests are all there at once, so that its rows are as full as
    the others'.
    """
    servers, num_programs = [], []
    for name in names:
        engine = sides.make_engine(name, decoder, sizes)
        num_programs.append(sides.warm_up(engine))
        jobs = [job._replace(arrival=0.0) for job in work.jobs] if name == TABLE else work.jobs
        servers.append(sides.make_server(name, engine, jobs))
    take_turns(servers, work, NUM_TURNS)
    for server in servers:
        wrong = [job for job, num in zip(work.jobs, server.num_tokens, strict=True) if num != job.num_tokens]
        if wrong:  # a side that loses tokens must not look fast
            raise RuntimeError(f"{server.name}: {len(wrong)} requests did not get all of their tokens")
    records = [
        server.record() | {"programs": num, "timeline": server.timeline()}
        for server, num in zip(servers, num_programs, strict=True)
    ]
    return servers, records


def compare(
    problems: Workload, few_shot: Workload, decoder: Decoder, rows: int, is_disturbed: bool
) -> tuple[list[Server], dict[str, Any]]:
    disturbed_len = interference.num_tokens(NUM_ROUNDS, STEPS_PER_TURN) if is_disturbed else 0
    longest_prompt = max(len(job.prompt) for job in problems.jobs[:rows])
    longest = max(problems.longest, few_shot.longest, longest_prompt + disturbed_len)
    sizes = Sizes(rows, longest)
    cost = sides.program_cost(sides.make_engine(CONTINUOUS, decoder, sizes))
    servers, first = serve(problems, (STATIC, CONTINUOUS, PREFIX, HOST, TABLE), decoder, sizes)
    _, second = serve(few_shot, (CONTINUOUS, PREFIX), decoder, sizes)
    report: dict[str, Any] = {
        "rows": rows,
        "steps_per_delivery": sizes.steps_per_dispatch,
        "program": cost,
        "workloads": [
            {"name": work.name, "source": work.source, "sides": records}
            for work, records in ((problems, first), (few_shot, second))
        ],
    }
    if is_disturbed:
        jobs = interference.endless(problems.jobs, rows, disturbed_len)
        disturbed = [
            Server(name, sides.make_engine(name, decoder, sizes), jobs, max_steps=steps)
            for name, steps in ((CONTINUOUS, interference.STEPS_PER_DELIVERY), (HOST, 1))
        ]
        report["interference"] = interference.measure(disturbed, NUM_ROUNDS, STEPS_PER_TURN)
    return servers, report | {"bars": bars_of(report)}


def bars_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    problems, few_shot = (
        {record["side"]: record for record in work["sides"]} for work in report["workloads"]
    )

    def ratio(figure: str, records: dict, side: str, other: str) -> float:
        return records[side][figure] / records[other][figure]

    no_model = ratio("step_ms", problems, TABLE, PREFIX)
    transfers = max(problems[side]["transfers_per_step"] for side in (CONTINUOUS, PREFIX))
    num_programs = max(record["programs"] for record in problems.values())
    cost = report["program"]
    of_pools = cost["temporary_bytes"] / cost["pool_bytes"]
    batches = ratio("tokens_per_s", problems, CONTINUOUS, STATIC)
    prefix = ratio("tokens_per_s", few_shot, PREFIX, CONTINUOUS)
    bars = [
        at_least("continuous, times the tokens/s of static batches", batches, 1.3),
        at_least("prefix cache, times none, 8-shot GSM8K", prefix, 2.0),
        at_most("a step without a model, of a full step", no_model, 0.1),
        at_most("transfers a step", transfers, 1 / 16),
        at_most("compiling the engine's program, s", cost["compile_s"], 20.0),
        at_most("programs of an engine", num_programs, 1),
        at_most("temporaries of the program, of the pools' bytes", of_pools, 0.25),
    ]
    if "interference" in report:
        engine, host = (record["slow_down_p99"] for record in report["interference"])
        what = "p99 between deliveries, disturbed / idle: engine's / host loop's"
        bars.append(at_most(what, engine / host, 1.0))
    return bars
