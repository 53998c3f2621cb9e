"""Options of an engine: values that group its arguments, and choices compiled into its program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from kvcache_jax.arrays.number_checks import finite_number, static_count, static_flag
from kvcache_jax.attention.tiles import MIN_TILE_TOKENS
from kvcache_jax.core.backends import XLA
from kvcache_jax.core.choose_backend import implementation_of
from kvcache_jax.core.config import CacheConfig, ceil_div
from kvcache_jax.core.state import Cache
from kvcache_jax.core.team import ALONE, Team
from kvcache_jax.decoding.arguments import check_num_drafts
from kvcache_jax.decoding.prompt_parts import NO_PARTS, PromptParts
from kvcache_jax.engine.inputs import Inputs
from kvcache_jax.engine.requests import GenerationRequest, TableSizes

MOST = 2**30
"""Of anything: the sum of two is an i32."""
_MOST_AGEING_STEPS = 2**28
"""So that a key of the policy "priority" is an i32."""


def size(name: str, value: Any, least: int = 1) -> int:
    """Checks a size of an engine, at most 2**30."""
    return static_count(name, value, least, MOST, "2**30")


def _set_sizes(value: Any, **least: int) -> None:
    """Checks sizes of a frozen value, each at least so large, or None if that is its default."""
    for name, smallest in least.items():
        number = getattr(value, name)
        if number is not None or getattr(type(value), name) is not None:
            object.__setattr__(value, name, size(name, number, smallest))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the requests that an engine takes: the sizes of its table.

    Attributes:
      max_requests: Requests that wait or run, each sample counted. Default: 4 per row, at least 64.
      max_tokens: Tokens of all of these, prompts and longest continuations. Default: as many as a quarter of
        `max_requests`, or all rows, have at most.
      max_stop_tokens: Stop tokens of one request.
      max_items: Multimodal items of one request.
      num_clients: Clients of the policy "fair".
      prompt_logprobs: Requests may ask for the log-probabilities of their prompts.

    Raises:
      ValueError, TypeError: no size.
    """

    max_requests: int | None = None
    max_tokens: int | None = None
    max_stop_tokens: int = 4
    max_items: int = 0
    num_clients: int = 8
    prompt_logprobs: bool = False

    def __post_init__(self):
        static_flag("prompt_logprobs", self.prompt_logprobs)
        _set_sizes(self, max_requests=1, max_tokens=1, max_stop_tokens=0, max_items=0, num_clients=1)


LIMITS = Limits()
"""The default ones."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Parameters of the policy by which an engine serves, and of the blocks that it keeps in reserve.

    Attributes:
      watermark: Share of the blocks that an admission leaves free, while a row runs.
      ageing_steps: Steps of waiting that weigh as much as one of priority, in the policy "priority".
      max_bypasses: Later requests that "longest prefix" may serve before one.
      long_prefill_len: Most tokens of one prompt in one step. Default: `max_seq_len`.

    Raises:
      ValueError, TypeError: no share, no size.
    """

    watermark: float = 0.01
    ageing_steps: int = 256
    max_bypasses: int = 16
    long_prefill_len: int | None = None

    def __post_init__(self):
        watermark = finite_number("watermark", self.watermark)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark is {watermark}, expected 0 to below 1")
        steps = static_count("ageing_steps", self.ageing_steps, 4, _MOST_AGEING_STEPS, "2**28")
        object.__setattr__(self, "watermark", watermark)
        object.__setattr__(self, "ageing_steps", steps)
        _set_sizes(self, max_bypasses=1, long_prefill_len=1)


