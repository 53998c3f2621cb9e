"""An engine's metrics as Prometheus text, under the names that vLLM's dashboards and autoscalers ask for."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class _Metrics(Collector):
    """Hands metrics to a registry, with the same labels for all."""

    def __init__(self, metrics: Mapping[str, Any], labels: Mapping[str, str]):
        self._metrics, self._names, self._values = metrics, [*labels], [*labels.values()]

    def collect(self) -> Iterator[Metric]:
        for name, value in self._metrics.items():
            what = name.removeprefix("vllm:").replace("_", " ")
            if isinstance(value, Mapping) and "buckets" in value:
                histogram = HistogramMetricFamily(name, what, labels=self._names)
                buckets = [
                    ("+Inf" if math.isinf(bound) else str(float(bound)), num)
                    for bound, num in value["buckets"].items()
                ]
                histogram.add_metric(self._values, buckets, value["sum"])
                yield histogram
            elif isinstance(value, Mapping):
                label = "finished_reason" if name == "vllm:request_success" else "reason"
                counter = CounterMetricFamily(name, what, labels=[*self._names, label])
                for reason, num in value.items():
                    counter.add_metric([*self._values, reason], num)
                yield counter
            else:
                kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
                family = kind(name, what, labels=self._names)
                family.add_metric(self._values, value)
                yield family


def exposition(metrics: Mapping[str, Any], **labels: str) -> str:
    """Writes what `Engine.metrics` returned in Prometheus' text format, each metric with the labels."""
    registry = CollectorRegistry()
    registry.register(_Metrics(metrics, labels))
    return generate_latest(registry).decode()


def write(path: Path, metrics: Mapping[str, Any], **labels: str) -> None:
    """Writes the text to a file at once, so that who reads it finds a whole one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(exposition(metrics, **labels))
    beside.replace(path)
