"""A process that answers prompts, saves its cache after each, and may be killed at any moment.

It loads what an earlier process saved, then prints a JSON object a line: what was loaded, and each answer.
"""

import json
import time
from pathlib import Path

import kvcache_jax as kv
from experiments.common import command
from models import checkpoint
from models.decoder import Decoder, cache_config, forward

BLOCK_SIZE, NUM_NEW = 16, 8


def make_config(decoder: Decoder, longest: int, **options) -> kv.CacheConfig:
    """The cache of a model for prompts of at most `longest` tokens."""
    max_seq_len = -(-(longest + NUM_NEW) // BLOCK_SIZE) * BLOCK_SIZE
    sizes = {"block_size": BLOCK_SIZE, "max_seqs": 2, "max_seq_len": max_seq_len}
    return cache_config(decoder.config, **sizes, enable_prefix_caching=True, **options)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.tiers.serve", __doc__)
    parser.add_argument("model", type=Path, help="a checkpoint of a model of bytes")
    parser.add_argument("folder", type=Path, help="of the store")
    parser.add_argument("prompts", type=Path, help="a JSON list of lists of token ids")
    options = parser.parse_args(arguments)
    prompts = json.loads(options.prompts.read_text())
    decoder = checkpoint.load(options.model)
    weights = kv.tiers.digest(decoder, (options.model / "config.json").read_bytes())
    store = kv.tiers.DirectoryStore(options.folder)
    longest = max(map(len, prompts))
    config = make_config(decoder, longest, num_blocks=len(prompts) * -(-(longest + NUM_NEW) // BLOCK_SIZE))
    start = time.perf_counter()
    cache, report = kv.tiers.load(store, kv.init(config), weights=weights)
    seconds = time.perf_counter() - start
    say(num_loaded=report.num_loaded, reasons=dict(report.reasons), seconds=seconds)
    for prompt in prompts:
        start = time.perf_counter()
        result = kv.generate(forward, decoder, [prompt], config, max_new_tokens=NUM_NEW, cache=cache)
        cache, seconds = result.cache, time.perf_counter() - start
        num_saved = kv.tiers.save(cache, store, weights=weights).num_saved
        answer = result.generations[0].tokens
        say(
            answer=[*map(int, answer)],
            num_cached=result.num_cached_tokens,
            num_saved=num_saved,
            seconds=seconds,
        )
    return 0


if __name__ == "__main__":
    command.run(main)
