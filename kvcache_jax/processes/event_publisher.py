"""Events on a socket, in the format of vLLM, which gateways that route by prefixes read."""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.core.attachment import Attachment, require_prefix_caching, shard_of
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.processes.index_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    IndexEvent,
    IndexFollower,
    require_events,
)

_END = b"\xff" * 8  # -1
_POLL_SECONDS, _SOON_SECONDS = 0.02, 0.001
_LINGER_SECONDS = 1.0
"""Time that closing gives the network, and clients to read more."""
_MOST_REQUESTS = 64
"""Of a client that wait for it to read, and it gets no answer to more; and of all between two messages."""


class _Closed(RuntimeError):  # noqa: N818
    """Says that a publisher is closed."""


class EventPublisher(Attachment, contextlib.AbstractContextManager):
    """A ZeroMQ publisher of batches of events, with numbers in sequence and a socket that sends them again.

    A message has three frames: the topic, the number as eight bytes in big-endian order, and MessagePack of
    `[time, events, rank]`. A subscriber that missed numbers sends the first of them to the replay socket, and
    gets `(number, payload)` for each from there on, and -1 at the end. The events name tokens: bind to an
    address that only those can reach who may read prompts. A publisher is of one engine at a time; once
    another one takes it, subscribers are told of all that one's blocks.

    Attributes:
      endpoint: Address of the publisher, such as "tcp://127.0.0.1:5557"; with the port that was chosen, where
        "*" asked for a free one.
      replay_endpoint: Address of the replay socket, or None for none.

    Example:
      publisher = kv.processes.EventPublisher("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558")
      publisher.look(cache)  # or engine.attach(publisher), which calls it after each dispatch

    References:
      vLLM's `kv_events.py`, whose subscribers are llm-d, AIBrix, Dynamo and others.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        max_batches: int = 10_000,
    ):
        """Binds the sockets.

        Args:
          endpoint: Address of the publisher.
          replay: Address of the replay socket.
          topic: First frame of every message.
          rank: Of this replica, by which subscribers tell the replicas of one model apart. An engine on a
            mesh has one rank per shard of rows, from this one on: each has an index of its own.
          max_batches: Batches that are kept to be sent again, and that may wait to be sent.

        Raises:
          ImportError: the extra `events` is not installed.
          OSError: an address that is in use, or none.
          TypeError, ValueError: an address or a topic that is no string, or a number that is none.
        """
        for name, text in (("endpoint", endpoint), ("replay", replay), ("topic", topic)):
            if not (isinstance(text, str) or (name == "replay" and text is None)):
                raise TypeError(f"{name} is {text!r}, expected a string")
        rank, max_batches = static_count("rank", rank, 0), static_count("max_batches", max_batches)
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ImportError(
                f"EventPublisher needs {error.name}, of the extra `events`: pip install 'kvcache_jax[events]'"
            ) from error
        self._zmq, self._encode = zmq, msgspec.msgpack.encode
        self._topic, self._rank = topic.encode(), rank
        self._waiting: queue.Queue[bytes] = queue.Queue(max_batches)
        self._sent: collections.deque[tuple[bytes, bytes]] = collections.deque(maxlen=max_batches)
        # By client the answers that it has not taken yet, the last message first.
        self._answers: dict[bytes, collections.deque[list[tuple[bytes, bytes]]]] = {}
        self._number = 0
        self._followers: dict[int, IndexFollower] = collections.defaultdict(IndexFollower)  # by shard
        self._late = set[int]()
        self._is_closing = threading.Event()
        with contextlib.ExitStack() as stack:
            self._context = stack.enter_context(self._zmq.Context())
            self._publisher, self.endpoint = self._bound(stack, self._zmq.PUB, endpoint)
            self._replay, self.replay_endpoint = None, None
            if replay is not None:
                self._replay, self.replay_endpoint = self._bound(stack, self._zmq.ROUTER, replay)
            self._stack = stack.pop_all()
        self._thread = threading.Thread(target=self._run, name="kvcache_jax events", daemon=True)
        self._thread.start()

    def look(self, cache: Cache) -> None:
        """Publishes what changed in a cache's index since the last look.

        While the network takes nothing, that is left out: then subscribers are told of all blocks again. Once
        the publisher is closed it does nothing, and the engine goes on.
        """
        shard = shard_of(cache)
        events = self._followers[shard].update(cache)
        try:
            self.publish([AllBlocksCleared(), *events] if shard in self._late else events, shard)
            self._late.discard(shard)
        except queue.Full:
            del self._followers[shard]
            self._late.add(shard)
        except _Closed:
            pass

    def begin(self, config: CacheConfig) -> None:
        """Forgets the engine before, of whose blocks subscribers were told."""
        require_prefix_caching("an EventPublisher", config)
        self._late.update(self._followers)
        self._followers.clear()

    def check_shards(self, config: CacheConfig) -> None:
        """Takes any: each shard is a rank of its own."""

    def publish(self, events: Sequence[IndexEvent], shard: int = 0) -> None:
        """Sends events of a shard as one batch, in another thread; none is no batch.

        Raises:
          TypeError: something else than events.
          RuntimeError: the publisher is closed.
          queue.Full: `max_batches` wait, for the network takes none.
        """
        events = require_events(events)
        if self._is_closing.is_set():
            raise _Closed("the publisher is closed, expected events before close()")
        if events:
            batch = [time.time(), [_fields_of(event) for event in events], self._rank + shard]
            self._waiting.put_nowait(self._encode(batch))

    def close(self) -> None:
        """Sends what waits, and closes the sockets."""
        self._is_closing.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self, stack: contextlib.ExitStack, kind: int, address: str) -> tuple[Any, str]:
        socket = stack.enter_context(self._context.socket(kind))
        socket.linger = round(1000 * _LINGER_SECONDS)
        if kind == self._zmq.ROUTER:
            # What a client does not take now waits for it, and is not left out.
            socket.router_mandatory = True
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            raise OSError(
                f"{address!r} cannot be bound ({error}), expected a free address such as 'tcp://127.0.0.1:*'"
            ) from error
        return socket, socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        # The sockets are this thread's from here on.
        with self._stack:
            while not (self._is_closing.is_set() and self._waiting.empty()):
                with contextlib.suppress(queue.Empty):
                    self._send(self._waiting.get(timeout=_POLL_SECONDS))
                # A client that asks without end keeps no event from the others.
                for _ in range(_MOST_REQUESTS):
                    if self._replay is None or not self._replay.poll(0):
                        break
                    self._answer(self._replay.recv_multipart())
                self._send_all_again()
            num_before, until = 0, 0.0
            while num_left := self._send_all_again():
                if num_left != num_before:  # clients read
                    num_before, until = num_left, time.monotonic() + _LINGER_SECONDS
                elif time.monotonic() > until:
                    break
                time.sleep(_SOON_SECONDS)

    def _send(self, payload: bytes) -> None:
        message, self._number = (self._number.to_bytes(8, "big"), payload), self._number + 1
        self._sent.append(message)
        self._publisher.send_multipart((self._topic, *message))

    def _answer(self, request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:  # of a client that speaks something else
            return
        client, _, first = request
        answers = self._answers.setdefault(client, collections.deque())
        if len(answers) < _MOST_REQUESTS:
            again = [message for message in self._sent if message[0] >= first]  # numbers as bytes
            answers.append([(_END, b""), *reversed(again)])

    def _send_all_again(self) -> int:
        """Sends all clients as much as they take now; returns the messages left."""
        for client in (*self._answers,):
            self._send_again(client)
        return sum(len(messages) for answers in self._answers.values() for messages in answers)

    def _send_again(self, client: bytes) -> None:
        """Sends a client as much as it takes now."""
        assert self._replay is not None
        answers = self._answers[client]
        try:
            while answers:
                while answers[0]:
                    self._replay.send_multipart((client, b"", *answers[0][-1]), self._zmq.NOBLOCK)
                    answers[0].pop()
                answers.popleft()
        except self._zmq.Again:
            return
        except self._zmq.ZMQError:
            pass  # it is gone
        del self._answers[client]


def _fields_of(event: IndexEvent) -> list[Any]:
    """Lists an event's tag and its fields, in the order that subscribers expect."""
    match event:
        case BlockStored():
            fields = [[*event.block_hashes], event.parent_block_hash, [*event.token_ids], event.block_size]
            fields += [None, event.medium, None]  # without the id and the name of a LoRA
            if event.namespace:
                fields.append([[event.namespace]] * len(event.block_hashes))
        case BlockRemoved():
            fields = [[*event.block_hashes], event.medium]
        case AllBlocksCleared():
            fields = []
    return [type(event).__name__, *fields]
