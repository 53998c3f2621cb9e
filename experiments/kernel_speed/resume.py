"""Goes on from what earlier calls of `experiments.kernel_speed` measured; only Python.

Entries of several calls stand in one report if nothing that decides about their times has changed: the
device, the code, the versions, and who takes part. Each entry keeps the number of its call, for the ceilings
are measured in each call and a share is of those of the same call.
"""

import json
from pathlib import Path
from typing import Any

from experiments.common.command import InputError

SAME = (
    "device",
    "sources",
    "jax",
    "packages",
    "flashinfer_modules",
    "xla_flags",
    "without",
)
"""What all calls of one report share. The revision may differ: `sources` tells whether code has changed."""
MEASURED_KINDS = ("decodes", "moves", "steps")
CEILINGS = "entries"
"""Lists of a report that hold entries."""
KEPT = ("calls", CEILINGS, *MEASURED_KINDS, "skipped", "crashes")
"""Lists of a report that a later call adds to."""


def resumed(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """`report`, of a call that begins, with what the calls before it left in `path`, if there is one.

    Raises:
      InputError: The file cannot be read, or was measured otherwise.
    """
    try:
        earlier = json.loads(path.read_text())
    except FileNotFoundError:
        return report
    except (OSError, ValueError) as error:
        raise InputError(f"got --resume, but {path} cannot be read ({error}): {_BEGIN_ANEW}") from error
    if not isinstance(earlier, dict) or not all(isinstance(earlier.get(kept), list) for kept in KEPT):
        raise InputError(f"got --resume, but {path} is no report that calls can be added to: {_BEGIN_ANEW}")
    changes = [
        f"{name} was {earlier.get(name)!r} and is {report.get(name)!r}"
        for name in SAME
        if earlier.get(name) != report.get(name)
    ]
    if changes:
        raise InputError(
            f"got --resume, but {path} was measured otherwise: {'; '.join(changes)}: {_BEGIN_ANEW}"
        )
    return report | {kept: earlier[kept] for kept in KEPT}


_BEGIN_ANEW = "begin anew without --resume"


def missing(jobs: list[tuple[str, str]], report: dict[str, Any]) -> list[tuple[str, str]]:
    """Those of `jobs` that a call has to do, in their order: the ceilings, and what has no entry yet.

    None, if that would be the ceilings again and nothing else. What was skipped is not tried again.
    """
    done = {(kind, entry["name"]) for kind in MEASURED_KINDS for entry in report[kind]}
    skipped = {skipped["cell"] for skipped in report["skipped"]}
    todo = [job for job in jobs if job not in done and job[1] not in skipped]
    is_complete = report[CEILINGS] and all(kind == CEILINGS for kind, _ in todo)
    return [] if is_complete else todo
