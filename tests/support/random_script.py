"""Random scripts of operations, run on a cache and on the oracle side by side; `scripts.py` lists them."""

import collections
import dataclasses

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core.state import row_fields
from tests.oracle.comparison import check_against_oracle
from tests.oracle.oracle import Oracle
from tests.support.script_configs import MAX_SOURCE, ROWS

WIDTH, NUM_PACKED = 5, 9
ENTRIES = 4  # of each call that takes ids, so that one program serves all
NUM_TOKENS_RANGE = 2**14
ON_CHUNKS = "store_chunk", "free_chunks", "compose"  # see `chunk_script.py`


# The compiled steps are shared by all drivers of one config.
@kv.donate
def append_some(cache, tokens, num_new, seq_ids):
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], seq_ids=seq_ids, tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step.status


@kv.donate
def append_packed(cache, tokens, num_new, seq_ids):
    cache, step = kv.extend(cache, num_new, num_tokens=tokens.shape[0], seq_ids=seq_ids, tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step.status


@kv.donate
def rewrite_some(cache, tokens, indices, seq_ids):
    cache, step = kv.rewrite(cache, seq_ids, indices)
    return testing.write_tokens(cache, tokens, step), step.status


write_some = kv.donate(kv.write_source)


@kv.donate
def compress_some(cache, scores, num_keep, seq_ids):
    return kv.compression.compress(cache, seq_ids, scores, num_keep)


@dataclasses.dataclass
class Driver:
    """Applies operations to a cache and to the oracle and compares everything after each.

    Attributes:
      config: The cache's.
      seed: Of the script.
      cache: The present one.
      oracle: What it ought to be.
      counts: How often an operation returned a status, rows of a call met and states occurred; see
        `count_events` and `count_states`.
    """

    config: kv.CacheConfig
    seed: int = 0

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.cache = testing.poison(kv.init(self.config))
        self.on_host, self.seen = None, None  # a copy of the cache, and of which one
        self.oracle = self.new_oracle()
        self.next_token = 0
        self.counts = collections.Counter[str]()

    def new_oracle(self) -> Oracle:
        return Oracle(self.config)

    def new_tokens(self, length: int) -> list[int]:
        """Ids that no token had recently, so that a stale slot never looks right."""
        start = self.next_token
        self.next_token += length
        return [token % NUM_TOKENS_RANGE for token in range(start, start + length)]

    def step(self) -> None:
        self.apply(*self.next_operation())
        self.count_states()

    def next_operation(self) -> tuple:
        return random_operation(self.rng, self)

    def totals(self) -> collections.Counter[str]:
        """The counts, with the oracle's."""
        of_oracle = {
            name: getattr(self.oracle, f"num_{name}") for name in ("copies", "evictions", "adoptions")
        }
        return self.counts | collections.Counter(of_oracle)

    def apply(self, name: str, *args) -> None:
        args = filled_up(name, args)
        before = self.on_host if self.seen is self.cache else copied_to_host(self.cache)
        expected_before, copies_before = self.expected_state(), self.oracle.num_copies
        got, expected = getattr(self, name)(*args)
        got = [kv.Status(status) for status in np.asarray(got).tolist()]
        assert got == expected, f"{name}{args}: status {got}, expected {expected}"
        self.counts.update(f"{name} {status.name}" for status in got)
        changed, asked = changed_rows(name, args)
        self.count_events(name, changed, asked, got, args, copies_before)
        after = copied_to_host(self.cache)  # once, and not in each of the checks
        self.on_host, self.seen = after, self.cache
        changes = expected_before != self.expected_state() or (name == "reorder" and kv.Status.OK in got)
        if not changes:
            same = bytes_of(before.control) == bytes_of(after.control)
            assert same, f"{name}{args} changed no row and changed the state"
        if changes or bytes_of(before.pools) != bytes_of(after.pools):  # else it was right, and still is
            violations = kv.check_invariants(after) + check_against_oracle(after, self.oracle)
            violations += testing.check_tokens(after, {row: r.tokens for row, r in self.oracle.rows.items()})
            violations += changed_blocks(before, after)
            assert not violations, f"{name}{args}: {violations}"
        if name not in ("commit", "reset_prefix_cache"):  # of which forks of a row learn
            succeeded = {row for row, status, n in zip(changed, got, asked, strict=True) if n and not status}
            others = differing_rows(before, after) - succeeded
            assert not others, f"{name}{args} changed rows {others}, which failed or were not named"

    def count_events(self, name, changed, asked, statuses, args, copies_before):
        """Counts the calls in which rows compete, repeat or build on one another."""
        lacking = [i for i, status in enumerate(statuses) if status == kv.Status.OUT_OF_BLOCKS]
        grown = [i for i, status in enumerate(statuses) if not status and asked[i]]
        found = {
            "several lack blocks": len(lacking) > 1,
            "one gets blocks and another none": lacking and grown,
            "a later one gets blocks": lacking and grown and grown[-1] > lacking[0],
            "a copy where blocks are short": lacking and self.oracle.num_copies > copies_before,
            "several copies": self.oracle.num_copies > copies_before + 1,
        }
        first_status = {}
        for row, status, n in zip(changed, statuses, asked, strict=True):
            if status == kv.Status.DUPLICATE_SEQ_ID:
                found["a repeated row"] = True
                found["a repeated row that failed"] = first_status[row] != kv.Status.OK
            elif n:
                first_status.setdefault(row, status)
        if name == "fork":
            started = {row for row, status in first_status.items() if not status}
            found["a chain of forks"] = any(source in started for source in args[0])
        if name == "reorder":
            found["a parent that changes"] = len({*args[0]} & {*args[1]} & {*range(ROWS)}) > 0
        self.counts.update(event for event, happened in found.items() if happened)

    def count_states(self):
        """Counts what some row is, and rows that are both of two."""
        rows = self.oracle.rows.values()
        kept, composed, published = (
            {id(row) for row in rows if has(row)}
            for has in (
                lambda row: row.num_kept,
                lambda row: row.first_composed is not None,
                lambda row: row.num_published,
            )
        )
        found = {
            "gone": any(row.gone for row in rows),
            "kept": kept,
            "composed": composed,
            "kept and composed": kept & composed,
            "published before what was kept": published & kept,
            "published and composed": published & composed,
        }
        self.counts.update(state for state, are in found.items() if are)

    def expected_state(self):
        """A copy of what an operation that does nothing leaves alone."""
        oracle = self.oracle
        rows = {
            seq_id: dataclasses.replace(row, tokens=row.tokens.copy(), tables=[*map(dict, row.tables)])
            for seq_id, row in oracle.rows.items()
        }
        owners = [*map(dict, oracle.owners)]
        chunks = oracle.chunks.copy()
        return rows, owners, chunks, oracle.published.copy(), list(oracle.cached), oracle.clock

    def allocate(self, seq_ids, num_tokens):
        self.cache, admission = kv.allocate(self.cache, seq_ids, num_tokens)
        return admission.status, self.oracle.allocate(seq_ids, num_tokens)

    def extend(self, num_new):
        """All rows, padded."""
        return self.extend_some(range(ROWS), num_new)

    def extend_some(self, seq_ids, num_new):
        tokens = [self.new_tokens(n) for n in num_new]
        num_more = ROWS - len(seq_ids)  # so that one program serves both
        columns = np.array([*num_new, *[0] * num_more]), np.array([*seq_ids, *[ROWS] * num_more])
        new = padded([*tokens, *[[]] * num_more], WIDTH)
        self.cache, status = append_some(self.cache, new, *columns)
        return status[: len(seq_ids)], self.oracle.extend(seq_ids, tokens)

    def extend_packed(self, seq_ids, num_new):
        """Rows end to end; together they fit."""
        tokens = [self.new_tokens(n) for n in num_new]
        flat = np.full(NUM_PACKED, 77, np.int32)
        flat[: sum(num_new)] = sum(tokens, [])
        self.cache, status = append_packed(self.cache, flat, np.array(num_new), np.array(seq_ids))
        return status, self.oracle.extend(seq_ids, tokens)

    def rewrite(self, seq_ids, indices):
        """The tokens that the rows hold there, so that nothing but who holds what may change."""
        rows = [self.oracle.rows[row].tokens if row in self.oracle.rows else [] for row in seq_ids]
        tokens = [
            [text[place] if 0 <= place < len(text) else 5 for place in places]
            for text, places in zip(rows, indices, strict=True)
        ]
        # Between chunks there was none yet.
        tokens = [[self.new_tokens(1)[0] if t is None else t for t in text] for text in tokens]
        max_seq_len = self.config.max_seq_len
        places = [[*row, *[max_seq_len] * WIDTH][:WIDTH] for row in indices]
        self.cache, status = rewrite_some(
            self.cache, padded(tokens, WIDTH), np.array(places, np.int32), np.array(seq_ids)
        )
        return status, self.oracle.rewrite(seq_ids, indices, tokens)

    def write_source(self, seq_ids, length):
        kinds = [self.config.layers[layer] for layer in self.config.source_layers]
        k, v = (
            [np.ones((ENTRIES, MAX_SOURCE + 1, x.num_kv_heads, x.head_dim), np.float32) for x in kinds]
            for _ in "kv"
        )
        self.cache, status = write_some(self.cache, np.array(seq_ids), k, v, np.array(length))
        return status, self.oracle.write_source(seq_ids, length)

    def drop(self, seq_ids, start, length):
        self.cache, status = kv.compression.drop(self.cache, seq_ids, start, length)
        return status, self.oracle.drop(seq_ids, start, length)

    def compress(self, seq_ids, seeds, num_keep):
        """Scores of few levels, so that many are equal; recent tokens are worth more."""
        width = self.config.max_seq_len
        noise = [np.random.default_rng(seed).integers(3, size=width) for seed in seeds]
        scores = np.float32(noise) + np.float32(np.arange(width) // 8)[None]
        self.cache, status = compress_some(self.cache, scores, np.array(num_keep), np.array(seq_ids))
        return status, self.oracle.compress(seq_ids, scores.tolist(), num_keep)

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


def filled_up(name: str, args: tuple) -> tuple:
    """The arguments with as many entries as all calls have; those added are skipped."""
    if name in ("extend", "evict", "reset_prefix_cache", *ON_CHUNKS) or args[0] is None:
        return args
    fills = [ROWS] * 2 if name in ("fork", "reorder") else [ROWS] + [0] * len(args)
    fills = [[] if arg and isinstance(arg[0], list) else fill for fill, arg in zip(fills, args, strict=False)]
    return tuple([*arg] + [fill] * (ENTRIES - len(arg)) for fill, arg in zip(fills, args, strict=True))


def changed_rows(name: str, args: tuple) -> tuple[list[int], list[int]]:
    """The row that each entry names, and a number that is 0 where nothing is asked of it."""
    if name in ("evict", "reset_prefix_cache"):
        return [], []
    if name == "extend":
        return list(range(ROWS)), args[0]
    ids = args[1] if name == "fork" else args[0]
    ids = list(range(ROWS)) if ids is None else ids
    if name in ("store_chunk", "free_chunks"):
        return [ROWS] * ENTRIES, [0] * ENTRIES  # rows stay as they are
    if name in ("rewrite", "compose"):
        return ids, [len(places) for places in args[1]]
    return ids, args[1] if name in ("extend_some", "extend_packed") else [1] * len(ids)


def copied_to_host(cache):
    """A copy, for a view of what is donated would see what is written there."""
    return jax.tree.map(np.array, cache)


def changed_blocks(before, after):
    """Finds blocks that forks or chunks share before and after an operation, and whose bits changed."""
    found = []
    for g, (old, new) in enumerate(zip(before.control.block_pools, after.control.block_pools, strict=True)):
        stays = ((old.ref_count > 1) & (new.ref_count > 1)) | (_of_chunks(before, g) & _of_chunks(after, g))
        for name, values in before.pools[g].arrays.items():
            bits = [x.view(np.uint32).reshape(len(x), -1) for x in (values, after.pools[g].arrays[name])]
            differs = (bits[0] != bits[1]).any(axis=1).reshape(-1, old.num_blocks).any(axis=0)
            found += [
                f"group {g}: shared block {b} changed its {name}" for b in np.flatnonzero(differs & stays)
            ]
    return found


def _of_chunks(cache, group_id):
    """bool[num_blocks], a chunk holds the block."""
    is_held = np.zeros(cache.control.block_pools[group_id].num_blocks + 1, bool)
    if "chunks" in cache.control.extras:
        is_held[cache.control.extras["chunks"].block_ids[group_id]] = True
    return is_held[:-1]


def bytes_of(tree):
    return [leaf.tobytes() for leaf in jax.tree.leaves(tree)]


def differing_rows(before, after):
    """The rows of which anything in the control state differs."""
    differs = np.zeros(ROWS, bool)
    for old, new in zip(_row_arrays(before), _row_arrays(after), strict=True):
        differs |= (old != new).reshape(ROWS, -1).any(axis=1)
    return {*np.flatnonzero(differs).tolist()}


def _row_arrays(cache):
    arrays = [*row_fields(cache.control).values(), *jax.tree.leaves(cache.control.holes)]
    return [*arrays, *(pool.block_table for pool in cache.control.block_pools)]


def padded(tokens, width):
    """i32[n, width] of n lists: one shape, so that one program serves all lengths."""
    out = np.full((len(tokens), width), 99, np.int32)
    for row, ids in enumerate(tokens):
        out[row, : len(ids)] = ids
    return out


def random_operation(rng: np.random.Generator, driver: Driver) -> tuple:
    """(name, arguments) of a plausible or a wrong operation."""
    names = ["allocate", "extend", "extend_some", "extend_packed", "fork", "reorder", "truncate", "free"]
    name = rng.choice(names, p=[0.1, 0.32, 0.1, 0.07, 0.14, 0.05, 0.1, 0.12])
    active = sorted(driver.oracle.rows)
    idle = sorted({*range(ROWS)} - {*active})
    if driver.config.source_layers and rng.random() < 0.12:
        return "write_source", row_ids(rng, active), rng.integers(-1, MAX_SOURCE + 2, ENTRIES).tolist()
    if driver.config.hides_tokens and keeps_all(driver.config) and rng.random() < 0.12:
        ids = row_ids(rng, active)
        return (
            "compress",
            ids,
            rng.integers(1000, size=ENTRIES).tolist(),
            [_num_keep(rng, driver, r) for r in ids],
        )
    if driver.config.hides_tokens and not driver.config.enable_prefix_caching and rng.random() < 0.15:
        ids = row_ids(rng, active)
        runs = [_run(rng, driver, row) for row in ids]
        return "drop", ids, [start for start, _ in runs], [length for _, length in runs]
    if rng.random() < 0.06:
        ids = row_ids(rng, active)
        if rng.random() < 0.25:
            ids[-1] = ids[0]
        return "rewrite", ids, [_places(rng, driver, row) for row in ids]
    if shares_a_tail(driver.oracle) and idle and rng.random() < 0.15:
        # A row that leaves few blocks for copies.
        group_id = driver.config.indexed_group
        num_blocks = driver.oracle.num_available(group_id) - int(rng.integers(3))
        length = num_blocks * driver.config.groups[group_id].block_size
        return "allocate", [int(rng.choice(idle))], [min(max(length, 0), driver.config.max_seq_len)]
    if shares_a_tail(driver.oracle) and rng.random() < 0.4:
        return "extend", [int(n) for n in rng.integers(0 if rng.random() < 0.5 else 1, WIDTH, ROWS)]
    if name in ("allocate", "fork") and len(idle) < 2 and rng.random() < 0.5:
        name = "free"  # there is nothing to start
    if name == "allocate":
        ids = row_ids(rng, idle)
        lengths = [int(rng.integers(32 if rng.random() < 0.2 else 13)) for _ in ids]
        lengths = [int(rng.choice([-1, 32, 33])) if rng.random() < 0.12 else n for n in lengths]
        return name, ids, lengths
    if name == "extend":
        top = rng.choice([1, 1, WIDTH])
        return name, [int(n) for n in rng.integers(0, top + 1, ROWS)]
    if name == "extend_some":
        return name, row_ids(rng, active), [int(n) for n in rng.integers(0, WIDTH + 1, ENTRIES)]
    if name == "extend_packed":
        return (
            name,
            row_ids(rng, active),
            [int(n) for n in rng.integers(0, NUM_PACKED // ENTRIES + 1, ENTRIES)],
        )
    if name == "truncate":
        ids = row_ids(rng, active)
        return name, ids, [_shorter(rng, driver, row) for row in ids]
    if name == "free":
        return name, row_ids(rng, active, most=3)
    if name == "reorder":
        return name, row_ids(rng, active), source_ids(rng, active)
    targets = row_ids(rng, idle)
    sources = source_ids(rng, active)
    for i in range(1, ENTRIES):
        if rng.random() < 0.2:
            sources[i] = targets[i - 1]  # a chain
    return name, sources, targets


def row_ids(rng: np.random.Generator, likely: list[int], most: int = ENTRIES) -> list[int]:
    """Ids of a call, up to `most` of which name a row, mostly the `likely` ones; often one repeats."""
    others = [row for row in range(ROWS) if row not in likely]
    chosen = [*rng.permutation(likely), *rng.permutation(others)][: int(rng.integers(1, most + 1))]
    ids = [ROWS] * ENTRIES
    for place, row in zip(rng.permutation(ENTRIES), chosen, strict=False):
        is_odd = rng.random() < 0.09
        ids[place] = int(rng.choice([-1, ROWS + 1, 2**31 - 1, *range(ROWS)]) if is_odd else row)
    if rng.random() < 0.25:
        first, second = rng.permutation(ENTRIES)[:2]
        ids[first] = ids[second]
    return ids


def shares_a_tail(oracle: Oracle) -> bool:
    """Whether a row would copy its last block if it grew, for it has other owners."""
    for row in oracle.rows.values():
        for g, group in enumerate(oracle.config.groups):
            column, offset = divmod(len(row.tokens), group.block_size)
            if offset and not group.holds_sources and oracle.owners[g][row.tables[g][column]] > 1:
                return True
    return False


def source_ids(rng: np.random.Generator, likely: list[int]) -> list[int]:
    """Ids of which each may repeat; often one serves all."""
    ids = [int(rng.choice(likely or range(ROWS))) for _ in range(ENTRIES)]
    if rng.random() < 0.4:
        ids = [ids[0]] * ENTRIES
    if rng.random() < 0.2:
        ids[rng.integers(ENTRIES)] = int(rng.choice([-1, ROWS, ROWS + 1, *range(ROWS)]))
    return ids


def _places(rng, driver: Driver, row: int) -> list[int]:
    """Places of a row to compute again, near its end for windows, at times in a wrong order or outside."""
    length = len(driver.oracle.rows[row].tokens) if row in driver.oracle.rows else 5
    first = int(rng.integers(max(length - 4, 0), length + 1)) if rng.random() < 0.6 else 0
    places = rng.permutation(np.arange(first, length))[:WIDTH].tolist()
    if rng.random() < 0.1:
        return places
    outside = [int(rng.choice([-1, length + 1]))] if rng.random() < 0.1 else []
    return sorted(places)[: WIDTH - len(outside)] + outside


def keeps_all(config):
    """Whether rows can be compressed."""
    return all(group.span.keeps_all for group in config.groups)


def _num_keep(rng, driver: Driver, row: int) -> int:
    """How many tokens a row is to keep, at times none or more than it has."""
    length = len(driver.oracle.rows[row].tokens) if row in driver.oracle.rows else 5
    return int(rng.integers(0, length + 2))


def _run(rng, driver: Driver, row: int) -> tuple[int, int]:
    """Start and length of what a row may drop, mostly next to what it dropped before."""
    held = driver.oracle.rows.get(row)
    if held is None or rng.random() < 0.2:
        return int(rng.integers(-1, 9)), int(rng.integers(-1, 9))
    text_len = len(held.tokens) + len(held.gone)
    start = min(held.dropped, default=int(rng.integers(3, 6)))
    end = int(rng.integers(start, max(start, text_len) + 1))
    return start, end - start


def _shorter(rng, driver: Driver, row: int) -> int:
    length = len(driver.oracle.rows[row].tokens) if row in driver.oracle.rows else 5
    return int(rng.integers(-1, length + 2)) if rng.random() < 0.4 else max(length - int(rng.integers(4)), 0)
