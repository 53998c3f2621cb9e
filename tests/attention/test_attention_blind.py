"""`kv.attention` against a dense float64 reference, written from the specification alone.

The pool is fragmented first. Unowned slots are NaN, and so are the q, k and v of padding and of failing rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from kvcache_jax.testing import poison
from tests.support.attention_driver import TOLERANCE, AttentionDriver, dense_attention, fragment
from tests.support.helpers import assert_same, statuses, table

NUM_KV_HEADS = 2
MAX_SEQ_LEN = 27

# Every pair of values of two columns is in at least one row; window is (length, sink tokens).
GRID = [
    # dtype, q heads per kv head, head_dim, block_size, max_new, window, sink_logits, soft_cap, scale,
    # return_lse, packed
    ("float32", 1, 64, 16, 1, None, False, None, None, True, False),
    ("float32", 2, 8, 4, 7, None, False, None, None, True, True),
    ("float32", 8, 8, 16, 3, None, False, 2.5, 0.3, True, False),
    ("float32", 1, 8, 16, 7, (5, 0), False, None, 0.3, False, False),
    ("float32", 2, 8, 1, 3, (9, 3), True, 2.5, 0.3, True, False),
    ("bfloat16", 8, 64, 1, 1, (5, 0), True, 2.5, None, False, True),
    ("float16", 1, 64, 4, 3, (9, 3), True, None, 0.3, False, True),
    ("float16", 8, 8, 4, 1, (9, 3), False, 2.5, None, True, False),
    ("bfloat16", 1, 8, 1, 7, None, True, None, 0.3, True, False),
    ("float16", 2, 64, 16, 1, None, True, None, 0.3, False, True),
    ("bfloat16", 2, 8, 4, 3, (5, 0), False, None, None, True, True),
    ("bfloat16", 1, 64, 16, 7, (9, 3), True, 2.5, None, True, True),
    ("float16", 8, 8, 1, 7, (5, 0), False, None, None, True, True),
    # float32 again, where the tolerance is tight
    ("float32", 1, 8, 4, 3, (5, 0), True, 2.5, None, True, True),
]


def config_of(
    *,
    dtype="float32",
    head_dim=8,
    block_size=4,
    width=3,
    window=None,
    num_layers=2,
    max_seqs=7,
    max_seq_len=MAX_SEQ_LEN,
):
    sizes = dict(num_kv_heads=NUM_KV_HEADS, head_dim=head_dim)
    if window is None:
        kind = kv.FullAttention(**sizes)
    else:
        kind = kv.SlidingWindow(**sizes, window=window[0], num_sink_tokens=window[1])
    num_blocks = max_seqs * (-(-max_seq_len // block_size) + 1)
    return kv.CacheConfig(
        layers=[kind] * num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        max_seqs=max_seqs,
        max_seq_len=max_seq_len,
        max_query_len=width,
        dtype=jnp.dtype(dtype),
    )


def prefill(driver, lengths, width):
    """Starts rows and fills them in chunks, side by side; each chunk is compared with the reference."""
    for seq_id, length in lengths.items():
        driver.start(seq_id, length)
    while any(driver.length(seq_id) < length for seq_id, length in lengths.items()):
        room = driver.width if driver.packed else None
        new_lens = {}
        for seq_id, length in lengths.items():
            count = min(width, length - driver.length(seq_id))
            if room is not None:
                count = min(count, room)
                room -= count
            new_lens[seq_id] = count
        driver.step(new_lens)


@pytest.mark.quick_cases(
    "float32-8-8-16-3-None-False-2.5-0.3-True-False", "bfloat16-2-8-4-3-(5, 0)-False-None-None-True-True"
)
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_attention_against_dense_float64(case):
    (
        dtype,
        group_size,
        head_dim,
        block_size,
        width,
        window,
        has_sink_logits,
        soft_cap,
        scale,
        return_lse,
        packed,
    ) = case
    config = config_of(
        dtype=dtype, head_dim=head_dim, block_size=block_size, width=width, window=window, num_layers=1
    )
    num_q_heads = NUM_KV_HEADS * group_size
    sink_logits = np.linspace(-1.5, 2.0, num_q_heads) if has_sink_logits else None
    driver = AttentionDriver(
        config,
        num_q_heads=num_q_heads,
        width=2 * width + 5 if packed else width,
        packed=packed,
        sink_logits=sink_logits,
        soft_cap=soft_cap,
        scale=scale,
        return_lse=return_lse,
        cache=fragment(kv.init(config)),
    )
    lengths = {0: 13, 1: 1, 3: 22, 4: MAX_SEQ_LEN, 6: 0}
    prefill(driver, lengths, width)
    if block_size == 1:
        assert np.any(np.diff(table(driver.cache, 3)) != 1), "the block table ought to be permuted"
    # Ragged rows beside an idle one, a full one and one without new tokens.
    new_lens = {0: width, 1: 1, 2: 1, 3: min(2, width), 4: 1, 6: 0}
    driver.step(new_lens, expected={2: Status.SEQ_NOT_ACTIVE, 4: Status.TOO_LONG}, twice=True)
    driver.step({6: 1, 5: 1, 3: 1}, expected={5: Status.SEQ_NOT_ACTIVE})


@pytest.mark.slow
def test_rows_that_fail_for_want_of_blocks():
    """Two rows want the last block: the second's output is zero and its context stays readable."""
    config = kv.CacheConfig(
        layers=[kv.FullAttention(num_kv_heads=NUM_KV_HEADS, head_dim=8)] * 2,
        num_blocks=5,
        block_size=4,
        max_seqs=7,
        max_seq_len=MAX_SEQ_LEN,
        max_query_len=3,
    )
    driver = AttentionDriver(config, num_q_heads=4, width=3, cache=fragment(kv.init(config)))
    prefill(driver, {4: 7, 1: 8}, 3)
    driver.step({1: 2, 4: 2}, expected={4: Status.OUT_OF_BLOCKS}, twice=True)
    driver.step({1: 2, 4: 1})
    driver.free(1)
    driver.step({4: 3})
    driver.step({4: 2, 1: 3}, expected={1: Status.SEQ_NOT_ACTIVE})


