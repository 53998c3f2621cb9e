"""Random scripts of operations, run on a cache and on the oracle side by side."""

import dataclasses
import functools

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import append_donated

ROWS, WIDTH, NUM_PACKED = 6, 5, 9
NUM_TOKENS_RANGE = 2**14


def full_config(**sizes):
    layers = [kv.FullAttention(1, 5)] * 2
    return kv.CacheConfig(
        layers, **{"num_blocks": 24, "block_size": 4, "max_seqs": ROWS, "max_seq_len": 31} | sizes
    )


def grouped_config(**sizes):
    """A full group and two window groups, interleaved, with block sizes 3, 4 and 2."""
    full = kv.FullAttention(1, 5)
    window = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=40)
    narrow = kv.SlidingWindow(1, 5, window=1, block_size=3, num_blocks=14)
    return kv.CacheConfig(
        [window, full, narrow, window],
        **{"num_blocks": 24, "block_size": 4, "max_seqs": ROWS, "max_seq_len": 31, "max_query_len": 9}
        | sizes,
    )


# The compiled steps are shared by all drivers of one config.
@kv.donate
def append_some(cache, tokens, num_new, seq_ids):
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], seq_ids=seq_ids, tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step.status


@kv.donate
def append_packed(cache, tokens, num_new, seq_ids):
    cache, step = kv.extend(cache, num_new, num_tokens=tokens.shape[0], seq_ids=seq_ids, tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step.status


@dataclasses.dataclass
class Driver:
    """Applies operations to a cache and to the oracle and compares everything after each."""

    config: kv.CacheConfig

    def __post_init__(self):
        self.cache = testing.poison(kv.init(self.config))
        self.oracle = self.new_oracle()
        self.next_token = 0
        self.statuses: dict[tuple[str, str], int] = {}

    def new_oracle(self) -> testing.Oracle:
        return testing.Oracle(self.config)

    def new_tokens(self, length: int) -> list[int]:
        """Ids that nobody used recently, so that a stale slot never looks right."""
        start = self.next_token
        self.next_token += length
        return [token % NUM_TOKENS_RANGE for token in range(start, start + length)]

    def apply(self, name: str, *args) -> None:
        before = control_bytes(self.cache)
        expected_before = self.expected_state()
        got, expected = getattr(self, name)(*args)
        got = [kv.Status(status) for status in np.asarray(got).tolist()]
        assert got == expected, f"{name}{args}: status {got}, expected {expected}"
        for status in got:
            self.statuses[name, status.name] = self.statuses.get((name, status.name), 0) + 1
        on_host = jax.tree.map(np.asarray, self.cache)  # once, and not in each of the checks
        violations = kv.check_invariants(on_host) + testing.check_against_oracle(on_host, self.oracle)
        violations += testing.check_tokens(on_host, {row: r.tokens for row, r in self.oracle.rows.items()})
        assert not violations, f"{name}{args}: {violations}"
        if expected_before == self.expected_state() and not (name == "reorder" and kv.Status.OK in got):
            same = before == control_bytes(self.cache)
            assert same, f"{name}{args} changed no row and changed the state"

    def expected_state(self):
        """A copy of what an operation that does nothing leaves alone."""
        oracle = self.oracle
        rows = {
            seq_id: dataclasses.replace(row, tokens=row.tokens.copy(), tables=[*map(dict, row.tables)])
            for seq_id, row in oracle.rows.items()
        }
        owners = [*map(dict, oracle.owners)]
        return rows, owners, oracle.published.copy(), list(oracle.cached), oracle.clock

    def allocate(self, seq_ids, num_tokens):
        self.cache, admission = kv.allocate(self.cache, seq_ids, num_tokens)
        return admission.status, self.oracle.allocate(seq_ids, num_tokens)

    def extend(self, num_new, width=None):
        """All rows, padded."""
        tokens = [self.new_tokens(n) for n in num_new]
        width = width or (WIDTH if max(num_new) > 1 else 1)
        self.cache, status = append_donated(self.cache, padded(tokens, width), np.array(num_new))
        return status, self.oracle.extend(range(ROWS), tokens)

    def extend_some(self, seq_ids, num_new):
        tokens = [self.new_tokens(n) for n in num_new]
        self.cache, status = append_some(
            self.cache, padded(tokens, WIDTH), np.array(num_new), np.array(seq_ids)
        )
        return status, self.oracle.extend(seq_ids, tokens)

    def extend_packed(self, seq_ids, num_new):
        """Rows end to end; together they fit."""
        tokens = [self.new_tokens(n) for n in num_new]
        flat = np.full(NUM_PACKED, 77, np.int32)
        flat[: sum(num_new)] = sum(tokens, [])
        self.cache, status = append_packed(self.cache, flat, np.array(num_new), np.array(seq_ids))
        return status, self.oracle.extend(seq_ids, tokens)

    def fork(self, src_ids, dst_ids):
        self.cache, status = kv.fork(self.cache, src_ids, dst_ids)
        return status, self.oracle.fork(src_ids, dst_ids)

    def reorder(self, seq_ids, parent_ids):
        self.cache, status = kv.reorder(self.cache, seq_ids, parent_ids)
        return status, self.oracle.reorder(seq_ids, parent_ids)

    def truncate(self, seq_ids, new_len):
        self.cache, status = kv.truncate(self.cache, seq_ids, new_len)
        return status, self.oracle.truncate(seq_ids, new_len)

    def free(self, seq_ids):
        self.cache, status = kv.free(self.cache, seq_ids)
        return status, self.oracle.free(seq_ids)


def control_bytes(cache):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(cache.control)]


