"""The tables and the picture of `experiments.tiers`."""

from typing import Any

from experiments.common import log_axes
from experiments.common.report import figure, show_bars, show_provenance
from experiments.common.timing import ms_columns, show_records

SPEEDS = {
    "MB/s": "{store}",
    "put": "{put:.0f}",
    "save": "{save:.0f}",
    "of it": "{save_ratio:.2f}",
    "get": "{get:.0f}",
    "load": "{load:.0f}",
    "of them": "{load_ratio:.2f}",
}
HITS = {
    "blocks on the device": "{num_blocks:,}",
    "device": "{device:.4f}",
    "with a host": "{host:.4f}",
    "one pool": "{both:.4f}",
    "with a store of all": "{store:.4f}",
}
TIERS = {"device": "device", "host": "and 4 times as many on the host", "store": "and all in a store"}


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    show_provenance(report)
    again = report["restart"]
    num_dropped = sum(again["dropped"].values())
    why = f" ({', '.join(again['dropped'])})" if num_dropped else ""
    print(f"\na process answered {again['num_prompts'][0]} prompts and was killed; the next one:")
    print(f"  loaded {again['num_loaded']} blocks in {1e3 * again['load_seconds']:.0f} ms")
    print(f"  computed again: {again['computed_again']} tokens that were cached, of {again['num_tokens']}")
    print("  a byte of the store flipped:")
    unchanged = "answers unchanged" if again["same_answers"] else "OTHER ANSWERS"
    print(f"  {num_dropped} block dropped{why}, {unchanged}")
    if "first_token" in report:
        columns = {"time to first token, ms": "{name}", **ms_columns()}
        show_records(
            "a prompt that is", columns, [{"name": n, **t} for n, t in report["first_token"].items()]
        )
        megabytes = report["stores"][0]["num_bytes"] / 1e6
        show_records(f"{megabytes:.0f} MB of blocks, alone and with the cache", SPEEDS, report["stores"])
        if isinstance(report["hits"], str):
            print(f"\nhit rates: {report['hits']}")
        else:
            title = f"hit rates of {report['hits']['num_requests']:,} conversations"
            show_records(title, HITS, report["hits"]["records"])
    show_bars(report)


@figure((8, 3.6), 1, 2, dpi=150)
def draw(report: dict[str, Any], *panels: Any) -> None:
    """Writes a picture: hit rates by tier, and times to first token."""
    hits, bars = panels
    if isinstance(report.get("hits"), dict):
        records = report["hits"]["records"]
        sizes = [record["num_blocks"] for record in records]
        for tier, label in TIERS.items():
            rates = [100 * record[tier] for record in records]
            hits.plot(sizes, rates, marker="o", markersize=3, label=label)
        hits.set(xscale="log", xlabel="blocks on the device", title="hit rate of blocks, %", ylim=(0, None))
        log_axes.label(hits.xaxis)
        hits.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.02, 0.62))
    times = report.get("first_token", {})
    bars.barh([*times], [time["median_us"] / 1e3 for time in times.values()], color="C0")
    bars.invert_yaxis()
    bars.set(title="time to first token, ms")
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
