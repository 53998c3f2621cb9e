"""The tables and the figure of `experiments.streaming`."""

from typing import Any

from experiments.common.report import figure, show_bars, show_provenance
from experiments.common.timing import show_records, show_table


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    show_provenance(report)
    stream, window, dense, moved = report["sides"]
    header = ["bytes", stream["side"], "sinks move", window["side"], "mask", f"step, {stream['side']}"]
    header += ["step, sinks move", "step, window"]
    rows = []
    for mask, *sides in zip(report["mask"], stream["parts"], moved["parts"], window["parts"], strict=True):
        bits = [f"{side['bits_per_byte']:.4f}" for side in sides]
        place = f"{sides[0]['start']:,} - {sides[0]['end']:,}"
        rows.append([place, *bits, "" if mask is None else f"{mask:.4f}", *map(_time, sides)])
    title = f"bits per byte, and ms for a step of {report['tokens_of_a_step']}: median (p10 - p90)"
    show_table(title, header, rows)
    show_records(f"{dense['side']}, until there is no more room", DENSE, dense["parts"])
    show_records("blocks", BLOCKS, report["sides"])
    show_bars(report, digits=4)


def _time(part: dict) -> str:
    median, low, high = (part[name] / 1e3 for name in ("median_us", "p10_us", "p90_us"))
    return f"{median:.1f} ({low:.1f} - {high:.1f})"


DENSE = {"bytes": "{start:,} - {end:,}", "bits per byte": "{bits_per_byte:.4f}", "step": _time}
BLOCKS = {"": "{side}", "tokens read": "{num_read:,}", "most blocks held": "{most_blocks:,}"}


@figure((10, 4), 1, 2)
def draw(report: dict, losses: Any, times: Any) -> None:
    """Two panels over the text: bits per byte, and the time of a step."""
    for i, side in enumerate(report["sides"]):
        middles = [(part["start"] + part["end"]) / 2 for part in side["parts"]]
        style = dict(color=f"C{i}", marker=".", label=side["side"], linestyle="--" if i == 1 else "-")
        losses.plot(middles, [part["bits_per_byte"] for part in side["parts"]], **style)
        times.plot(middles, [part["median_us"] / 1e3 for part in side["parts"]], **style)
        if side["num_read"] < report["sides"][0]["num_read"]:
            for axes, name, scale in ((losses, "bits_per_byte", 1), (times, "median_us", 1e3)):
                end = side["parts"][-1][name] / scale
                axes.annotate("its table ends", (middles[-1], end), xytext=(8, 0), textcoords="offset points")
    masked = [
        (sum(part) / 2, bits) for part, bits in zip(report["parts"], report["mask"], strict=True) if bits
    ]
    losses.plot(*zip(*masked, strict=True), "kx", label="a mask over all tokens")
    losses.set(title="bits per byte", xlabel="bytes of text", ylim=(0, None))
    times.set(
        title=f"a step of {report['tokens_of_a_step']} tokens, ms", xlabel="bytes of text", ylim=(0, None)
    )
    for axes in (losses, times):
        axes.xaxis.set_major_formatter("{x:,.0f}")
    losses.legend(frameon=False)
