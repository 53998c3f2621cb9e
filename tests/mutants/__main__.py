"""Breaks the library on purpose, one mutation of `mutants/*.txt` at a time, and demands that a test fails.

    python -m tests.mutants                  # all of them, as `make mutants` does
    python -m tests.mutants window rollback  # those with one of these words in their names
    python -m tests.mutants --share 0/4      # the first quarter of them, by their names
    python -m tests.mutants --stale          # names those that do not fit the library any more, tries none

Each mutant is a copy of the repository with one text replaced, in a folder of its own, on which the tests
that ought to notice run, two mutants at a time. A mutant counts as killed if one of them fails by an
assertion or hangs. A mutant that survives, crashes, or whose text is not found exactly once (somebody edited
the library: adapt the mutation) is a failure; stale ones are named first, once more at the end, and do not
keep the others from being tried. Tests that already fail on the copy without a mutation are a failure of all.
"""

import argparse
import concurrent.futures
import functools
import sys
import zlib
from collections.abc import Sequence

from tests.mutants.reading import ROOT, read_all
from tests.mutants.runner import WORKERS, Copy, try_mutant, why_stale, why_unfit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Shows that every mutation of the library fails a test.")
    parser.add_argument("words", nargs="*", metavar="word", help="only mutations with it in their names")
    parser.add_argument("--share", metavar="K/N", default="0/1", help="only the K-th share of N, K from 0")
    parser.add_argument("--stale", action="store_true", help="only name those that do not fit the library")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    try:
        mutations = read_all()
    except ValueError as error:
        parser.error(str(error))
    chosen = [mutation for mutation in mutations if any(word in mutation.name for word in words)]
    if not chosen:
        parser.error(f"no mutation has {' or '.join(words)} in its name")
    index, count = map(int, options.share.split("/"))
    if not 0 <= index < count:
        parser.error(f"--share is {options.share}, expected K/N with 0 <= K < N")
    chosen = [mutation for mutation in chosen if zlib.crc32(mutation.name.encode()) % count == index]
    stale = {mutation.name: why for mutation in chosen if (why := why_stale(ROOT, mutation))}
    mutations = [mutation for mutation in chosen if mutation.name not in stale]
    print(*stale.values(), sep="\n", end="\n" if stale else "", flush=True)
    if options.stale:
        print(f"{len(stale)} of {len(chosen)} are stale")
        return int(bool(stale))
    num_killed = 0
    with Copy(ROOT) as original:
        if mutations and (error := why_unfit(original, mutations)):
            print(error)
        else:
            attempt = functools.partial(try_mutant, original.root)
            with concurrent.futures.ThreadPoolExecutor(WORKERS) as executor:
                for is_killed, line in executor.map(attempt, mutations):
                    print(line, flush=True)
                    num_killed += is_killed
    print(*stale.values(), sep="\n", end="\n" if stale else "")
    print(f"{num_killed} passed, {len(chosen) - num_killed} failed, {len(stale)} of them stale")
    return int(num_killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
