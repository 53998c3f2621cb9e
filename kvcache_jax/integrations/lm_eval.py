"""A model for EleutherAI's lm-eval: `--model kvcache_jax`, on `score` and `Engine`.

    python -m kvcache_jax.integrations.lm_eval run --model kvcache_jax --model_args model=my_model:load ...

lm-eval's own command knows the models of its package alone. This one registers `kvcache_jax`, as an import of
this module does, and goes on as lm-eval's.
"""

# pyright: reportMissingImports=false
import logging
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcache_jax.decoding.options import SamplingParams
from kvcache_jax.decoding.score import score
from kvcache_jax.engine.engine import Engine
from kvcache_jax.engine.options import Limits
from kvcache_jax.engine.requests import GenerationRequest
from kvcache_jax.engine.stop_text import StopStrings

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        "kvcache_jax.integrations.lm_eval needs lm-eval, of the extra `lm-eval`: pip install "
        "'kvcache_jax[lm-eval]'"
    ) from error

_log = logging.getLogger(__name__)
_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}
_HANDLED = _SAMPLING | {"until", "max_gen_toks", "do_sample"}
_PUSHED_AT_ONCE = 64


class Model(TemplateLM):
    """A model on the cache, as lm-eval calls it.

    Contexts that are equal are computed once and shared by their continuations. In a cache with
    `enable_prefix_caching` so is all that contexts begin with in common, such as the examples of a task.

    Args:
      model: `function(**arguments) -> (forward, params, config, tokenizer)`, or its name, "module:function":
        a model as for `generate`, a `CacheConfig` of at least 2 rows, and `encode(text) -> ids`,
        `decode(ids) -> text` and `stop_tokens`. A context is cut from the left where it and its continuation
        have more than `config.max_seq_len` tokens, or, for a text to be generated, than one fewer.
      prefix_token: Token before a text without a context. Default: the one that the tokenizer puts in front
        of texts, else its first stop token.
      max_gen_toks: Most tokens of an answer, where its task does not say.
      **arguments: For `model`. `batch_size`, `max_batch_size` and `device`, of lm-eval's command, are left
        out: the rows of `config` are the batch, and jax chooses the device.

    Attributes:
      num_cached_tokens: Tokens of contexts that were not computed, for the prefix cache had them; lm-eval
        writes it into the results' `config`.

    Raises:
      ValueError, TypeError: no model, or no token to begin a text with.
    """

    def __init__(
        self,
        model: str | Callable[..., tuple[Any, ...]],
        *,
        prefix_token: int | None = None,
        max_gen_toks: int = 256,
        **arguments: Any,
    ):
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):
            arguments.pop(name, None)
        if not callable(model) and not (isinstance(model, str) and ":" in model):
            raise ValueError(f"model is {model!r}, expected module:function, such as my_model:load")
        load: Any = pkgutil.resolve_name(model) if isinstance(model, str) else model
        found = load(**arguments)
        if not isinstance(found, Sequence) or len(found) != 4:
            raise ValueError(f"model returned {found!r:.200}, expected (forward, params, config, tokenizer)")
        self._forward, self._params, self._config, self._tokenizer = found
        self._max_gen_toks, self.num_cached_tokens = int(max_gen_toks), 0
        firsts = [*self._tokenizer.encode("")[:1], *self._tokenizer.stop_tokens]
        if prefix_token is None and not firsts:
            raise ValueError("the tokenizer has no stop tokens, expected prefix_token=, to begin a text with")
        self._prefix_token = firsts[0] if prefix_token is None else int(prefix_token)

    @property
    def max_length(self) -> int:
        """Most tokens that the model is fed to predict one more."""
        return self._config.max_seq_len - 1

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, or, without one, begins it."""
        return next(iter(self._tokenizer.stop_tokens), self._prefix_token)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self._prefix_token

    def get_model_info(self) -> dict[str, Any]:
        """Returns what lm-eval writes into the results' `config`."""
        return {"num_cached_tokens": self.num_cached_tokens}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Converts a text to token ids, as the tokenizer does."""
        return list(self._tokenizer.encode(string))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Computes (log-probability, whether greedy decoding writes it) of each continuation."""
        by_context: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
        for i, (_, context, continuation) in enumerate(requests):
            context, most = context or [self._prefix_token], self._config.max_seq_len - len(continuation)
            if most < 1:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, expected fewer than max_seq_len = "
                    f"{self._config.max_seq_len}: give the cache longer rows"
                )
            by_context[tuple(self._cut(context, most))][tuple(continuation)].append(i)
        cache, answers = None, [(0.0, True)] * len(requests)
        # In this order contexts follow one another that begin alike, and are not evicted in between.
        for context in tqdm(sorted(by_context), "Contexts", disable=disable_tqdm):
            own = list(by_context[context])
            found = score(self._forward, self._params, context, own, self._config, cache=cache)
            cache, parts = found.cache, zip(found.logprobs, found.is_greedy, strict=True)
            self.num_cached_tokens += found.num_cached_tokens
            for places, (logprobs, is_greedy) in zip(by_context[context].values(), parts, strict=True):
                answer = float(logprobs.sum(dtype=np.float64)), bool(is_greedy.all())
                for i in places:
                    answers[i] = answer
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Computes the log-probability of each text, a window of the model's length at a time."""
        windows = []
        for i, request in enumerate(requests):
            tokens = self.tok_encode(*request.args)
            if tokens[:1] == [self._prefix_token]:
                tokens = tokens[1:]  # the first window has it in front
            cut = get_rolling_token_windows(tokens, self._prefix_token, self.max_length, context_len=1)
            windows += [(i, *make_disjoint_window(window)) for window in cut]
        answers = [0.0] * len(requests)
        scores = self._loglikelihood_tokens([(None, *window[1:]) for window in windows], disable_tqdm)
        for (i, *_), (logprob, _) in zip(windows, scores, strict=True):
            answers[i] += logprob
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues each text until one of its stop strings, a stop token or its most tokens.

        Answers that are drawn, by `do_sample`, have their request's number as their seed.

        Raises:
          ValueError: options that are unknown, or a prompt and an answer that the cache has no room for.
          FloatingPointError: logits are no numbers.
        """
        asked = [self._generation(i, *request.args) for i, request in enumerate(requests)]
        waiting = sorted(asked, key=lambda request: tuple(request.prompt))
        limits = Limits(max_stop_tokens=max(1, len(self._tokenizer.stop_tokens)))
        engine = Engine(self._forward, self._params, self._config, limits=limits)
        tokens: list[list[int]] = [[] for _ in asked]
        texts = [""] * len(asked)
        with tqdm(total=len(asked), desc="Answers", disable=disable_tqdm) as progress:
            while waiting or engine.num_unfinished:
                del waiting[: engine.push(waiting[:_PUSHED_AT_ONCE])]
                engine.drain()
                for event in engine.take_events():
                    i: Any = event.id
                    reason = event.finish_reason
                    tokens[i] += event.tokens
                    texts[i] += event.text or ""
                    if reason is None:
                        continue
                    if reason == "refused":
                        raise ValueError(
                            f"request {i} has a prompt of {len(asked[i].prompt)} tokens and an answer of "
                            f"{asked[i].max_new_tokens}, expected as many as the cache has blocks for: raise "
                            "num_blocks, or lower max_gen_toks by --gen_kwargs"
                        )
                    if reason not in ("stop", "length"):
                        raise FloatingPointError(
                            f"request {i} ended by {reason!r}, expected an answer: look for a weight that is "
                            "not finite"
                        )
                    # A stop token is not part of the answer, though the tokenizer may have a text for it.
                    is_stop = bool(tokens[i]) and tokens[i][-1] in self._tokenizer.stop_tokens
                    if is_stop or asked[i].stop_strings is None:
                        texts[i] = self._tokenizer.decode(tokens[i][: len(tokens[i]) - is_stop])
                    self.num_cached_tokens += event.num_cached_tokens or 0
                    self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                    progress.update()
        return texts

    def _generation(self, i: int, context: str, options: dict[str, Any]) -> GenerationRequest:
        """Makes the engine's request of a task's."""
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(options, self._max_gen_toks))
        if unknown := sorted(wanted.keys() - _HANDLED):
            raise ValueError(
                f"the generation options have {', '.join(unknown)}, expected {', '.join(sorted(_HANDLED))}"
            )
        num_new = wanted["max_gen_toks"]
        most = self.max_length - num_new
        if most < 1:
            raise ValueError(
                f"max_gen_toks is {num_new}, expected fewer than {self.max_length}, the tokens of a row: "
                "lower it by --gen_kwargs, or give the cache longer rows"
            )
        prompt = self.tok_encode(context) or [self._prefix_token]
        drawn = {name: value for name, value in wanted.items() if name in _SAMPLING and value is not None}
        sampling = SamplingParams(seed=i, **drawn) if wanted["do_sample"] else SamplingParams()
        texts = [text for text in wanted["until"] if text]
        stops: dict[str, Any] = {"stop_tokens": self._tokenizer.stop_tokens}
        if texts:
            stops["stop_strings"] = StopStrings(texts, self._tokenizer.decode)
        return GenerationRequest(self._cut(prompt, most), num_new, id=i, sampling=sampling, **stops)

    def _cut(self, context: list[int], most: int) -> list[int]:
        if len(context) > most:
            _log.warning("a context of %d tokens is longer than a row: %d are left", len(context), most)
        return context[-most:]


# By name, for as a program this module has two, and one class for each.
model_registry.register("kvcache_jax", target="kvcache_jax.integrations.lm_eval:Model")

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
