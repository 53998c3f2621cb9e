"""Decoders with recurrent layers: in pieces of any lengths, packed, stacked and not, and refused by name."""

import dataclasses

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE
from models.decoder import cache_config, unstacked
from models.first_layers import first_layers
from tests.models.checkpoint_files import HYBRIDS
from tests.models.driver import ROW, Driver, all_tokens, assert_close, check_packed, expected, load

PIECES = 7, 1, 1, 13, 1, 2, 16, 1, 1, 9, 1, 1, 1, 1, 3
NARROW = 16  # tokens of a row: the state's block


@pytest.mark.quick_cases("kimi_linear")
@pytest.mark.parametrize("family", HYBRIDS)
def test_pieces_of_all_lengths_and_single_tokens(family):
    """Narrow steps, beside a row that is elsewhere in its block; single tokens by a program of their own."""
    tokens, want, at = all_tokens(family), expected(family)["logits"], 0
    assert sum(PIECES) == len(tokens)
    driver = Driver(load(family), {0: 50, ROW: len(tokens)})
    driver.feed({0: tokens[:5]}, NARROW)
    for num in PIECES:
        pieces = {ROW: tokens[at : at + num], 0: tokens[5 + at // 2 :][: num // 2 + 1]}
        if num == 1:
            del pieces[0]
        assert_close(driver.feed(pieces, 1 if num == 1 else NARROW)[ROW], want[at : at + num])
        at += num


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "lfm2"])
def test_packed_steps_and_single_layers_compute_the_same(family):
    """With two stacks in a run, with layers that keep nothing, and with convolutions alone."""
    check_packed(unstacked(load(family)), family, [[7, 0, 18], [1, 20, 6], [16, 1, 8], [1, 1, 1]], 27)


def test_a_program_holds_one_period_of_a_run():
    """Twice two recurrent layers and a full one: a scan, whose layers come from a stack each."""
    config = load("qwen3_5").config
    assert config.mixers == (RECURRENCE, RECURRENCE, ATTENTION) * 2
    assert config.stacks == ((0, 1, 3, 4), (2, 5))
    assert len(config.runs) == 1 and config.runs[0].period == 3
    config = load("nemotron_h").config
    assert config.cache_layers == (0, None, 1, 2, 3, None)


def test_cache_config_has_a_layer_for_each_mixer():
    config = load("nemotron_h").config
    sizes = cache_config(config, max_rollback=3, quantise=lambda kind: kv.Quantised(kind, "int8"))
    recurrent = dataclasses.replace(config.recurrence, max_rollback=3)
    full = kv.Quantised(kv.FullAttention(2, 8), "int8")
    assert sizes.layers == (recurrent, full, recurrent, recurrent)


def test_a_recurrent_layer_is_not_asked_for_queries():
    decoder = load("lfm2")

    def ask():
        cache = kv.init(cache_config(decoder.config, max_seqs=1, max_seq_len=16))
        cache, step = kv.extend(cache, [1], max_new=1)
        return first_layers(decoder, np.zeros((1, 1), np.int32), cache, step)

    with pytest.raises(
        ValueError, match=r"layers 0 to 1 are \['recurrence', 'recurrence'\], expected attention"
    ):
        jax.eval_shape(ask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mixers=(RECURRENCE,)), "mixers has 1 entries, expected 6 or none"),
        (dict(mixers=("conv",) * 6), "mixers has 'conv', expected entries of attention, recurrence$"),
        (dict(mixers=(RECURRENCE, None) * 3), "mixers has None, expected entries of attention, recurrence$"),
        (dict(mixers=(None,) * 6, has_split_layers=True), "mixers is None everywhere, expected a layer that"),
        (dict(recurrence=None), "recurrence is None and mixers is .*, expected a kind where layers are 'rec"),
        (dict(mixers=()), "recurrence is .* and mixers is \\(\\), expected a kind where layers are 'rec"),
        (dict(residual_scale=0.0), "residual_scale is 0.0, expected a positive, finite number"),
        (dict(logits_divisor=-1.0), "logits_divisor is -1.0, expected a positive, finite number"),
    ],
)
def test_an_impossible_hybrid_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(load("qwen3_5").config, **changes)
