"""The tables and the picture of `experiments.plan`."""

from typing import Any

import numpy as np

from experiments.common.report import figure, show_provenance
from experiments.common.timing import show_records
from kvcache_jax.core.config import format_bytes

GIB = 1024**3
_GROUPS = {
    "layers": "{num_layers} x {kind}",
    "bytes a token": lambda group: f"{group['token_bytes']:,.6g}" if group["keeps_all"] else "–",
    "a row at most": lambda group: format_bytes(group["row_bytes"]),
}
_LENGTHS = {
    "tokens of a row": "{length:,}",
    "bytes of a row": lambda record: format_bytes(record["row_bytes"]),
    "rows that fit": "{num_rows:,}",
}
_SPOTS = {
    "LRU": "{name}",
    "size": lambda spot: format_bytes(spot["bytes"]),
    "trace blocks": "{num_blocks:,}",
    "hits of tokens": lambda spot: f"{spot['hit_rate_tokens']:.4f}",
    "of blocks": lambda spot: f"{spot['hit_rate_blocks']:.4f}",
}


def show(report: dict[str, Any]) -> None:
    """Prints a report, the object of `--json`, as tables."""
    show_provenance(report)
    weights, rows = report["weights"], report["step_rows"]
    print(
        f"{report['config']} in {report['dtype']}: {format_bytes(report['memory'])} of memory, "
        f"weights {format_bytes(weights['bytes'])} (from {weights['source']}), "
        f"a step {format_bytes(report['step_bytes'])}, room for the cache {format_bytes(report['room'])}"
    )
    device = f"this machine's device, {report['device']}"
    if rows is None:
        print(f"The room is also for the temporaries of a step: --step ROWS counts them, for {device}.")
    else:
        print(f"The step is of {rows} rows, compiled for {device}; another device has other temporaries.")
    show_records(f"{report['token_bytes']:,} bytes a token", _GROUPS, report["groups"])
    show_records("rows", _LENGTHS, report["lengths"])
    if "trace" in report:
        trace = report["trace"]
        spots = [{"name": name, **spot} for name, spot in trace["spots"].items()]
        show_records(f"hits of {trace['name']}", _SPOTS, spots)


@figure((8, 4), 1, 2, dpi=150)
def draw(report: dict[str, Any], rows: Any, hits: Any) -> None:
    """Writes a picture: rows by their length, and hits by the size of the cache, with the knee."""
    fitting = [(record["length"], record["num_rows"]) for record in report["lengths"] if record["num_rows"]]
    if fitting:
        rows.plot(*zip(*fitting, strict=True), marker="o", markersize=3)
        rows.set(xscale="log", yscale="log")
        rows.set_xticks([length for length, _ in fitting], [f"{length:,}" for length, _ in fitting])
        rows.set_yticks([num for _, num in fitting], [f"{num:,}" for _, num in fitting])
        rows.minorticks_off()
    rows.set(xlabel="tokens of a row", title=f"rows beside the weights in {format_bytes(report['memory'])}")
    if "trace" in report:
        trace = report["trace"]
        rates = 100 * np.array(trace["hit_rate_tokens"])
        hits.plot(np.arange(len(rates)) * trace["block_bytes"] / GIB, rates)
        for name, spot in trace["spots"].items():
            at = spot["bytes"] / GIB, 100 * spot["hit_rate_tokens"]
            hits.plot(*at, "o", markersize=4, color="black")
            hits.annotate(name, at, textcoords="offset points", xytext=(6, -10), fontsize=8)
        hits.set(
            xlabel="GiB of keys and values",
            ylabel="%",
            title=f"tokens that hit, {trace['name']}",
            ylim=(0, None),
        )
    else:
        hits.set_axis_off()
    for panel in (rows, hits):
        panel.spines[["top", "right"]].set_visible(False)
