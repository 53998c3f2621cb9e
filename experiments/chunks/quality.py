"""What composed passages lose, and how much of it comes back with the tokens that are computed again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.chunks import rows
from experiments.chunks.rows import Prompts
from experiments.common import quality as common_quality
from models.decoder import Decoder

SHARES = 0.1, 0.2, 0.5, 0.75
NONE, UNTURNED, ALL, RANDOM = "none", "none, keys not rotated", "all", "random"
SELECTORS = "attention", "key deviation", "value deviation", "first", RANDOM
EARLIER, SEEN = "attention, of an earlier prompt", "attention, of this prompt"


class Study:
    """Prompts of one kind that were prefilled, and the same composed of passages that were computed alone.

    `exact` are the log-probabilities f64[n, question_len, vocab_size] after the prefilled ones.
    """

    def __init__(self, decoder: Decoder, prompts: Prompts):
        self.decoder, self.prompts, self.tokens = decoder, prompts, prompts.tokens
        num_rows, num_chunks, chunk_len = prompts.chunks.shape
        num_tokens = self.tokens.shape[1]
        self.places = np.tile(np.arange(num_tokens, dtype=np.int32), (num_rows, 1))
        sizes = dict(num_chunks=num_rows * num_chunks, max_chunk_len=chunk_len)
        longest = num_tokens + prompts.question.shape[1]
        self.empty = rows.empty_cache(decoder, max_seqs=num_rows, max_seq_len=longest, **sizes)
        self.full = self._prefilled(prompts.chunks)
        self.exact = self.log_p(self.full)
        lengths = np.full((num_rows, num_chunks), chunk_len)
        self.stored, self.chunk_ids = rows.stored(decoder, self.empty, prompts.chunks, lengths)
        self.composed = self.compose(rows.rotations_of(decoder, num_tokens))

    def _prefilled(self, passages: np.ndarray) -> kv.Cache:
        """Rows that read passages i32[n, K, T], a step each."""
        cache = rows.started(self.empty)
        for tokens in passages.swapaxes(0, 1):
            cache, _ = rows.read(self.decoder, cache, tokens)
        return cache

    def compose(self, rotate: tuple[rows.Rotate, ...] | None) -> kv.Cache:
        """The rows composed, and nothing computed again."""
        return rows.composed(self.stored, self.chunk_ids, self.prompts.starts, rotate)

    def log_p(self, cache: kv.Cache) -> np.ndarray:
        """Log-probabilities of what follows each token of the question, after the rows of a cache."""
        return np.asarray(rows.read(self.decoder, cache, self.prompts.question)[1], np.float64)

    def kl(self, cache: kv.Cache) -> np.ndarray:
        """KL divergence to the prefilled rows, nats a token, f64[n]."""
        exact, log_p = (x[:, self.prompts.first_scored :] for x in (self.exact, self.log_p(cache)))
        return common_quality.kl(log_p, exact).mean(axis=1)

    def repaired(self, places: np.ndarray) -> kv.Cache:
        """The composed rows after the tokens at the places i32[n, T] were computed again."""
        return rows.repaired(self.decoder, self.composed, self.tokens, places)

    def candidates(self) -> dict[str, tuple[str, kv.chunks.Metadata]]:
        """Names selectors as printed, and says what they see: of attention also what full prefill shows."""
        k_deviation, v_deviation = rows.deviations(self.decoder, self.composed, self.tokens, self.places)
        found = kv.chunks.metadata(self.stored, self.chunk_ids, self.prompts.starts)._replace(
            attention=self._attention_elsewhere(),
            k_deviation=k_deviation,
            v_deviation=v_deviation,
            key=jax.random.key(0),
        )
        names = {EARLIER if name == "attention" else name: (name, found) for name in SELECTORS}
        seen = found._replace(attention=self._attention(self.full, self.prompts.chunks))
        return names | {SEEN: ("attention", seen)}

    def chosen(self, selector: str, found: kv.chunks.Metadata, share: float) -> np.ndarray:
        """The places i32[n, T] of a share of the tokens that are not exact."""
        num = round(share * (self.tokens.shape[1] - self.prompts.chunk_len))
        return np.asarray(kv.chunks.select_tokens(selector, found, [num] * len(self.tokens), max_select=num))

    def _attention(self, cache: kv.Cache, passages: np.ndarray) -> jax.Array:
        """What each token of rows i32[n, K, T] gives to earlier passages, f32[n, max_seq_len]."""
        places = self.places.reshape(passages.shape)
        found = [
            rows.inter_attention(self.decoder, cache, passages[:, i], places[:, i])
            for i in range(1, passages.shape[1])
        ]
        return jnp.stack(found).sum(axis=0)

    def _attention_elsewhere(self) -> np.ndarray:
        """What passages gave when they were met before: in the other order, after one of another file."""
        chunks = self.prompts.chunks
        passages = np.concatenate([self.prompts.others[:, None], chunks[:, :0:-1]], axis=1)
        met = np.array(self._attention(self._prefilled(passages), passages))
        by_passage = met[:, : self.tokens.shape[1]].reshape(chunks.shape)
        by_passage[:, 1:] = by_passage[:, :0:-1].copy()
        return met


def measure(study: Study) -> dict[str, Any]:
    """KL divergence to full prefill by selector and share."""
    records = []

    def add(selector: str, share: float, cache: kv.Cache) -> None:
        each, way = study.kl(cache), {"selector": selector, "share": share}
        records.append(way | {"kl": float(each.mean()), "of_each": each.tolist()})

    add(UNTURNED, 0.0, study.compose(None))
    add(NONE, 0.0, study.composed)
    for shown, (selector, found) in study.candidates().items():
        for share in SHARES:
            add(shown, share, study.repaired(study.chosen(selector, found, share)))
    whole = study.repaired(study.places)
    add(ALL, 1.0, whole)
    return {
        "text": study.prompts.name,
        "records": records,
        "difference_of_all": float(np.abs(study.log_p(whole) - study.exact).max()),
        "different_bits_of_first": _different_bits(study),
    }


def _different_bits(study: Study) -> int:
    """Counts the numbers of first passages that composed and prefilled rows do not have alike, by bits."""
    num = 0
    for layer in range(study.decoder.config.num_layers):
        for row in range(len(study.tokens)):
            found = [kv.gather(cache, row, layer)[:2] for cache in (study.full, study.composed)]
            for pair in zip(*found, strict=True):
                a, b = (np.asarray(x[: study.prompts.chunk_len]).view(np.uint32) for x in pair)
                num += int((a != b).sum())
    return num
