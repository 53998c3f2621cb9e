"""The kinds of layer that a cache may have, a line each, and the properties that every kind is held to.

A kind enters by its line in `KINDS`: its name, its layers, the oracle of each layer, and the cells of which
something else than "works" is true. The oracle is a dense reference of what attention over a whole row gives.

    python -m tests.kinds.table              # prints each cell that is something else than "works", and why
    python -m tests.kinds.table --markdown   # prints the table of docs/measured.md
    python -m tests.kinds.table --stored     # prints what a token stores in layers of DeepSeek-V3's size
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from tests.kinds import rounding
from tests.kinds.outside_kind import SideBySide
from tests.support import hash_states
from tests.support.dense_reference import dense_attention

PROPERTIES = (
    "allocate",
    "fork",
    "copy-on-write",
    "in-place",
    "truncate",
    "rewrite",
    "drop",
    "compress",
    "compose",
    "window",
    "commit",
    "hit",
    "partial-hit",
    "evict",
    "transfer",
    "gradient",
    "shard",
    "context",
    "export",
    "poison",
    "manager",
    "generate",
)
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


@dataclasses.dataclass(frozen=True)
class Refused:
    """A cell that is an exception by name.

    Attributes:
      error: Its type.
      sentence: A pattern of what it says.
    """

    error: type[Exception]
    sentence: str


@dataclasses.dataclass(frozen=True)
class NoMeaning:
    """A cell that asks for nothing.

    Attributes:
      why: The reason, a sentence.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class Kind:
    """A line of the table.

    Attributes:
      name: In the names of the tests.
      layers: One entry per model layer.
      oracles: Of each layer: `(q [L, NUM_Q_HEADS, d], k [L, NUM_KV_HEADS, d], v) -> out`, like q. Row `i` of
        the result must not depend on what comes after token `i`. Of a layer that reads a source `k` and `v`
        are those of the source, and its length is a fourth argument; of any other, `is_hidden` bool[L] tells
        which tokens no query sees.
      rollback: Tokens that a long row may be shortened by; None for all of them.
      cells: By property, where something else than "works" is true.
      quick: Its cells that `make test` runs, where other lines, or tests, say there what the others say.
      spans_as: Name of another line in whose layers the same tokens stay in sight, if there is one: what
        depends on that alone is tested there.
      stores_as: Name of another line that stores tokens in such arrays: what depends on that alone is tested
        there.
    """

    name: str
    layers: tuple[kv.LayerKind, ...]
    oracles: tuple[Callable[..., jax.Array], ...]
    rollback: int | None = None
    cells: dict[str, Refused | NoMeaning] = dataclasses.field(default_factory=dict)
    quick: tuple[str, ...] | None = None
    spans_as: str | None = None
    stores_as: str | None = None


def dense(q, k, v, **reach):
    return dense_attention(q, k, v, **reach)[0]


def near(window, num_sink_tokens=0):
    return functools.partial(dense, window=window, num_sink_tokens=num_sink_tokens)


def latent(q, k, v, **reach):
    """Attention to the first head's keys, of which the first five numbers are values."""
    k = k[:, :1]
    return dense(q, k, jnp.where(jnp.arange(HEAD_DIM)[None, None] < 5, k, 0), **reach)


