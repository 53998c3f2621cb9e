"""The tables and the figure of `experiments.quantised`."""

from typing import Any

from experiments.common import log_axes
from experiments.common.report import figure, show_bars, show_provenance
from experiments.common.timing import ms_columns, show_records

STORED = {
    "storage": "{storage}",
    "bytes a token": "{bytes_per_token:,}",
    "rows in bf16's bytes": "{rows_in_bytes_of_bfloat16:.2f}x",
    "KL to float32": "{kl:.1e}",
    "bits per byte": "{bits_added:+.4f}",
    "of files": lambda record: f"{min(record['of_each']):+.4f} - {max(record['of_each']):+.4f}",
}
ROUNDED = {
    "": "{num_bits} bits, keys {keys}, values {values}",
    "KL to float32": "{kl:.1e}",
    "bits per byte": "{bits_added:+.4f}",
}
STEPS = {
    "storage": "{side}",
    **ms_columns(2),
    "of float32": "{times_float32[1]:.2f}x",
    "rounds": "{times_float32[0]:.2f} - {times_float32[2]:.2f}",
    "first call (compiles)": "{first_call_s:.1f} s",
}


def show(report: dict) -> None:
    """Prints a report, the object of `--json`, as tables."""
    show_provenance(report)
    print(f"{report['model']}, {report['bits_per_byte']:.3f} bits per byte in float32")
    show_records("keys and values of all layers in the cache", STORED, report["storages"])
    show_records("rounded without a cache", ROUNDED, report["roundings"])
    name, num_calls = report["steps"][0]["case"]["name"], report["steps"][0]["num_calls"]
    title = f"a decode step, {name}, ms; {num_calls} rounds of {report['steps_in_a_loop']} steps"
    show_records(title, STEPS, report["steps"])
    show_bars(report)


@figure((10, 4), 1, 2, grid="y")
def draw(report: dict, formats: Any, keys: Any) -> None:
    """Two panels: KL by bytes a token, and what rounding keys per token or per channel costs."""
    records = [record for record in report["storages"] if record["kl"] > 0]
    formats.plot([r["bytes_per_token"] for r in records], [r["kl"] for r in records], "o", color="C0")
    for record in records:
        place = record["bytes_per_token"], record["kl"]
        is_below = record["storage"].endswith("rotated")  # beside its neighbour of the same bytes
        offset = (7, -12) if is_below else (7, 4)
        formats.annotate(record["storage"], place, xytext=offset, textcoords="offset points")
    formats.set(yscale="log", xlabel="bytes a token, all layers", ylabel="nats a byte")
    formats.set_title("KL divergence to float32")
    formats.set_xlim(0, 1.25 * max(record["bytes_per_token"] for record in records))
    formats.margins(y=0.15)

    groups: dict[str, dict[str, float]] = {}
    for record in report["roundings"]:
        name = f"{record['num_bits']} bits" + ("" if record["values"] == "per token" else ",\nkeys alone")
        groups.setdefault(name, {})[record["keys"]] = record["bits_added"]
    for i, way in enumerate(("per token", "per channel")):
        places = [x + 0.38 * (i - 0.5) for x in range(len(groups))]
        heights = [group[way] for group in groups.values()]
        bars = keys.bar(places, heights, width=0.36, color=f"C{i}", label=f"keys {way}")
        keys.bar_label(bars, [f"{height:+.3f}" for height in heights], fontsize=8, padding=2)
    keys.set_xticks(range(len(groups)), groups)
    keys.set(yscale="log", ylabel="bits per byte added", title="rounding keys per token and per channel")
    keys.set_ylim(top=3 * keys.get_ylim()[1])  # for the legend
    keys.legend(frameon=False, loc="upper left")
    log_axes.label(keys.yaxis)
