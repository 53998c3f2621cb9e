"""Checks of the arguments that `generate`, `score` and `beam_search` share."""

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from kvcache_jax.arrays.number_checks import as_list, static_count
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.config import CacheConfig, require_config
from kvcache_jax.core.token_arguments import host_tokens

_NO_LIMIT = np.iinfo(np.int32).max
_OBJECT = np.dtype(object)
_PARTITION = (
    "params, static = eqx.partition(module, eqx.is_array), and a function that calls "
    "eqx.combine(params, static)(tokens, cache, step); see docs/guides/own_model.md"
)
# Two may well be wanted, of a model and of its draft.
_TOO_MANY_OF_ONE_CODE = 3
_functions_of_code: dict[types.CodeType, set[int]] = {}


def check_model(caller: str, forward: Any, config: Any, *values: Any) -> None:
    """Refuses a call within a trace, and anything but a model and a config.

    The pytrees `values`, first the parameters, are handed to compiled programs and must not be traced.
    """
    require_config(caller, config)
    if config.source_layers:
        label = config.layers[config.source_layers[0]].label
        raise NotImplementedError(
            f"{caller} got {label} layers, for whose sources it has no argument, expected a loop of your "
            "own: kv.allocate, kv.write_source, then kv.extend and the model for each step"
        )
    if not callable(forward):
        raise TypeError(
            f"forward is {forward!r}, expected a model: (params, tokens, cache, step) -> (logits, cache)"
        )
    made_here = explicit_transfers(jnp.zeros)(())  # a tracer within a trace
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((values, made_here))):
        raise TypeError(
            f"{caller} is called within jit, grad or another transformation, expected outside of all: it is "
            "a loop of the host around compiled programs; jit your own that calls kv.extend and the model"
        )
    try:
        hash(forward)
    except TypeError as error:
        if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(forward)):
            raise TypeError(
                f"forward is a {type(forward).__name__} that holds arrays, expected a function, and its "
                f"arrays as params: {_PARTITION}"
            ) from None
        raise TypeError(
            f"forward is a {type(forward).__name__} and cannot be hashed ({error}), expected a function or "
            "an object that can be: pass its method, or make it a @dataclass(frozen=True) or (eq=False)"
        ) from None
    _check_signature(forward)
    require_arrays(values[0])
    _warn_of_fresh(forward)


