"""Question: what does a context over several devices cost a step, what of memory has each, and what changes?

Command: python -m experiments.context [--steps N] [--tokens N] [--json]
Machine: 2 virtual cores of an AMD EPYC, other work beside it; jax 0.12.0.1
Answer:  160 of 160 tokens are equal, and attention to 2e-7 (bar 1e-6); 32.5 MiB on one device are 16.2 on
  each of two and 8.1 on each of four; 7.1, 12.8 and 5.2 ms a step, which other work on the machine decides.

Four rows of different lengths decode greedily on one device, and with the tokens of each block split over two
and four (`CacheConfig(context_axis=)`): their tokens, the largest difference of attention in any step, the
bytes that each device has, and a step's median time. The devices are threads of one CPU, and so the times say
what the merging costs and nothing of what is won.
"""

import time
from typing import Any

from experiments.common import command, timing
from experiments.common.report import add_options, at_least, at_most, deliver, table

NUM_LAYERS, NUM_KV_HEADS, NUM_Q_HEADS, DIM, VOCAB, WIDTH = 2, 2, 8, 64, 512, 512
NUM_ROWS, BLOCK_SIZE, NUM_DEVICES = 4, 32, (1, 2, 4)


def decode(num_devices: int, num_tokens: int, num_steps: int) -> tuple[dict[str, Any], Any, Any]:
    """Decodes on some devices: a record, the tokens i32[steps, rows] and attention of all steps."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import kvcache_jax as kv

    config = kv.CacheConfig(
        [kv.FullAttention(NUM_KV_HEADS, DIM)] * NUM_LAYERS,
        block_size=BLOCK_SIZE,
        max_seqs=NUM_ROWS,
        max_seq_len=num_tokens + num_steps,
        context_axis="context" if num_devices > 1 else None,
    )
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((VOCAB, NUM_LAYERS, NUM_Q_HEADS + 2 * NUM_KV_HEADS, DIM), np.float32)
    head = rng.standard_normal((NUM_Q_HEADS * DIM, VOCAB), np.float32)

    def forward(
        cache: kv.Cache, tokens: jax.Array, num_new: jax.Array
    ) -> tuple[kv.Cache, jax.Array, jax.Array]:
        cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1])
        outs = []
        for layer in range(NUM_LAYERS):
            parts = jnp.asarray(vectors)[tokens, layer]
            q, k, v = jnp.split(parts, [NUM_Q_HEADS, NUM_Q_HEADS + NUM_KV_HEADS], axis=2)
            cache, out = kv.attention(cache, layer, q, k, v, step)
            outs.append(out)
        last = sum(outs)[:, -1].reshape(NUM_ROWS, -1)  # type: ignore
        return cache, jnp.argmax(last @ head, axis=-1).astype(jnp.int32), jnp.stack(outs)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("context",))
    with jax.set_mesh(mesh):
        cache = kv.init(config)
        num_bytes = [
            sum(x.addressable_shards[i].data.nbytes for x in jax.tree.leaves(cache.pools))
            for i in range(num_devices)
        ]
        step_fn = kv.donate(forward)
        lengths = num_tokens - np.arange(NUM_ROWS) * num_tokens // 5
        cache, admitted = kv.allocate(cache, np.arange(NUM_ROWS), lengths)
        assert not np.asarray(admitted.status).any()
        text = rng.integers(VOCAB, size=(NUM_ROWS, num_tokens)).astype(np.int32)
        for start in range(0, num_tokens, WIDTH):
            num_new = np.clip(lengths - start, 0, WIDTH).astype(np.int32)
            cache, _, _ = step_fn(cache, text[:, start : start + WIDTH], num_new)
        said, outs, seconds = [text[:, -1]], [], []
        for _ in range(num_steps):
            begun = time.perf_counter()
            cache, tokens, out = step_fn(cache, said[-1][:, None], np.ones(NUM_ROWS, np.int32))
            said.append(np.asarray(tokens))
            seconds.append(time.perf_counter() - begun)
            outs.append(np.asarray(out))
    record = {"devices": num_devices, "bytes": max(num_bytes), **timing.summary(seconds[1:])}
    return record, np.stack(said[1:]), np.stack(outs)


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.context", __doc__)
    parser.count("--steps", 40, least=2)
    parser.count("--tokens", 8 * WIDTH, least=WIDTH)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", max(NUM_DEVICES))
    except RuntimeError:  # as many as there are, set before
        pass
    num_tokens = options.tokens // WIDTH * WIDTH
    records, tokens, outs = zip(*(decode(num, num_tokens, options.steps) for num in NUM_DEVICES), strict=True)
    for record, said, out in zip(records, tokens, outs, strict=True):
        record["equal"] = int((said == tokens[0]).sum())
        record["of"] = int(said.size)
        record["difference"] = float(abs(out - outs[0]).max())
    bars = []
    for record in records[1:]:
        num = record["devices"]
        share = record["bytes"] / records[0]["bytes"]
        bars += [
            at_least(f"share of equal tokens, {num} devices", record["equal"] / record["of"], 1),
            at_most(f"difference of attention, {num} devices", record["difference"], 1e-6),
            at_most(f"share of the memory on each of {num} devices", share, 1 / num),
        ]
    columns = {
        "devices": "{devices}",
        "MiB on each": lambda record: f"{record['bytes'] / 2**20:.1f}",
        "equal tokens": "{equal} of {of}",
        "difference": "{difference:.1e}",
        **timing.ms_columns(),
    }
    return deliver(
        {"records": list(records), "bars": bars}, options, table("a step of four rows", columns, 6)
    )


if __name__ == "__main__":
    command.run(main)
