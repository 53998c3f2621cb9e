"""Prompts in pieces: which call of the model holds what, and what becomes of rows without blocks."""

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax.decoding import prefill
from tests.support.tiny_model import PREFILL_LEN, VOCAB, config, forward, make_params

PARAMS = make_params()
LENGTH = 48  # of a row at most


def test_the_vocabulary_is_read_off_the_model():
    assert prefill.vocab_size(forward, PARAMS, kv.init(config()), PREFILL_LEN) == VOCAB


def test_a_call_of_the_model_holds_pieces_of_several_prompts():
    """Of 12 tokens in pieces of 3: rows of 1, 4, 7 and 2 tokens are 1 + 2 + 3 + 1 pieces."""
    fed = []

    def counting(params, tokens, cache, step):
        jax.debug.callback(lambda lens: fed.append(np.asarray(lens).tolist()), step.query_len, ordered=True)
        return forward(params, tokens, cache, step)

    lengths, prompts = np.array([1, 4, 7, 2], np.int32), np.ones((4, LENGTH), np.int32)
    cache, admission = kv.allocate(kv.init(config()), [0, 1, 2, 3], lengths)
    kv.raise_for_status(admission.status)
    prefill.prefill(counting, PARAMS, cache, prompts, lengths, prefill_len=PREFILL_LEN)
    jax.effects_barrier()
    assert fed == [[1, 3, 1, 3], [3, 1, 2, 0]]


def test_prefill_says_why_a_row_failed():
    """13 of 24 blocks are taken at first; one row wants two more than are left, and one is full."""
    held, admission = kv.allocate(kv.init(config()), [3, 0, 1], [2, 0, LENGTH])
    kv.raise_for_status(admission.status)
    lengths, prompts = np.array([47, LENGTH + 1, 0, 2], np.int32), np.ones((4, LENGTH + 1), np.int32)
    held, fed = prefill.prefill(forward, PARAMS, held, prompts, lengths, prefill_len=PREFILL_LEN)
    assert fed.status.tolist() == [kv.Status.OUT_OF_BLOCKS, kv.Status.TOO_LONG, kv.Status.OK, kv.Status.OK]
    assert held.context_len.tolist()[3] == 2 and np.asarray(fed.logits).any(axis=1).tolist() == [0, 0, 0, 1]


def test_a_prompt_that_failed_is_fed_no_further():
    """Of 8 blocks its third call lacks one; what its last call wants would fit, at another place."""
    held, admission = kv.allocate(kv.init(config()), [0, 1, 2], [0, LENGTH, 16])
    kv.raise_for_status(admission.status)
    lengths, prompts = np.array([39, 0, 0, 0], np.int32), np.ones((4, LENGTH), np.int32)
    held, fed = prefill.prefill(forward, PARAMS, held, prompts, lengths, prefill_len=PREFILL_LEN)
    assert fed.status.tolist() == [kv.Status.OUT_OF_BLOCKS, kv.Status.OK, kv.Status.OK, kv.Status.OK]
    assert held.context_len.tolist() == [24, 0, 0, 0] and not np.asarray(fed.logits).any()