def require_arrays(params: Any) -> None:
    """Refuses parameters that a compiled program does not take."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if callable(leaf) or not _is_numeric(leaf):
            place = jax.tree_util.keystr(path)
            raise TypeError(f"params{place} is {leaf!r}, expected arrays alone: {_PARTITION}")


def committed_shardings(hint: str = "", **values: Any) -> list[Sharding]:
    """Lists where the arrays of pytrees, by name, are committed to; refuses devices that differ.

    One program takes all of them. The `hint` goes after the fix.
    """
    leaves = [(name, leaf) for name, value in values.items() for leaf in jax.tree.leaves(value)]
    found = [(name, x.sharding) for name, x in leaves if isinstance(x, jax.Array) and x.committed]
    homes = {frozenset(sharding.device_set): name for name, sharding in reversed(found)}
    if len(homes) > 1:
        named = [(" and ".join(sorted(map(str, devices))), name) for devices, name in homes.items()]
        (first, name), (second, other), *_ = sorted(named)
        raise ValueError(
            f"{name} has arrays committed to {first} and {'others' if other == name else other} to {second}, "
            f"expected all on the same: jax.device_put(params, device){hint}"
        )
    return [sharding for _, sharding in found]


def _is_numeric(leaf: Any) -> bool:
    """Tests whether a compiled program takes it: a number, an array, or what is made one."""
    is_array = getattr(leaf, "dtype", _OBJECT) != _OBJECT or hasattr(leaf, "__jax_array__")
    return is_array or isinstance(leaf, bool | int | float | complex)


def _check_signature(forward: Callable) -> None:
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # of a callable that is not written in Python
        return
    try:
        signature.bind(*[None] * 4)
    except TypeError:
        raise TypeError(
            f"forward takes {signature}, expected (params, tokens, cache, step) -> (logits, cache): wrap a "
            "module's method in such a function"
        ) from None


def _warn_of_fresh(forward: Any) -> None:
    """Warns once of code that makes a new function for each call: each is compiled anew."""
    inner = inspect.unwrap(forward)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    code = getattr(inner, "__code__", None)
    if code is None or inspect.ismethod(inner):
        return
    known = _functions_of_code.setdefault(code, set())
    is_new = hash(forward) not in known
    known.add(hash(forward))
    if is_new and len(known) == _TOO_MANY_OF_ONE_CODE:
        warnings.warn(
            f"forward is function number {len(known)} made of {inner.__qualname__} in {code.co_filename}, "
            f"line {code.co_firstlineno}, and programs are compiled anew for each: define the function once, "
            "outside of the code that calls this, and pass what it closes over as params",
            stacklevel=4,
        )


def require_functions(**fns: Any) -> None:
    """Refuses anything but functions and None."""
    for name, fn in fns.items():
        if fn is not None and not callable(fn):
            raise TypeError(f"{name} is {fn!r}, expected a function, or None")


def model_tokens(name: str, values: Any, least: int = 0) -> np.ndarray:
    """Converts at least `least` token ids to numpy, i32[n]; a model takes none below 0."""
    tokens = host_tokens(name, values)
    if len(tokens) < least:
        raise ValueError(f"{name} has {len(tokens)} tokens, expected at least {least}")
    if (tokens < 0).any():
        wrong = tokens.min() if np.min(values) < 0 else tokens[tokens < 0][0].astype(np.uint32)
        raise ValueError(f"{name} has the token id {wrong}, expected 0 to {_NO_LIMIT}")
    return tokens


def prompt_tokens(prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Converts each prompt to i32[n], n at least 1."""
    prompts = as_list("prompts", prompts, "prompts, each a list of token ids")
    return [model_tokens(f"prompt {i}", prompt, least=1) for i, prompt in enumerate(prompts)]


def prompt_seeds(seed: int | Sequence[int], num_prompts: int) -> list[tuple[int, int]]:
    """Pairs each prompt's seed with a number: the prompt's, if one seed serves all."""
    if isinstance(seed, int):
        return [(seed, number) for number in range(num_prompts)]
    if len(seed) != num_prompts:
        raise ValueError(f"seed has {len(seed)} values, expected one or {num_prompts}, one per prompt")
    return [(value, 0) for value in seed]


def usable_prefill_len(prefill_len: Any, config: CacheConfig) -> int:
    """Limits the tokens of one call of the model to as many as the cache takes at once."""
    return min(static_count("prefill_len", prefill_len), config.query_len_limit)


def check_num_drafts(num_drafts: int, config: CacheConfig, *others: CacheConfig) -> None:
    """Refuses more drafts than a step of the cache takes, or than windows of any cache take back."""
    if num_drafts >= config.query_len_limit:
        raise ValueError(
            f"num_drafts is {num_drafts}, expected below max_query_len = {config.query_len_limit}"
        )
    for each in (config, *others):
        for group in each.groups:
            limit = group.span.rollback_limit
            if limit is not None and limit < num_drafts:
                layer = group.layer_ids[0]
                raise ValueError(
                    f"num_drafts is {num_drafts} and layers[{layer}] is {each.layers[layer].label} with "
                    f"max_rollback = {limit}, expected max_rollback={num_drafts} there, or fewer drafts"
                )


@explicit_transfers
def stop_ids(stop_tokens: Sequence[int]) -> jax.Array:
    """Converts the stop tokens to i32[any]; without any, to -1, which no token has."""
    ids = model_tokens("stop_tokens", stop_tokens)
    return jnp.asarray(ids if len(ids) else [-1], jnp.int32)
