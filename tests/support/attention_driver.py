"""A dense float64 reference of attention, and a driver that compares every step of a cache with it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax.testing import poison
from tests.support.helpers import assert_same, statuses


def dense_attention(q, k, v, *, window=None, num_sink_tokens=0, scale=None, soft_cap=None, sink_logits=None):
    """Causal attention in float64, the q being the last tokens of the row.

    q [T, num_q_heads, head_dim], k and v [L, num_kv_heads, head_dim] -> out like q, lse [T, num_q_heads].
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    num_new, num_q_heads, head_dim = q.shape
    length = k.shape[0]
    group_size = num_q_heads // k.shape[1]
    k, v = np.repeat(k, group_size, axis=1), np.repeat(v, group_size, axis=1)
    scores = np.einsum("thd,lhd->thl", q, k) * (1 / math.sqrt(head_dim) if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    query_at = np.arange(length - num_new, length)[:, None]
    key_at = np.arange(length)[None, :]
    is_seen = key_at <= query_at
    if window is not None:
        is_seen &= (key_at > query_at - window) | (key_at < num_sink_tokens)
    scores = np.where(is_seen[:, None, :], scores, -np.inf)
    if sink_logits is not None:
        extra = np.broadcast_to(np.asarray(sink_logits, np.float64)[None, :, None], (num_new, num_q_heads, 1))
        all_scores = np.concatenate([scores, extra], axis=-1)
    else:
        all_scores = scores
    top = all_scores.max(axis=-1)
    lse = top + np.log(np.exp(all_scores - top[..., None]).sum(axis=-1))
    return np.einsum("thl,lhd->thd", np.exp(scores - lse[..., None]), v), lse


TOLERANCE = {"float32": (2e-5, 2e-5), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 3e-2)}  # rtol, atol


@functools.cache
def compiled_step(packed, scale=None, soft_cap=None, return_lse=False):
    """One model step, `extend` and the attention of every layer, jitted.

    packed=False: q is a tuple of [n, max_new, ...]; packed=True: of [num_tokens, ...].
    """

    def run(cache, q, k, v, num_new, sink_logits):
        width = q[0].shape[0] if packed else q[0].shape[1]
        cache, step = kv.extend(cache, num_new, **({"num_tokens": width} if packed else {"max_new": width}))
        outputs = []
        for layer in range(cache.config.num_layers):
            cache, out = kv.attention(
                cache,
                layer,
                q[layer],
                k[layer],
                v[layer],
                step,
                scale=scale,
                soft_cap=soft_cap,
                sink_logits=sink_logits,
                return_lse=return_lse,
            )
            outputs.append(out)
        return cache, outputs, step

    return jax.jit(run)


