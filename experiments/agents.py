"""Question: how many tokens do agents have computed by LRU, by tail-optimised LRU and by retention? And how
many less where answers stay as the history drops the reasoning before them?

Command: python -m experiments.agents [--sessions N] [--retain S] [--tool S] [--user S] [--reasoning SHARE]
         [--seed N] [--json]
Machine: 2 cores of an AMD EPYC, shared with other work; jax 0.12.0.1
Answer:  48.4, 52.9 and 37.6 million of 373 million tokens of prompts: retention computes 0.776 of LRU's. A
  kept answer costs 0.307 of one that is computed again, for 0.0012 nats a byte; in all that computes 46.6
  million tokens, without it 51.1.
Record:  experiments/results/agents.json

Sessions are drawn to published figures. Sub-agents fork from their parent's tokens, some side by side, and
never return once they end. 24 sessions live at a time and share a system prompt. Between turns run tools, for
seconds, some for minutes; one turn in ten waits for a user instead. The pool holds half of the tokens of the
sessions that live at a time. By retention, a turn that calls a tool, or waits for a sub-agent, says `retain`
seconds, and one that ends or asks a user says none: an agent knows which it does, and not how long it takes.

The cache is the library's, without keys and values: each turn is allocated, extended, committed and freed
before the next one comes, all of them in one `lax.scan`. A token of it is a block of 64.

In the second table a share of what each turn writes is reasoning, which the turns after it do not read. The
answer after it is stored as a chunk as the turn ends; the next turn computes a fifth of it, if it is there.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import command, corpus, timing
from experiments.common.report import add_options, at_most, deliver, framed
from experiments.kept_answers import AGAIN, allowed_kl, quality
from models import checkpoint

BLOCK, SYSTEM, LONGEST = 64, 6_144, 64_000
"""Tokens of a block, of the system prompt, and of the longest context."""
LIVE, TURNS, TURNS_SPREAD, FORKING = 24, 43, 0.9, 0.44
READ, WRITTEN, SPREAD = 420, 160, 0.8
"""Medians of tokens that a tool's answer adds, and that a turn writes; the spread of their logarithms."""
SPREAD_S, ASKS, FORKS, SUB_TURNS, ABREAST = 1.2, 0.1, 0.08, 10, 3
"""Of waits the spread of their logarithms; the shares of turns that ask a user and that fork; the turns of a
sub-agent, and how many run side by side, both on average."""
TOKENS_PER_S, SPARE, MOST_RATIO = 60.0, 1_024, 0.8
MOST_ANSWER, NUM_ANSWERS, MOST_COST = 8, 2 * LIVE, 0.5
"""Of kept answers: their blocks, how many there are, and a bar of what one costs."""


class Turn(NamedTuple):
    """One request: `ids` of the blocks of its prompt and answer.

    The first `num_prompt` are the prompt's, the first `num_shared` also of the text that it was forked from.
    """

    at: float
    conversation: int
    is_retained: bool
    ids: np.ndarray
    num_shared: int
    num_prompt: int
    prompt_len: int
    written: int
    new_len: int
    answer: "_Answer"
    before: "_Answer"  # the last one in its prompt


class _Answer(NamedTuple):
    """An answer after reasoning: `start` and `length` in tokens of the history."""

    name: int
    start: int
    length: int


_NO_ANSWER = _Answer(0, 0, 0)


class _Text:
    """A growing list of tokens, as ids of its blocks; a fork shares whole blocks."""

    def __init__(self, name: int, ids: list[int], length: int, next_id: Iterator[int]):
        self.name, self._ids, self.length, self._next_id = name, ids, length, next_id
        self.num_shared, self.answer = len(ids), _NO_ANSWER

    def grow(self, num: int) -> None:
        self.length += num
        while len(self._ids) < self.length // BLOCK:
            self._ids.append(next(self._next_id))

    def fork(self, name: int) -> "_Text":
        text = _Text(name, list(self._ids), self.length, self._next_id)
        text.answer = self.answer
        return text

    def with_more(self, num: int) -> np.ndarray:
        """Returns its blocks, and the blocks of `num` tokens after it, which no other has."""
        num_more = (self.length + num) // BLOCK - len(self._ids)
        return np.array([*self._ids, *(next(self._next_id) for _ in range(num_more))], np.int32)

    @property
    def ids(self) -> np.ndarray:
        return np.array(self._ids, np.int32)


