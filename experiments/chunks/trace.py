"""Requests about source files, by `kv.generate`: what a prefix cache and a store of chunks compute."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import corpus

NUM_FILES, NUM_REQUESTS, OF_REQUEST = 40, 200, 4
LENGTHS, ASKED = (96, 224), (16, 48)  # bytes of a passage and of a question
SHARES = 0.0, 0.2, 0.5
BLOCK_SIZE, _VOCAB = 16, 256


class Request(NamedTuple):
    """A prompt: tokens of passages at the spans, and a question after them."""

    prompt: list[int]
    spans: list[tuple[int, int]]


def make_requests(num_requests: int = NUM_REQUESTS, num_files: int = NUM_FILES) -> list[Request]:
    """Draws requests: four passages each, more often of the files that come first (Zipf), in random order."""
    rng = np.random.default_rng(0)
    names = corpus.training_files()
    names = [names[i] for i in np.linspace(0, len(names) - 1, num_files).astype(int)]
    passages = [
        (corpus.folder() / name).read_bytes()[: int(length)]
        for name, length in zip(names, rng.integers(*LENGTHS, len(names)), strict=True)
    ]
    questions = b"".join(corpus.held_out_files().values())
    popularity = 1 / np.arange(1, len(passages) + 1)
    requests = []
    for _ in range(num_requests):
        chosen = rng.choice(len(passages), OF_REQUEST, replace=False, p=popularity / popularity.sum())
        rng.shuffle(chosen)
        ends = np.cumsum([len(passages[i]) for i in chosen])
        spans = [(int(end) - len(passages[i]), int(end)) for i, end in zip(chosen, ends, strict=True)]
        start = int(rng.integers(len(questions) - ASKED[1]))
        asked = questions[start : start + int(rng.integers(*ASKED))]
        requests.append(Request([*b"".join(passages[i] for i in chosen), *asked], spans))
    return requests


def measure(requests: list[Request]) -> list[dict[str, Any]]:
    """Counts the tokens that each side computes of all prompts, by a model that computes nothing."""
    passages = {tuple(r.prompt[start:end]) for r in requests for start, end in r.spans}
    store = kv.chunks.Store(len(passages), max_chunk_len=max(map(len, passages)))
    max_seq_len = max(len(request.prompt) for request in requests) + 1
    of_rows = 2 * _num_blocks(max_seq_len)
    of_prompts = of_rows + sum(_num_blocks(len(request.prompt)) for request in requests)
    of_chunks = of_rows + store.num_chunks * _num_blocks(store.max_chunk_len)
    prompts, spans = [request.prompt for request in requests], [request.spans for request in requests]
    sides: list[Any] = [
        ("prefix cache, memory for all", None, of_prompts, [], prompts),
        ("prefix cache, as much memory", None, of_chunks, [], prompts),
    ]
    for share in SHARES:
        reuse = kv.chunks.Reuse(rotate=None, selector="first", share=share)
        sides.append(("chunk cache", share, of_chunks, [store], kv.chunks.Prompts(prompts, spans, reuse)))
    records = [{"side": "no cache", "share": None, "computed": sum(map(len, prompts)), "blocks": 0}]
    for side, share, num_blocks, extras, made_of in sides:
        config = kv.CacheConfig(
            [kv.FullAttention(1, 1)],
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_seqs=2,
            max_seq_len=max_seq_len,
            enable_prefix_caching=True,
            partial_hits=True,
            extras=extras,
        )
        num = kv.generate(_no_model, None, made_of, config, max_new_tokens=1).num_prompt_tokens
        records.append({"side": side, "share": share, "computed": num, "blocks": num_blocks})
    return records


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _no_model(params: None, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> tuple[jax.Array, kv.Cache]:
    return jnp.zeros((*tokens.shape, _VOCAB)), cache
