"""A server's figures as Prometheus text, under the names that vLLM's dashboards and autoscalers ask for.

Counters count tokens where vLLM's do (`prefix_cache_queries` and `prefix_cache_hits` too). Times are those of
the server's clock, of requests that have ended.
"""

from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import kvcache_jax as kv
from experiments.serve.server import Server

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def exposition(server: Server, model_name: str) -> str:
    """Writes a server's figures in Prometheus' text format.

    Args:
      server: In the middle of a run, or behind it.
      model_name: The label `model_name` of every metric.
    """
    registry = CollectorRegistry()
    labels = {"model_name": model_name, "engine": server.name}

    def gauge(name: str, what: str, value: float) -> None:
        Gauge(f"vllm:{name}", what, [*labels], registry=registry).labels(**labels).set(value)

    def counter(name: str, what: str, value: float, **more: str) -> None:
        metric = Counter(f"vllm:{name}", what, [*labels, *more], registry=registry)
        metric.labels(**labels, **more).inc(value)

    def histogram(name: str, what: str, values: np.ndarray, buckets: tuple[float, ...]) -> None:
        metric = Histogram(f"vllm:{name}", what, [*labels], registry=registry, buckets=buckets).labels(
            **labels
        )
        for value in values.tolist():
            metric.observe(value)

    counts, figures = server.counts, server.figures
    num_blocks = sum(group.num_blocks for group in server.engine.config.groups)
    cached = counts[kv.engine.Counter.CACHED_TOKENS]
    computed = counts[kv.engine.Counter.PREFILL_TOKENS] + counts[kv.engine.Counter.ADMISSIONS]
    is_done = server.num_tokens == np.array([job.num_tokens for job in server.jobs])
    arrival = np.array([job.arrival for job in server.jobs])
    prompt_len = np.array([len(job.prompt) for job in server.jobs])
    first, last, num_tokens = server.first_at, server.last_at, server.num_tokens
    several = is_done & (num_tokens > 1)
    per_token = (last - first)[several] / (num_tokens - 1)[several]

    waiting = server.check_ins[-1].waiting if server.check_ins else 0
    gauge("num_requests_running", "Requests with a row.", figures.running)
    gauge("num_requests_waiting", "Requests without a row.", waiting)
    gauge(
        "kv_cache_usage_perc", "Share of the blocks that rows hold, 0 to 1.", figures.blocks_used / num_blocks
    )
    counter("prefix_cache_queries", "Tokens of admitted prompts.", cached + computed)
    counter("prefix_cache_hits", "Those of them found in the cache.", cached)
    counter(
        "num_preemptions",
        "Rows taken from requests for want of blocks.",
        counts[kv.engine.Counter.PREEMPTIONS],
    )
    counter("prompt_tokens", "Tokens of prompts with an answer.", int(prompt_len[num_tokens > 0].sum()))
    counter("generation_tokens", "Tokens of answers.", int(num_tokens.sum()))
    counter("request_success", "Requests that ended.", int(is_done.sum()), finished_reason="length")
    histogram("request_prompt_tokens", "Tokens of a prompt.", prompt_len[is_done], _TOKENS)
    histogram("request_generation_tokens", "Tokens of an answer.", num_tokens[is_done], _TOKENS)
    histogram("time_to_first_token_seconds", "Until the first token.", (first - arrival)[is_done], _SECONDS)
    histogram("e2e_request_latency_seconds", "Until the last token.", (last - arrival)[is_done], _SECONDS)
    histogram("request_time_per_output_token_seconds", "A request's mean.", per_token, _SECONDS)
    return generate_latest(registry).decode()


def write(path: Path, server: Server, model_name: str) -> None:
    """Writes the text to a file at once, so that who reads it finds a whole one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(exposition(server, model_name))
    beside.replace(path)
