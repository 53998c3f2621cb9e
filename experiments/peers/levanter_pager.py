# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false
"""Question: what does levanter's pager, in-jit like ours, cost for the same decode step?

Command: python -m experiments.bookkeeping --peers [--peers-python PYTHON_WITH_LEVANTER]
   alone: python -m experiments.peers.levanter_pager '{"num_blocks": 65536, ...}'
Machine: 2 cores of an AMD EPYC; marin-levanter 0.2.227.dev, jax 0.11.2
Answer:  it searches the pool anew for each page, so the pages taken make the cost: 1,140 us for a decode
  step in which 16 of 256 rows take a page (1,097 inside a loop), 15,563 us when all take one.
"""

import dataclasses
import json
import sys
import time
from importlib import metadata

from experiments.common.timing import summary

try:
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from levanter.inference.jit_scheduler import SequenceTable
    from levanter.inference.page_table import PageTable

    MISSING = "" if hasattr(SequenceTable, "allocate_for_seq") else "its page table has another interface"
except Exception as error:  # the answer to "why skipped"
    MISSING = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def record(variant: str, figure: str, seconds: list[float], steps_per_call: int = 1) -> dict:
    return {
        "operation": "extend",
        "variant": variant,
        "calls": "SequenceTable.allocate_for_seq, donated",
        "figure": figure,
        **summary([second / steps_per_call for second in seconds]),
        "steps_per_call": steps_per_call,
    }


def new_state(sizes: dict) -> "tuple[SequenceTable, PageTable]":
    """Rows of `context_lens` tokens on blocks scattered over the pool."""
    context_lens = np.asarray(sizes["context_lens"], np.int32)
    num_rows, block_size = len(context_lens), sizes["block_size"]
    num_columns = sizes["max_seq_len"] // block_size
    sequences = SequenceTable.init(num_rows, num_columns, block_size)
    pages = PageTable.init(sizes["num_blocks"], num_rows, block_size, num_columns)
    held = np.arange(num_columns) < -(-context_lens // block_size)[:, None]
    table = np.array(sequences.page_indices.array)  # all entries: their "no page"
    table[held] = np.random.default_rng(0).permutation(sizes["num_blocks"])[: held.sum()]
    ref_counts = np.zeros(sizes["num_blocks"], np.int32)
    ref_counts[table[held]] = 1

    def named(like, array):
        return hax.named(jnp.asarray(array), [axis.name for axis in like.axes])

    sequences = dataclasses.replace(
        sequences,
        seq_lens=named(sequences.seq_lens, context_lens),
        kv_pages=named(sequences.kv_pages, table),
        page_indices=named(sequences.page_indices, table.copy()),
        used_mask=named(sequences.used_mask, np.ones(num_rows, bool)),
    )
    return sequences, dataclasses.replace(pages, page_ref_counts=named(pages.page_ref_counts, ref_counts))


def decode_step(state):
    """The paging of one decode step of their engine: one new token for each row."""
    sequences, pages = state
    seq_lens = sequences.seq_lens.array
    slot_ids = hax.named(jnp.arange(seq_lens.shape[0], dtype=jnp.int32), "position")
    sequences, pages, batch = sequences.allocate_for_seq(pages, slot_ids, hax.named(seq_lens, "position"))
    return (sequences, pages), batch.new_token_dests.array.sum()


def time_calls(fn, sizes: dict, num_calls: int, steps_per_call: int = 1) -> list[float]:
    jax.block_until_ready(fn(new_state(sizes)))
    state = jax.block_until_ready(new_state(sizes))
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        state, checksum = jax.block_until_ready(fn(state))
        seconds.append(time.perf_counter() - start)
    advanced = np.asarray(state[0].seq_lens.array) - np.asarray(sizes["context_lens"])
    assert (advanced == num_calls * steps_per_call).all(), "levanter: rows did not advance"
    num_held = int((np.asarray(state[1].page_ref_counts.array) == 1).sum())
    expected = -(-np.asarray(state[0].seq_lens.array) // sizes["block_size"]).sum()
    assert num_held == expected, f"levanter: {num_held} pages for tokens of {expected}"
    return seconds


def main() -> dict:
    sizes = json.loads(sys.argv[1])
    if MISSING:
        return {"peer": "levanter", "skipped": MISSING}
    num_steps = 16
    one = jax.jit(decode_step, donate_argnums=0)

    def steps(state):
        def body(_, carry):
            state, checksum = decode_step(carry[0])
            return state, carry[1] + checksum

        return jax.lax.fori_loop(0, num_steps, body, (state, jnp.int32(0)))

    many = jax.jit(steps, donate_argnums=0)
    some_take = "16 rows take a page"
    records = [
        record(some_take, "separate call", time_calls(one, sizes, 30)),
        record(some_take, "in a loop", time_calls(many, sizes, 5, num_steps), num_steps),
    ]
    at_boundary = [sizes["block_size"] * (n // sizes["block_size"]) for n in sizes["context_lens"]]
    all_take = [time_calls(one, {**sizes, "context_lens": at_boundary}, 1)[0] for _ in range(5)]
    records.append(record("all rows take a page", "separate call", all_take))
    names = ("marin-levanter", "levanter")
    versions = [d.version for d in metadata.distributions() if d.metadata["Name"] in names]
    version = versions[0] if versions else "unknown"
    return {"peer": "levanter", "version": version, "jax": jax.__version__, "records": records}


if __name__ == "__main__":
    print(json.dumps(main()))
