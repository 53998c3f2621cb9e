"""Replicas of an engine on Ray Serve, with OpenAI's protocol in front of them.

Command: python -m experiments.fleet.deployment [--replicas N] [--router POLICY] [--store DIR]
  and the options of experiments.server

A request goes to the replica that `kvcache_jax.processes.choose_replica` names. The router knows the blocks
of each from what the replica tells Ray twice a second, and from what it has sent since. Where a replica is
lost, its requests go on in another one, after the tokens that were told. With --store replicas save what
they compute, and find what another one did. /metrics are sums over the replicas.

Needs the extra `serve`; `make fleet` tries it.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Hashable, Sequence
from pathlib import Path
from typing import Any

try:
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
    from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise SystemExit(
        f"replicas on Ray Serve need {error.name}: pip install -e '.[serve]' in a clone"
    ) from None

import kvcache_jax as kv
from experiments.common import command, compiled_programs
from experiments.fleet.__main__ import POLICIES
from experiments.fleet.routing import STATS_S, Knowledge, Summary, rest_of, total
from experiments.server import __main__ as server
from experiments.server.app import make_app
from experiments.server.engine_thread import Channel, EngineThread, Stopped
from models.checkpoint import CheckpointError

MOST_LOSSES = 8
"""Replicas that a request may lose."""


class EngineReplica:
    """An engine in a process of its own."""

    def __init__(self, options: argparse.Namespace):
        compiled_programs.keep()  # one that takes the place of another starts sooner
        engine = server.make_engine(options)
        self._summary = Summary()
        engine.attach(self._summary)
        if options.store is not None:
            weights = kv.tiers.digest(engine.params, (options.checkpoint / "config.json").read_bytes())
            engine.attach(kv.tiers.AttachedStore(kv.tiers.DirectoryStore(options.store), weights=weights))
        self._thread = EngineThread(engine)
        self._thread.start()

    async def generate(self, request: kv.GenerationRequest) -> AsyncIterator[kv.engine.TokenEvent]:
        """Yields the events of a request; to leave cancels it."""
        channel = Channel(self._thread, [request])
        try:
            if not await self._thread.submit(channel):
                raise Stopped("the queue is full")
            async for event in channel.events():
                yield event
        finally:
            channel.close()

    async def status(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "metrics": await self._thread.metrics()}

    def record_routing_stats(self) -> dict[str, Any]:
        """Answers Ray, which hands it to the router."""
        return self._summary.stats

    def check_health(self) -> None:
        """Has Ray replace a replica whose engine failed for good."""
        if self._thread.end is not None:
            raise RuntimeError(self._thread.end)


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that a policy names; a call without one goes to any."""

    def initialize_state(self, block_size: int, policy: str) -> None:
        self._knowledge = Knowledge(block_size, policy)

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        """Ranks replicas; the others are for when the first has no room."""
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        stats = {name: replica.routing_stats for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._knowledge.rank(pending_request.args[0], stats)]

    def on_request_routed(self, pending_request, replica_id, result) -> None:
        """Counts what a replica has to do, and what it is about to hold."""
        if pending_request.args:
            replica = self.curr_replicas.get(replica_id)
            number, stats = (
                pending_request.metadata.internal_request_id,
                replica.routing_stats if replica else {},
            )
            self._knowledge.send(pending_request.args[0], number, replica_id.unique_id, stats)

    def on_request_completed(self, replica_id, internal_request_id) -> None:
        self._knowledge.end(internal_request_id)


