"""Two replicas on Ray Serve, of which one is killed under load: no request is lost, prefixes are found again.

    python -m tests.integrations.fleet

Needs the extra `serve` in an environment of its own: `make fleet`.
"""

import concurrent.futures
import json
import os
import re
import signal
import socket
import tempfile
import time
import urllib.request
from pathlib import Path

import ray
from ray import serve

from experiments.fleet import deployment
from models import checkpoint
from models.tokenizer import ByteTokenizer
from tests.experiments import tiny

DEADLINE, BLOCK_SIZE, SHARED = 60.0, 16, 320
FAMILIES = [(f"{name}: " * SHARED)[:SHARED] for name in ("ash", "birch", "cedar", "date", "elm", "fir")]
NUM_TOKENS, NUM_LONG = 8, 600


class Fleet:
    """Two replicas that are asked over HTTP, with a store."""

    def __init__(self, folder: Path):
        model = folder / "tiny"
        checkpoint.save(model, tiny.decoder(**tiny.ONE_LAYER, max_seq_len=1024), ByteTokenizer())
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            self.port = opened.getsockname()[1]
        arguments = [
            "--checkpoint",
            str(model),
            "--rows",
            "4",
            "--max-len",
            "1024",
            "--block-size",
            str(BLOCK_SIZE),
        ]
        arguments += [
            "--blocks",
            "512",
            "--store",
            str(folder / "store"),
            "--cpus",
            "0.1",
            "--top-logprobs",
            "0",
        ]
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        serve.run(deployment.make_application(deployment.make_parser().parse_args(arguments)))
        self.engines = serve.get_deployment_handle("EngineReplica", "default")

    def ask(self, prompt: str, num_tokens: int, told=lambda: None) -> tuple[str, int]:
        """Streams an answer: its text, and how many tokens of the prompt were cached."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        text, usage = "", None
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data in ("", "[DONE]"):
                    continue
                event = json.loads(data)
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
                told()
        assert usage["completion_tokens"] == num_tokens, usage
        return text, usage["prompt_tokens_details"]["cached_tokens"]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=DEADLINE) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line and line[0] != "#"]
        return {re.split("[{ ]", line)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def replicas(self) -> dict[int, dict]:
        """{process: metrics} of the replicas."""
        found = self.engines.broadcast("status").results(timeout_s=DEADLINE, return_exceptions=True)
        return {each["pid"]: each["metrics"] for each in found if isinstance(each, dict)}


def wait_for(condition, what: str):
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"in {DEADLINE:.0f} s there was no {what}")
        time.sleep(0.1)
    return found


def check(fleet: Fleet) -> None:
    # Each family is sent where its beginning is, and not all to one replica.
    first = {family: fleet.ask(family + "first", NUM_TOKENS) for family in FAMILIES}
    assert not any(cached for _, cached in first.values())
    for end in ("second", "third"):
        for family in FAMILIES:
            assert fleet.ask(family + end, NUM_TOKENS)[1] == SHARED, (family, end)
    prompts = {pid: each["vllm:prompt_tokens"] for pid, each in fleet.replicas().items()}
    assert len(prompts) == 2 and min(prompts.values()) > 2 * SHARED, prompts
    print(
        f"{3 * len(FAMILIES)} prompts: the second and third of each family found {SHARED} tokens", flush=True
    )

    expected = {family: fleet.ask(family + "long", NUM_LONG)[0] for family in FAMILIES}
    num_told, killed = 0, []

    def told():
        nonlocal num_told
        num_told += 1

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        asked = [(family, pool.submit(fleet.ask, family + "long", NUM_LONG, told)) for family in FAMILIES * 4]
        wait_for(lambda: num_told > len(asked), "answer that is under way")
        running = {pid: each["vllm:num_requests_running"] for pid, each in fleet.replicas().items()}
        killed.append(max(running, key=running.__getitem__))
        os.kill(killed[0], signal.SIGKILL)
        begin, num_running = time.monotonic(), running[killed[0]]
        for family, answer in asked:
            assert answer.result(DEADLINE)[0] == expected[family], family
    assert num_running > 0, running
    seconds = time.monotonic() - begin
    print(
        f"{len(asked)} answers, {num_running:.0f} in rows of a replica that was killed: "
        f"none lost, {seconds:.1f} s"
    )

    found = [fleet.ask(family + "fourth", NUM_TOKENS)[1] for family in FAMILIES]
    assert found == [SHARED] * len(FAMILIES), found
    metrics = fleet.metrics()
    assert metrics["vllm:external_prefix_cache_hits_total"] >= SHARED, metrics
    print(
        f"in the store: {metrics['vllm:external_prefix_cache_hits_total']:.0f} tokens of prompts", flush=True
    )
    wait_for(lambda: len({*fleet.replicas()} - {*killed}) == 2, "replica in place of the one that was killed")
    print(f"a new replica after {time.monotonic() - begin:.1f} s")


def main() -> int:
    begin = time.monotonic()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=2**27,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            fleet = Fleet(Path(folder))
            print(f"up after {time.monotonic() - begin:.1f} s", flush=True)
            check(fleet)
            serve.shutdown()
    finally:
        ray.shutdown()
    print(f"all in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
