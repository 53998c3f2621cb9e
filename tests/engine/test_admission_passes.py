"""Who waits for blocks that another request is to compute, against a comparison token by token."""

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine import admit
from kvcache_jax.engine.order import look_up, waits
from tests.engine.exact_engine import ask, make_engine


def expected_of(state, slots, prompts, hits):
    """bool[max_seqs + n, n], by looking at one pair after the other."""
    requests, control, num = state.requests, state.cache.control, len(slots)
    block_size = state.cache.config.groups[0].block_size
    rows = [
        (int(slot), int(known)) for slot, known in zip(state.row_request, control.context_len, strict=True)
    ]
    owners = rows + [(int(slot), int(known)) for slot, known in zip(slots, hits.num_tokens, strict=True)]
    num_idle = int((~np.asarray(control.is_active)).sum())
    found = np.zeros((len(owners), num), bool)
    for o, (owner, known) in enumerate(owners):
        is_row = o < len(rows)
        if owner == requests.num_slots or (is_row and not state.may_publish[o]):
            continue
        length = int(state.length[owner])
        tokens = np.asarray(requests.tokens[requests.start[owner] :][:length])
        for i, slot in enumerate(map(int, slots)):
            is_later = is_row or (o - len(rows) < i and num_idle > 1)
            if slot == requests.num_slots or not is_later or not prompts.reuse[i]:
                continue
            if known >= max(int(requests.prompt_len[owner]), length - 1):
                continue
            if (requests.namespace[owner] != requests.namespace[slot]).any():
                continue
            own = np.asarray(requests.tokens[requests.start[slot] :][: int(prompts.num_tokens[i]) - 1])
            most = min(len(tokens), len(own))
            differs = np.flatnonzero(tokens[:most] != own[:most])
            num_common = int(differs[0]) if len(differs) else most
            found[o, i] = num_common // block_size > int(hits.num_tokens[i]) // block_size
    return found


@pytest.mark.quick_cases("4")  # of 64 the other tests of engines are
@pytest.mark.parametrize("at_once", [4, 64])
def test_who_waits_for_blocks_of_others(monkeypatch, at_once):
    """Prompts that share their first tokens, at all stages of their computation, in two namespaces."""
    engine, num_found = make_engine(), 0

    @jax.jit
    def look(state, slots):
        found = look_up(state, slots)
        return admit._is_computed(state, slots, *found), found

    names = [None, kv.namespace(tenant="another")]
    for seed in range(12):
        rng = np.random.default_rng(seed)
        first = rng.integers(0, 3, 40)
        lens = rng.integers(2, 40, 6)
        prompts = [np.append(first[:length], rng.integers(0, 3, 3)) for length in lens]
        asked = [ask(prompt, 3, namespace=names[int(rng.random() < 0.2)]) for prompt in prompts]
        assert engine.push(asked) == 6
        for _ in range(4):
            state = engine.state
            slots = np.flatnonzero(np.asarray(waits(state)))[:4].astype(np.int32)
            slots = np.append(slots, np.full(4 - len(slots), state.requests.num_slots, np.int32))
            with monkeypatch.context() as patch:  # not for the engine, whose program others share
                patch.setattr(admit, "_COMPARED_ON_CPUS", at_once)
                found, looked_up = jax.device_get(look(state, slots))
            np.testing.assert_array_equal(found, expected_of(jax.device_get(state), slots, *looked_up))
            num_found += int(found.sum())
            engine.drain(1)
        for _ in engine:
            pass
    assert num_found > 20
