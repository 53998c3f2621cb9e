"""The gate for composed prompts: any checkpoint and one's own prompts, beside full prefill.

Prompts are lines of JSON, `{"chunks": ["a passage", ...], "question": "what comes after them"}`. Passages
and questions are tokenised apart, so that a passage has the same tokens at every place. What follows each
token of the question is predicted and compared: with the answer after it, each token of the answer too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import kvcache_jax as kv
from experiments.chunks import rows
from experiments.common import quality
from experiments.common.command import InputError
from experiments.common.report import at_least, at_most, show_bars, show_provenance
from experiments.common.timing import show_records
from kvcache_jax.chunks.chunk_selector import num_of_share
from models.decoder import Decoder
from models.tokenizer import Tokenizer

MOST_KL, LEAST_AGREEMENT, TOLERANCE = 0.01, 0.95, 1e-3


class Prompt(NamedTuple):
    """A prompt in tokens: chunks i32[length] each, and a question."""

    chunks: list[np.ndarray]
    question: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """i32[K], tokens of the chunks."""
        return np.array([len(chunk) for chunk in self.chunks], np.int32)

    @property
    def starts(self) -> np.ndarray:
        """i32[K + 1], where chunks and the question begin."""
        return np.cumsum([0, *self.lengths], dtype=np.int32)


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Reads the prompts of a file; what is none is an InputError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"got {path}, expected lines of JSON: {error}") from None
    prompts = [_prompt(f"{path}, prompt {i}", line, tokenizer) for i, line in enumerate(lines, 1)]
    if not prompts:
        raise InputError(f"{path} has no prompt, expected lines of JSON")
    return prompts


def _prompt(name: str, line: str, tokenizer: Tokenizer) -> Prompt:
    wanted = 'expected {"chunks": ["text", ...], "question": "text"}, none of them empty'
    try:
        found = json.loads(line)
        texts = [*found["chunks"], found["question"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{name} is no prompt ({error!r}), {wanted}") from None
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{name} is {line[:80]!r}, {wanted}")
    first = tokenizer.encode("")  # what is in front of a whole prompt, and of no later passage
    tokens = [tokenizer.encode(text) for text in texts]
    if first and all(x[: len(first)] == first for x in tokens):
        tokens = [tokens[0], *(x[len(first) :] for x in tokens[1:])]
    if not all(tokens):
        raise InputError(f"{name} has a text without tokens, {wanted}")
    *chunks, question = (np.array(x, np.int32) for x in tokens)
    return Prompt(chunks, question)


class Gate:
    """Prompts of one checkpoint, one at a time, in programs that all of them share."""

    def __init__(self, decoder: Decoder, prompts: Sequence[Prompt], reuse: kv.chunks.Reuse):
        self.decoder, self.reuse = decoder, reuse
        self.num_chunks = max(len(prompt.chunks) for prompt in prompts)
        self.chunk_len = max(len(chunk) for prompt in prompts for chunk in prompt.chunks)
        self.question_len = max(len(prompt.question) for prompt in prompts)
        self.prompt_len = max(int(prompt.starts[-1]) for prompt in prompts)
        sizes = dict(num_chunks=self.num_chunks, max_chunk_len=self.chunk_len)
        longest = self.prompt_len + self.question_len
        self.empty = rows.empty_cache(decoder, max_seqs=1, max_seq_len=longest, **sizes)

    def compare(self, prompt: Prompt) -> dict[str, Any]:
        """Compares a prompt composed with the same prefilled."""
        tokens = np.concatenate(prompt.chunks)
        full, _ = self._read(rows.started(self.empty), tokens, self.prompt_len)
        exact = self._predictions(full, prompt)
        composed, found = self._composed(prompt)
        whole, _ = self._repaired(composed, tokens, np.arange(len(tokens)))
        repaired, num_again = self._repaired(composed, tokens, self._chosen(found, prompt))
        off = self._predictions(whole, prompt) - exact
        return {
            "tokens": len(tokens),
            "question": len(prompt.question),
            "again": num_again,
            "without": _compared(self._predictions(composed, prompt), exact),
            "with": _compared(self._predictions(repaired, prompt), exact),
            "off_when_all": float(np.abs(off).max()),
            "keys_off": _first_layer_off(full, composed, len(tokens)),
        }

    def _read(self, cache: kv.Cache, tokens: np.ndarray, width: int) -> tuple[kv.Cache, np.ndarray]:
        padded = np.pad(tokens, (0, width - len(tokens)))[None]
        cache, log_p = rows.read(self.decoder, cache, padded, np.array([len(tokens)], np.int32))
        return cache, np.asarray(log_p[0, : len(tokens)], np.float64)

    def _predictions(self, cache: kv.Cache, prompt: Prompt) -> np.ndarray:
        return self._read(cache, prompt.question, self.question_len)[1]

    def _composed(self, prompt: Prompt) -> tuple[kv.Cache, kv.chunks.Metadata]:
        """A row of the prompt's passages, each computed alone; and what a selector sees."""
        passages = np.stack([np.pad(x, (0, self.chunk_len - len(x))) for x in prompt.chunks])[None]
        cache, found = rows.stored(self.decoder, self.empty, passages, prompt.lengths[None])
        more = ((0, 0), (0, self.num_chunks - len(prompt.chunks)))
        ids = np.pad(found, more, constant_values=self.num_chunks)
        starts = np.pad(prompt.starts[None, :-1], more)
        cache = rows.composed(cache, ids, starts, self.reuse.rotate)
        return cache, kv.chunks.metadata(cache, ids, starts)._replace(key=jax.random.key(self.reuse.seed))

    def _chosen(self, found: kv.chunks.Metadata, prompt: Prompt) -> np.ndarray:
        """The places that are computed again, of each passage its share."""
        num = np.zeros((1, self.num_chunks), np.int32)
        num[0, : len(prompt.chunks)] = num_of_share(self.reuse.share, prompt.lengths)
        places = kv.chunks.select_tokens(self.reuse.selector, found, num, max_select=self.prompt_len)
        return np.asarray(places)[0]

    def _repaired(self, cache: kv.Cache, tokens: np.ndarray, places: np.ndarray) -> tuple[kv.Cache, int]:
        places = places[places < len(tokens)]
        nowhere = self.empty.config.max_seq_len
        padded = np.pad(places, (0, self.prompt_len - len(places)), constant_values=nowhere)[None]
        all_tokens = np.pad(tokens, (0, self.prompt_len - len(tokens)))[None]
        return rows.repaired(self.decoder, cache, all_tokens, padded), len(places)


