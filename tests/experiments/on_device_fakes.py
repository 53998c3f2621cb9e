"""A part of `experiments.first_gpu_run` with made-up sides, which end, hang and break as they are told to.

    python -m tests.experiments.on_device_fakes FOLDER SIDE=ENTRY,ACT,STEP ... [options of parts]

SIDE is "data" where the contest itself acts, and ENTRY "*" for all; "start=ACT,ACT" says what each start
does, the last also those that follow. They are counted in FOLDER.
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

from experiments.on_device.contests import Contest, Program, Side, hold, say

ENTRIES, SIDES = ("one", "two", "three", "four"), ("ours", "peer", "other peer")
is_lost = False


def act(told):
    global is_lost
    if told == "abort":
        os.abort()
    elif told == "exit":
        raise SystemExit("the peer does not support this")
    elif told == "leave":
        os._exit(3)
    elif told == "hang":
        time.sleep(600)
    elif told == "raise":
        raise RuntimeError("it does not work")
    elif told == "refuse":
        print("python -m parts: jax runs on cpu here", file=sys.stderr)
        os._exit(2)
    is_lost |= told == "lose"
    if is_lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("acts", nargs="*")
    parser.add_argument("--resume", type=json.loads)
    options, _ = parser.parse_known_args()
    acts = dict(told.split("=") for told in options.acts)

    def obey(side, name, step):
        entry, what, at = acts.get(side, "no,act,step").split(",")
        act(what if entry in (name, "*") and at == step else "")

    def prepare(side, name, _):
        num_runs = 0

        def run():
            nonlocal num_runs
            num_runs += 1
            obey(side, name, {1: "launch", 3: "sample"}.get(num_runs, ""))
            time.sleep(0.001)

        obey(side, name, "prepare")
        return Program(run, lambda _: None, lambda _: None, note=str(os.getpid()))

    made = []

    def make(name):
        made.append(name)
        obey("data", name, "data")
        sides = [Side(side, functools.partial(prepare, side, name), side == "ours") for side in SIDES]
        return Contest(name, 10**9, lambda _: 0.0, 0.0, 2), sides

    starts = acts.get("start", "").split(",")
    with (options.folder / "starts").open("ab") as file:
        file.write(b".")
        nth = file.tell()
    act(starts[min(nth, len(starts)) - 1])
    say(environment={"device": {"name": "Fake GPU"}, "jax": "0"}, names=ENTRIES)
    makers = {name: functools.partial(make, name) for name in ENTRIES}
    hold(makers, 0.0, options.resume, lambda: act(""), lambda: obey("data", made[-1], "clean"))


if __name__ == "__main__":
    main()
