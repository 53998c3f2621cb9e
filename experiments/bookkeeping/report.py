"""The tables of `experiments.bookkeeping`."""

from experiments.bookkeeping.operations import BLOCK_SIZE, FLOOR, FULL, NUM_BLOCKS, NUM_ROWS, SMALL
from experiments.common.timing import show_table


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    host = report["machine"]
    print(f"{host['cpu']}, {host['num_cores']} cores")
    print(f"{report['device']}, jax {report['jax']}; times in microseconds")
    records = [record for record in report["records"] if record["workload"] == FULL.name]
    _show_figures(f"{NUM_ROWS} rows, {NUM_BLOCKS:,} blocks of {BLOCK_SIZE}; {FULL}", records)
    _show_growth([record for record in report["records"] if record["workload"] == SMALL.name])

    rows = [[field, f"{size:,}"] for field, size in report["control_bytes"].items()]
    show_table(f"control state, {NUM_BLOCKS:,} blocks", ["field", "bytes"], rows)
    small, large = report["decode_step_bytes"]["N"], report["decode_step_bytes"]["8N"]
    rows = [[kind, f"{small[kind]:,}", f"{large[kind]:,}"] for kind in small]
    show_table("compiled decode step of two layers, bytes", ["", "N blocks", "8N blocks"], rows)

    _show_peers(report["peers"])
    rows = [
        [bar["bar"], _number(bar["measured"]), _number(bar["limit"]), bar["unit"], _verdict(bar["holds"])]
        for bar in report["bars"]
    ]
    show_table("bars", ["bar", "measured", "at most", "", ""], rows)
    num_failed = sum(not bar["holds"] for bar in report["bars"])
    print(f"\n{num_failed} of {len(rows)} bars do not hold; {report['seconds']:.0f} s in all")


def _show_figures(title: str, records: list[dict]) -> None:
    rows = [
        [
            record["operation"],
            *_figure(record),
            f"{record['num_calls']} x {record['steps_per_call']}",
            f"{record['first_call_s']:.2f} s",
        ]
        for record in records
    ]
    header = ["operation", "figure", "median", "p10 - p90", "calls x steps", "first call (compiles)"]
    show_table(title, header, rows, num_text=2)


def _show_growth(records: list[dict]) -> None:
    sizes = sorted({record["num_blocks"] for record in records})
    medians: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        if record["figure"] != FLOOR:
            key = record["operation"], record["figure"]
            medians.setdefault(key, {})[record["num_blocks"]] = record["median_us"]
    rows = []
    for key, by_size in medians.items():
        first, *larger = (by_size[size] for size in sizes)
        rows.append(
            [*key, _number(first), *(f"{_number(median)} = {median / first:.2f}x" for median in larger)]
        )
    header = ["operation", "figure", *(f"{size:,} blocks" for size in sizes)]
    show_table(f"growth with the pool; {SMALL}", header, rows, num_text=2)


def _show_peers(peers: list[dict]) -> None:
    rows = []
    for peer in peers:
        if "skipped" in peer:
            print(f"\n{peer['peer']} was skipped: {peer['skipped']}")
            print("  (install it anywhere and name that interpreter with --peers-python)")
        for record in peer.get("records", []):
            rows.append(
                [
                    f"{peer['peer']} {peer['version']}",
                    record["operation"],
                    record["variant"],
                    *_figure(record),
                ]
            )
    if rows:
        header = ["peer", "operation", "variant", "figure", "median", "p10 - p90"]
        show_table("peers, the same rows and blocks", header, rows, num_text=4)


def _figure(record: dict) -> list[str]:
    spread = f"{_number(record['p10_us'])} - {_number(record['p90_us'])}"
    return [record["figure"], _number(record["median_us"]), spread]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "does not hold"