def _compared(log_p: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """KL divergence to exact predictions f64[tokens, vocab_size], and the share of the same best token."""
    kl = quality.kl(log_p, exact)
    agrees = log_p.argmax(axis=-1) == exact.argmax(axis=-1)
    return {"kl": float(kl.mean()), "most_kl": float(kl.max()), "agreement": float(agrees.mean())}


def _first_layer_off(full: kv.Cache, composed: kv.Cache, num_tokens: int) -> float:
    """How far stored keys of the first layer are from a prefill's, of the largest number.

    They depend on the token and its position alone: what is off is the rotation.
    """
    right, found = (np.asarray(kv.gather(x, 0, 0)[0], np.float64)[:num_tokens] for x in (full, composed))
    return float(np.abs(found - right).max() / np.abs(right).max())


def measure(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    reuse: kv.chunks.Reuse,
    most_kl: float,
    least_agreement: float,
) -> dict[str, Any]:
    """Compares all prompts, and says whether the checkpoint may be used so."""
    gate = Gate(decoder, prompts, reuse)
    records = [gate.compare(prompt) for prompt in prompts]
    weights = [record["question"] for record in records]

    def mean(way: str, name: str) -> float:
        return float(np.average([record[way][name] for record in records], weights=weights))

    means = {way: {name: mean(way, name) for name in ("kl", "agreement")} for way in ("without", "with")}
    share = f"{reuse.selector}, {reuse.share:.0%} again"
    keys_off, off = (max(record[name] for record in records) for name in ("keys_off", "off_when_all"))
    bars = [
        at_most("keys of the first layer off a prefill's", keys_off, TOLERANCE),
        at_most("log-probabilities off, all again", off, TOLERANCE),
        at_most(f"KL to full prefill, nats a token: {share}", means["with"]["kl"], most_kl),
        at_least(f"same best token: {share}", means["with"]["agreement"], least_agreement),
    ]
    said = {"selector": reuse.selector, "share": reuse.share}
    return said | {"prompts": records, "means": means, "bars": bars}


PROMPTS = {
    "tokens": "{tokens:,}",
    "again": "{again:,}",
    "KL, none again": "{without[kl]:.5f}",
    "KL": "{with[kl]:.5f}",
    "most": "{with[most_kl]:.5f}",
    "same best, none again": "{without[agreement]:.1%}",
    "same best": "{with[agreement]:.1%}",
}


def show(report: dict[str, Any]) -> None:
    show_provenance(report)
    print(f"{report['model']}; {report['selector']}, {report['share']:.0%} of the tokens computed again")
    show_records("composed beside full prefill", PROMPTS, report["prompts"])
    show_bars(report)
    failed = [bar for bar in report["bars"] if not bar["holds"]]
    print("may be composed" if not failed else "may not be composed so: compute more again, or do not reuse")
