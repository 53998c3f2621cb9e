"""The tables and the figure of `experiments.kernel_speed`."""

from collections.abc import Sequence
from pathlib import Path

from experiments.common.timing import show_table
from experiments.kernel_speed.cells import BLOCK_SIZES, LARGE_BYTES
from experiments.kernel_speed.names import OURS, READ, WITH_PLAN
from experiments.kernel_speed.summary import absences, ceiling_rates, gb_per_s, medians_us

NOT_MEASURED = "not measured"


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    device = report["device"]
    print(f"{device['name']}, jax {report['jax']}, {report['date']}, {report['revision'] or 'no revision'}")
    if report["is_interpreted"]:
        print("interpreted on the CPU: the path is checked, nothing is measured")
    if len(report["calls"]) > 1:
        print(f"{len(report['calls'])} calls, the first {report['calls'][0]['date']}")
    rates = ceiling_rates(report)
    print(f"ceilings: {', '.join(f'{name} {_range(rates[name])}' for name in rates)}")
    floors = [entry for entry in report["entries"] if not entry["num_bytes"]]
    if len(report["calls"]) > 1:
        floors = [{**entry, "name": f"{entry['name']}, call {entry['call'] + 1}"} for entry in floors]
    _show_others("what a launch costs at least", floors)
    _show_decodes(report["decodes"])
    _show_others("movement of tokens and blocks", report["moves"])
    _show_others("a whole step of the decoder", report["steps"])
    _show_absences(report)
    _show_summary(report)


def _show_decodes(entries: Sequence[dict]) -> None:
    rows = []
    for entry in entries:
        compared, medians = entry["comparison"], medians_us(entry)
        best = compared["best_peer"]
        rows.append(
            [
                entry["name"],
                f"{entry['num_bytes'] / 1e9:.3g}",
                _us(entry, OURS),
                _us(entry, WITH_PLAN),
                _gb(compared["gb_per_s"]),
                _percent(compared["of_ceiling"]),
                f"{best} {medians[best]:,.1f}" if best else "none",
                f"{compared['ratio']:.2f}x" if compared["ratio"] else compared["why_no_ratio"],
            ]
        )
    header = [
        "batch x context",
        "GB",
        "ours, us",
        "with plan",
        "",
        "of reading",
        "best peer, us",
        "its time / ours",
    ]
    if rows:
        show_table("paged decode, bfloat16", header, rows)


def _show_others(title: str, entries: Sequence[dict]) -> None:
    rows = []
    for entry in entries:
        for side in entry["sides"]:
            rows.append(
                [
                    entry["name"],
                    side["side"],
                    f"{entry['num_bytes'] / 1e9:.3g}",
                    _us(entry, side["side"]),
                    _gb(gb_per_s(entry, side["side"])) if entry["num_bytes"] else "",
                    _percent(entry.get("of_ceiling", {}).get(side["side"])),
                    side["status"],
                ]
            )
    header = ["", "", "GB", "median (p10 - p90), us", "", "of the ceiling", ""]
    if rows:
        show_table(title, header, rows, num_text=2)


def _show_absences(report: dict) -> None:
    for absence in absences([*report["entries"], *report["decodes"], *report["moves"], *report["steps"]]):
        names = absence["on"]
        where = names[0] if len(names) == 1 else f"{len(names)} entries, {names[0]} and others"
        print(f"{absence['side']}: {absence['reason']} ({where})")
    for skipped in report["skipped"]:
        print(f"skipped {skipped['cell']}: {skipped['reason']}")
    if report["left_out"]:
        print(f"left out, no time: {'; '.join(report['left_out'])}")
        print(f"{len(report['left_out'])} left out: the same command with --resume measures them")
    if report["stopped"]:
        print(f"stopped early: {report['stopped']}")


def _show_summary(report: dict) -> None:
    summary = report["summary"]
    if summary["losses"]:
        rows = [[loss["cell"], loss["best_peer"], f"{loss['ratio']:.2f}x"] for loss in summary["losses"]]
        show_table("cells in which a peer is faster", ["batch x context", "peer", "its time / ours"], rows, 2)
    verdicts = {True: "holds", False: "does not hold", None: NOT_MEASURED}
    rows = [
        [
            bar["bar"],
            NOT_MEASURED if bar["measured"] is None else f"{bar['measured']:.3g}",
            f"at least {bar['at_least']:g}",
            verdicts[bar["holds"]],
        ]
        for bar in summary["bars"]
    ]
    show_table("bars", ["bar", "measured", "", ""], rows)
    num_compared, num_cells = summary["num_compared"], summary["num_cells"]
    print(f"\n{num_compared} of {num_cells} cells compared with a peer; {report['seconds']:.0f} s in all")