def padded(tokens, width):
    """i32[n, width] of n lists: one shape, so that one program serves all lengths."""
    out = np.full((len(tokens), width), 99, np.int32)
    for row, ids in enumerate(tokens):
        out[row, : len(ids)] = ids
    return out


def random_operation(rng: np.random.Generator, driver: Driver) -> tuple:
    """(name, arguments) of a plausible or a wrong operation."""
    name = rng.choice(
        [
            "allocate",
            "extend",
            "extend",
            "extend",
            "extend_some",
            "extend_packed",
            "fork",
            "reorder",
            "truncate",
            "free",
        ]
    )
    any_row = functools.partial(_row, rng)
    if name == "allocate":
        return (
            name,
            [any_row(), any_row()],
            [int(rng.integers(-1, 34)) if rng.random() < 0.3 else int(rng.integers(13)) for _ in range(2)],
        )
    if name == "extend":
        top = rng.choice([1, 1, WIDTH])
        return name, [int(n) for n in rng.integers(0, top + 1, ROWS)]
    if name == "extend_some":
        return name, [any_row() for _ in range(3)], [int(n) for n in rng.integers(0, WIDTH + 1, 3)]
    if name == "extend_packed":
        num_new = [int(n) for n in rng.integers(0, 4, 3)]
        return name, [any_row() for _ in range(3)], num_new
    if name == "truncate":
        rows = [any_row(), any_row()]
        return name, rows, [_shorter(rng, driver, row) for row in rows]
    if name == "free":
        return name, [any_row(), any_row()] if rng.random() < 0.7 else [ROWS, ROWS]
    count = 3 if name == "reorder" else 2
    return name, [any_row() for _ in range(count)], [any_row() for _ in range(count)]


def _row(rng) -> int:
    return int(rng.integers(ROWS)) if rng.random() < 0.9 else int(rng.choice([-1, ROWS, ROWS + 1, 2**31 - 1]))


def _shorter(rng, driver: Driver, row: int) -> int:
    length = len(driver.oracle.rows[row].tokens) if row in driver.oracle.rows else 5
    return int(rng.integers(-1, length + 2)) if rng.random() < 0.4 else max(length - int(rng.integers(4)), 0)