class AttentionDriver:
    """A cache and every row's keys and values on the host; each step is compared with `dense_attention`.

    Padding and the rows that ought to fail get NaN as q, k and v, and must come out as exact zeros. Keys and
    values are normal numbers, queries `query_size` times such ones.
    """

    def __init__(
        self,
        config,
        *,
        num_q_heads,
        width,
        packed=False,
        seed=0,
        sink_logits=None,
        scale=None,
        soft_cap=None,
        return_lse=True,
        cache=None,
        tolerance=None,
        query_size=1.0,
    ):
        self.cache = poison(kv.init(config) if cache is None else cache)
        self.config = config
        self.num_q_heads = num_q_heads
        self.width = width  # max_new, or num_tokens when packed
        self.packed = packed
        self.options = dict(scale=scale, soft_cap=soft_cap)
        self.return_lse = return_lse
        self.sink_logits = None if sink_logits is None else np.asarray(sink_logits, np.float32)
        self.rng = np.random.default_rng(seed)
        self.dtype = np.dtype(jnp.dtype(config.dtype))
        self.tolerance = tolerance or TOLERANCE[self.dtype.name]
        self.query_size = query_size
        self.history = {}  # seq_id -> [(k, v) per layer]

    @property
    def run(self):
        return compiled_step(self.packed, return_lse=self.return_lse, **self.options)

    def length(self, seq_id):
        return self.history[seq_id][0][0].shape[0]

    def start(self, seq_id, num_tokens):
        self.cache, admission = kv.allocate(self.cache, [seq_id], [num_tokens])
        assert statuses(admission.status) == [kv.Status.OK]
        self.history[seq_id] = [
            tuple(np.zeros((0, kind.num_kv_heads, kind.head_dim), self.dtype) for _ in "kv")
            for kind in self.config.layers
        ]

    def fork(self, source, target):
        self.cache, status = kv.fork(self.cache, [source], [target])
        assert statuses(status) == [kv.Status.OK]
        self.history[target] = list(self.history[source])

    def truncate(self, seq_id, length):
        self.cache, status = kv.truncate(self.cache, [seq_id], [length])
        (found,) = statuses(status)
        if found == kv.Status.OK:
            self.history[seq_id] = [(k[:length], v[:length]) for k, v in self.history[seq_id]]
        return found

    def free(self, seq_id):
        self.cache, status = kv.free(self.cache, [seq_id])
        assert statuses(status) == [kv.Status.OK]
        del self.history[seq_id]

    def random(self, shape, size=1.0):
        return (size * self.rng.standard_normal(shape)).astype(np.float32).astype(self.dtype)

    def inputs(self, num_new, expected):
        """Arrays for one step, NaN wherever there is no token of a row that ought to succeed."""
        shape = (self.width,) if self.packed else (self.config.max_seqs, self.width)
        starts = np.concatenate([[0], np.cumsum(num_new)])

        def place(per_row, num_heads, head_dim):
            array = np.full((*shape, num_heads, head_dim), np.nan, np.float32).astype(self.dtype)
            for seq_id, new in per_row.items():
                if self.packed:
                    array[starts[seq_id] : starts[seq_id + 1]] = new
                else:
                    array[seq_id, : len(new)] = new
            return array

        fresh, arrays = [], []
        for kind in self.config.layers:
            rows = [
                r
                for r in range(self.config.max_seqs)
                if num_new[r] and expected.get(r, kv.Status.OK) == kv.Status.OK
            ]
            new = {
                r: (
                    self.random((num_new[r], self.num_q_heads, kind.head_dim), self.query_size),
                    self.random((num_new[r], kind.num_kv_heads, kind.head_dim)),
                    self.random((num_new[r], kind.num_kv_heads, kind.head_dim)),
                )
                for r in rows
            }
            fresh.append(new)
            arrays.append(
                tuple(
                    place({r: new[r][i] for r in rows}, heads, kind.head_dim)
                    for i, heads in enumerate((self.num_q_heads, kind.num_kv_heads, kind.num_kv_heads))
                )
            )
        return fresh, tuple(zip(*arrays, strict=True)), starts

    def step(self, new_lens, expected=None, twice=False):
        """Appends `new_lens[seq_id]` tokens to rows, attends in every layer, and compares everything.

        Args:
          new_lens: dict from seq_id to the number of new tokens.
          expected: dict from seq_id to the status that the row ought to get, where it is not OK.
          twice: run the compiled step a second time from the same state and demand equal bits.
        """
        expected = expected or {}
        num_new = np.zeros(self.config.max_seqs, np.int32)
        for seq_id, count in new_lens.items():
            num_new[seq_id] = count
        self.cache = poison(self.cache)
        fresh, (q, k, v), starts = self.inputs(num_new, expected)
        before = self.cache
        self.cache, outputs, step = self.run(before, q, k, v, num_new, self.sink_logits)
        if twice:
            assert_same((self.cache, outputs, step), self.run(before, q, k, v, num_new, self.sink_logits))

        found = statuses(step.status)
        for seq_id, status in enumerate(found):
            assert status == expected.get(seq_id, kv.Status.OK), f"row {seq_id}: {status!r}, new {new_lens}"
        for layer, kind in enumerate(self.config.layers):
            out, lse = outputs[layer] if self.return_lse else (outputs[layer], None)
            assert out.shape == q[layer].shape and out.dtype == self.dtype
            out = np.array(out).astype(np.float32)
            if lse is not None:
                assert lse.shape == q[layer].shape[:-1] and lse.dtype == np.float32
                lse = np.array(lse)
            is_real = np.zeros(out.shape[: 1 if self.packed else 2], bool)
            for seq_id, (new_q, new_k, new_v) in fresh[layer].items():
                old_k, old_v = self.history[seq_id][layer]
                all_k, all_v = np.concatenate([old_k, new_k]), np.concatenate([old_v, new_v])
                self.history[seq_id] = [
                    (all_k, all_v) if at == layer else halves
                    for at, halves in enumerate(self.history[seq_id])
                ]
                want, want_lse = dense_attention(
                    new_q,
                    all_k,
                    all_v,
                    window=getattr(kind, "window", None),
                    num_sink_tokens=getattr(kind, "num_sink_tokens", 0),
                    sink_logits=self.sink_logits,
                    **self.options,
                )
                at = (
                    slice(starts[seq_id], starts[seq_id + 1])
                    if self.packed
                    else (seq_id, slice(0, num_new[seq_id]))
                )
                is_real[at] = True
                rtol, atol = self.tolerance
                message = f"row {seq_id}, layer {layer}, context {len(all_k)}"
                np.testing.assert_allclose(out[at], want, rtol=rtol, atol=atol, err_msg=message)
                if lse is not None:
                    np.testing.assert_allclose(lse[at], want_lse, rtol=rtol, atol=atol, err_msg=message)
            assert (out[~is_real] == 0).all(), "padding and failed rows must come out as exact zeros"
            if lse is not None:
                assert (lse[~is_real] == -np.inf).all()
        for seq_id in self.history:
            assert int(self.cache.context_len[seq_id]) == self.length(seq_id)
        return step


def fragment(cache, lengths=(13, 5, 9, 2, 17)):
    """Mixes the free stack: allocates and frees rows in an odd order until block ids come out permuted."""
    max_seqs = cache.config.max_seqs
    for shift in range(3):
        started = []
        for i, length in enumerate(lengths[:max_seqs]):
            seq_id = (i + shift) % max_seqs
            cache, admission = kv.allocate(cache, [seq_id], [min(length, cache.config.max_seq_len)])
            if statuses(admission.status) == [kv.Status.OK]:
                started.append(seq_id)
        for i in (3, 0, 4, 1, 2):
            if i < len(started):
                cache, _ = kv.free(cache, [started[(i + shift) % len(started)]])
    assert not np.asarray(cache.is_active).any()
    return cache
