"""Times: to the first token of a prompt by the tier that has it, and of stores with the cache and without."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvcache_jax as kv
from experiments.common.timing import summary
from experiments.tiers.serve import BLOCK_SIZE, make_config
from models.decoder import Decoder, forward

ROUNDS = 5
WEIGHTS = "the weights of this run"


def config_for(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> kv.CacheConfig:
    """Makes the one config of all times: blocks for all prompts, on the device and on the host."""
    longest = max(map(len, prompts))
    num_blocks = (len(prompts) + 1) * -(-longest // BLOCK_SIZE)
    return make_config(decoder, longest, num_blocks=num_blocks, extras=[kv.tiers.Host(num_blocks)])


def first_tokens(
    decoder: Decoder, prompts: Sequence[Sequence[int]], config: kv.CacheConfig
) -> dict[str, dict[str, float]]:
    """Times the first token of each prompt: computed, and found on the device, on the host and on disk."""
    times: dict[str, list[float]] = {"computed": [], "device": [], "host": [], "disk": []}

    def answer(cache: kv.Cache, prompt: Sequence[int]) -> tuple[kv.Cache, float, int]:
        start = time.perf_counter()
        result = kv.generate(forward, decoder, [prompt], config, max_new_tokens=1, cache=cache)
        return result.cache, time.perf_counter() - start, result.num_cached_tokens

    with tempfile.TemporaryDirectory() as folder:
        store = kv.tiers.DirectoryStore(folder)
        cache = kv.init(config)
        for nth, prompt in enumerate([prompts[0], *prompts]):  # the first compiles
            cache, computed, _ = answer(kv.reset_prefix_cache(cache)[0], prompt)
            cache, on_device, found = answer(cache, prompt)
            kv.tiers.save(cache, store, weights=WEIGHTS)
            cache, _ = kv.tiers.demote_to_utilization(cache, 0.0)
            cache, *_ = answer(cache, prompt[:1])  # after which the contents are on the host
            cache, on_host, promoted = answer(cache, prompt)
            cache, _ = kv.reset_prefix_cache(cache)
            start = time.perf_counter()
            cache, _ = kv.tiers.load(store, cache, weights=WEIGHTS, prompts=[prompt])
            loaded = time.perf_counter() - start
            cache, seconds, on_disk = answer(cache, prompt)
            assert found == on_disk == promoted, (found, on_disk, promoted)
            if nth:
                for name, each in zip(times, (computed, on_device, on_host, loaded + seconds), strict=True):
                    times[name].append(each)
    return {name: summary(seconds) for name, seconds in times.items()}


class Recorded(kv.tiers.MemoryStore):
    """A store in memory that keeps the batches that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[tuple[str, Any]]] = []

    def put(self, items: Sequence[tuple[str, Any]]) -> None:
        self.batches.append([*items])
        super().put(items)


def store_speeds(
    decoder: Decoder, prompts: Sequence[Sequence[int]], config: kv.CacheConfig
) -> list[dict[str, Any]]:
    """Times `save` and `load` beside the store's own writing and reading of the same values, in turns."""
    cache = kv.init(config)
    for prompt in prompts:
        result = kv.generate(forward, decoder, [prompt], config, max_new_tokens=1, cache=cache)
        cache = result.cache
    recorded = Recorded()
    kv.tiers.save(cache, recorded, weights=WEIGHTS)
    config = dataclasses.replace(config, extras=())  # all blocks are on the device
    cache, _ = kv.tiers.load(recorded, kv.init(config), weights=WEIGHTS)
    kv.tiers.save(cache, kv.tiers.MemoryStore(), weights=WEIGHTS)  # compiles
    num_bytes = sum(len(value) for batch in recorded.batches for _, value in batch)
    makers: dict[str, Callable[[Path], Any]] = {"directory": kv.tiers.DirectoryStore}
    try:
        kv.tiers.TensorStore({"driver": "memory"})
        makers["ocdbt"] = kv.tiers.TensorStore
    except ImportError:
        pass
    records = []
    for name, make in makers.items():
        times: dict[str, list[float]] = {"put": [], "save": [], "get": [], "load": []}
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                alone, saved = make(Path(folder) / "alone"), make(Path(folder) / "saved")
                times["put"].append(
                    timed(lambda alone=alone: [alone.put(batch) for batch in recorded.batches])
                )
                times["save"].append(timed(lambda saved=saved: kv.tiers.save(cache, saved, weights=WEIGHTS)))
                times["get"].append(timed(lambda alone=alone: read_all(alone, recorded.batches)))
                empty = jax.block_until_ready(kv.init(config))
                times["load"].append(timed(lambda saved=saved, empty=empty: load_all(saved, empty)))
        speeds = {what: num_bytes / 1e6 / float(np.median(seconds)) for what, seconds in times.items()}
        ratios = {
            "save_ratio": float(np.median(np.divide(times["put"], times["save"]))),
            "load_ratio": float(np.median(np.divide(times["get"], times["load"]))),
        }
        records.append({"store": name, "num_bytes": num_bytes} | speeds | ratios)
    return records


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_all(store: Any, batches: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Reads every byte once."""
    for batch in batches:
        for value in store.get([key for key, _ in batch]):
            np.frombuffer(value, np.uint8).sum()


def load_all(store: Any, cache: kv.Cache) -> None:
    cache, report = kv.tiers.load(store, cache, weights=WEIGHTS)
    assert report.num_loaded and not report.reasons
    cache.pools[0].k.block_until_ready()
