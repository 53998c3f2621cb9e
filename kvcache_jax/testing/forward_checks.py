"""A check that a model's step computes the same with a cache as without, for any model."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.number_checks import finite_number, static_count
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.config import CacheConfig, memory_bytes, require_config
from kvcache_jax.core.describe import control_bytes
from kvcache_jax.core.donate import donate
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache, Step
from kvcache_jax.core.status import raise_for_status
from kvcache_jax.decoding.forward import width_of
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.extend import extend
from kvcache_jax.operations.fork import fork
from kvcache_jax.testing.poisoned_slots import poison

BoundForward = Callable[[jax.Array, Cache, Step], tuple[jax.Array, Cache]]

_FIRST_PIECES = (1, 5, 2)


@explicit_transfers
def check_forward(
    forward: BoundForward,
    config: CacheConfig,
    *,
    vocab_size: int,
    num_tokens: int | None = None,
    seed: int = 0,
    atol: float = 1e-4,
) -> None:
    """Checks that a model's step computes the same however its tokens reach the cache.

    * one token at a time == the whole sequence in one call on an empty cache (cached == uncached);
    * uneven pieces, beside rows of other lengths, == the whole;
    * a fork that goes its own way neither sees nor disturbs its source;
    * all slots without a token hold NaN throughout;
    * the rows are as long as the step made them;
    * one compiled program per piece width, whatever the lengths and rows;
    * the compiled steps, of one token and of all, make no copy of a pool when the cache is donated.

    Args:
      forward: `(tokens i32[n, T], cache, step) -> (logits [n, T, vocab_size], cache)`; bind parameters
        with `functools.partial`.
      config: At least 3 rows, which fit `num_tokens` each and take them in one call; blocks for two of them.
      vocab_size: Tokens are drawn below it.
      num_tokens: Length of the test sequence, which is also fed in four uneven pieces, and forked in the
        middle: at least 9. Default: two blocks and 7 tokens, at least 23, or as many as a row has. A window
        does nothing before it is full: name more tokens than it has.
      seed: Seed of the tokens.
      atol: Largest difference of two logits that should be equal.

    Raises:
      AssertionError: names what differs and by how much.
      ValueError, TypeError: too small a config or `num_tokens`; a forward of other arguments, or one that
        returns something else; parameters with which no token matters to the next.
      StatusError: the config has too few blocks.
    """
    require_config("check_forward", config)
    if not callable(forward):
        raise TypeError(f"forward is {forward!r}, expected a function: (tokens, cache, step)")
    vocab_size, atol = static_count("vocab_size", vocab_size), finite_number("atol", atol)
    if atol < 0:
        raise ValueError(f"atol is {atol}, expected 0 or more")
    if num_tokens is None:
        num_tokens = max(23, 2 * max(group.block_size for group in config.groups) + 7)
        num_tokens = min(num_tokens, config.max_seq_len, config.query_len_limit)
    num_tokens = static_count("num_tokens", num_tokens, least=sum(_FIRST_PIECES) + 1)
    _check_arguments(forward, config, num_tokens)
    rng = np.random.default_rng(static_count("seed", seed, least=0))
    tokens = rng.integers(vocab_size, size=num_tokens)
    at = num_tokens // 2
    other = np.concatenate([tokens[:at], rng.integers(vocab_size, size=num_tokens - at)])
    runner = _Runner(forward, config, vocab_size)

    whole, whole_other = runner.run(tokens, [num_tokens]), runner.run(other, [num_tokens])
    changed = tokens.copy()
    changed[-2] = (changed[-2] + 1) % vocab_size
    if _difference(runner.run(changed, [num_tokens])[-1], whole[-1]) <= atol:
        raise ValueError(
            f"the last token's logits change by no more than atol = {atol} with the token before it, so the "
            "check would notice nothing; expected parameters with which attention matters: scale them, or "
            "lower atol"
        )
    _assert_close(runner.run(tokens, [1] * num_tokens), whole, atol, "token by token differs from one call")
    pieces = [*_FIRST_PIECES, num_tokens - sum(_FIRST_PIECES)]
    _assert_close(runner.run(tokens, pieces, beside=other), whole, atol, "pieces differ from one call")
    source, branch = runner.run_fork(tokens, other, at)
    _assert_close(source, whole[at:], atol, "the source of a fork differs")
    _assert_close(branch, whole_other[at:], atol, "a fork differs from a row of its own")
    runner.assert_compiled_once_per_width()
    runner.assert_no_pool_copy()


def _check_arguments(forward: BoundForward, config: CacheConfig, num_tokens: int) -> None:
    try:
        parameters = inspect.signature(forward)
    except ValueError:  # some callables have none
        parameters = None
    if parameters is not None:
        try:
            parameters.bind(None, None, None)
        except TypeError:
            raise TypeError(
                f"forward takes {parameters}, expected (tokens, cache, step): bind its parameters, "
                "functools.partial(forward, params)"
            ) from None
    if config.max_seqs < 3 or config.max_seq_len < num_tokens:
        raise ValueError(
            f"config has {config.max_seqs} rows of {config.max_seq_len} tokens, expected 3 of {num_tokens}"
        )
    if config.query_len_limit < num_tokens:
        raise ValueError(
            f"config has max_query_len = {config.query_len_limit}, expected at least num_tokens = "
            f"{num_tokens}: the whole sequence is fed in one call; raise max_query_len or lower num_tokens"
        )


class _Runner:
    """Runner of a model's step: feeds token sequences to it and counts its programs."""

    def __init__(self, forward: BoundForward, config: CacheConfig, vocab_size: int):
        self.config = config
        self.widths: set[int] = set()

        def step_fn(cache: Cache, tokens: jax.Array, num_new: jax.Array):
            cache, step = extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
            result = forward(tokens, cache, step)
            if (width := width_of(result, cache, *tokens.shape)) != vocab_size:
                raise ValueError(
                    f"forward returned logits of {width} entries, expected vocab_size = {vocab_size}"
                )
            logits, cache = result
            return cache, (logits, step.status)

        self.step_fn = donate(step_fn)

    def feed(self, cache: Cache, pieces: Mapping[int, np.ndarray], width: int) -> tuple[Cache, np.ndarray]:
        """Calls the step once on new tokens of some rows; returns logits [max_seqs, width, vocab]."""
        tokens, num_new = (
            np.zeros((self.config.max_seqs, width), np.int32),
            np.zeros(self.config.max_seqs, np.int32),
        )
        for row, piece in pieces.items():
            tokens[row, : len(piece)], num_new[row] = piece, len(piece)
        self.widths.add(width)
        lengths = np.asarray(cache.context_len) + num_new
        try:
            result = self.step_fn(poison(cache), jnp.asarray(tokens), jnp.asarray(num_new))
        except jax.errors.UnexpectedTracerError as error:
            raise AssertionError(
                "forward keeps an array of one call in Python for the next: what lasts belongs into the cache"
            ) from error
        cache, (logits, status) = result
        raise_for_status(status, "extend")
        found = np.asarray(cache.context_len)
        _require(
            np.array_equal(found, lengths),
            f"forward left rows of {found.tolist()} tokens, expected {lengths.tolist()}: "
            "it is given a step, so it must neither extend rows nor change them otherwise",
        )
        return cache, np.asarray(logits.astype(jnp.float32))

    def run(self, tokens: np.ndarray, sizes: Sequence[int], beside: np.ndarray | None = None) -> np.ndarray:
        """Computes the logits [tokens, vocab] of row 1; `beside` runs ahead of it in row 0."""
        # Pieces are padded to the whole: two programs serve, this one and the one of single tokens.
        width = 1 if max(sizes) == 1 else len(tokens)
        cache = init(self.config)
        cache, admission = allocate(cache, [1], [len(tokens)], tokens=tokens[None])
        raise_for_status(admission.status, f"allocate for {len(tokens)} tokens")
        if beside is not None:
            cache, _ = allocate(cache, [0], [0], tokens=beside[None])
            cache, _ = self.feed(cache, {0: beside[:3]}, width)
        logits, start = [], 0
        for size in sizes:
            pieces = {1: tokens[start : start + size]}
            if beside is not None:
                pieces[0] = beside[3 + start : 4 + start]
            cache, out = self.feed(cache, pieces, width)
            logits.append(out[1, :size])
            start += size
        return np.concatenate(logits)

    def run_fork(self, tokens: np.ndarray, other: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
        """Computes the logits from `at` on of a row and of its fork, fed in turn."""
        cache, admission = allocate(init(self.config), [2], [at], tokens=tokens[None])
        raise_for_status(admission.status, f"allocate for {at} tokens")
        cache, _ = self.feed(cache, {2: tokens[:at]}, len(tokens))
        cache, status = fork(cache, [2], [0])
        raise_for_status(status, "fork")
        logits = []
        for i in range(at, len(tokens)):
            cache, branch = self.feed(cache, {0: other[i : i + 1]}, 1)
            cache, source = self.feed(cache, {2: tokens[i : i + 1]}, 1)
            logits.append((source[2, 0], branch[0, 0]))
        source, branch = zip(*logits, strict=True)
        return np.stack(source), np.stack(branch)

    def assert_compiled_once_per_width(self) -> None:
        num_programs = self.step_fn._cache_size()  # pyright: ignore
        expected = len(self.widths)
        _require(num_programs == expected, f"{num_programs} programs for {expected} piece widths")

    def assert_no_pool_copy(self) -> None:
        small, large = self._resized(is_large=False), self._resized(is_large=True)
        pool_growth = memory_bytes(large) - memory_bytes(small)
        # Policies other than lru, and a keeper of blocks, look at all blocks when they must evict.
        is_plain = self.config.eviction.policy == "lru" and self.config.keeper.memory_kind is None
        looks_at_all = self.config.enable_prefix_caching and not is_plain
        least_copy = 0.01 * pool_growth + looks_at_all * (control_bytes(large) - control_bytes(small))
        for width in sorted(self.widths):
            used = self._bytes_used(large, width)
            if used < least_copy:  # then it grows by less, whatever a step of the small pools uses
                continue
            growth = used - self._bytes_used(small, width)
            _require(
                growth < least_copy,
                f"the compiled step of {width} tokens uses {growth} bytes more when its pools grow by "
                f"{pool_growth}: a pool is copied; keep one version of the cache and donate it",
            )

    def _resized(self, is_large: bool) -> CacheConfig:
        """Resizes the config's pools for comparison; large ones dwarf all other memory of the step."""
        kinds = []
        for group in self.config.groups:
            # From 2048 blocks on temporaries of a fixed number of blocks no longer grow with the pool.
            num_blocks = max(group.num_blocks, 2048)
            if is_large:
                num_blocks = max(8 * num_blocks, 2**19 // group.block_size)
            kinds.append(dataclasses.replace(group.kind, num_blocks=num_blocks))
        layers = list(self.config.layers)
        for layer in self.config.own_layers:
            layers[layer] = kinds[self.config.locate(layer)[0]]
        return dataclasses.replace(self.config, layers=layers, num_blocks=None, memory_budget=None)

    def _bytes_used(self, config: CacheConfig, width: int) -> int:
        """Counts the bytes that a compiled step needs beside its donated cache."""
        cache = jax.eval_shape(functools.partial(init, config))
        rows = jax.ShapeDtypeStruct((config.max_seqs,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((config.max_seqs, width), jnp.int32)
        memory = self.step_fn.lower(cache, tokens, rows).compile().memory_analysis()  # pyright: ignore
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _difference(got: np.ndarray, expected: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return np.where(got == expected, 0, np.abs(got - expected)).max()  # of equal infinities, none


def _assert_close(got: np.ndarray, expected: np.ndarray, atol: float, what: str) -> None:
    difference = _difference(got, expected)
    # Not "difference > atol": NaN must fail.
    _require(difference <= atol, f"{what}: logits differ by {difference}, expected at most {atol}")


def _require(condition: bool | np.bool_, message: str) -> None:
    """Raises an `AssertionError` unless the condition holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)
