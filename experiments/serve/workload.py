"""Requests: prompts of a benchmark as they are, arrivals and lengths of answers of a production trace.

Other people's files, in the folder that --data or KVCACHE_DATA_DIR names; without it both are made up, and
the workload says so:
  text/                           see experiments/common/benchmarks.py
  traces/AzureLLMInferenceTrace_conv.csv     Azure/AzurePublicDataset, CC-BY 4.0; read for TIMESTAMP and
                                  GeneratedTokens. Other traces of theirs, and Mooncake's (`timestamp` in ms
                                  and `output_length` in JSON lines), are read too.
"""

import csv
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import prefix_prompts
from experiments.common import benchmarks
from experiments.common.command import InputError

TRACE = Path("traces", "AzureLLMInferenceTrace_conv.csv")
# Of that trace: mean and deviation of the logarithm of an answer's tokens, the longest, and seconds between
# two arrivals. What is made up has them.
_LOG_LEN, _LOG_DEVIATION, _LONGEST, _GAP = 5.02, 0.86, 1000, 0.181


class Answer(NamedTuple):
    """An entry of a trace: seconds after its first one, and tokens of the answer."""

    arrival: float
    num_tokens: int


class Job(NamedTuple):
    """A request: its prompt, the tokens that it gets, and the second in which it comes."""

    prompt: Sequence[int]
    num_tokens: int
    arrival: float


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival; `source` says where they are from, and the factors."""

    name: str
    jobs: list[Job]
    source: str

    @property
    def num_tokens(self) -> int:
        return sum(job.num_tokens for job in self.jobs)

    @property
    def longest(self) -> int:
        return max(len(job.prompt) + job.num_tokens for job in self.jobs)


def human_eval(
    folder: Path | None, trace: Path | None, num: int, arrivals: float, lengths: float
) -> Workload:
    """Programming problems: prompts that have little in common."""
    if folder is None:
        prompts = _made_up_prompts(0, 450, num)
    else:
        each = [[*problem.text.encode()] for problem in benchmarks.human_eval(folder)]
        prompts = [*itertools.islice(itertools.cycle(each), num)]
    return _workload("HumanEval", prompts, folder, trace, arrivals, lengths)


def few_shot(folder: Path | None, trace: Path | None, num: int, arrivals: float, lengths: float) -> Workload:
    """Eight-shot GSM8K: nine tenths of each prompt are the same for all."""
    prompts = benchmarks.few_shot_prompts(folder, num) if folder else _made_up_prompts(4000, 400, num)
    return _workload("8-shot GSM8K", prompts, folder, trace, arrivals, lengths)


def alike(num: int, arrivals: float, lengths: float) -> Workload:
    """Made-up prompts that begin alike, with answers like the trace's; needs no data."""
    prompts = _made_up_prompts(400, 200, num)
    return _workload("prompts that begin alike", prompts, None, None, arrivals, lengths)


def _workload(
    name: str,
    prompts: list[list[int]],
    folder: Path | None,
    trace: Path | None,
    arrivals: float,
    lengths: float,
) -> Workload:
    if trace is None and folder is not None:
        trace = folder / TRACE
    answers = made_up_answers(len(prompts)) if trace is None else read_answers(trace, len(prompts))
    jobs = [
        Job(prompt, max(round(answer.num_tokens * lengths), 1), answer.arrival * arrivals)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    of_prompts = "made-up prompts (no --data)" if folder is None else f"{name}'s prompts as they are"
    of_trace = "made-up answers and arrivals" if trace is None else trace.name
    factors = f"its arrivals times {arrivals:g}, lengths of answers times {lengths:g}"
    return Workload(name, jobs, f"{of_prompts}; {of_trace}, {factors}")


def read_answers(path: Path, num: int) -> list[Answer]:
    """Reads the first entries of a trace of Azure (.csv) or Mooncake (.jsonl)."""
    read = _read_csv if path.suffix == ".csv" else _read_json_lines
    try:
        with path.open(encoding="utf-8") as file:
            answers = [*itertools.islice(read(file), num)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"got the trace {path}, which cannot be read: {error!r}") from None
    if len(answers) < num:
        raise InputError(f"the trace {path} has {len(answers)} requests, expected {num}: lower --requests")
    first = answers[0].arrival
    return [Answer(answer.arrival - first, answer.num_tokens) for answer in answers]


def _read_csv(file) -> Iterator[Answer]:
    for row in csv.DictReader(file):
        arrival = datetime.fromisoformat(row["TIMESTAMP"][:26])  # tenths of microseconds are cut off
        yield Answer(arrival.timestamp(), int(row["GeneratedTokens"]))


def _read_json_lines(file) -> Iterator[Answer]:
    for line in file:
        entry = json.loads(line)
        yield Answer(entry["timestamp"] / 1000, int(entry["output_length"]))


def made_up_answers(num: int) -> list[Answer]:
    """Draws answers like the trace's: lengths log-normal, arrivals at random."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(_LOG_LEN, _LOG_DEVIATION, num)), 1, _LONGEST).astype(int)
    arrivals = np.cumsum(rng.exponential(_GAP, num)) - _GAP
    return [Answer(max(a, 0.0), n) for a, n in zip(arrivals.tolist(), lengths.tolist(), strict=True)]


def _made_up_prompts(num_shared: int, mean_len: int, num: int) -> list[list[int]]:
    """Pieces of source after one common piece, of half to one and a half times the mean length."""
    lengths = np.random.default_rng(1).integers(mean_len // 2, mean_len * 3 // 2, num).tolist()
    shared = prefix_prompts.made_up_pairs(1, num_shared or 1, 1)[0][0][:num_shared]
    pairs = prefix_prompts.made_up_pairs(num, 1, max(lengths))
    return [shared + own[1 : length + 1] for (own, _), length in zip(pairs, lengths, strict=True)]
