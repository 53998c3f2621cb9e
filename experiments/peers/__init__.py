"""Other projects' cache managers, timed on the same machine in the same run.

Each module is run alone, with one argument, the sizes as JSON, and prints one JSON object on its last
line: `{"peer": ..., "records": [...]}`, or `{"peer": ..., "skipped": reason}`. Of ours it imports `timing`
alone, so that it also runs under an interpreter in which only the peer is installed (`--peers-python`).
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PEERS = {"vllm": "experiments.peers.vllm_manager", "levanter": "experiments.peers.levanter_pager"}


def run_peers(sizes: dict, pythons: Sequence[str]) -> list[dict]:
    """Each peer in a process of its own, under the first interpreter that can import it."""
    return [_run_peer(peer, sizes, (sys.executable, *pythons)) for peer in PEERS]


def _run_peer(peer: str, sizes: dict, pythons: Sequence[str]) -> dict:
    reasons = []
    for python in pythons:
        command = [python, "-m", PEERS[peer], json.dumps(sizes)]
        root = Path(__file__).resolve().parents[2]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=90, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{_name(python)}: {error}")
            continue
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            report = json.loads(lines[-1])
            if "records" in report:
                return report
            reasons.append(f"{_name(python)}: {report['skipped']}")
        else:
            reasons.append(f"{_name(python)}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return {"peer": peer, "skipped": "; ".join(reasons)}


def _name(python: str) -> str:
    return "here" if python == sys.executable else python
