"""The tables of `experiments.bookkeeping`."""

from experiments.bookkeeping.operations import BLOCK_SIZE, FLOOR, FULL, NUM_BLOCKS, NUM_ROWS, SMALL
from experiments.common.report import show_provenance, verdict
from experiments.common.timing import number, show_records, show_table, spread_columns

FIGURES = {
    "operation": "{operation}",
    "figure": "{figure}",
    **spread_columns(),
    "calls x steps": "{num_calls} x {steps_per_call}",
    "first call (compiles)": "{first_call_s:.2f} s",
}
PEERS = {"peer": "{peer}", "operation": "{operation}", "variant": "{variant}", "figure": "{figure}"}
BARS = {
    "bar": "{bar}",
    "measured": lambda bar: number(bar["measured"]),
    "at most": lambda bar: number(bar["limit"]),
    "": "{unit}",
    "verdict": lambda bar: verdict(bar["holds"]),
}


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    show_provenance(report)
    print("times in microseconds")
    records = [record for record in report["records"] if record["workload"] == FULL.name]
    title = f"{NUM_ROWS} rows, {NUM_BLOCKS:,} blocks of {BLOCK_SIZE}; {FULL}"
    show_records(title, FIGURES, records, num_text=2)
    _show_growth([record for record in report["records"] if record["workload"] == SMALL.name])

    rows = [[field, f"{size:,}"] for field, size in report["control_bytes"].items()]
    show_table(f"control state, {NUM_BLOCKS:,} blocks", ["field", "bytes"], rows)
    small, large = report["decode_step_bytes"]["N"], report["decode_step_bytes"]["8N"]
    rows = [[kind, f"{small[kind]:,}", f"{large[kind]:,}"] for kind in small]
    show_table("compiled decode step of two layers, bytes", ["", "N blocks", "8N blocks"], rows)

    _show_peers(report["peers"])
    show_records("bars", BARS, report["bars"])
    num_failed = sum(not bar["holds"] for bar in report["bars"])
    print(f"\n{num_failed} of {len(report['bars'])} bars do not hold; {report['seconds']:.0f} s in all")


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
            [*key, number(first), *(f"{number(median)} = {median / first:.2f}x" for median in larger)]
        )
    header = ["operation", "figure", *(f"{size:,} blocks" for size in sizes)]
    show_table(f"growth with the pool; {SMALL}", header, rows, num_text=2)


def _show_peers(peers: list[dict]) -> None:
    records = []
    for peer in peers:
        if "skipped" in peer:
            print(f"\n{peer['peer']} was skipped: {peer['skipped']}")
            print("  (install it anywhere and name that interpreter with --peers-python)")
        name = f"{peer['peer']} {peer.get('version')}"
        records += [{"peer": name, **record} for record in peer.get("records", [])]
    if records:
        show_records("peers, the same rows and blocks", {**PEERS, **spread_columns()}, records, num_text=4)
