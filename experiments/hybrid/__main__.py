"""Question: which states of recurrent layers must a prefix cache keep?

Command: python -m experiments.hybrid [--json] [--picture FILE]
Machine: 2 virtual cores of an Intel Xeon; jax 0.12.0.1
Answer:  one where prompts part, and the last one of an answer; the last one of a prompt for prompts that come
  again. Of the tokens that a snapshot at every block saves, junctions alone save 98.4% of few-shot prompts'
  with 0.2% of the bytes; junctions and answers' ends 99.1% of chats' with 9.8%. In a pool of 20 points every
  block saves 12% of the tokens, junctions and ends 71%, as in any pool.
Record:  experiments/results/hybrid.json, docs/hybrid.png; docs/measured.md tells of the workloads.

With the pool that holds all snapshots, a model of random weights runs: what it predicts after each token of a
few-shot prompt or a chat that a policy computes is compared with what it predicts uncached. Pools of few
points serve the same requests on tables alone, without storage: what is found depends on tokens alone.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from experiments.common import command
from experiments.common.report import add_options, at_least, at_most, deliver, figure, framed
from experiments.common.timing import show_records
from experiments.hybrid import bytes_moved, tables
from experiments.hybrid.tables import BLOCK_SIZE, DEFAULT, JUNCTIONS, POLICIES, SAVED, SCARCE, Request, Served

KIB, MIB, GIB = 2**10, 2**20, 2**30
PREFIXES, OTHERS_BLOCK = (17, 64, 500, 2000), 528
FEW_SHOT, CHATS, TWO_LEVELS = "few-shot", "chats", "two levels"
FEW_POINTS, LEAST_POINTS = 20, 4  # a row's share is four
BYTE_SHARES = {FEW_SHOT: 0.01, CHATS: 0.15}
SNAPSHOTS = {
    "computed": "{num_computed:,}",
    "saved": "{saved:.1%}",
    "snapshots": "{num_snapshots}",
    "KiB": lambda one: f"{one['snapshot_bytes'][0] / KIB:,.0f}",
    "Qwen3-Next, GiB": lambda one: f"{one['snapshot_bytes'][1] / GIB:.2f}",
    "of every block's tokens": "{share_of_saved:.1%}",
    "of its bytes": "{share_of_bytes:.2%}",
}


@framed
def show(report: dict[str, Any]) -> None:
    for name in dict.fromkeys(one["workload"] for one in report["policies"]):
        records = [one for one in report["policies"] if one["workload"] == name]
        title = f"{name}: {records[0]['num_tokens']:,} tokens of prompts, with the model"
        show_records(title, {"policy": "{policy}", **SNAPSHOTS}, records)
    points = report["few_points"][0]["num_points"]
    title = f"two levels, a pool of {points} points, tables alone"
    show_records(title, {"policy": "{policy}", **SNAPSHOTS}, report["few_points"])
    title = "junctions and ends in a pool of few points, tables alone"
    show_records(title, {"": "{workload}", "points": "{num_points}", **SNAPSHOTS}, report["limited"])
    prefixes = {
        "shared tokens": "{shared:,}",
        "cached, by request": lambda one: ", ".join(map(str, one["cached"])),
        "by blocks of 528": "{others:,}",
    }
    show_records("four prompts of one prefix, junctions, with the model", prefixes, report["prefixes"])
    moved = [{"what": what, "mib": num / MIB} for what, num in report["decode_bytes"].items()]
    title = "bytes per token and layer in decode, Qwen3-Next's sizes, MiB"
    show_records(title, {"": "{what}", "MiB": "{mib:.3f}"}, moved)
    print(f"\n{report['num_different']} of {report['num_compared']:,} predictions are not the uncached ones")


@figure((12, 9), 2, 1, grid="x")
def draw(report: dict[str, Any], *panels: Any) -> None:
    for axes, (name, requests) in zip(panels, report["maps"].items(), strict=True):
        rows = range(len(requests))
        found = [one["num_found"] for one in requests]
        computed = [one["num_blocks"] - one["num_found"] for one in requests]
        axes.barh(rows, found, color="C0", alpha=0.25, height=0.9, label="found")
        axes.barh(rows, computed, left=found, color="C1", alpha=0.35, height=0.9, label="computed")
        dots = [(column + 0.5, row) for row, one in enumerate(requests) for column in one["snapshots"]]
        axes.plot(*zip(*dots, strict=True), "k.", markersize=4, label="carries a snapshot")
        axes.set(title=f"{name}, junctions and ends", xlabel="block", ylabel="request")
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


class Workloads(NamedTuple):
    """Requests by name, and by the length of a prefix that four of them share."""

    named: dict[str, list[Request]]
    prefixes: dict[int, list[Request]]


def workloads_of(writer: tables.Writer) -> Workloads:
    named = {FEW_SHOT: tables.few_shot, CHATS: tables.chats, TWO_LEVELS: tables.two_levels}
    return Workloads(
        {name: draw(writer) for name, draw in named.items()},
        {length: tables.repeated_prefix(writer, length) for length in PREFIXES},
    )


def measure(work: Workloads, params: tables.Params, few_points: int = FEW_POINTS) -> dict[str, Any]:
    """Serves all requests by all policies, compiling for two at a time."""

    def roomy(policy: str) -> dict[str, Served]:
        config, names = tables.config_of(POLICIES[policy]), [*work.named]
        if policy in (tables.ANSWERS, tables.ENDS, tables.NONE):
            names.remove(TWO_LEVELS)
        return {name: tables.serve(config, work.named[name], params) for name in names}

    def scarce(policy: str) -> Served:
        return tables.serve(tables.config_of(SCARCE[policy], few_points), work.named[TWO_LEVELS])

    def limited(name: str) -> Served:
        return tables.serve(tables.config_of(POLICIES[DEFAULT], limits[name]), work.named[name])

    with ThreadPoolExecutor(2) as threads:
        small = {policy: threads.submit(scarce, policy) for policy in SCARCE}
        by_policy = _all(threads, POLICIES, roomy)
        dense = by_policy[tables.DENSE]
        shares = {name: share * dense[name].num_snapshots for name, share in BYTE_SHARES.items()}
        limits = {name: max(LEAST_POINTS, int(share)) for name, share in shares.items()}
        by_limit = _all(threads, limits, limited)
        by_small = {policy: future.result() for policy, future in small.items()}
        config = tables.config_of(POLICIES[JUNCTIONS])
        found = {length: tables.serve(config, requests, params) for length, requests in work.prefixes.items()}
    compared = [num_compared(served, by_policy[tables.NONE]) for served in by_policy.values()]
    num_predicted, num_different = map(sum, zip(*compared, strict=True))
    [points] = config.snapshot_groups
    point_bytes = config.groups[points].block_bytes, bytes_moved.point_bytes()
    records = [
        {"workload": name, "policy": policy, **record_of(served[name], dense[name], point_bytes)}
        for name in work.named
        for policy, served in by_policy.items()
        if name in served
    ]
    in_small = [
        {"policy": policy, "num_points": few_points, **record_of(served, dense[TWO_LEVELS], point_bytes)}
        for policy, served in by_small.items()
    ]
    in_limits = [
        {"workload": name, "num_points": limits[name], **record_of(served, dense[name], point_bytes)}
        for name, served in by_limit.items()
    ]
    return {
        "point_bytes": point_bytes,
        "policies": records,
        "few_points": in_small,
        "limited": in_limits,
        "prefixes": [
            {"shared": length, "cached": served.num_cached, "others": length // OTHERS_BLOCK * OTHERS_BLOCK}
            for length, served in found.items()
        ],
        "num_compared": num_predicted,
        "num_different": num_different,
        "decode_bytes": bytes_moved.of_decode(),
        "maps": {name: map_of(by_policy[DEFAULT][name], work.named[name]) for name in BYTE_SHARES},
    }


def _all[T](
    threads: ThreadPoolExecutor, names: Sequence[str] | dict, run: Callable[[str], T]
) -> dict[str, T]:
    return dict(zip(names, threads.map(run, names), strict=True))


def record_of(served: Served, dense: Served, point_bytes: tuple[int, int]) -> dict[str, Any]:
    """Compares a policy with a snapshot at every block."""
    return {
        "num_tokens": served.num_tokens,
        "num_computed": served.num_tokens - served.num_saved,
        "saved": served.num_saved / served.num_tokens,
        "num_snapshots": served.num_snapshots,
        "snapshot_bytes": [served.num_snapshots * each for each in point_bytes],
        "share_of_saved": served.num_saved / dense.num_saved,
        "share_of_bytes": served.num_snapshots / dense.num_snapshots,
    }


def num_compared(served: dict[str, Served], uncached: dict[str, Served]) -> tuple[int, int]:
    """Counts the predictions after computed tokens, and those that are not the uncached ones."""
    num, num_different = 0, 0
    for name, exact in uncached.items():
        predicted = served[name].predicted
        is_computed = predicted >= 0
        num += int(is_computed.sum())
        num_different += int((predicted != exact.predicted)[is_computed].sum())
    return num, num_different


def map_of(served: Served, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Tells of each request how many blocks it found and held, and which of them carry a snapshot."""
    return [
        {
            "num_found": num_cached // BLOCK_SIZE,
            "num_blocks": -(-sum(map(len, request)) // BLOCK_SIZE),
            "snapshots": np.flatnonzero(carries).tolist(),
        }
        for request, num_cached, carries in zip(requests, served.num_cached, served.has_snapshot, strict=True)
    ]


def bars_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    policies = {(each["workload"], each["policy"]): each for each in found["policies"]}
    small = {each["policy"]: each for each in found["few_points"]}
    bars = []

    def add(where: str, each: dict[str, Any]) -> None:
        where, limit = f"{each['workload']}, {where}", BYTE_SHARES[each["workload"]]
        bars.append(at_least(f"{where}: tokens saved, of every block's", each["share_of_saved"], 0.95))
        bars.append(at_most(f"{where}: bytes, of every block's", each["share_of_bytes"], limit))

    add("junctions", policies[FEW_SHOT, JUNCTIONS])
    add("junctions and answers' ends", policies[CHATS, tables.ANSWERS])
    for each in found["limited"]:
        add(f"junctions and ends, {each['num_points']} points", each)
    for each in found["prefixes"]:
        bar = f"shared prefix of {each['shared']:,}: tokens cached from the third request on"
        bars.append(at_least(bar, min(each["cached"][2:]), each["shared"] // BLOCK_SIZE * BLOCK_SIZE))
    most, saved = policies[TWO_LEVELS, JUNCTIONS]["saved"], small[DEFAULT]["saved"]
    state = sum(num for what, num in found["decode_bytes"].items() if what.startswith("state"))
    where = f"two levels, {small[DEFAULT]['num_points']} points, junctions and ends"
    return [
        *bars,
        at_least(f"{where}: tokens saved, of junctions' in any pool", saved / most, 1),
        at_least("the same by tokens saved, of junctions' in any pool", small[SAVED]["saved"] / most, 1),
        at_most("predictions that are not the uncached ones", found["num_different"], 0),
        at_most("state bytes per token and layer in decode, MiB", state / MIB, 2.5),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.Parser("experiments.hybrid", __doc__)
    add_options(parser)
    options = parser.parse_args(arguments)
    found = measure(workloads_of(tables.Writer(0)), tables.random_params())
    return deliver(found | {"bars": bars_of(found)}, options, show, draw)


if __name__ == "__main__":
    command.run(main)
