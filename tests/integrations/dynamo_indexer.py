"""Asks NVIDIA Dynamo's indexer, which subscribes to events of vLLM's format, what it knows of a cache.

Needs the wheel `ai-dynamo-runtime` in an environment of its own: `make integrations`.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import jax
import numpy as np

import kvcache_jax as kv

BLOCK_SIZE, TEXT_LEN, DEADLINE = 4, 40, 30.0
CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 8)],
    num_blocks=32,
    block_size=BLOCK_SIZE,
    max_seqs=1,
    max_seq_len=TEXT_LEN + BLOCK_SIZE,
    enable_prefix_caching=True,
)


class LossyPublisher(kv.processes.EventPublisher):
    """A publisher of which the network loses the messages with the numbers in `lost`."""

    lost = frozenset({7, 30, 31})

    def _send(self, payload):
        publisher = self._publisher
        if self._number in self.lost:
            self._publisher = self._context.socket(self._zmq.PUB)  # connected to nothing
        super()._send(payload)
        if self._publisher is not publisher:
            self._publisher.close()
            self._publisher = publisher


@jax.jit
def serve(cache, tokens, length):
    """A prompt comes and goes."""
    cache, admission = kv.allocate(cache, [0], length[None], tokens=tokens[None])
    num_new = length - admission.num_cached[0]
    new = jax.numpy.roll(tokens, -admission.num_cached[0])
    cache, _ = kv.extend(cache, num_new[None], max_new=TEXT_LEN, tokens=new[None])
    cache, _ = kv.free(kv.commit(cache)[0], [0])
    return cache, admission.num_cached[0]


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def ask(port: int, path: str, body: dict | None = None) -> dict:
    """Asks the indexer; an answer that is no JSON is {}."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def wait_for(condition, what: str):
    """Waits until a condition returns something."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{what}: not within {DEADLINE:.0f} s")


def main() -> int:
    port = free_port()
    with (
        tempfile.TemporaryFile() as log,
        LossyPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher,
    ):
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        indexer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            check(port, publisher)
        except BaseException:
            log.seek(0)
            print(log.read().decode()[-3000:])
            raise
        finally:
            indexer.terminate()
            indexer.wait(10)
    return 0


def check(port: int, publisher: LossyPublisher) -> None:
    wait_for(lambda: ask(port, "/health") is not None, "the indexer starts")
    place = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    ask(port, "/register", {"instance_id": 1, "model_name": "m", "block_size": BLOCK_SIZE, **place})

    def num_matched(text: np.ndarray) -> int:
        answer = ask(port, "/query", {"token_ids": text.tolist(), "model_name": "m"})
        return max((int(num) for ranks in answer["scores"].values() for num in ranks.values()), default=0)

    rng, cache, follower = (
        np.random.default_rng(0),
        kv.init(CONFIG, storage=False),
        kv.processes.IndexFollower(),
    )
    texts, num_cached, num_batches = rng.integers(1, 500, (6, TEXT_LEN)).astype(np.int32), 0, 0

    def draw() -> tuple[np.ndarray, int]:
        text, cut = texts[rng.integers(len(texts))].copy(), int(rng.integers(TEXT_LEN))
        text[cut:] = rng.integers(1, 500, TEXT_LEN - cut)
        return text, int(rng.integers(1, TEXT_LEN))

    def agrees() -> bool:
        known = [*texts, *(draw()[0] for _ in range(20))]
        # One token more: the whole of a prompt is never found.
        prompts = np.array([[*text, 0] for text in known], np.int32)
        expected = np.asarray(kv.lookup(cache, prompts, [TEXT_LEN + 1] * len(prompts))).tolist()
        found = [num_matched(text) for text in known]
        return found == expected and max(expected) > 0

    for nth in range(300):
        text, length = draw()
        cache, found = serve(cache, text, length)
        num_cached += int(found)
        events = follower.update(cache)
        publisher.publish(events)
        num_batches += bool(events)
        if nth % 60 == 59:
            wait_for(agrees, f"after {nth + 1} prompts the indexer knows what the cache holds")
    assert num_batches > max(publisher.lost) and num_cached > 0 and int(kv.stats(cache).num_evictions) > 100
    publisher.publish(follower.update(kv.reset_prefix_cache(cache)[0]))
    wait_for(lambda: not any(map(num_matched, texts)), "all is cleared")
    print(f"{num_batches} batches, {len(publisher.lost)} of them lost: the indexer knew what the cache held")


if __name__ == "__main__":
    raise SystemExit(main())
