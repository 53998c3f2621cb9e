"""What predictions lose after answers that were computed after reasoning, which the history drops.

Part of `experiments.agents`.
"""

import json
from pathlib import Path

import numpy as np

import kvcache_jax as kv
from experiments.chunks import rows
from experiments.common.quality import held_out_windows, kl, read, started
from models.decoder import Decoder

RESULTS = Path(__file__).parent / "results"
AGAIN = 0.2
"""The share of kept answers that is computed again."""


def quality(decoder: Decoder) -> dict[str, float]:
    """Measures the KL divergence to predictions after an answer that is computed again, nats a byte.

    Of predictions after one that is kept, with a fifth of it computed again, and with none.
    """
    lens = np.array([320, 160, 160, 160])
    pieces = held_out_windows(12, 2500, int(lens.sum()))
    prompt, reasoning, answer, question = np.split(pieces, lens.cumsum()[:-1], axis=1)
    num_rows, start, length = len(pieces), lens[0], lens[2]
    each, starts = np.arange(num_rows), np.full((num_rows, 1), start)
    sizes = dict(max_seqs=num_rows, max_seq_len=int(lens.sum()), num_chunks=num_rows)
    cache = rows.empty_cache(decoder, max_chunk_len=int(length), **sizes)
    exact = read_all(decoder, started(cache), prompt, answer, question)[1]
    said, _ = read_all(decoder, started(cache), prompt, reasoning, answer)
    said, stored = kv.chunks.store(said, each, each * 0 + start + lens[1], each * 0 + length, answer)
    kv.raise_for_status(stored.status, "store")
    row, _ = read_all(decoder, started(kv.free(said, each)[0]), prompt)
    rotate = rows.rotations_of(decoder, int(lens.sum()))
    ids = np.asarray(stored.chunk_ids)[:, None]
    row, status = kv.chunks.compose(row, each, ids, starts, rotate=rotate)
    kv.raise_for_status(status, "compose")
    places = start + np.tile(np.arange(round(AGAIN * length), dtype=np.int32), (num_rows, 1))
    again = rows.repaired(decoder, row, np.concatenate([prompt, answer], axis=1), places)
    found = (read_all(decoder, cache, question)[1] for cache in (again, row))
    names = "kl", "kl_of_none"
    return {name: float(kl(log_p, exact).mean()) for name, log_p in zip(names, found, strict=True)}


def read_all(decoder: Decoder, cache: kv.Cache, *texts: np.ndarray) -> tuple[kv.Cache, np.ndarray]:
    """Appends texts i32[n, T] to rows; returns the log-probabilities after the tokens of the last, too."""
    log_p = np.zeros(0)
    for text in texts:
        cache, found = read(decoder, cache, text)
        log_p = np.asarray(found, np.float64)
    return cache, log_p


def allowed_kl() -> float:
    """Reads what `experiments.chunks` measured where the first fifth of passages is computed again."""
    texts = json.loads((RESULTS / "chunks.json").read_text())["texts"]
    records = next(text["records"] for text in texts if text["text"] == "same")
    return next(r["kl"] for r in records if r["selector"] == "first" and r["share"] == AGAIN)
