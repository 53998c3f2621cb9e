"""Decoding for any model: each prompt is prefilled once, and its samples share it by fork.

The host admits requests, collects results and streams; everything between two check-ins of the host is
one compiled loop (`loop.decode`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init
from kvcache_jax.core.state import Cache
from kvcache_jax.core.status import Status
from kvcache_jax.decoding import arguments, loop
from kvcache_jax.decoding.admission import admit
from kvcache_jax.decoding.forward import Forward, prepared
from kvcache_jax.decoding.host import Generation, Host, Snapshot, Stopwatch, WaitingPrompts, idle_cache
from kvcache_jax.decoding.loop import DecodeState, DraftSource, RowPhase
from kvcache_jax.decoding.options import (
    GREEDY,
    UNWATCHED,
    Draft,
    Drafts,
    SamplingParams,
    StopStrings,
    Watch,
    require_option,
    steps_between_check_ins,
)
from kvcache_jax.decoding.own_prompts import (
    CheckedRows,
    call_len,
    check_retention,
    most_held,
    namespaces_within,
    text_width,
)
from kvcache_jax.decoding.prefill import prefill, vocab_size
from kvcache_jax.decoding.prompts import KEEP_ALL, PromptCall, PromptSource, Retention
from kvcache_jax.decoding.sampling import sampling_columns
from kvcache_jax.layers.span import ceil_div
from kvcache_jax.operations.allocate import allocate
from kvcache_jax.operations.fork import fork


@dataclasses.dataclass
class GenerateResult:
    """Result of `generate`.

    Attributes:
      generations: One per prompt and sample, in that order.
      cache: The cache at the end, all rows idle; its counters tell forks and copies.
      num_steps: Calls of the model in the decode loop.
      num_prompt_tokens: Computed in prefill; a prompt counts once for all samples that start
        together.
      num_cached_tokens: Tokens of prompts that were not computed, for the prefix cache had them.
      num_reused_tokens: Tokens of prompts that a feature put into rows, beside cached prefixes.
      num_stored_tokens: Of `num_prompt_tokens`, those that were computed to be reused.
      num_drafted: Draft tokens proposed.
      num_accepted: Draft tokens accepted.
      prefill_seconds: Host clock around prefills, forks and first tokens included; compilation too.
      decode_seconds: Host clock around the decode loop, likewise; callbacks do not count.
      timeline: One entry per check-in of the host: after every prefill, and as `check_in_every` says.
    """

    generations: list[Generation]
    cache: Cache
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_reused_tokens: int
    num_stored_tokens: int
    num_drafted: int
    num_accepted: int
    prefill_seconds: float
    decode_seconds: float
    timeline: list[Snapshot]


def generate(
    forward: Forward,
    params: Any,
    prompts: Sequence[Sequence[int]] | PromptSource,
    config: CacheConfig,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    sampling: SamplingParams = GREEDY,
    stop_tokens: Sequence[int] = (),
    stop_strings: StopStrings | None = None,
    drafts: Drafts | None = None,
    cache: Cache | None = None,
    namespace: ArrayLike | None = None,
    retention: Retention = KEEP_ALL,
    prefill_len: int = 128,
    watch: Watch = UNWATCHED,
) -> GenerateResult:
    """Continues prompts with a model that keeps its keys and values in a cache.

    Requests wait until there are rows, and blocks for all tokens that they and those before them may come to,
    so there may be more of them than rows. A prompt is prefilled once; its samples fork from it. If they do
    not fit into the cache side by side, as many as do start together, and the others later, from the prompt
    again. If the whole cache has too few blocks for one row, the row ends with the tokens so far. A row whose
    logits hold NaN or +inf ends too, and publishes none of its blocks from there on. With prefix caching,
    prefixes that prompts have in common are computed once, also across calls that hand `cache` on.

    Args:
      forward: `(params, tokens i32[n, T], cache, step) -> (logits [n, T, vocab], cache)`; a module-level
        function, so that compiled programs are found again. Functions made anew for each call are warned of.
      params: Passed on to `forward`.
      prompts: Token ids, each prompt at least one; or a feature's `PromptSource`, which puts them together.
      config: The cache's. Speculative decoding on window layers needs `max_rollback >= num_drafts`.
      max_new_tokens: Per continuation; fewer where prompt and continuation reach `max_seq_len`, unless rows
        drop tokens.
      num_samples: Continuations per prompt; more than `max_seqs` take turns.
      sampling: How tokens are drawn, `kv.decoding.SamplingParams(temperature=0.8)`. Its seed is one of all
        draws, or one per prompt. A continuation depends on the seed and on its prompt and sample numbers, not
        on the other rows. With a seed per prompt, the prompt's number does not matter. With a
        draft model, it also matters whether there was room for the drafts. Default: greedy.
      stop_tokens: Ids that end a continuation.
      stop_strings: Texts that end one, `kv.decoding.StopStrings(texts, detokenize)`.
      drafts: Speculative decoding, `kv.decoding.Drafts(num_drafts)` by n-gram lookup, or
        `kv.decoding.Drafts(num_drafts, draft)` by a draft model.
      cache: From an earlier call with the same config, to find its prefixes; donated. Default: an empty one.
      namespace: u32[4] or u32[prompts, 4], who may share the prompts' blocks. A cache that served other
        parameters needs another one, `kv.namespace(weights=...)`. Default: all zero.
      retention: The tokens that rows keep, of prompts and continuations. Default: all of them. A row that
        drops tokens goes on past `max_seq_len`.
      prefill_len: Prompt tokens of all rows in one call of the model, which computes so many even if fewer
        are left. More of them keep an accelerator busier. Rows that drop tokens may compute fewer.
      watch: Callbacks while decoding runs, `kv.decoding.Watch(on_tokens)`. An exception of one ends the call,
        and a `cache` that was passed in is lost.

    Returns:
      A `GenerateResult`.

    Raises:
      ValueError, TypeError: for empty prompts, ids that are none, prompts that can never fit, bad options, a
        call within `jit`, a `forward` without a hash; names got and expected.
    """
    arguments.check_model("generate", forward, config, params, cache)
    prompts = prompts if isinstance(prompts, PromptSource) else PromptSource(prompts)
    require_option("sampling", sampling, SamplingParams)
    require_option("stop_strings", stop_strings, StopStrings, or_none=True)
    require_option("drafts", drafts, Drafts, or_none=True)
    require_option("watch", watch, Watch)
    requests = WaitingPrompts(
        prompts.tokens,
        static_count("num_samples", num_samples, 1, 2**31 - 1, "2**31 - 1"),
        namespace,
        sampling.seed,
    )
    requests.namespaces = namespaces_within(prompts, requests.namespaces)
    max_new_tokens = static_count("max_new_tokens", max_new_tokens)
    if stop_strings is not None and not stop_strings.texts:
        stop_strings = None
    num_drafts, draft = (drafts.num_drafts, drafts.draft) if drafts else (0, None)
    prefill_len = arguments.usable_prefill_len(prefill_len, config)
    check_retention(retention, "generate", config, num_drafts)
    prefill_len = call_len(retention, config, prefill_len)
    _check(requests, config, num_drafts, draft, most_held(retention, config, prefill_len))
    width = text_width(retention, config, requests.prompts, max_new_tokens)
    params = prepared(forward, params)
    if draft is not None:
        draft = dataclasses.replace(draft, params=prepared(draft.forward, draft.params))
    draft_params = draft.params if draft else None
    arguments.committed_shardings(params=params, cache=cache, draft=draft_params)
    prompt_rows = CheckedRows(
        prompts,
        PromptCall(
            caller="generate",
            forward=forward,
            params=params,
            config=config,
            tokens=requests.prompts,
            namespaces=requests.namespaces,
            prefill_len=prefill_len,
            retention=retention,
        ),
    )
    check_in_every = steps_between_check_ins(watch, has_stop_strings=stop_strings is not None)
    draft_source = DraftSource(num_drafts, draft.forward if draft else None) if num_drafts else None

    stops = arguments.stop_ids(stop_tokens)
    host = Host(requests, config, stop_strings, watch)
    prefilling, decoding, num_prompt_tokens, num_cached_tokens = Stopwatch(), Stopwatch(), 0, 0
    cache = idle_cache("generate", cache, config)
    state = _empty_state(cache, width, draft.config if draft else None, stops, sampling)
    if draft is not None and state.draft_cache is not None:  # while the caller's cache is whole
        _check_vocabularies(
            vocab_size(forward, params, cache, prefill_len),
            vocab_size(
                draft.forward, draft.params, state.draft_cache, _draft_prefill_len(prefill_len, draft)
            ),
        )
    while requests.waiting or host.running:
        while True:
            state, admitted, num_cached = prefilling(  # a feature may compute parts of prompts here
                admit, state, requests, host, prompt_rows, max_new_tokens, retention, prefill_len
            )
            if not admitted:
                break
            state = prefilling(
                _prefill, forward, params, draft, state, host, admitted, prefill_len, retention
            )
            num_tokens = sum(len(requests.prompts[host.running[row][0]]) for row in admitted)
            num_prompt_tokens += num_tokens - num_cached
            num_cached_tokens += num_cached
            host.note(state)
        state = decoding(
            loop.decode,
            forward,
            params,
            draft_params,
            state,
            np.int32(check_in_every),
            draft_source=draft_source,
            retention=retention,
            may_share=requests.num_samples > 1 or config.enable_prefix_caching,
        )
        state = host.check_in(state, prompt_rows)
    counts = jax.device_get((state.num_steps, state.num_drafted, state.num_accepted))
    num_steps, num_drafted, num_accepted = map(int, counts)
    num_reused, num_stored = prompt_rows.counts
    return GenerateResult(
        generations=sorted(host.done, key=lambda g: (g.prompt_id, g.sample_id)),
        cache=state.cache,
        num_steps=num_steps,
        num_prompt_tokens=num_prompt_tokens + num_stored - num_reused,
        num_cached_tokens=num_cached_tokens,
        num_reused_tokens=num_reused,
        num_stored_tokens=num_stored,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        prefill_seconds=prefilling.seconds,
        decode_seconds=decoding.seconds,
        timeline=host.timeline,
    )


def _check(
    requests: WaitingPrompts,
    config: CacheConfig,
    num_drafts: int,
    draft: Draft | None,
    max_held_len: int | None,
) -> None:
    for i, prompt in enumerate(requests.prompts):
        if max_held_len is None and len(prompt) >= config.max_seq_len:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, expected fewer than max_seq_len = {config.max_seq_len}"
            )
        held_len = len(prompt) if max_held_len is None else min(len(prompt), max_held_len)
        for group in config.groups:
            need = min(ceil_div(held_len, group.block_size), group.max_held_blocks)
            if need > group.num_blocks:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens and needs {need} blocks, "
                    f"expected at most num_blocks = {group.num_blocks}; raise num_blocks"
                )
    if draft is not None:
        arguments.check_model("kv.Draft", draft.forward, draft.config, draft.params)
    arguments.check_num_drafts(num_drafts, config, *([draft.config] if draft else []))
    if draft and (draft.config.max_seqs, draft.config.max_seq_len) != (config.max_seqs, config.max_seq_len):
        raise ValueError(
            f"the draft's cache has {draft.config.max_seqs} rows of {draft.config.max_seq_len} tokens, "
            f"expected {config.max_seqs} of {config.max_seq_len} like the target's"
        )


def _check_vocabularies(target: int, draft: int) -> None:
    if target != draft:
        raise ValueError(
            f"the draft model's logits are for {draft} tokens and the model's for {target}, expected one "
            "vocabulary"
        )


@explicit_transfers
def _empty_state(
    cache: Cache, width: int, draft_config: CacheConfig | None, stops: jax.Array, sampling: SamplingParams
) -> DecodeState:
    rows = cache.max_seqs
    return DecodeState(
        cache=cache,
        draft_cache=init(draft_config) if draft_config else None,
        history=jnp.zeros((rows, width), jnp.int32),
        prompt_len=jnp.zeros(rows, jnp.int32),
        length=jnp.zeros(rows, jnp.int32),
        max_len=jnp.zeros(rows, jnp.int32),
        logprobs=jnp.zeros((rows, width), jnp.float32),
        phase=jnp.full(rows, int(RowPhase.IDLE), jnp.int32),  # an enum would type it weakly
        sampling=sampling_columns(
            rows,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        ),
        stop_tokens=stops,
        num_steps=jnp.int32(0),
        num_drafted=jnp.int32(0),
        num_accepted=jnp.int32(0),
    )


def _prefill(
    forward: Forward,
    params: Any,
    draft: Draft | None,
    state: DecodeState,
    host: Host,
    admitted: dict[int, list[int]],
    prefill_len: int,
    retention: Retention,
) -> DecodeState:
    """Computes the admitted prompts, forks their samples and draws the first tokens."""
    max_seqs, width = state.history.shape
    prompts, lengths = np.zeros((max_seqs, width), np.int32), np.zeros(max_seqs, np.int32)
    for row in admitted:
        prompt = host.requests.prompts[host.running[row][0]]
        prompts[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    cache, fed = prefill(
        forward, params, state.cache, prompts, lengths, prefill_len=prefill_len, retention=retention
    )
    draft_cache = state.draft_cache
    if draft is not None and draft_cache is not None:
        draft_lengths = np.zeros_like(lengths)
        for row in admitted:
            words = host.requests.namespaces[host.running[row][0]]
            row_prompt = prompts[row : row + 1]
            draft_cache, admission = allocate(
                draft_cache, [row], [lengths[row]], tokens=row_prompt, namespace=words
            )
            # A prompt that the draft's cache has no room for is decoded without drafts.
            draft_lengths[row] = lengths[row] if int(admission.status[0]) == Status.OK else 0
        prefill_len = _draft_prefill_len(prefill_len, draft)
        draft_cache, _ = prefill(
            draft.forward, draft.params, draft_cache, prompts, draft_lengths, prefill_len=prefill_len
        )
    source = np.zeros(max_seqs, np.int32)
    src_ids, dst_ids = np.full(max_seqs, max_seqs), np.full(max_seqs, max_seqs)
    forks = [(first, row) for first, rows in admitted.items() for row in rows[1:]]
    for i, (first, row) in enumerate(forks):
        src_ids[i], dst_ids[i] = first, row
    for first, rows in admitted.items():
        source[rows] = first
    if forks:
        cache, _ = fork(cache, src_ids, dst_ids)
        if draft_cache is not None:
            draft_cache, _ = fork(draft_cache, src_ids, dst_ids)
    started = np.zeros(max_seqs, bool)
    started[[row for rows in admitted.values() for row in rows]] = True
    state = dataclasses.replace(state, cache=cache, draft_cache=draft_cache)
    return loop.begin(state, fed.logits, fed.status, source, started)


def _draft_prefill_len(prefill_len: int, draft: Draft) -> int:
    return min(prefill_len, draft.config.query_len_limit)