@pytest.mark.slow
def test_branches_that_write_in_one_call():
    """Three owners of a half-full block append different tokens at once, and each sees its own."""
    config = config_of()
    driver = AttentionDriver(
        config, num_q_heads=4, width=3, cache=fragment(kv.init(config)), sink_logits=np.zeros(4)
    )
    prefill(driver, {5: 10, 0: 5}, 3)
    driver.fork(5, 2)
    driver.fork(2, 6)
    driver.step({5: 1, 2: 3, 6: 2, 0: 1}, twice=True)
    assert driver.truncate(6, 9) == Status.OK
    driver.fork(6, 3)
    driver.step({3: 2, 6: 3, 2: 1})
    driver.free(5)
    driver.step({3: 1, 6: 1, 2: 1, 0: 3})


def state_and_step(config, num_q_heads, seed=3):
    """A fragmented, poisoned cache after `extend`, with random q, k, v: what `attention` starts from."""
    driver = AttentionDriver(
        config,
        num_q_heads=num_q_heads,
        width=3,
        cache=fragment(kv.init(config)),
        seed=seed,
        sink_logits=np.zeros(num_q_heads),  # the program of large logits, too
    )
    prefill(driver, {0: 7, 2: 17, 5: 2}, 3)
    new_lens = np.zeros(config.max_seqs, np.int32)
    new_lens[[0, 2, 5, 6]] = (3, 1, 2, 1)  # row 6 is idle
    _, (q, k, v), _ = driver.inputs(new_lens, {6: Status.SEQ_NOT_ACTIVE})
    cache, step = kv.extend(poison(driver.cache), new_lens, max_new=3)
    assert statuses(step.status)[6] == Status.SEQ_NOT_ACTIVE
    return driver, new_lens, cache, step, q, k, v


@pytest.mark.slow
def test_write_and_attend_are_the_halves_of_attention():
    _, _, cache, step, q, k, v = state_and_step(config_of(), 4)
    whole, (out, lse) = kv.attention(cache, 1, q[1], k[1], v[1], step, return_lse=True)
    written = kv.write(cache, 1, k[1], v[1], step)
    assert_same(whole, written)
    assert_same((written, (out, lse)), kv.attend(written, 1, q[1], step, return_lse=True))
    assert_same((written, out), kv.attend(written, 1, q[1], step))
    assert_same((written, out), kv.attend(written, 1, q[1], step, implementation="xla"))
    # Writing the same again changes nothing; only layer 1's slots of this step differ from before.
    assert_same(written, kv.write(written, 1, k[1], v[1], step))
    old, new = np.asarray(cache.pools[0].k), np.asarray(written.pools[0].k)
    is_changed = (old.view(np.int32) != new.view(np.int32)).any(axis=(1, 3)).reshape(2, -1)
    slots = np.asarray(step.slots[0])
    real = slots[slots < is_changed.shape[1]]
    assert real.size == 6 and not is_changed[0].any()
    assert set(np.flatnonzero(is_changed[1])) == set(real.tolist())


