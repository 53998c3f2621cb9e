"""A worker of `experiments.kernel_speed` with made-up sides, which end, hang and break as they are told to.

python -m tests.experiments.kernel_speed_fakes SCENARIO ...    ... is what any worker gets

SCENARIO is JSON: {"sides": {side: {entry: ACT}}, "data": {entry: ACT}, "clean": {entry: ACT},
"start": [ACT, ...], "ceilings": [entry, ...], "environment": {...}}, where an entry is one of ENTRIES or "*",
`start` has an act for each start, which are counted in the file that `starts` names, `ceilings` are entries
before the others, and `environment` changes what the report says of the machine. ACT is "WHAT" or, for a
side, "WHAT@STEP".
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

from experiments.common.command import InputError
from experiments.kernel_speed import worker
from experiments.kernel_speed.timing import Contest, Program, Side

ENTRIES = ("one", "two", "three", "four")
SIDES = ("ours", "peer", "other peer")
IS_LOST = False


def act(told: str) -> None:
    global IS_LOST
    if told == "abort":
        os.write(2, b"  what():  CUDA error: no kernel image\n")
        os.abort()
    elif told == "exit":
        raise SystemExit("the peer does not support this")
    elif told == "leave":
        os._exit(0)
    elif told == "hang":
        time.sleep(600)
    elif told == "lose":
        IS_LOST = True
    elif told == "raise":
        raise RuntimeError("it does not work")
    elif told == "refuse":
        raise InputError("jax runs on cpu here")
    elif told:
        raise ValueError(told)
    if IS_LOST:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Jobs:
    environment = {
        "device": {"name": "Fake GPU", "platform": "gpu"},
        "jax": "0",
        "date": "today",
        "revision": "abc",
    }

    def __init__(self, scenario: dict):
        self.scenario, self.now = scenario, ""
        self.environment = self.environment | scenario.get("environment", {})
        ceilings = [("entries", name) for name in scenario.get("ceilings", [])]
        self.names = [*ceilings, *(("decodes", name) for name in ENTRIES)]
        if "start" in scenario:
            counter = Path(scenario["starts"])
            counter.write_bytes(counter.read_bytes() + b"." if counter.exists() else b".")
            acts = scenario["start"]
            act(acts[min(counter.stat().st_size, len(acts)) - 1])

    def make(self, kind, name):
        self.now = name
        print("the data of", name)
        self._act("data", name)
        sides = [
            Side(side, functools.partial(self.prepare, side, name), side.startswith("ours")) for side in SIDES
        ]
        return Contest(name, 10**9, lambda _: 0.0, 0.0, 2), sides, {"block_size": 16, "pid": os.getpid()}

    def prepare(self, side, name, num_launches):
        calls = {name: told for name, told in self.scenario.get("sides", {}).get(side, {}).items()}
        told, _, step = calls.get(name, calls.get("*", "")).partition("@")
        num_runs = 0

        def run():
            nonlocal num_runs
            num_runs += 1
            act(told if step == "run" or (step == "sample" and num_runs == 3) else "")
            time.sleep(0.001)

        act(told if step == "prepare" else "")
        return Program(run, lambda _: None, lambda _: None)

    def check(self):
        act("")

    def clean(self):
        self._act("clean", self.now)

    def _act(self, when, name):
        act(self.scenario.get(when, {}).get(name, ""))


if __name__ == "__main__":
    scenario = json.loads(sys.argv[1])
    os._exit(worker.main(sys.argv[2:], lambda *_: Jobs(scenario)))
