"""Evaluates the small model with lm-eval, by its classes and by its command, on tasks with data made up here.

    python -m tests.integrations.harness

Needs `lm-eval` in an environment of its own: `make integrations`. Nothing is loaded from elsewhere.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LMEVAL_LOG_LEVEL": "ERROR"}

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import kvcache_jax as kv
from experiments.common.corpus import END, MODEL
from kvcache_jax.integrations.lm_eval import Model
from models import checkpoint
from models import decoder as models

ROW, ATOL = 160, 2e-3
FEW_SHOT = "def add(a, b):\n    return a + b\n\ndef first(items):\n    return items[0]\n\n"
CHOICES = [" self", " rows[0]", " import"]
BODIES = ["class A:\n    def get(self):\n        return", "def f(rows):\n    return", "import os\n\nfrom re"]
LONG = "".join(f"def function_{i}(self, value):\n    return value + {i}\n\n" for i in range(12))
UNTIL = "\n", ")"
TASKS = {
    "made_up_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": FEW_SHOT + "{{text}}",
        "doc_to_target": "{{gold}}",
        "doc_to_choice": CHOICES,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "made_up_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "made_up_answers": {
        "output_type": "generate_until",
        "doc_to_text": FEW_SHOT + "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [*UNTIL], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@functools.cache
def decoder():
    return checkpoint.load(MODEL, dtype="float32")


def load(prefix_caching=True, row=ROW):
    config = models.cache_config(
        decoder().config, max_seqs=4, max_seq_len=row, enable_prefix_caching=prefix_caching
    )
    return models.forward, models.for_decoding(decoder()), config, checkpoint.load_tokenizer(MODEL)


@jax.jit
def _logprobs(params, tokens):
    config = models.cache_config(params.config, max_seqs=1, max_seq_len=tokens.shape[1])
    cache, _ = kv.allocate(kv.init(config), [0], [tokens.shape[1]])
    cache, step = kv.extend(cache, [tokens.shape[1]], max_new=tokens.shape[1])
    return jax.nn.log_softmax(models.forward(params, tokens, cache, step)[0][0].astype(jnp.float32))


def logprobs_of(tokens: list[int]) -> np.ndarray:
    """Returns the log-probabilities after each token of a text that is computed whole and alone."""
    padded = np.zeros((1, ROW), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_logprobs(decoder(), padded))


@functools.cache
def expected(context: str, continuation: str) -> tuple[float, bool]:
    own = list((context[len(context.rstrip()) :] + continuation).encode())  # lm-eval moves the spaces
    tokens = [*(list(context.rstrip().encode()) or [END]), *own][-ROW:]
    first = len(tokens) - len(own)
    after = logprobs_of(tokens)[first - 1 : len(tokens) - 1]
    return sum(after[i, token] for i, token in enumerate(own)), after.argmax(axis=-1).tolist() == own


@functools.cache
def greedy(context: str, until: tuple[str, ...], num_new: int) -> str:
    tokens = (list(context.encode()) or [END])[-(ROW - 1 - num_new) :]
    own: list[int] = []
    while len(own) < num_new:
        own.append(int(logprobs_of(tokens + own)[len(tokens) + len(own) - 1].argmax()))
        text = bytes(own).decode(errors="replace")
        if places := [text.index(stop) for stop in until if stop in text]:
            return text[: min(places)]
        if own[-1] == END:
            return text[:-1]
    return bytes(own).decode(errors="replace")


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def check_calls(prefix_caching: bool) -> list:
    """Compares the three calls with a model that computes each text whole; returns their results."""
    model = Model(load, prefix_caching=prefix_caching)
    best = greedy("import os\nimport ", (), 3)
    pairs = [(FEW_SHOT + body, choice) for choice in CHOICES for body in BODIES]
    pairs += [("", "import"), pairs[0], ("import os\nimport ", best), (LONG, "def function_12"), ("x = ", "")]
    pairs += [("import os\nimport ", best[0] + "?"), ("return ", "a b"), ("return", " a b")]
    found = model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    for pair, (logprob, is_greedy) in zip(pairs, found, strict=True):
        logprob_of_whole, is_greedy_of_whole = expected(*pair)
        assert abs(logprob - logprob_of_whole) < ATOL, (pair, logprob, logprob_of_whole)
        assert is_greedy == is_greedy_of_whole, pair
    assert [is_greedy for _, is_greedy in found].count(True) > 1 and found[0] == found[len(CHOICES) ** 2 + 1]

    texts = [LONG, FEW_SHOT, "a", LONG, ""]
    rolling = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]))
    windows = [LONG[i : i + ROW - 1] for i in range(0, len(LONG) - ROW, ROW - 1)]
    # The last window is as long as a row; only what no window before it had is scored.
    num_left = len(LONG) - sum(map(len, windows))
    whole = sum(
        expected(LONG[i - 1] if (i := n * (ROW - 1)) else "", window)[0] for n, window in enumerate(windows)
    )
    whole += expected(LONG[-ROW:-num_left], LONG[-num_left:])[0]
    for got, exact in zip(
        rolling, [whole, expected("", FEW_SHOT)[0], expected("", "a")[0], whole, 0.0], strict=True
    ):
        assert abs(got - exact) < ATOL * 3, (got, exact)

    options = {"until": [*UNTIL], "max_gen_toks": 24}
    asked = [(FEW_SHOT + body, options) for body in BODIES] + [("", options), (LONG, options)]
    asked += [asked[0], ("import os\nimport ", {"until": [], "max_gen_toks": 6, "do_sample": False})]
    drawn = {"until": ["\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 0.9}
    answers = model.generate_until(
        requests("generate_until", asked + [("def ", drawn)] * 3), disable_tqdm=True
    )
    for (context, given), answer in zip(asked, answers[:-3], strict=True):
        assert answer == greedy(context, tuple(given["until"]), given["max_gen_toks"]), (context, answer)
    assert len({*answers[-3:]}) > 1, "three samples are the same"
    num_cached, num_asked = model.num_cached_tokens, len(pairs) + len(texts) + len(asked)
    assert num_cached > 200 if prefix_caching else num_cached == 0, num_cached
    print(f"{num_asked} requests equal texts computed whole; prefix caching saved {num_cached} tokens")
    return [[round(logprob, 2) for logprob, _ in found], [is_greedy for _, is_greedy in found], answers]


class Digits:
    """A tokenizer that has a text for its stop token too."""

    stop_tokens = (5,)

    def encode(self, text):
        return [*map(int, text)]

    def decode(self, ids):
        return "".join(map(str, ids))


def count_up(params, tokens, cache, step):
    k = jnp.zeros((*tokens.shape, 1, 8))
    cache, _ = kv.attention(cache, 0, k, k, k, step)
    return 9.0 * jax.nn.one_hot(tokens + 1, 8), cache


def check_ends() -> None:
    """Answers end before a stop token; those that the cache has no blocks for, and no model, are named."""
    config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=2, block_size=4, max_seqs=2, max_seq_len=32)
    model = Model(lambda: (count_up, {}, config, Digits()), max_gen_toks=4)
    asked = [("02", {}), ("1", {"until": ["9"]}), ("0", {"until": ["3"]}), ("0", {"max_gen_toks": 2})]
    assert model.generate_until(requests("generate_until", asked)) == ["34", "234", "12", "12"]
    for call, message in (
        (lambda: model.generate_until(requests("generate_until", [("012340", {})])), "raise num_blocks"),
        (lambda: Model(5), "model is 5, expected module:function"),
        (lambda: Model(lambda: (1, 2)), "returned (1, 2), expected (forward, params, config, tokenizer)"),
        (lambda: Model(lambda: 5), "returned 5, expected (forward, params, config, tokenizer)"),
    ):
        try:
            call()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def write_tasks(folder: pathlib.Path) -> None:
    documents = [{"text": text, "gold": i % 3, "long": LONG[i * 30 :]} for i, text in enumerate(BODIES * 2)]
    for i, each in enumerate(documents):  # two of three have the right answer
        each["answer"] = greedy(FEW_SHOT + each["text"], UNTIL, 24) if i % 3 else "another"
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "data.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "metadata": {"version": 1},
    }
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | shared | task))  # JSON is YAML


def check_tasks(folder: pathlib.Path) -> None:
    """Runs the tasks without shared prefixes, and by the command with them: their results are the same."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = get_model("kvcache_jax")(load, prefix_caching=False)
    alone = simple_evaluate(model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
    config = ["run", "--model", "kvcache_jax", "--model_args", "model=tests.integrations.harness:load"]
    config += [
        "--tasks",
        ",".join(TASKS),
        "--include_path",
        str(folder),
        "--output_path",
        str(folder / "out"),
    ]
    command = [sys.executable, "-m", "kvcache_jax.integrations.lm_eval", *config]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if said.returncode:
        raise SystemExit(f"lm-eval's command failed: {said.stderr[-2000:]}")
    [written] = (folder / "out").rglob("results*.json")
    shared = json.loads(written.read_text())
    num_cached = shared["config"]["num_cached_tokens"]
    assert alone["config"]["num_cached_tokens"] == 0 and num_cached > 500, num_cached
    figures = [
        {
            f"{task}: {name.removesuffix(',none')}": round(float(value), 5)
            for task, metrics in each["results"].items()
            for name, value in metrics.items()
            if isinstance(value, float) and "stderr" not in name
        }
        for each in (alone, shared)
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 4, figures
    assert figures[0]["made_up_answers: exact_match"] == round(2 / 3, 5), figures
    print(f"{figures[0]}, also by the command, where {num_cached} tokens were not computed")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        # The command, and each second engine, find their programs compiled.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/programs"
        jax.config.update("jax_compilation_cache_dir", f"{folder}/programs")
        check_ends()
        shared, alone = (check_calls(prefix_caching) for prefix_caching in (True, False))
        assert shared[1:] == alone[1:]
        write_tasks(pathlib.Path(folder))
        check_tasks(pathlib.Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