def _us(entry: dict, name: str) -> str:
    for side in entry["sides"]:
        if side["side"] == name:
            if side["median_us"] is None:
                return side["status"]
            return f"{side['median_us']:,.1f} ({side['p10_us']:,.1f} - {side['p90_us']:,.1f})"
    return ""


def _gb(rate: float | None) -> str:
    return NOT_MEASURED if rate is None else f"{rate:,.0f} GB/s"


def _range(rates: Sequence[float]) -> str:
    """What the calls measured, sorted, and how far that is apart."""
    if len(rates) < 2:
        return _gb(rates[0] if rates else None)
    return f"{rates[0]:,.0f} to {_gb(rates[-1])} ({rates[-1] / rates[0] - 1:.1%} apart in {len(rates)} calls)"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def draw(report: dict, path: Path) -> None:
    """Three panels: the decode's bandwidth by bytes, its ratio to the best peer, and the other kernels'."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    bandwidth, ratios, others = figure.subplots(1, 3)
    device = report["device"]["name"]
    figure.suptitle(f"{device}, jax {report['jax']}, {report['date']} {report['revision']}", fontsize=9)

    decodes, read = report["decodes"], ceiling_rates(report).get(READ, [])
    for nth, block_size in enumerate(BLOCK_SIZES):
        points = [
            (entry["num_bytes"] / 1e9, entry["comparison"]["gb_per_s"])
            for entry in decodes
            if entry["block_size"] == block_size and entry["comparison"]["gb_per_s"] is not None
        ]
        if points:
            bandwidth.plot(
                *zip(*points, strict=True), "o", color=f"C{nth}", label=f"ours, block {block_size}"
            )
    peers = [
        (entry["num_bytes"] / 1e9, gb_per_s(entry, entry["comparison"]["best_peer"]))
        for entry in decodes
        if entry["comparison"]["best_peer"]
    ]
    if peers:
        bandwidth.plot(*zip(*peers, strict=True), "x", color="0.5", label="best peer")
    for nth, rate in enumerate(read):
        label = "" if nth else f"reading only{', each call' * (len(read) > 1)}"
        bandwidth.axhline(rate, color="0.3", linestyle="--", linewidth=1, label=label)
    bandwidth.axvline(LARGE_BYTES / 1e9, color="0.8")
    bandwidth.set(xscale="log", xlabel="GB of keys and values", ylabel="GB/s", title="paged decode")
    bandwidth.set_ylim(0)
    bandwidth.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    bandwidth.minorticks_off()

    compared = sorted(
        (entry["comparison"]["ratio"], entry["name"])
        for entry in decodes
        if entry["comparison"]["ratio"] is not None
    )
    places = range(len(compared))
    ratios.bar(places, [ratio for ratio, _ in compared], color=["C3" if r < 1 else "C0" for r, _ in compared])
    if len(compared) <= 24:
        ratios.set_xticks(places, [name for _, name in compared], rotation=90, fontsize=6)
    for value, style in ((1.0, "-"), (0.9, ":")):
        ratios.axhline(value, color="0.3", linestyle=style)
    ratios.set(ylabel="the best peer's time / ours", title="every cell that has a peer")

    bars = [
        (f"{entry['name']}, {side}", gb_per_s(entry, side), side == OURS)
        for entry in (*report["moves"], *report["steps"])
        for side in medians_us(entry)
    ]
    others.barh(
        [name for name, _, _ in bars],
        [rate for _, rate, _ in bars],
        color=["C0" if is_ours else "0.6" for _, _, is_ours in bars],
    )
    others.invert_yaxis()
    others.tick_params(axis="y", labelsize=6)
    others.set(xlabel="GB/s, read and written", title="movement, and whole steps")

    for axes, drawn in ((bandwidth, decodes and read), (ratios, compared), (others, bars)):
        if drawn:
            axes.grid(alpha=0.3)
        else:
            axes.text(0.5, 0.5, NOT_MEASURED, ha="center", va="center", transform=axes.transAxes)
    if bandwidth.get_legend_handles_labels()[0]:
        bandwidth.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)