class Fleet:
    """The replicas, as the server sees an engine's thread; of one event loop."""

    end = None

    def __init__(self, engines: Any):
        self._engines = engines
        self._tasks: dict[Hashable, asyncio.Task] = {}

    def start(self) -> None:
        """Does nothing: Ray starts replicas."""

    stop = close = start

    async def submit(self, channel: Channel) -> bool:
        """Sends the requests of a channel to replicas, each to its own."""
        for request in channel.requests:
            task = asyncio.create_task(self._serve(request, channel))
            self._tasks[request.id] = task
            task.add_done_callback(lambda _, name=request.id: self._tasks.pop(name, None))
        return True

    def cancel(self, requests: Sequence[kv.GenerationRequest]) -> None:
        for request in requests:
            if task := self._tasks.get(request.id):
                task.cancel()

    async def metrics(self) -> dict[str, Any]:
        found = await self._engines.broadcast("status").results_async(return_exceptions=True)
        return total([each["metrics"] for each in found if not isinstance(each, Exception)])

    async def view(self) -> dict[str, Any]:
        """Returns metrics alone: rows and blocks are of each replica."""
        metrics = {
            name: value for name, value in (await self.metrics()).items() if isinstance(value, int | float)
        }
        return {"metrics": metrics, "groups": [], "rows": [], "waiting": []}

    async def _serve(self, request: kv.GenerationRequest, channel: Channel) -> None:
        told: list[int] = []
        try:
            for _ in range(MOST_LOSSES):
                rest = rest_of(request, told)
                if rest is None:
                    break
                if isinstance(rest, kv.engine.TokenEvent):
                    return channel.put(rest)
                answer = self._engines.options(stream=True).generate.remote(rest)
                # Where the replica is lost, another one goes on.
                with contextlib.suppress(RayActorError):
                    try:
                        async for event in answer:
                            told += event.tokens
                            channel.put(_of_prompt(event, len(request.prompt)))
                        return
                    except asyncio.CancelledError:
                        answer.cancel()
                        raise
            channel.put(Stopped("the request's replica was lost"))
        except Exception as error:  # a client that waits is always told
            channel.put(Stopped(f"the request failed: {getattr(error, 'cause', None) or error}"))


def _of_prompt(event: kv.engine.TokenEvent, num_tokens: int) -> kv.engine.TokenEvent:
    """Counts no token of the answer as one of the prompt."""
    if event.num_cached_tokens is None:
        return event
    return dataclasses.replace(event, num_cached_tokens=min(event.num_cached_tokens, num_tokens))


class Front:
    """OpenAI's protocol over HTTP, for `serve.ingress`."""

    def __init__(self, engines: Any, options: argparse.Namespace):
        self._service = server.make_service(options, thread=Fleet(engines))

    def __serve_build_asgi_app__(self):
        return make_app(self._service)


def make_application(options: argparse.Namespace) -> Any:
    routed = RequestRouterConfig(
        request_router_class=f"{PrefixRouter.__module__}:{PrefixRouter.__name__}",
        request_router_kwargs={"block_size": options.block_size, "policy": options.router},
        request_routing_stats_period_s=STATS_S,
    )
    engines = serve.deployment(EngineReplica).options(
        num_replicas=options.replicas,
        max_ongoing_requests=options.rows + options.queue,
        request_router_config=routed,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        health_check_period_s=1,
        graceful_shutdown_timeout_s=1,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        max_ongoing_requests=options.replicas * (options.rows + options.queue),
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(engines.bind(options), options)


def make_parser() -> command.Parser:
    parser = server.make_parser()
    add = parser.add_argument
    parser.count("--replicas", 2)
    add("--router", choices=POLICIES, default="cost", help="policy of the router; default: %(default)s")
    add("--store", type=Path, metavar="DIR", help="that replicas save to and find prompts in")
    add("--cpus", type=command.number(0), default=0.5, metavar="N", help="of a replica; default: %(default)s")
    add("--gpus", type=command.number(0), default=0, metavar="N", help="of a replica; default: %(default)s")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    with parser.refusing(CheckpointError):
        server.load_tokenizer(options)  # a missing checkpoint is a sentence here, and not one per replica
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(make_application(options), blocking=True)
    return 0


if __name__ == "__main__":
    from experiments.fleet import deployment  # whose classes workers find by their names

    command.run(deployment.main)