SCHEDULE = Schedule()
"""The default one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Devices on which an engine runs, and the axes that are split over them.

    Attributes:
      mesh: The devices.
      row_axis: Mesh axis whose devices have `max_seqs` rows and a scheduler each; each request goes to the
        one that has least to do with it: tokens of its prompt's beginning that went there before do not
        count. Heads are split over `config.head_axis`, if it is set: `forward` then runs within
        `jax.shard_map`, sees its own heads, and adds up over that axis where it must. Tokens of blocks are
        split over `config.context_axis`, of which `forward` needs to know nothing.
      params_spec: `PartitionSpec`s of the parameters, a prefix of their tree. Default: on all devices.
      team: The processes whose devices the mesh has, `kv.processes.DistributedTeam()`. Default: this one.

    Raises:
      ValueError, TypeError: no mesh, an axis that the mesh lacks, devices of processes that are no team.
    """

    mesh: Mesh
    row_axis: str | None = None
    params_spec: Any = None
    team: Team = ALONE

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh is {self.mesh!r}, expected a jax.sharding.Mesh")
        require_axis("row_axis", self.row_axis, self.mesh)
        if not isinstance(self.team, Team):
            raise TypeError(f"team is {self.team!r}, expected a kv.processes.DistributedTeam")
        if self.mesh.is_multi_process and self.team is ALONE:
            raise ValueError(
                "mesh has devices of other processes and there is no team, expected "
                "kv.engine.Placement(mesh, row_axis, team=kv.processes.DistributedTeam())"
            )


def require_axis(name: str, axis: str | None, mesh: Mesh | None) -> None:
    """Refuses an axis that the mesh lacks, or that there is no mesh for."""
    names = () if mesh is None else mesh.axis_names
    if axis is not None and not (isinstance(axis, str) and axis in names):
        axes = "no mesh" if mesh is None else f"a mesh with the axes {mesh.axis_names}"
        raise ValueError(f"{name} is {axis!r} and there is {axes}, expected it among a mesh's axes")


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices that are compiled into the program; hashable."""

    policy: str  # name of a `request_policy`
    num_pieces: int  # pieces of prompts that a step computes beside the rows' next tokens
    piece_len: int  # tokens of a piece
    num_drafts: int  # draft tokens per row and step
    num_top_logprobs: int  # most probable tokens whose log-probabilities are reported
    schedule: Schedule
    most_admissions: int  # requests looked at for admission in one step
    # Whether a token's logits may not depend on its company, to the bit; pieces are then of one token.
    batch_invariant: bool = False
    prompt_logprobs: bool = False  # requests may ask for the log-probabilities of their prompts
    parts: PromptParts = NO_PARTS

    @property
    def width(self) -> int:
        """Tokens of a row in the part of a step that all rows take part in."""
        return 1 + self.num_drafts

    def body_len(self, max_seqs: int) -> int:
        """Counts the tokens of each call of a batch-invariant step: all rows' next tokens, rounded up."""
        return ceil_div(max_seqs * self.width, _BODY_MULTIPLE) * _BODY_MULTIPLE

    def most_entries(self, max_seqs: int) -> int:
        """Counts the entries that a step may add to the outbox."""
        return max_seqs * self.width + (self.num_pieces * self.piece_len if self.prompt_logprobs else 0)

    def num_reserved(self, cache: Cache) -> list[int]:
        """Counts the blocks of each group that the watermark holds back."""
        pools = cache.control.block_pools
        return [ceil_div(int(self.schedule.watermark * pool.num_blocks * 1000), 1000) for pool in pools]


_BODY_MULTIPLE = 16
"""See `invariant.py`."""
_LEAST_PROMPT_TOKENS = 256
"""Of a step, by default; with more rows as many as there are, for rows that end make room."""
_LEAST_PIECES = 4
_PIECE_LEN = 128
"""Tokens of a piece where the budget has more of them: a prompt then wastes little of its last one."""


