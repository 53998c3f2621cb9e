"""Requests: one as its caller writes it, and the table of all requests on the device.

The table has a fixed number of slots. A request has the same slot from the time it is pushed until the host
has read that it ended; then the slot is another's, so 10,000 requests go through a table of 64. Its tokens
are a run of one buffer: the prompt, then the generated tokens, so that both are one prompt when a
preempted request comes back.

Invariants: of a request in slot `s` the tokens `[start[s], start[s] + prompt_len[s] + num_generated[s])` are
known, the run is `prompt_len + max_new` long, and runs of live requests do not overlap. `uid` counts requests
in the order in which they were pushed, and is never used twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import as_list, finite_number, static_count, static_flag
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.core.arguments import hashable_id, namespace_words, one_priority
from kvcache_jax.core.extras import MOST_TICKS, Turn, ticks_of
from kvcache_jax.core.token_arguments import host_tokens
from kvcache_jax.decoding.options import GREEDY, SamplingParams, require_option
from kvcache_jax.decoding.prompt_parts import NO_PARTS, PromptParts
from kvcache_jax.decoding.sampling import SamplingColumns
from kvcache_jax.engine.inputs import PARTS, InputSpec, empty_inputs
from kvcache_jax.engine.stop_text import StopStrings


@pytree_dataclass()
class RequestArrays:
    """The table of requests on the device; `R` slots."""

    tokens: jax.Array  # i32[any], runs of prompts and generated tokens
    uid: jax.Array  # i32[R], number in the order of arrival; -1 for a slot that was never used
    start: jax.Array  # i32[R], first token in `tokens`
    prompt_len: jax.Array  # i32[R]
    max_new: jax.Array  # i32[R], most tokens to generate
    sampling: SamplingColumns
    stop: jax.Array  # i32[R, S], tokens that end it; -1 for none
    priority: jax.Array  # i32[R], higher is served first by the policy "priority"
    arrival_step: jax.Array  # i32[R], steps of the engine before it came, modulo 2**32
    client: jax.Array  # i32[R], number of the client, for the policy "fair"
    turn: Turn  # i32[R] each, the conversation that it is a turn of, and for how long that is retained
    namespace: jax.Array  # u32[R, 4], who may share its blocks, within the namespace of the present weights
    parent: jax.Array  # i32[R], slot of the request whose prompt it forks; R for none
    parent_uid: jax.Array  # i32[R], the `uid` that it has if it is still that one
    # i32[R, I, 2], first position and end of multimodal items, equal ones for none; None for I = 0.
    items: jax.Array | None
    # i32[R, P, 2], first place and end of the prompt's parts, in order, equal ones for none; None for P = 0.
    parts: jax.Array | None
    keeps_end: jax.Array | None  # bool[R], its end is kept as a part; None for P = 0
    inputs: dict[str, jax.Array]  # by name [R, ...], values of its own; see `inputs.py`
    wants_prompt: jax.Array  # bool[R], the log-probabilities of its prompt are reported

    @property
    def num_slots(self) -> int:
        """Slots; also the slot that means none."""
        return self.uid.shape[-1]

    def of_slots(self) -> dict[str, Any]:
        """Returns the arrays by name that the host fills slot by slot."""
        apart = "tokens", "namespace", "arrival_step"
        names = [field.name for field in dataclasses.fields(self) if field.name not in apart]
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class TableSizes:
    """Sizes of the table (static)."""

    num_slots: int  # requests at the same time, each sample counted; those that wait included
    num_tokens: int  # of the buffer of tokens
    num_stops: int  # stop tokens of one request
    num_clients: int  # clients of the policy "fair"
    num_items: int  # multimodal items of one request
    num_tops: int = 0  # most probable tokens that are reported
    inputs: tuple[InputSpec, ...] = ()
    prompt_logprobs: bool = False  # whether requests may ask for them
    hears_turns: bool = False  # whether the cache makes something of `retain`
    # Parts of prompts, and what says which parts a request has; see `PromptParts.spans`.
    parts: PromptParts = NO_PARTS
    spans: Callable[["GenerationRequest"], Sequence[tuple[int, int]]] | None = None


def empty_requests(sizes: TableSizes) -> RequestArrays:
    """Makes a table without requests, in numpy; `Inbox` builds its columns from one of N slots."""
    num_slots, num_parts = sizes.num_slots, sizes.parts.max_parts

    def column(fill: int = 0, shape: tuple[int, ...] = (), dtype: Any = np.int32) -> Any:
        return np.full((num_slots, *shape), fill, dtype)

    return RequestArrays(
        tokens=np.zeros(sizes.num_tokens, np.int32),  # type: ignore
        uid=column(-1),
        start=column(),
        prompt_len=column(),
        max_new=column(),
        sampling=SamplingColumns(
            temperature=column(0, dtype=np.float32),
            top_k=column(),
            top_p=column(1, dtype=np.float32),
            min_p=column(0, dtype=np.float32),
            seed=column(0, dtype=np.uint32),
        ),
        stop=column(-1, (sizes.num_stops,)),
        priority=column(),
        arrival_step=column(),
        client=column(),
        turn=Turn(column(), column()),
        namespace=column(0, (4,), np.uint32),
        parent=column(num_slots),
        parent_uid=column(-1),
        items=column(0, (sizes.num_items, 2)) if sizes.num_items else None,
        parts=column(0, (num_parts, 2)) if num_parts else None,
        keeps_end=column(dtype=bool) if num_parts else None,
        inputs=empty_inputs(sizes.inputs, num_slots),
        wants_prompt=column(dtype=bool),
    )


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The conversation that a request is a turn of, in place of its client.

    Attributes:
      name: Anything that can be hashed, None for no conversation; `Engine.metrics` says why a conversation's
        next turn misses.
      retain: Seconds for which what the turn leaves in the cache is worth more than what others leave, such
        as the time that a tool takes; it is still given up if nothing else can be. The conversation's next
        turn says it anew. For a cache with `kv.policies.Conversations` and the policy "retention".
      client: Who asks, as in `GenerationRequest`.

    Example:
      >>> import kvcache_jax as kv
      >>> kv.GenerationRequest([5, 6], 4, client=kv.engine.Conversation("agent 7", retain=60)).client.retain
      60.0
    """

    name: Hashable
    retain: float = 0.0
    client: int = 0

    def __post_init__(self):
        retain = finite_number("retain", self.retain)
        if retain < 0:
            raise ValueError(f"retain is {retain}, expected seconds, 0 or more")
        object.__setattr__(self, "name", hashable_id("name", self.name))
        object.__setattr__(self, "retain", retain)
        object.__setattr__(self, "client", static_count("client", self.client, least=0))


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationRequest:
    """A prompt and how it goes on; values are checked when it is made.

    Attributes:
      prompt: Token ids, at least one; multimodal items have theirs from `item_tokens`.
      max_new_tokens: Most tokens to generate. With the prompt at most `max_seq_len + 1`: the last one is not
        stored. A longer one, however long, is answered by the finish reason "refused".
      id: Names it in results, anything that can be hashed; unique among those that have not ended. Default: a
        number that no other request has.
      sampling: How its tokens are drawn, `kv.decoding.SamplingParams(temperature=0.8)`. Its one seed decides
        the draws, with each token's position and, of several samples, the sample's number. Default: greedy.
      stop_tokens: Ids that end it; the one that did is its last token.
      priority: Higher is served first by the policy "priority".
      client: Who asks, for the policy "fair": 0 to below `num_clients`; or a `kv.engine.Conversation`, which
        may have one.
      namespace: u32[4], who may share its blocks, as in `allocate`; see `Engine.namespace_of`.
      num_samples: Continuations, which share the prompt's blocks.
      deadline: Seconds after it was pushed, when it ends if it is not done. None: no end.
      items: First position and end of each multimodal item, as in `allocate`.
      inputs: Values of its own by the names that the engine declares; zeros where there is none. "parts" are
        pairs, first position and end of each part of its prompt, for an engine that puts prompts together.
      num_top_logprobs: Most probable tokens reported with each token. Default: as many as the engine has.
      prompt_logprobs: Reports the log-probabilities of the prompt's tokens, which the cache then does not
        serve; NaN for an id that the model's logits do not reach, as of items. Of several samples the first
        one's events have them.
      stop_strings: Texts that end it, `kv.engine.StopStrings(texts, detokenize)`: its tokens and its text end
        before.

    Example:
      >>> import kvcache_jax as kv
      >>> drawn = kv.decoding.SamplingParams(temperature=0.8, seed=3)
      >>> kv.GenerationRequest([5, 6, 7], 4, sampling=drawn, num_samples=2).num_samples
      2
    """

    prompt: Sequence[int] | np.ndarray
    max_new_tokens: int
    id: Hashable = None
    sampling: SamplingParams = GREEDY
    stop_tokens: Sequence[int] = ()
    priority: int = 0
    client: int | Conversation = 0
    namespace: ArrayLike | None = None
    num_samples: int = 1
    deadline: float | None = None
    items: Sequence[tuple[int, int]] = ()
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_top_logprobs: int | None = None
    prompt_logprobs: bool = False
    stop_strings: StopStrings | None = None

    def __post_init__(self):
        prompt = host_tokens("prompt", self.prompt)
        if not len(prompt):
            raise ValueError("prompt has 0 tokens, expected at least 1")
        stops = host_tokens("stop_tokens", self.stop_tokens)
        if len(stops) and stops.min() < 0:
            raise ValueError(f"stop_tokens has {int(stops.min())}, expected token ids, 0 or more")
        require_option("sampling", self.sampling, SamplingParams)
        if not isinstance(self.sampling.seed, int):
            raise ValueError(
                f"sampling has the seeds {self.sampling.seed}, expected one: a request has one seed"
            )
        items = _checked_items(self.items, len(prompt))
        checked: dict[str, Any] = {
            "prompt": prompt,
            "id": hashable_id("id", self.id),
            "max_new_tokens": static_count("max_new_tokens", self.max_new_tokens),
            "stop_tokens": stops,
            "priority": one_priority(self.priority),
            "num_samples": static_count("num_samples", self.num_samples),
            "namespace": one_namespace(self.namespace),
            "items": items,
            "inputs": _checked_inputs(self.inputs),
            "prompt_logprobs": static_flag("prompt_logprobs", self.prompt_logprobs),
        }
        require_option("stop_strings", self.stop_strings, StopStrings, or_none=True)
        if self.num_top_logprobs is not None:
            checked["num_top_logprobs"] = static_count("num_top_logprobs", self.num_top_logprobs, least=0)
        if self.deadline is not None:
            checked["deadline"] = finite_number("deadline", self.deadline)
        if not isinstance(self.client, Conversation):
            checked["client"] = static_count("client", self.client, least=0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Parts of the prompt, where an engine declares them."""
        return self.inputs[PARTS].tolist() if PARTS in self.inputs else []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of its longest continuation."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def client_id(self) -> int:
        """The number of its client."""
        return self.client.client if isinstance(self.client, Conversation) else self.client

    @property
    def conversation(self) -> Conversation | None:
        """The conversation that it is a turn of, if it names one."""
        return self.client if isinstance(self.client, Conversation) else None

    @property
    def turn(self) -> tuple[int, int]:
        """The number of its conversation, 0 for none, and the ticks for which what it leaves is retained."""
        if (conversation := self.conversation) is None:
            return 0, 0
        number = 0 if conversation.name is None else hash(conversation.name) % MOST_TICKS + 1
        return number, ticks_of(conversation.retain)


def _checked_items(items: Any, prompt_len: int) -> tuple[tuple[int, int], ...]:
    checked = []
    for item in as_list("items", items, "pairs (first position, end)"):
        pair = as_list("items", item, "pairs (first position, end)")
        if len(pair) != 2:
            raise ValueError(f"items has {item!r}, expected a pair (first position, end)")
        first, end = (static_count("items", value, least=0) for value in pair)
        if not first < end <= prompt_len:
            raise ValueError(
                f"items has ({first}, {end}), expected first < end <= {prompt_len}, the prompt's tokens"
            )
        checked.append((first, end))
    return tuple(checked)


def _checked_inputs(inputs: Any) -> dict[str, np.ndarray]:
    """Copies values, so that a request says what it said when it was made."""
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs is {inputs!r}, expected {{name: value}}, with names that the Engine declares"
        )
    checked = {}
    for name, value in inputs.items():
        try:
            checked[name] = np.array(value)
        except ValueError:
            raise ValueError(
                f"inputs[{name!r}] is {value!r}, expected a number, or an array of one shape"
            ) from None
    return checked


def one_namespace(namespace: ArrayLike | None) -> np.ndarray:
    """Checks one namespace, u32[4]; None is the namespace 0."""
    return np.array(namespace_words(namespace, 1))[0]


@functools.lru_cache(maxsize=1024)
def sample_seed(seed: Any, sample_id: int) -> int:
    """Derives the seed of one sample, below 2**32."""
    return int(np.random.SeedSequence([seed, sample_id]).generate_state(1)[0])