def draw(
    num_sessions: int, tool_s: float, user_s: float, seed: int, reasoning: float = 0.0
) -> tuple[list[Turn], dict[str, Any]]:
    """Draws the turns of all sessions in the order of their times, and tells what was drawn.

    The history drops `reasoning`, a share of what turns write.
    """
    rng, next_id = np.random.default_rng(seed), iter(range(1, 2**31 - 1))
    system = _Text(0, [], 0, next_id)
    system.grow(SYSTEM)
    turns: list[Turn] = []
    names, idle_at, spans, lens, num_forking = iter(range(1, 2**31 - 1)), [0.0] * LIVE, [], [], 0

    def take_turn(text: _Text, at: float, is_retained: bool) -> float:
        """Appends a turn, and returns when it ends."""
        before = text.length
        text.grow(1 + int(rng.lognormal(np.log(READ), SPREAD)))
        prompt_len, written = text.length, 1 + int(rng.lognormal(np.log(WRITTEN), SPREAD))
        before_it = text.answer
        if num_dropped := round(reasoning * written):
            ids = text.with_more(written)
            text.answer = _Answer(len(turns) + 1, prompt_len, written - num_dropped)
            text.grow(written - num_dropped)
        else:
            text.grow(written)
            ids = text.ids
        of_text = at, text.name, is_retained, ids, text.num_shared, prompt_len // BLOCK
        turns.append(Turn(*of_text, prompt_len, written, prompt_len - before, text.answer, before_it))
        return at + written / TOKENS_PER_S

    def wait(median: float) -> float:
        return float(rng.lognormal(np.log(median), SPREAD_S))

    def run_sub_agent(text: _Text, at: float) -> float:
        for left in reversed(range(1 + rng.poisson(SUB_TURNS - 1))):
            is_last = not left or text.length > LONGEST - 4_000
            at = take_turn(text, at, not is_last)
            if is_last:
                break
            at += wait(tool_s)
        return at

    for _ in range(num_sessions):
        place = int(np.argmin(idle_at))
        at = idle_at[place] + wait(user_s)
        begun, text = at, system.fork(next(names))
        num_turns = max(1, round(rng.lognormal(np.log(TURNS), TURNS_SPREAD)))
        forks, num_forks = bool(rng.random() < FORKING), 0
        i = 0
        for i in range(num_turns):
            is_last = i == num_turns - 1 or text.length > LONGEST - 4_000
            asks = not is_last and rng.random() < ASKS
            at = take_turn(text, at, not (is_last or asks))
            if asks:
                at += wait(user_s)
            elif not is_last and forks and (rng.random() < FORKS or (not num_forks and i == num_turns // 2)):
                num_forks += 1
                num_abreast = 1 + rng.poisson(ABREAST - 1)
                at = max(run_sub_agent(text.fork(next(names)), at) for _ in range(num_abreast))
            else:
                at += wait(tool_s)
            if is_last:
                break
        num_forking += num_forks > 0
        lens.append(i + 1)
        spans.append((begun, at, text))
        idle_at[place] = at
    turns.sort(key=lambda turn: turn.at)
    drawn = {
        "sessions": num_sessions,
        "turns": len(turns),
        "median_turns": float(np.median(lens)),
        "read_per_written": sum(t.prompt_len for t in turns) / sum(t.written for t in turns),
        "forking": num_forking / num_sessions,
    }
    return turns, drawn


def half_the_conversations(turns: list[Turn]) -> int:
    """Counts the blocks that hold half of the tokens of the conversations that live at a time, or one row."""
    last = {turn.conversation: i for i, turn in enumerate(turns)}
    length: dict[int, int] = {}
    held = []
    for i, turn in enumerate(turns):
        length[turn.conversation] = len(turn.ids) - turn.num_shared
        held.append(sum(length.values()) + SYSTEM // BLOCK)
        if last[turn.conversation] == i:
            del length[turn.conversation]
    quarter = len(held) // 4
    mean = float(np.mean(held[quarter : len(held) - quarter]))
    return max(round(mean / 2), max(len(turn.ids) for turn in turns))


@kv.donate
def serve_all(cache: kv.Cache, turns: dict[str, jax.Array]) -> tuple[kv.Cache, dict[str, jax.Array]]:
    """Serves turns one after the other.

    Returns [turns]: the blocks that each found, its worst status, and whether the answer before it was kept.
    """
    width = turns["ids"].shape[1] + 1
    keeps = "chunks" in cache.control.extras

    def serve(cache: kv.Cache, turn: dict[str, jax.Array]) -> tuple[kv.Cache, dict[str, jax.Array]]:
        row = jnp.where(turn["num_ids"] > 0, 0, cache.max_seqs)[None]
        is_kept = jnp.bool_(False)
        if keeps:
            name = jnp.broadcast_to(turn["before"], (1, MOST_ANSWER))
            length = jnp.minimum(-(-turn["before_len"] // BLOCK), MOST_ANSWER)
            found = kv.chunks.find(cache, name, length[None])[0]
            is_kept = (found < NUM_ANSWERS) & (length > 0)
            cache, _ = kv.chunks.evict(cache, 0, num_blocks=turn["num_ids"] + 1)  # as an engine does
        tokens = jnp.zeros(2 * width, jnp.int32).at[: width - 1].set(turn["ids"])
        # A prompt's last token is always computed: one token more, which is never published.
        prompt = tokens[:width].at[turn["num_prompt"]].set(0)
        cache, admission = kv.allocate(cache, row, turn["num_prompt"][None] + 1, tokens=prompt[None])
        num_hits = admission.num_cached
        new = jax.lax.dynamic_slice(tokens, num_hits, (width,))
        num_new = turn["num_ids"][None] + 1 - num_hits
        cache, step = kv.extend(cache, num_new, max_new=width, seq_ids=row, tokens=new[None])
        # What the history drops is published nowhere, as by an engine that keeps answers.
        drops = jnp.bool_(keeps) & (turn["answer_len"] > 0)
        final_len = jnp.where(drops, turn["num_prompt"], turn["num_ids"])
        cache, committed = kv.commit(cache, row, final_len=final_len[None])
        statuses = [admission.status, step.status, committed]
        if "conversations" in cache.control.extras:
            cache = kv.policies.set_time(cache, turn["at"])
            cache, said = kv.policies.set_turns(cache, row, turn["conversation"][None], turn["retain"][None])
            statuses.append(said)
        if keeps:  # without room it is not kept
            name = jnp.broadcast_to(turn["answer"], (1, MOST_ANSWER))
            length = jnp.minimum(-(-turn["answer_len"] // BLOCK), MOST_ANSWER)[None]
            cache, _ = kv.chunks.evict(cache, 1)
            cache, _ = kv.chunks.store(cache, row, turn["num_ids"][None] + 1 - length, length, name)
        cache, freed = kv.free(cache, row)
        status = jnp.stack([*statuses, freed]).max()
        return cache, {"num_hits": num_hits[0], "status": status, "is_kept": is_kept}

    return jax.lax.scan(serve, cache, turns)


def replay(
    turns: list[Turn], num_blocks: int, policy: str, retain: float, keeps: bool = False
) -> dict[str, Any]:
    """Counts the tokens that all turns compute with a policy and a pool of `num_blocks` blocks.

    Answers after dropped reasoning are kept if it `keeps` them.
    """
    extras: list[Any] = [kv.chunks.Store(NUM_ANSWERS, MOST_ANSWER)] if keeps else []
    if policy != "lru":
        extras.append(kv.policies.Conversations(spare_len=SPARE // BLOCK))
    longest = max(len(turn.ids) for turn in turns)
    config = kv.CacheConfig(
        [kv.FullAttention(1, 1)],
        num_blocks=num_blocks + 1,
        block_size=1,
        max_seqs=1,
        max_seq_len=longest + 1,
        enable_prefix_caching=True,
        extras=extras,
        eviction_policy=policy,
    )
    columns = {
        "ids": np.stack([np.pad(turn.ids, (0, longest - len(turn.ids))) for turn in turns]),
        "num_ids": np.array([len(turn.ids) for turn in turns], np.int32),
        "num_prompt": np.array([turn.num_prompt for turn in turns], np.int32),
        "at": np.array([turn.at for turn in turns], np.float32),
        "conversation": np.array([turn.conversation for turn in turns], np.int32),
        "retain": np.array([retain * turn.is_retained for turn in turns], np.float32),
    }
    for what in "answer", "before":
        for name, field in (what, "name"), (f"{what}_len", "length"):
            columns[name] = np.array([getattr(getattr(turn, what), field) for turn in turns], np.int32)
    _, found = serve_all(kv.init(config, storage=False), columns)
    kv.raise_for_status(found["status"].max()[None], "replay")
    prompt_len, new_len = (np.array([getattr(t, n) for t in turns]) for n in ("prompt_len", "new_len"))
    num_cached = BLOCK * np.asarray(found["num_hits"])
    is_lost = np.array([turn.before.start for turn in turns]) >= num_cached
    cost = np.where(is_lost, columns["before_len"], 0)  # of the answer before, computed again
    # What it lacks are its last token, and those after the longest that is kept.
    kept = np.clip(columns["before_len"] - 1, 0, MOST_ANSWER * BLOCK)
    saved = np.where(is_lost & np.asarray(found["is_kept"]), kept - np.ceil(AGAIN * kept), 0).astype(int)
    computed = prompt_len - num_cached - saved
    again = computed - new_len
    return {
        "policy": policy + ", answers kept" * keeps,
        "cost": float((cost.sum() - saved.sum()) / max(cost.sum(), 1)),
        "retain": retain if policy == "retention" else None,
        "computed": int(computed.sum()),
        "again": int(np.maximum(again, 0).sum()),
        "late": float((again > SPARE + BLOCK).mean()),
        "hit_rate": 1 - float(computed.sum() / prompt_len.sum()),
    }


def study(
    num_sessions: int, waits: tuple[float, float], retain: float, seed: int, reasoning: float
) -> dict[str, Any]:
    """Replays the same turns by all policies; `waits` are medians of seconds, for a tool and for a user."""
    turns, drawn = draw(num_sessions, *waits, seed)
    drawn["num_blocks"] = half_the_conversations(turns)
    policies = ("lru", "tail lru", "retention")
    records = [replay(turns, drawn["num_blocks"], policy, retain) for policy in policies]
    turns, _ = draw(num_sessions, *waits, seed, reasoning)
    num_blocks, ways = (
        half_the_conversations(turns),
        (("lru", False), ("retention", False), ("retention", True)),
    )
    dropped = [replay(turns, num_blocks, policy, retain, keeps) for policy, keeps in ways]
    for table in (records, dropped):
        for record in table:
            record["ratio"] = record["computed"] / table[0]["computed"]
    lost = quality(checkpoint.load(corpus.MODEL, dtype=jnp.float32))
    cost = "tokens computed of an answer behind dropped reasoning, kept / computed again"
    bars = [
        at_most("tokens computed by retention / by LRU", records[-1]["ratio"], MOST_RATIO),
        at_most(cost, dropped[-1]["cost"], MOST_COST),
        at_most("KL of predictions behind kept answers, nats a byte", lost["kl"], allowed_kl()),
    ]
    found = {"drawn": drawn, "records": records, "reasoning": reasoning, "dropped": dropped}
    return found | {"quality": lost, "bars": bars}


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.agents", __doc__)
    parser.count("--sessions", 150)
    seconds = {"type": command.number(0.0), "metavar": "SECONDS"}
    parser.add_argument("--retain", default=300.0, help="of a turn that waits for a tool", **seconds)
    parser.add_argument("--tool", default=6.0, help="median of the time that a tool takes", **seconds)
    parser.add_argument("--user", default=120.0, help="median of the time that a user takes", **seconds)
    share = {"type": command.number(0.0), "metavar": "SHARE"}
    parser.add_argument("--reasoning", default=0.5, help="of what turns write, in the second table", **share)
    parser.count("--seed", 0, least=0)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    if options.reasoning >= 1:
        parser.error(f"--reasoning is {options.reasoning}, expected less than 1")
    waits = options.tool, options.user
    found = study(options.sessions, waits, options.retain, options.seed, options.reasoning)
    return deliver(found, options, show)


@framed
def show(report: dict[str, Any]) -> None:
    drawn = report["drawn"]
    print(
        f"{drawn['sessions']} sessions, {drawn['turns']:,} turns, {drawn['median_turns']:g} of a session in "
        f"the median, sub-agents in {drawn['forking']:.0%}; {drawn['read_per_written']:.0f} tokens read per "
        f"token written; a pool of {drawn['num_blocks']:,} blocks"
    )
    columns = {
        "policy": "{policy}",
        "tokens computed": "{computed:,}",
        "/ LRU's": "{ratio:.3f}",
        "computed again": "{again:,}",
        "late turns": "{late:.1%}",
        "prompts' tokens that hit": "{hit_rate:.1%}",
    }
    timing.show_records("one replay of the same turns each", columns, report["records"])
    del columns["late turns"]
    columns["an answer's tokens computed"] = "{cost:.1%}"
    title = f"the history drops {report['reasoning']:.0%} of what turns write, which is reasoning"
    timing.show_records(title, columns, report["dropped"])


if __name__ == "__main__":
    command.run(main)
