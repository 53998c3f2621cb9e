"""Lists the files of the library that a call of a public operation reaches, those that a reader must open.

    python -m tests.reached_files              # all operations
    python -m tests.reached_files fork extend
    python -m tests.reached_files --markdown   # the table for docs/measured.md

The cache has full attention, no prefix cache and no kernels. A file is reached when one of its functions
runs, also while jax traces. What every operation needs is set apart: checks of arguments, masked updates, the
state, its configuration, status and the names of backends. Exit status 1 if an operation reaches more files
than `MOST` allows.
"""

import argparse
import dataclasses
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import kvcache_jax as kv

FOLDER = pathlib.Path(kv.__file__).resolve().parent
APART = (
    "arrays/",
    "layers/",
    "core/arguments.py",
    "core/backends.py",
    "core/cache_checks.py",
    "core/cache_form.py",
    "core/config.py",
    "core/counter.py",
    "core/extras.py",
    "core/holes.py",
    "core/state.py",
    "core/status.py",
    "core/token_arguments.py",
    "core/verdicts.py",
)
"""Files, and folders, that are set apart."""
MOST = {"fork": 3, "extend": 6, "commit": 7, "a chunk": 14, "scores, compress": 12}
"""Files that an operation may reach, without those that are set apart."""
CONFIG = kv.CacheConfig(
    [kv.FullAttention(num_kv_heads=1, head_dim=8)], num_blocks=8, block_size=4, max_seqs=4, max_seq_len=16
)


@dataclasses.dataclass(frozen=True)
class Reached:
    """Files of the library by their paths in it, in the order of their first call.

    Attributes:
      files: Those that say what the operation does.
      apart: Those that every operation needs.
    """

    files: tuple[str, ...]
    apart: tuple[str, ...]


def reached_by(call: Callable[[], object]) -> Reached:
    """Runs `call` and returns what it reached, without what jax has traced before and finds again."""
    found = {}

    def note(frame: types.FrameType, event: str, _: object) -> None:
        # The bodies of modules and classes, which an import within a function runs, are no functions.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.setdefault(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    paths = [pathlib.Path(name).resolve() for name in found]
    names = [path.relative_to(FOLDER).as_posix() for path in paths if path.is_relative_to(FOLDER)]
    apart = tuple(name for name in names if name.startswith(APART))
    return Reached(tuple(name for name in names if name not in apart), apart)


def calls() -> dict[str, Callable[[], object]]:
    """Returns a call of each public operation, on a cache with a row of 6 tokens."""
    cache, _ = kv.allocate(kv.init(CONFIG), jnp.array([0]), jnp.array([6]))
    cache, step = kv.extend(cache, jnp.array([6, 0, 0, 0]), max_new=6)
    k = jnp.ones((4, 6, 1, 8))
    row, other, one = jnp.array([0]), jnp.array([1]), jnp.array([1])
    return {
        "init": lambda: kv.init(CONFIG),
        "allocate": lambda: kv.allocate(cache, other, jnp.array([5])),
        "extend": lambda: kv.extend(cache, jnp.array([1, 0, 0, 0]), max_new=1),
        "fork": lambda: kv.fork(cache, row, other),
        "reorder": lambda: kv.reorder(cache, row, row),
        "truncate": lambda: kv.truncate(cache, row, jnp.array([3])),
        "free": lambda: kv.free(cache, row),
        "touch": lambda: kv.touch(cache, row),
        "set_priority": lambda: kv.set_priority(cache, row, one),
        "write": lambda: kv.write(cache, 0, k, k, step),
        "attend": lambda: kv.attend(cache, 0, k, step),
        "attention": lambda: kv.attention(cache, 0, k, k, k, step),
        "append": lambda: kv.append(cache, k[None, :, :1], k[None, :, :1], jnp.array([1, 0, 0, 0])),
        "gather": lambda: kv.gather(cache, jnp.array(0), 0),
        "stats": lambda: kv.stats(cache),
    }


def stories() -> dict[str, Callable[[], object]]:
    """Returns what takes several calls: a commit of a prompt, a chunk's whole life, scores and `compress`."""
    chunked, dropping, indexed = (
        dataclasses.replace(CONFIG, **options)
        for options in (
            {"extras": [kv.chunks.Store(2, 8)]},
            {"extras": [kv.compression.Dropping()]},
            {"enable_prefix_caching": True},
        )
    )
    tokens, row, other = jnp.arange(6)[None], jnp.array([0]), jnp.array([1])

    def started(config: kv.CacheConfig) -> tuple[kv.Cache, kv.Step]:
        prompts = jnp.broadcast_to(tokens, (4, 6)) + jnp.arange(4)[:, None]
        cache, _ = kv.allocate(kv.init(config), jnp.array([0, 1]), jnp.array([6, 1]), tokens=prompts[:2])
        return kv.extend(cache, jnp.array([6, 0, 0, 0]), max_new=6, tokens=prompts)

    def chunk() -> object:
        cache, stored = kv.chunks.store(first, row, jnp.array([0]), jnp.array([6]), tokens)
        found = kv.chunks.find(cache, tokens, jnp.array([6]))[:, None]
        cache, _ = kv.chunks.compose(cache, other, found, jnp.array([[0]]), rotate=None)
        known = kv.chunks.metadata(cache, found, jnp.array([[1]]))
        places = kv.chunks.select_tokens("first", known, [2], max_select=2)
        return stored, kv.rewrite(cache, other, jnp.minimum(places, 1))

    def compress() -> object:
        scores = kv.compression.token_scores(filled, 0, jnp.ones((4, 6, 1, 8)), step, "tova")
        return kv.compression.compress(filled, row, scores[:1, 0], jnp.array([3]))

    first, _ = started(chunked)
    filled, step = started(dropping)
    published, _ = started(indexed)
    return {"commit": lambda: kv.commit(published, row), "a chunk": chunk, "scores, compress": compress}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lists the files that a call of an operation reaches.")
    parser.add_argument("operations", nargs="*", metavar="operation", help="of the public ones; default: all")
    parser.add_argument("--markdown", action="store_true", help="print a table")
    options = parser.parse_args(arguments)
    by_name = calls()
    if not options.operations or {*options.operations} - {*by_name}:
        by_name |= stories()
    names = options.operations or list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"{', '.join(unknown)}: expected names among {', '.join(by_name)}")
    if options.markdown:
        print("| operation | files | at most | with those set apart | names |")
        print("| --- | --: | --: | --: | --- |")
    failed = False
    for name in names:
        jax.clear_caches()
        reached, most = reached_by(by_name[name]), MOST.get(name)
        num_files, num_all = len(reached.files), len(reached.files) + len(reached.apart)
        failed |= most is not None and num_files > most
        if options.markdown:
            cells = name, num_files, "" if most is None else most, num_all, ", ".join(reached.files)
            print("| " + " | ".join(map(str, cells)) + " |")
            continue
        limit = "" if most is None else f", at most {most}"
        print(f"{name}: {num_files}{limit}; {num_all} with those set apart")
        print(*(f"    {file}" for file in reached.files), sep="\n")
        print(f"    apart: {', '.join(reached.apart)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
