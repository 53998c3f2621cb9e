"""The table and the picture of `experiments.fleet`."""

from typing import Any

from experiments.common import log_axes
from experiments.common.report import figure, show_bars, show_provenance
from experiments.common.timing import show_records

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
