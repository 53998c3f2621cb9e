"""Question: does an answer depend on who else is in the batch, and what does it cost that it does not?

Command: python -m experiments.batch_invariance [--copies N] [--json]
Machine: 2 cores of an AMD EPYC, other work beside it; jax 0.12.0
Answer:  By default it does: 1,000 copies of a prompt get one text, but log-probabilities of 45 different bit
  patterns. Batch-invariant, all copies get the same bits, in 1.06 times the time. All of 204 sampled tokens
  get the same log-probability to the bit when the engine is asked again, and one within 4.8e-6 from the
  forward pass of training.
Record:  experiments/results/batch_invariance.json

Copies of one prompt go through an engine in a random order among as many other requests, of other lengths, so
that each is computed in other company, in other pieces, and some are preempted and computed again. Without a
prefix cache, or all copies would share the first one's keys and values.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from experiments.common import command, corpus, timing
from experiments.common.report import add_options, at_most, deliver, framed
from experiments.train.bits_per_byte import empty_cache, losses
from models import checkpoint
from models.decoder import Decoder, cache_config, forward

NUM_ROWS = 16
NUM_BLOCKS = 64  # of 16 tokens: rows of the longest requests do not all fit
MAX_LEN = 128
PROMPT_LEN, NUM_NEW = 40, 32
ROUND = 200  # requests that one engine answers before it is the other one's turn
NUM_SCORED = 12  # sampled requests whose tokens are scored again
MOST_RATIO = 3.0
MOST_DIFFERENCE = 1e-5

Answers = dict[Any, tuple[list[int], list[float]]]
"""By a request's id: its tokens and their log-probabilities."""
_losses = jax.jit(losses)


@dataclasses.dataclass
class Mode:
    """What an engine answered to equal requests.

    `num_bits` counts answers whose log-probabilities differ by a bit too; at token `first_split` two part.
    """

    name: str
    seconds: float
    num_tokens: int
    num_preemptions: int
    num_answers: int
    num_bits: int
    first_split: int | None


def make_engine(decoder: Decoder, is_invariant: bool) -> kv.Engine:
    """An engine without a prefix cache; all of its programs' sizes are fixed here."""
    config = cache_config(decoder.config, num_blocks=NUM_BLOCKS, max_seqs=NUM_ROWS, max_seq_len=MAX_LEN)
    return kv.Engine(forward, decoder, config, token_budget=NUM_ROWS + 64, batch_invariant=is_invariant)


def answers(engine: kv.Engine, requests: Sequence[kv.GenerationRequest]) -> Answers:
    """Hands requests over as there is room, and collects what comes."""
    waiting, found = list(requests), {request.id: ([], []) for request in requests}
    while waiting or engine.num_unfinished:
        waiting = waiting[engine.push(waiting) :]
        engine.drain()
        for event in engine.take_events():
            found[event.id][0].extend(event.tokens)
            found[event.id][1].extend(event.logprobs)
    return found


def requests_of(data: np.ndarray, num_copies: int) -> list[kv.GenerationRequest]:
    """Copies of one prompt, greedy, shuffled among as many others of random lengths, some of them sampled."""
    rng = np.random.default_rng(0)
    prompt = data[:PROMPT_LEN].tolist()
    requests = [kv.GenerationRequest(prompt, NUM_NEW, id=("copy", i)) for i in range(num_copies)]
    for i in range(num_copies):
        start, length = int(rng.integers(len(data) - MAX_LEN)), int(rng.integers(1, MAX_LEN - NUM_NEW))
        max_new, other = int(rng.integers(1, NUM_NEW + 1)), data[start : start + length].tolist()
        sampling = kv.decoding.SamplingParams(temperature=i % 2, seed=i)
        requests.append(kv.GenerationRequest(other, max_new, id=i, sampling=sampling))
    return [requests[i] for i in rng.permutation(len(requests))]


def measure(
    engines: dict[str, kv.Engine], requests: Sequence[kv.GenerationRequest]
) -> dict[str, tuple[Mode, Answers]]:
    """Lets each engine answer all requests; they take turns, for other work may slow the machine down."""
    found: dict[str, Answers] = {name: {} for name in engines}
    seconds, before = dict.fromkeys(engines, 0.0), {}
    for name, engine in engines.items():
        answers(engine, requests[:NUM_ROWS])  # compiles
        before[name] = engine.figures().counts
    for start in range(0, len(requests), ROUND):
        for name, engine in engines.items():
            begin = time.perf_counter()
            found[name] |= answers(engine, requests[start : start + ROUND])
            seconds[name] += time.perf_counter() - begin
    return {
        name: (_mode(name, engine, before[name], seconds[name], found[name]), found[name])
        for name, engine in engines.items()
    }