@pytest.mark.slow
def test_traced_layers_in_a_scan():
    """A scan over the layers carries the cache and a layer index, and equals the unrolled loop bit by bit."""
    _, _, cache, step, q, k, v = state_and_step(config_of(), 4)
    q, k, v = (np.stack(part) for part in (q, k, v))

    @jax.jit
    def scanned(cache, step, q, k, v):
        def layer_step(cache, inputs):
            layer, q, k, v = inputs
            return kv.attention(cache, layer, q, k, v, step)

        return jax.lax.scan(layer_step, cache, (jnp.arange(2, dtype=jnp.int32), q, k, v))

    @jax.jit
    def unrolled(cache, step, q, k, v):
        outputs = []
        for layer in range(2):
            cache, out = kv.attention(cache, layer, q[layer], k[layer], v[layer], step)
            outputs.append(out)
        return cache, jnp.stack(outputs)

    assert_same(unrolled(cache, step, q, k, v), scanned(cache, step, q, k, v))


@pytest.mark.quick_cases("False")
@pytest.mark.parametrize("packed", [False, True])
def test_large_logits_do_not_overflow(packed):
    """Scores of some thousands: one key takes all, and the log-sum-exp is as large."""
    driver = AttentionDriver(
        config_of(),
        num_q_heads=4,
        width=11 if packed else 3,
        packed=packed,
        query_size=1000.0,
        tolerance=(2e-5, 5e-3),
        sink_logits=np.array([0.0, 900.0, -900.0, 3.0]),
        cache=fragment(kv.init(config_of())),
    )
    prefill(driver, {1: 9, 4: 21}, 3)
    driver.step({1: 3, 4: 2}, twice=True)


def test_absent_sink_logits_and_very_low_ones_agree():
    driver, new_lens, cache, step, q, k, v = state_and_step(config_of(), 4)
    cache = kv.write(cache, 0, k[0], v[0], step)
    _, (out, lse) = kv.attend(cache, 0, q[0], step, return_lse=True)
    low = jnp.full(4, -1e30, jnp.float32)
    _, (out_low, lse_low) = kv.attend(cache, 0, q[0], step, sink_logits=low, return_lse=True)
    np.testing.assert_allclose(out_low, out, rtol=1e-6, atol=1e-6)
    real = np.arange(3)[None, :] < np.asarray(step.query_len)[:, None]
    np.testing.assert_allclose(np.asarray(lse_low)[real], np.asarray(lse)[real], rtol=1e-6, atol=1e-6)
    # One head's sink takes weight from that head only.
    one = jnp.array([-1e30, 4.0, -1e30, -1e30], jnp.float32)
    out_one, lse_one = (
        np.asarray(x) for x in kv.attend(cache, 0, q[0], step, sink_logits=one, return_lse=True)[1]
    )
    for seq_id in (0, 2, 5):
        count = new_lens[seq_id]
        old_k, old_v = driver.history[seq_id][0]
        want, want_lse = dense_attention(
            q[0][seq_id, :count],
            np.concatenate([old_k, k[0][seq_id, :count]]),
            np.concatenate([old_v, v[0][seq_id, :count]]),
            sink_logits=one,
        )
        rtol, atol = TOLERANCE["float32"]
        np.testing.assert_allclose(out_one[seq_id, :count], want, rtol=rtol, atol=atol)
        np.testing.assert_allclose(lse_one[seq_id, :count], want_lse, rtol=rtol, atol=atol)
    np.testing.assert_allclose(
        out_one[:, :, [0, 2, 3]], np.asarray(out)[:, :, [0, 2, 3]], rtol=1e-6, atol=1e-6
    )


def test_other_rows_and_padding_do_not_matter():
    """A row's output has the same bits whatever is in other rows' q, k, v and in the padding."""
    _, _, cache, step, q, k, v = state_and_step(config_of(), 4)
    first = np.array(kv.attention(cache, 0, q[0], k[0], v[0], step)[1])
    q, k, v = (np.array(part[0]) for part in (q, k, v))
    for array in (q, k, v):
        array[0] = 77.0
        array[5, 2:] = -1e9
        array[6] = 3.0
        array[[1, 3, 4]] = 1e20
    q, k, v = (jnp.asarray(array) for array in (q, k, v))
    second = np.array(kv.attention(cache, 0, q, k, v, step)[1])
    assert first[[2, 5]].tobytes() == second[[2, 5]].tobytes()
    assert (second[[1, 3, 4, 6]] == 0).all() and (second[5, 2:] == 0).all() and (second[2, 1:] == 0).all()