def table_sizes(limits: Limits, config: CacheConfig, inputs: Inputs) -> TableSizes:
    """Works out the sizes of a table of requests."""

    def spans(request: GenerationRequest) -> Sequence[tuple[int, int]]:
        if request.items or request.prompt_logprobs:
            raise ValueError(
                f"a request has parts {request.parts} and items or prompt_logprobs, expected one of them: a "
                "part is computed without the tokens before it, and is known by its token ids alone"
            )
        # Its last token is not stored.
        found = inputs.parts.spans(np.asarray(request.prompt), request.parts, request.num_tokens - 1, config)
        if len(request.parts) > inputs.parts.max_parts:
            raise ValueError(
                f"a request has {len(request.parts)} parts, expected at most max_parts = "
                f"{inputs.parts.max_parts} of the Engine's inputs=kv.engine.Inputs(parts=...): raise it"
            )
        return found

    num_slots = max(4 * config.max_seqs, 64) if limits.max_requests is None else limits.max_requests
    longest, num_tokens = config.max_seq_len + 1, limits.max_tokens
    if num_tokens is None:
        num_tokens = min(max(num_slots // 4, config.max_seqs, 2) * longest, MOST)
    return TableSizes(
        num_slots=size("max_requests", num_slots),
        num_tokens=size("max_tokens", num_tokens, longest),
        num_stops=max(limits.max_stop_tokens, 1),
        num_clients=limits.num_clients,
        num_items=limits.max_items,
        inputs=inputs.specs(),
        prompt_logprobs=limits.prompt_logprobs,
        hears_turns=any(extra.hears_turns for extra in config.extras),
        parts=inputs.parts,
        spans=spans if inputs.parts.max_parts else None,
    )


def inbox_sizes(sizes: TableSizes, config: CacheConfig) -> TableSizes:
    """Works out the sizes of the inbox of one dispatch, for a table of these sizes."""
    most = most_entering(config.max_seqs)
    return dataclasses.replace(
        sizes,
        num_slots=min(sizes.num_slots, most),
        num_tokens=max(config.max_seq_len + 1, min(sizes.num_tokens, 256 * most)),
    )


def most_admissions(max_seqs: int) -> int:
    """Returns how many requests a step looks at for admission: rows are full within some dozens of steps."""
    return max(4, max_seqs // 64)


def most_entering(max_seqs: int) -> int:
    """Returns how many requests a dispatch takes in, enough for its steps to admit."""
    return max(64, max_seqs // 4)


def with_budget(options: Options, config: CacheConfig, token_budget: int | None) -> Options:
    """Shares a step's tokens between the rows' next ones and prompts."""
    num_next = config.max_seqs * options.width
    if token_budget is None:
        token_budget = num_next + max(min(_LEAST_PROMPT_TOKENS, config.max_seq_len), config.max_seqs)
    num_prompt = size("token_budget", token_budget) - num_next
    if num_prompt < 1:
        raise ValueError(
            f"token_budget is {token_budget}, expected more than {num_next}, the next tokens of "
            f"{config.max_seqs} rows of {options.width}: raise it, or lower max_seqs"
        )
    piece_len = 1
    if options.batch_invariant and config.has_states:
        # A step keeps the states at its end alone, and a second call on prompts would begin before it.
        num_prompt = min(num_prompt, options.body_len(config.max_seqs))
    if not options.batch_invariant:
        num_pieces = max(_LEAST_PIECES, num_prompt // _PIECE_LEN)
        piece_len = config.piece_len(ceil_div(num_prompt, num_pieces))
    return dataclasses.replace(options, num_pieces=max(num_prompt // piece_len, 1), piece_len=piece_len)


def check_options(options: Options, config: CacheConfig, **hooks: Callable | None) -> None:
    """Refuses parts that the cache does not keep, and drafts that a hook or the cache cannot take."""
    if options.parts.max_parts:
        options.parts.check(config)
        if options.batch_invariant:
            raise ValueError(
                "batch_invariant is True and requests may have parts, expected one of them: what is computed "
                "again is not computed token by token"
            )
    if options.num_drafts == 0:
        return
    for name, hook in hooks.items():
        if hook is not None:
            raise ValueError(
                f"got num_drafts = {options.num_drafts} and {name}, expected one of them: the hook sees "
                "one next token per row, and drafts are several"
            )
    check_num_drafts(options.num_drafts, config)


def batch_invariant_config(config: CacheConfig) -> CacheConfig:
    """Asks for XLA's attention, in tiles of one length; refuses kernels.

    How a kernel splits a row may depend on other rows. Without a fixed length rows read what they share
    together.
    """
    name = implementation_of(config)
    if name not in (None, XLA):
        raise ValueError(
            f"batch_invariant is True and implementation {name!r}, expected 'xla': how a "
            "kernel splits a row, and so how it rounds, may depend on the other rows"
        )
    tile_tokens = config.tile_tokens or MIN_TILE_TOKENS
    return dataclasses.replace(config, implementation=XLA, tile_tokens=tile_tokens)