def _mode(name: str, engine: kv.Engine, before: dict, seconds: float, found: Answers) -> Mode:
    counts = {counter: num - before[counter] for counter, num in engine.figures().counts.items()}
    computed = kv.engine.Counter.PREFILL_TOKENS, kv.engine.Counter.GENERATED_TOKENS
    copies = [answer for request_id, answer in found.items() if isinstance(request_id, tuple)]
    tokens = np.array([tokens for tokens, _ in copies])
    bits = [(*tokens, *np.array(logprobs, np.float32).view(np.int32)) for tokens, logprobs in copies]
    differs = (tokens != tokens[0]).any(axis=0)
    return Mode(
        name,
        seconds,
        sum(counts[counter] for counter in computed),
        counts[kv.engine.Counter.PREEMPTIONS],
        len(set(map(tuple, tokens.tolist()))),
        len(set(bits)),
        int(differs.argmax()) if differs.any() else None,
    )


def score_again(
    decoder: Decoder, engine: kv.Engine, requests: Sequence[kv.GenerationRequest], found: Answers
) -> dict[str, float]:
    """Asks the engine again for the log-probabilities of sampled tokens, and the forward pass of training."""
    sampled = [request for request in requests if request.sampling.temperature > 0][:NUM_SCORED]
    parts, said = [], {}
    largest = 0.0
    for request in sampled:
        tokens, logprobs = found[request.id]
        text = [*request.prompt, *tokens]
        for i, said_of_one in enumerate(zip(tokens, logprobs, strict=True)):
            request_id = (request.id, i)
            prompt = text[: len(request.prompt) + i]
            parts.append(dataclasses.replace(request, prompt=prompt, max_new_tokens=1, id=request_id))
            said[request_id] = said_of_one
        window = np.zeros((1, MAX_LEN + 1), np.int32)
        window[0, : len(text)] = text
        nats = _losses(decoder, window, empty_cache(decoder.config, 1, MAX_LEN))[0]
        first = len(request.prompt) - 1
        largest = max(largest, np.abs(np.asarray(nats)[first : len(text) - 1] + logprobs).max().item())
    again = answers(engine, parts)
    equal = [again[i] == ([token], [logprob]) for i, (token, logprob) in said.items()]
    return {"num_tokens": len(said), "num_equal": sum(equal), "largest_difference": largest}


def bars_of(default: Mode, invariant: Mode, scores: dict[str, float]) -> list[dict]:
    ratio, largest = invariant.seconds / default.seconds, scores["largest_difference"]
    num_unequal = scores["num_tokens"] - scores["num_equal"]
    return [
        at_most("distinct answers to the bit, batch-invariant", invariant.num_bits, 1),
        at_most("tokens whose log-probability the engine says otherwise", num_unequal, 0),
        at_most("time, in times of the default", ratio, MOST_RATIO),
        at_most("difference from the forward pass of training", largest, MOST_DIFFERENCE),
    ]


MODES = {
    "mode": "{name}",
    "seconds": "{seconds:.1f}",
    "tokens/s": lambda mode: f"{mode['num_tokens'] / mode['seconds']:.0f}",
    "preemptions": "{num_preemptions}",
    "answers": "{num_answers}",
    "to the bit": "{num_bits}",
    "first split": lambda mode: "none" if mode["first_split"] is None else f"token {mode['first_split']}",
}


@framed
def show(report: dict) -> None:
    title = f"{report['copies']} copies of a prompt among as many others"
    timing.show_records(title, MODES, report["modes"])
    print(f"  {report['scores']['num_tokens']} tokens scored again")


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.batch_invariance", __doc__)
    parser.count("--copies", 1000, least=2)
    add_options(parser, draws=False)
    options = parser.parse_args(arguments)
    decoder = checkpoint.load(corpus.MODEL, dtype=jnp.float32)
    data = np.frombuffer(next(iter(corpus.held_out_files().values())), np.uint8).astype(np.int32)
    requests = requests_of(data, options.copies)
    engines = {"default": make_engine(decoder, False), "batch-invariant": make_engine(decoder, True)}
    measured = measure(engines, requests)
    (default, _), (invariant, found) = measured.values()
    scores = score_again(decoder, engines["batch-invariant"], requests, found)
    report = {
        "copies": options.copies,
        "modes": [dataclasses.asdict(mode) for mode in (default, invariant)],
        "scores": scores,
        "bars": bars_of(default, invariant, scores),
    }
    deliver(report, options, show)
    return int(not all(bar["holds"] for bar in report["bars"]))


if __name__ == "__main__":
    command.run(main)
