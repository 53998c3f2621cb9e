"""Writers that are killed, and a store that remembers what it was given."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import kvcache_jax as kv

# A program that needs no jax: for each line that it reads it writes a pair of a key and a value from a file.
WRITER = """
import importlib.util, sys, types
for name in ("kvcache_jax", "kvcache_jax.tiers"):
    sys.modules[name] = types.ModuleType(name)
for name in ("block_store", sys.argv[4]):
    spec = importlib.util.spec_from_file_location(f"kvcache_jax.tiers.{name}", f"{sys.argv[1]}/{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
store = getattr(module, sys.argv[5])(sys.argv[2])
lines = [line.split() for line in open(sys.argv[3])]
print("up", flush=True)
for key, value in lines:
    sys.stdin.readline()
    store.put([(key, bytes.fromhex(value))])
    print(1, flush=True)
"""


class RecordingStore(kv.tiers.MemoryStore):
    """A store that remembers what it was given, in order."""

    def __init__(self):
        super().__init__()
        self.items = []

    def put(self, items):
        self.items += items
        super().put(items)


def kill_writers(make, folder, items, times, check):
    """Starts writers of `items` to the stores that `make` makes of a path, and kills each at a random moment.

    Calls `check(store)` after each; returns how many items `put` had returned from.
    """
    file, total, rng = folder / "items", 0, random.Random(times)
    names, paths = [make.__module__.rpartition(".")[2], make.__name__], {"PYTHONPATH": ":".join(sys.path)}
    file.write_text("\n".join(f"{key} {bytes(value).hex()}" for key, value in items))
    room = pathlib.Path(kv.tiers.__file__).parent
    for nth in range(times):
        path = folder / f"store {nth}"
        with subprocess.Popen(
            [sys.executable, "-S", "-c", WRITER, str(room), str(path), str(file), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | paths,
            text=True,
        ) as writer:
            assert writer.stdin is not None and writer.stdout is not None
            assert writer.stdout.readline() == "up\n"
            num = rng.randrange(len(items))
            writer.stdin.write(
                "\n" * (num + 1)
            )  # it is killed in the last of these writes, before or after it
            writer.stdin.flush()
            said = [writer.stdout.readline() for _ in range(num)]
            time.sleep(rng.uniform(0, 0.001))
            writer.send_signal(signal.SIGKILL)
            said += [line for line in writer.stdout.read().split("\n")[:-1] if line.isdigit()]
        store = make(path)
        acknowledged = [key for key, _ in items[: len(said)]]
        assert all(store.contains(acknowledged))
        total += len(acknowledged)
        check(store)
    return total