def whole_source(q, k, v, source_len):
    """Attention of all queries to the first `source_len` keys."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") / q.shape[-1] ** 0.5
    is_source = jnp.arange(k.shape[0])[None, None] < source_len
    shares = jax.nn.softmax(jnp.where(is_source, logits, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", shares, v, precision="highest")


def hashed(tokens):
    """Running hashes of tokens, and sums of the last ones, u32[L, 2]."""

    def step(state, token):
        state, _ = hash_states.next_state(state, token)
        return state, state

    tokens = tokens.astype(jnp.uint32)
    _, states = jax.lax.scan(step, jnp.uint32(0), tokens)
    inputs, num = jnp.pad(tokens + jnp.uint32(1), (hash_states.KERNEL - 1, 0)), tokens.shape[0]
    last = jnp.stack([inputs[i : i + num] for i in range(hash_states.KERNEL)], axis=1)
    return jnp.stack([states, hash_states.inputs_sum(last)], axis=1)


def recurrent(name, kind, columns, quick=None):
    """A line of a recurrent kind, of whose outputs `hashed` has the columns, after full attention."""
    layers = FULL, kind(1, 1, max_rollback=5)
    return Kind(name, layers, (dense, lambda tokens: hashed(tokens)[:, columns]), 5, STATES, quick)


def window(**options):
    return kv.SlidingWindow(NUM_KV_HEADS, HEAD_DIM, **options)


def quantised(name, round_numbers, rotate=False, quick=None, stores_as=None):
    """A line of a format around full attention."""
    layer = kv.Quantised(FULL, name.removesuffix("-rotated"), rotate)
    oracle = rounding.attending(dense, round_numbers)
    cells = STAYS | NOT_MOVED | {"gradient": NO_GRADIENT}
    return Kind(name, (layer,), (oracle,), None, cells, quick, "full", stores_as)


FULL = kv.FullAttention(NUM_KV_HEADS, HEAD_DIM)
STAYS = {"window": NoMeaning("All tokens stay in sight, so no block is given back.")}
NO_GRADIENT = Refused(NotImplementedError, "got a gradient through Quantised.* layers, which have none")
NO_PREFIX = Refused(ValueError, r"layers.*CrossAttention.*, expected False: what tokens compute depends on")
NO_SOURCE = Refused(NotImplementedError, "generate got CrossAttention.* layers, for whose sources it has no")
NO_WINDOW = Refused(NotImplementedError, "compress got .* layers, expected layers that keep all tokens")
IN_WINDOW = {"compress": NO_WINDOW}
SHORTER = NoMeaning("A prefix is found where its last window is: tests/prefix/test_token_index.py.")
ALONE = IN_WINDOW | dict.fromkeys(("commit", "hit", "partial-hit", "evict"), SHORTER)
NOT_MOVED = {
    "compose": Refused(
        NotImplementedError, "layers.* is .*, expected layers whose keys can be rotated to another"
    )
}
FIXED = "expected layers of keys and values: a state stands for all tokens before it"
STATES = (
    NOT_MOVED
    | dict.fromkeys(("drop", "compress", "partial-hit"), Refused(NotImplementedError, FIXED))
    | {
        "gradient": NoMeaning("Hashes have none: tests/layers/test_recurrent_kinds.py."),
        "rewrite": Refused(NotImplementedError, "rewrite and layers.1. is .*, expected layers"),
        "context": Refused(
            NotImplementedError, "layers.1. is .*, expected layers of keys and values: a state stands for all"
        ),
        "in-place": NoMeaning("Pools of states have the rows' shares: tests/recurrence/test_states.py."),
    }
)

KINDS = (
    Kind("full", (FULL,), (dense,), None, STAYS),
    Kind("window", (window(window=6),), (near(6),), 0, ALONE, (), stores_as="full"),
    Kind("sinks", (window(window=6, num_sink_tokens=3),), (near(6, 3),), 0, ALONE, (), stores_as="full"),
    Kind("rollback", (window(window=6, max_rollback=5),), (near(6),), 5, ALONE, (), "mix", "full"),
    Kind("mix", (window(window=6, max_rollback=5), FULL), (near(6), dense), 5, IN_WINDOW),
    # A kind defined outside of the library.
    Kind(
        "outside",
        (SideBySide(NUM_KV_HEADS, HEAD_DIM),),
        (dense,),
        None,
        STAYS | NOT_MOVED,
        ("copy-on-write",),
        spans_as="full",
    ),
    Kind(
        "outside-window",
        (SideBySide(NUM_KV_HEADS, HEAD_DIM, window=6),),
        (near(6),),
        0,
        ALONE | NOT_MOVED,
        quick=(),
        spans_as="window",
        stores_as="outside",
    ),
    quantised("int8", rounding.int8, quick=(), stores_as="int4-rotated"),
    quantised("fp8", rounding.fp8, quick=(), stores_as="int4-rotated"),
    quantised("int4", rounding.int4, quick=(), stores_as="int4-rotated"),
    quantised("int4-rotated", rounding.rotated(rounding.int4), rotate=True),
    Kind("latent", (kv.LatentAttention(5, HEAD_DIM - 5),), (latent,), None, STAYS, (), spans_as="full"),
    Kind(
        "shared",
        (window(window=6, max_rollback=5), FULL, kv.SharedWith(0), kv.SharedWith(1)),
        (near(6), dense, near(6), dense),
        5,
        IN_WINDOW,
        ("copy-on-write",),
        spans_as="mix",
        stores_as="mix",
    ),
    Kind(
        "cross",
        (FULL, kv.CrossAttention(NUM_KV_HEADS, HEAD_DIM, max_source_len=11), kv.SharedWith(1)),
        (dense, whole_source, whole_source),
        None,
        STAYS
        | NOT_MOVED
        | dict.fromkeys(("commit", "hit", "partial-hit", "evict", "transfer"), NO_PREFIX)
        | {"generate": NO_SOURCE},
        (),  # tests/operations/test_sources.py
    ),
    Kind(
        "int8-window",
        (kv.Quantised(window(window=6, max_rollback=5), "int8"), FULL),
        (rounding.attending(near(6), rounding.int8), dense),
        5,
        IN_WINDOW | NOT_MOVED | {"gradient": NO_GRADIENT},
        quick=(),
        spans_as="mix",
        stores_as="int4-rotated",
    ),
    recurrent("points", hash_states.HashState, slice(2)),
    recurrent("state-per-token", hash_states.StatePerToken, slice(1), quick=()),
    recurrent("last-inputs", hash_states.LastInputs, slice(1, 2), quick=()),
)


def word(kind: Kind, name: str) -> str:
    """Returns the word of a cell: "works", "refused" or "no meaning"."""
    cell = kind.cells.get(name)
    if cell is None:
        return "works"
    return "refused" if isinstance(cell, Refused) else "no meaning"


def reasons() -> list[str]:
    """Lists all that is not "works": what the exceptions of cells say, and why cells ask for nothing."""
    found: dict[str, dict[str, list[str]]] = {}
    for kind in KINDS:
        for name, cell in kind.cells.items():
            if isinstance(cell, Refused):
                why = f'{cell.error.__name__}, "{cell.sentence.replace(".*", "...")}"'
            else:
                why = cell.why
            found.setdefault(why, {}).setdefault(name, []).append(kind.name)
    lines = []
    for why, by_name in found.items():
        of_kinds: dict[str, list[str]] = {}
        for name, kinds in by_name.items():
            of_kinds.setdefault(", ".join(kinds), []).append(name)
        lines += [f"* {', '.join(names)} of {kinds}: {why}" for kinds, names in of_kinds.items()]
    return lines


def stored() -> list[str]:
    """Lists values per token and layer, and the GiB of a row of 131,072 tokens in 61 layers, in bfloat16."""
    full = kv.FullAttention(128, 128)
    layers = {
        "`FullAttention(128, 128)`": [full] * 61,
        "`FullAttention(8, 128)`": [kv.FullAttention(8, 128)] * 61,
        "`LatentAttention(512, 64)`": [kv.LatentAttention(512, 64)] * 61,
        "`FullAttention(8, 128)`, every second layer `SharedWith` the one before": [
            kv.SharedWith(i - 1) if i % 2 else kv.FullAttention(8, 128) for i in range(61)
        ],
    }
    lines = ["| layers | values per token and layer | GiB |", "| --- | --: | --: |"]
    for name, kinds in layers.items():
        sizes = dict(max_seqs=1, max_seq_len=131_072, dtype="bfloat16")
        num_bytes = kv.memory_bytes(kv.CacheConfig(kinds, **sizes))
        per_token = num_bytes / (2 * 61 * 131_072)
        lines.append(f"| {name} | {per_token:,.0f} | {num_bytes / 2**30:.1f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prints the table of layer kinds and their properties.")
    parser.add_argument("--markdown", action="store_true", help="print the whole table")
    parser.add_argument("--stored", action="store_true", help="print what a token stores")
    options = parser.parse_args(arguments)
    if options.stored:
        print(*stored(), sep="\n")
        return 0
    if options.markdown:
        print(f"| kind | {' | '.join(PROPERTIES)} |")
        print("|".join(["", " --- "] + [" :-: "] * len(PROPERTIES) + [""]))
        for kind in KINDS:
            print(f"| {kind.name} | {' | '.join(word(kind, name) for name in PROPERTIES)} |")
        print()
    print(*reasons(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
