"""The public operations as programs. Their limits are those of DESIGN.md, section 7.

A group is the layers of one kind; the second one has a window. The host is waited for once where blocks are
short, and once for each group that copies, hits, publishes or evicts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from tests.aot.budget import i32
from tests.aot.program import Limits, Program, shapes_of, traced_for_gpu

NUM_ROWS, NUM_LISTED, PROMPT_LEN = 32, 8, 256
"""Rows of the cache, rows that a call names, and tokens of a prompt."""
NUM_CHUNKS_PER_ROW = 4
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 128
LRU, OTHER_POLICY = "lru", "hyperbolic"
SMALL = 500_000
"""Temporary bytes of an operation on control alone; a pool has 268 MB."""
TILE = 2 * 2 * NUM_ROWS * NUM_KV_HEADS * 2048 * HEAD_DIM + 5_000_000
"""Temporary bytes of attention: keys and values of 2,048 tokens of each row, their logits and weights."""


def config_of(num_groups: int, policy: str | None, num_layers: int = 1) -> kv.CacheConfig:
    """Returns a cache with so many layers a group, and an index if it has a policy."""
    kinds = (kv.FullAttention(NUM_KV_HEADS, HEAD_DIM), kv.SlidingWindow(NUM_KV_HEADS, HEAD_DIM, window=64))
    index = {} if policy is None else dict(enable_prefix_caching=True, eviction_policy=policy)
    return kv.CacheConfig(
        kinds[:num_groups] * num_layers,
        num_blocks=32_768,
        max_seqs=NUM_ROWS,
        max_seq_len=4096,
        max_query_len=PROMPT_LEN,
        dtype=jnp.bfloat16,
        implementation="xla",
        **index,
    )


def dropping_config(num_groups: int) -> kv.CacheConfig:
    """Returns a cache of so many groups whose rows may drop tokens."""
    return dataclasses.replace(config_of(num_groups, None), extras=[kv.compression.Dropping()])


def source_config() -> kv.CacheConfig:
    """Returns a cache of a layer that stores tokens and one that reads sources."""
    source = kv.CrossAttention(NUM_KV_HEADS, HEAD_DIM, max_source_len=PROMPT_LEN)
    config = config_of(1, None)
    return dataclasses.replace(config, layers=[*config.layers, source])


def _extend(cache, num_new, tokens):
    return kv.extend(cache, num_new, max_new=1, tokens=tokens)


def _allocate(cache, seq_ids, num_tokens, tokens):
    return kv.allocate(cache, seq_ids, num_tokens, tokens=tokens)


def _attention(cache, q, k, v, step):
    for layer in range(cache.config.num_layers):
        cache, q = kv.attention(cache, layer, q, k, v, step)
    return cache, q


def _write(cache, k, v, step):
    for layer in range(cache.config.num_layers):
        cache = kv.write(cache, layer, k, v, step)
    return cache


def _write_and_attend(cache, q, k, v, step):
    """Reads each layer after the write of the next one."""
    for layer in range(cache.config.num_layers):
        cache = kv.write(cache, layer, k, v, step)
        if layer:
            cache, q = kv.attend(cache, layer - 1, q, step)
    return cache, q


def _gather(cache, seq_id):
    return kv.gather(cache, seq_id, 0)


def _values(num_heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((NUM_ROWS, 1, num_heads, HEAD_DIM), jnp.bfloat16)


def _step(config: kv.CacheConfig) -> Any:
    with traced_for_gpu():
        return jax.eval_shape(lambda *args: _extend(*args, None)[1], shapes_of(config), i32(NUM_ROWS))


def _programs_of(num_groups: int, policy: str | None) -> list[Program]:
    """All operations on one cache, but those that a policy has no part in only once."""
    config = config_of(num_groups, policy)
    has_index = policy is not None
    words = [f"{num_groups} group{'s' * (num_groups > 1)}", *(["index", policy] if has_index else [])]
    # Other policies than LRU choose their victims by one loop more for each group that evicts.
    choices = int(policy not in (None, LRU))
    shortage, copies, hits = 1, num_groups, num_groups * has_index
    evictions = num_groups * (1 + choices) * has_index
    listed, prompts = i32(NUM_LISTED), i32(NUM_LISTED, PROMPT_LEN)
    known = (lambda tokens: tokens) if has_index else (lambda tokens: None)

    def program(subject: str, function: Callable, *columns: Any, limits: Limits, **options: Any) -> Program:
        def arguments() -> tuple:
            return shapes_of(config), *columns

        return Program(subject, ", ".join(words), config, function, arguments, limits, **options)

    def waits(most: int) -> dict:
        return dict(limits=Limits(most, temporary_bytes=SMALL))

    programs = [
        program(
            "extend", _extend, i32(NUM_ROWS), known(i32(NUM_ROWS, 1)), **waits(shortage + copies + evictions)
        ),
        program("allocate", _allocate, listed, listed, known(prompts), **waits(shortage + hits + evictions)),
    ]
    rewriting = listed, i32(NUM_LISTED, PROMPT_LEN)
    programs.append(program("rewrite", kv.rewrite, *rewriting, **waits(shortage + copies + evictions)))
    if has_index:
        publications = num_groups
        programs += [
            program("commit", kv.commit, listed, **waits(1 + publications)),
            program("lookup", kv.lookup, prompts, listed, donated=None, **waits(0)),
            # Of the group that prefixes are found by, which takes the blocks of the others along.
            program("evict", kv.evict, i32(), **waits(1 + choices)),
        ]
    if policy not in (None, LRU):
        return programs
    rows = {
        "fork": (listed, listed),
        "free": (listed,),
        "truncate": (listed, listed),
        "reorder": (listed, listed),
        "touch": (listed,),
        "set_priority": (listed, listed),
    }
    # Row after row, each one would launch as much.
    straight = Limits(0, known_loops=0, launches=20 + 40 * num_groups, temporary_bytes=SMALL)
    programs += [
        program(name, getattr(kv, name), *columns, limits=straight) for name, columns in rows.items()
    ]
    if not has_index:
        q, k, step = _values(NUM_Q_HEADS), _values(NUM_KV_HEADS), _step(config)
        attending = Limits(num_groups, temporary_bytes=TILE)
        programs += [
            program("attention", _attention, q, k, k, step, limits=attending),
            program("write", _write, k, k, step, **waits(0)),
            program("gather", _gather, i32(), donated=None, **waits(0)),
        ]
    return programs


def _drop(num_groups: int) -> Program:
    config = dropping_config(num_groups)
    listed = i32(NUM_LISTED)
    limits = Limits(0, known_loops=0, launches=20 + 40 * num_groups, temporary_bytes=SMALL)
    detail = f"{num_groups} group{'s' * (num_groups > 1)}"
    return Program(
        "drop", detail, config, kv.compression.drop, lambda: (shapes_of(config), *[listed] * 3), limits
    )


def _write_source() -> Program:
    """Takes blocks, and looks at one source after the other only where they are short."""
    config = source_config()
    values = jax.ShapeDtypeStruct((1, NUM_LISTED, PROMPT_LEN, NUM_KV_HEADS, HEAD_DIM), jnp.bfloat16)

    def arguments() -> tuple:
        return shapes_of(config), i32(NUM_LISTED), values, values, i32(NUM_LISTED)

    limits = Limits(1, temporary_bytes=SMALL)
    return Program("write_source", "2 groups, one of sources", config, kv.write_source, arguments, limits)


def _of_hybrid(policy: str | None, *extras: kv.tiers.Host) -> list[Program]:
    """Points and entries beside keys: of the one nothing is copied, and of the other nothing is cached."""
    layer = kv.GatedDeltaNet(NUM_KV_HEADS, HEAD_DIM, key_dim=HEAD_DIM, max_rollback=3)
    config = config_of(1, policy)
    if extras:  # so small that the index of both tiers is smaller than each array of the pools
        layer = dataclasses.replace(layer, num_blocks=512)
        config = dataclasses.replace(config, num_blocks=512)
    config = dataclasses.replace(config, layers=[*config.layers, layer], extras=extras)
    copies, cached, listed = 2, 2 * bool(policy), i32(NUM_LISTED)

    def program(subject: str, function: Callable, waits: int, *columns: Any) -> Program:
        def arguments() -> tuple:
            return shapes_of(config), *columns

        detail = ", ".join(["hybrid", *(["index", policy] if policy else []), *["host"] * len(extras)])
        limits, is_ordinary = Limits(waits, temporary_bytes=SMALL), bool(extras)
        return Program(subject, detail, config, function, arguments, limits, is_ordinary=is_ordinary)

    tokens = i32(NUM_ROWS, 1) if policy else None
    programs = [program("extend", _extend, 1 + copies + cached, i32(NUM_ROWS), tokens)]
    if policy:
        columns = listed, listed, i32(NUM_LISTED, PROMPT_LEN)
        programs.append(program("allocate", _allocate, 1 + 2 * cached + len(extras), *columns))
    return programs


def _halves_of_attention(num_layers: int = 3) -> Program:
    """`kv.write` and `kv.attend` in turn; a read after a write of the same array must not copy it."""
    config = config_of(1, None, num_layers)

    def arguments() -> tuple:
        k = _values(NUM_KV_HEADS)
        return shapes_of(config), _values(NUM_Q_HEADS), k, k, _step(config)

    limits = Limits(num_layers - 1, temporary_bytes=TILE)
    return Program("write, attend", f"{num_layers} layers", config, _write_and_attend, arguments, limits)


def _compress(policy: str | None, num_layers: int = 3) -> Program:
    """`kv.compression.compress` of some rows, by a score per layer and head, in a loop of known trips."""
    config = dataclasses.replace(config_of(1, policy, num_layers), extras=[kv.compression.Dropping()])

    def arguments() -> tuple:
        shape = NUM_LISTED, num_layers, NUM_KV_HEADS, config.max_seq_len
        scores = jax.ShapeDtypeStruct(shape, jnp.float32)
        return shapes_of(config), i32(NUM_LISTED), scores, i32(NUM_LISTED)

    # Shortage, and eviction with an index. Keys and values of the rows in one layer, and the sorted scores.
    rows = 2 * 2 * NUM_LISTED * NUM_KV_HEADS * config.max_seq_len * HEAD_DIM
    limits = Limits(1 + (policy is not None), known_loops=1, temporary_bytes=rows + 20_000_000)
    words = [f"{num_layers} layers", *(["index", policy] if policy else [])]
    return Program("compress", ", ".join(words), config, kv.compression.compress, arguments, limits)


def _rotate(keys: jax.Array, distance: jax.Array) -> jax.Array:
    """A rotation of features of 128, by angles that are made on the spot."""
    angle = distance[..., None, None] * jnp.arange(HEAD_DIM // 2, dtype=jnp.float32)
    x, y = jnp.split(keys, 2, axis=-1)
    return jnp.concatenate(
        [x * jnp.cos(angle) - y * jnp.sin(angle), y * jnp.cos(angle) + x * jnp.sin(angle)], -1
    )


def _compose_rows(cache, seq_ids, chunk_ids, starts):
    return kv.chunks.compose(cache, seq_ids, chunk_ids, starts, rotate=_rotate)


def _of_chunks(num_groups: int, policy: str | None, num_layers: int = 3) -> list[Program]:
    """The operations on chunks; layers are a loop of known trips in each group, on rows of one layer."""
    sizes = dict(extras=[kv.chunks.Store(64, PROMPT_LEN)])
    config = dataclasses.replace(config_of(num_groups, policy, num_layers), **sizes)
    listed, placed = i32(NUM_LISTED), i32(NUM_LISTED, NUM_CHUNKS_PER_ROW)
    names = i32(NUM_LISTED, PROMPT_LEN)
    words = [f"{num_groups} group{'s' * (num_groups > 1)}", *(["index", policy] if policy else [])]
    rows = 2 * 2 * NUM_LISTED * NUM_KV_HEADS * HEAD_DIM
    # Rotated in float32, of which there are a few copies.
    composed, stored = 8 * rows * config.max_seq_len, 2 * rows * (PROMPT_LEN + 16)
    # Shortage; with an index also eviction.
    moving = 1 + num_groups * (policy is not None)

    def program(subject: str, function: Callable, *columns: Any, limits: Limits, **options: Any) -> Program:
        def arguments() -> tuple:
            return shapes_of(config), *columns

        return Program(subject, ", ".join(words), config, function, arguments, limits, **options)

    def moves(most: int) -> Limits:
        return Limits(moving, known_loops=num_groups, temporary_bytes=most + SMALL)

    return [
        program("chunks.store", kv.chunks.store, *[listed] * 3, names, limits=moves(stored)),
        program("compose", _compose_rows, listed, placed, placed, limits=moves(composed)),
        program(
            "chunks.find",
            kv.chunks.find,
            names,
            listed,
            donated=None,
            limits=Limits(0, temporary_bytes=SMALL),
        ),
        program("chunks.free", kv.chunks.free, listed, limits=Limits(0, temporary_bytes=SMALL)),
    ]


def _with_host_tier(num_groups: int) -> list[Program]:
    """The operations that move blocks between tiers; those that move none wait as they do without a host.

    Loops within a loop make no trip then. `allocate` asks besides whether the host had a part of a prompt.
    """
    config = config_of(num_groups, LRU)
    config = dataclasses.replace(config, num_blocks=4096, extras=[kv.tiers.Host(8192)])
    listed, prompts = i32(NUM_LISTED), i32(NUM_LISTED, PROMPT_LEN)

    def program(subject: str, function: Callable, waits: int, *columns: Any) -> Program:
        def arguments() -> tuple:
            return shapes_of(config), *columns

        limits = Limits(waits, temporary_bytes=SMALL)
        detail = f"{num_groups} group{'s' * (num_groups > 1)}, index, lru, host"
        return Program(subject, detail, config, function, arguments, limits, is_ordinary=True)

    waits = 1 + 2 * num_groups
    return [
        program("extend", _extend, waits, i32(NUM_ROWS), i32(NUM_ROWS, 1)),
        program("allocate", _allocate, waits + 1, listed, listed, prompts),
        program("prefetch", kv.tiers.prefetch, waits + 1, prompts, listed),
        program("commit", kv.commit, 1 + num_groups, listed),
        program("evict", kv.evict, 1, i32()),
    ]


def block_programs(implementation: str) -> list[Program]:
    """Blocks that leave a cache and come back, moved by kernels: a launch for both arrays of a group."""
    config = config_of(2, LRU)
    listed, detail = i32(NUM_LISTED), f"2 groups, index, lru, {implementation}"

    def contents() -> Any:
        return jax.eval_shape(kv.tiers.export_blocks, shapes_of(config), listed)

    def program(subject: str, column: Callable[[], Any], limits: Limits, **options: Any) -> Program:
        by_kernels = dataclasses.replace(config, implementation=implementation)

        def arguments() -> tuple:
            return shapes_of(by_kernels), column()

        function = getattr(kv.tiers, subject)
        return Program(subject, detail, by_kernels, function, arguments, limits, **options)

    return [
        program("export_blocks", lambda: listed, Limits(0, 0, 12, SMALL), donated=None),
        # It looks at the queue of cached blocks of each group, which may have to be swept.
        program("import_blocks", contents, Limits(2, 0, 72, SMALL)),
    ]


def operation_programs() -> list[Program]:
    """Returns all of them, in the order of the table."""
    caches = [(num_groups, policy) for policy in (None, LRU, OTHER_POLICY) for num_groups in (1, 2)]
    return [
        *(program for cache in caches for program in _programs_of(*cache)),
        _drop(1),
        _drop(2),
        _write_source(),
        *_of_hybrid(None),
        *_of_hybrid(LRU),
        *_of_hybrid(LRU, kv.tiers.Host(512)),
        _halves_of_attention(),
        _compress(None),
        _compress(LRU),
        *_of_chunks(1, None),
        *_of_chunks(2, LRU),
        *_with_host_tier(1),
        *_with_host_tier(2),
    ]
