"""Events on a socket: numbered, sent again on request, in the bytes that subscribers of vLLM decode."""

import contextlib
import dataclasses
import queue
import struct
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.processes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    IndexFollower,
)
from tests.processes.router import Router, texts_of
from tests.support.prefix_user import CONFIG, PrefixUser

msgspec, zmq = pytest.importorskip("msgspec"), pytest.importorskip("zmq")


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """As subscribers declare them: the tag first, then the fields in their order."""


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


NAMESPACE = "01" * 16
EVENTS = [
    BlockStored((2**64 - 1, 3), None, (1, 2, 3, 4), 2, "GPU", ""),
    BlockStored((5,), 3, (5, 6), 2, "CPU", NAMESPACE),
    BlockRemoved((3, 5), "GPU"),
    AllBlocksCleared(),
]
DECODED = [
    Stored([2**64 - 1, 3], None, [1, 2, 3, 4], 2, None, "GPU", None),
    Stored([5], 3, [5, 6], 2, None, "CPU", None, [[NAMESPACE]]),
    Removed([3, 5], "GPU"),
    Cleared(),
]


def decoded(payload):
    return msgspec.msgpack.decode(payload, type=Batch)


def received(socket):
    assert socket.poll(20_000), "nothing came within 20 s"
    return socket.recv_multipart()


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def subscribed(context, publisher, topic=""):
    """Subscribes, and sends until the subscription has arrived."""
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    socket.subscribe(topic)
    socket.connect(publisher.endpoint)
    for _ in range(500):
        publisher.publish([AllBlocksCleared()])
        if socket.poll(20):
            return socket
    raise AssertionError("no message came in 10 s")


@contextlib.contextmanager
def asking(context, publisher, *firsts):
    """Asks for all messages from some numbers on, one after the other."""
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.replay_endpoint)
        for first in firsts:
            socket.send_multipart((b"", struct.pack(">q", first)))
        yield socket


def answer(socket):
    found = []
    while True:
        empty, number, payload = received(socket)
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


def replayed(context, publisher, first, reads_after=0.0):
    with asking(context, publisher, first) as socket:
        time.sleep(reads_after)
        return answer(socket)


def test_a_subscriber_decodes_what_was_published_and_gets_again_what_it_missed(context):
    address = "tcp://127.0.0.1:*"
    with EventPublisher(address, replay=address, topic="kv", rank=3, max_batches=1000) as publisher:
        with subscribed(context, publisher, "kv") as socket:
            publisher.publish([])  # is no batch
            publisher.publish(EVENTS)
            publisher.publish(EVENTS[2:3], 2)  # of the third shard of rows
            messages = []
            while not messages or decoded(messages[-1][2]).events != DECODED[2:3]:
                messages.append(received(socket))
        topics, numbers, payloads = zip(*messages, strict=True)
        numbers = [int.from_bytes(number, "big") for number in numbers]
        assert {*topics} == {b"kv"} and numbers == [*range(numbers[0], numbers[-1] + 1)]
        assert decoded(payloads[-2]).events == DECODED and decoded(payloads[-2]).data_parallel_rank == 3
        assert decoded(payloads[-1]).data_parallel_rank == 5
        again = replayed(context, publisher, numbers[-2])
        assert again == [*zip(numbers[-2:], payloads[-2:], strict=True)]
        everything = replayed(context, publisher, 0)
        assert [number for number, _ in everything] == [*range(numbers[-1] + 1)]
        assert replayed(context, publisher, numbers[-1] + 1) == []
        with pytest.raises(OSError, match=r"cannot be bound \(.*\), expected a free address"):
            EventPublisher(publisher.endpoint)
    with pytest.raises(RuntimeError, match="the publisher is closed"):
        publisher.publish(EVENTS)


def test_a_replay_is_whole_for_a_client_that_reads_late(context):
    """Of more messages than a socket queues by itself, and of more bytes than the network takes at once."""
    event = BlockStored((1,), None, (70_000,) * 2000, 2000, "GPU", "")
    with EventPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher:
        for nth in range(6000):
            publisher.publish([event._replace(block_hashes=(nth,))])
        publisher.publish([AllBlocksCleared()])
        while publisher._number < 6001:
            time.sleep(0.01)
        found = replayed(context, publisher, 0, reads_after=1.0)
    assert [number for number, _ in found] == [*range(6001)]


def test_a_client_that_asks_three_times_at_once_gets_three_answers(context):
    """Of more messages than it and the network take; one that goes meanwhile leaves nothing."""
    event, address = BlockStored((1,), None, (70_000,) * 2000, 2000, "GPU", ""), "tcp://127.0.0.1:*"
    with EventPublisher(address, replay=address, max_batches=2000) as publisher:
        for _ in range(2000):
            publisher.publish([event])
        while publisher._number < 2000:
            time.sleep(0.01)
        with asking(context, publisher, 0, 0, 0):
            while not publisher._answers:
                time.sleep(0.01)
        with asking(context, publisher, 0, 1999, 0) as socket:
            time.sleep(0.5)
            found = [[number for number, _ in answer(socket)] for _ in range(3)]
        assert found == [[*range(2000)], [1999], [*range(2000)]]
        end = time.monotonic() + 5
        while publisher._answers and time.monotonic() < end:
            time.sleep(0.01)
        assert not publisher._answers


def test_closing_sends_what_a_client_asked_for_and_is_reading(context):
    event, address = BlockStored((1,), None, (70_000,) * 2000, 2000, "GPU", ""), "tcp://127.0.0.1:*"
    with contextlib.ExitStack() as stack:
        with EventPublisher(address, replay=address, max_batches=2500) as publisher:
            for _ in range(2500):
                publisher.publish([event])
            while publisher._number < 2500:
                time.sleep(0.01)
            socket = stack.enter_context(asking(context, publisher, 0))
            while not publisher._answers:
                time.sleep(0.01)
            closing = threading.Thread(target=publisher.close)
            closing.start()
            assert len(answer(socket)) == 2500
            closing.join()


def test_the_last_batches_alone_are_kept(context):
    with EventPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", max_batches=4) as publisher:
        with subscribed(context, publisher) as socket:
            for nth in range(9):
                publisher.publish([BlockRemoved((nth,), "GPU")])
                while decoded(received(socket)[2]).events != [Removed([nth], "GPU")]:
                    pass
            kept = [decoded(payload).events[0].block_hashes for _, payload in replayed(context, publisher, 0)]
    assert kept == [[5], [6], [7], [8]]


@pytest.mark.slow
def test_events_that_are_replayed_from_the_start_rebuild_the_index_after_10_000_requests(context):
    """Four at a time, which begin alike; their blocks are evicted again and again."""
    config = kv.CacheConfig(
        [kv.FullAttention(1, 5)],
        num_blocks=24,
        block_size=2,
        max_seqs=4,
        max_seq_len=10,
        enable_prefix_caching=True,
    )

    @jax.jit
    def serve(cache, tokens):
        rows, lengths = jnp.arange(4), jnp.full(4, 10)
        cache, admission = kv.allocate(cache, rows, lengths, tokens=tokens)
        new = jax.vmap(jnp.roll)(tokens, -admission.num_cached)
        cache, _ = kv.extend(cache, lengths - admission.num_cached, max_new=10, tokens=new)
        return kv.free(kv.commit(cache)[0], rows)[0]

    rng, cache, address, end = np.random.default_rng(0), kv.init(config), "tcp://127.0.0.1:*", Removed([], "")
    with EventPublisher(address, replay=address) as publisher:
        for nth in range(2500):
            cache = serve(cache, rng.integers(0, 3, (4, 10)).astype(np.int32))
            if nth % 2:  # two calls between two looks, as a dispatch has several steps
                publisher.look(cache)
        publisher.publish([BlockRemoved((), "")])
        batches = []
        while not batches or batches[-1].events != [end]:
            batches = [decoded(payload) for _, payload in replayed(context, publisher, 0)]
    router = Router()
    for batch in batches[:-1]:
        router.apply(map(told, batch.events))
    assert router.texts() == texts_of(cache) and len(router.blocks["GPU"]) > 15
    assert len(batches) > 1000 and int(kv.stats(cache).num_evictions) > 10_000


def told(event):
    """A decoded event as the library tells it."""
    match event:
        case Stored():
            parts = tuple(event.block_hashes), event.parent_block_hash, tuple(event.token_ids)
            return BlockStored(*parts, event.block_size, event.medium, "")
        case Removed():
            return BlockRemoved(tuple(event.block_hashes), event.medium)
    return AllBlocksCleared()


def test_subscribers_are_told_of_all_blocks_again_after_some_were_not_sent(monkeypatch):
    user, sent = PrefixUser(CONFIG), []
    with EventPublisher("tcp://127.0.0.1:*") as publisher:
        for start, is_full in ((1, False), (2, True), (3, True), (4, False), (4, False)):

            def publish(events, shard, is_full=is_full):
                if is_full:
                    raise queue.Full
                sent.append(events)

            monkeypatch.setattr(publisher, "publish", publish)
            user.start(0, user.new_text(start, 9))
            user.free(0)
            publisher.look(user.cache)
    assert sent[1:] == [[AllBlocksCleared(), *IndexFollower().update(user.cache)], []]
    assert sum(len(event.block_hashes) for event in sent[1][1:]) == 4 * 2


def test_another_engine_begins_anew_and_goes_on_after_the_end(monkeypatch):
    """Its config is another one; subscribers knew the blocks of the engine before."""
    user, router, told = PrefixUser(CONFIG), Router(), []
    user.start(0, user.new_text(1, 9))
    empty = kv.init(dataclasses.replace(CONFIG, num_blocks=7))
    with EventPublisher("tcp://127.0.0.1:*") as publisher:
        monkeypatch.setattr(publisher, "publish", lambda events, shard: told.append(events))
        for cache in (user.cache, user.cache, empty):
            publisher.begin(cache.config)
            publisher.look(cache)
            assert (AllBlocksCleared() in told[-1]) == (len(told) > 1)
            router.apply(told[-1])
            assert router.texts() == texts_of(cache) and bool(router.texts()) == (cache is user.cache)
        monkeypatch.undo()
    publisher.begin(CONFIG)
    publisher.look(user.cache)
    assert publisher._waiting.empty()


def test_a_client_that_asks_without_end_keeps_no_event_from_others():
    class Asked:
        """Of a client that has always sent more, until it ends."""

        has_ended, num_asked = False, 0

        def poll(self, timeout):
            return not self.has_ended

        def recv_multipart(self):
            self.num_asked += 1
            return [b"client", b"nothing"]

    publisher, asked = EventPublisher("tcp://127.0.0.1:*"), Asked()
    publisher._replay = asked
    while asked.num_asked < 100:
        time.sleep(0.01)
    publisher.publish([AllBlocksCleared()])
    end = time.monotonic() + 2
    while publisher._number < 1 and time.monotonic() < end:
        time.sleep(0.01)
    number, asked.has_ended = publisher._number, True
    publisher.close()
    assert number == 1


def test_bad_input_is_refused_by_name():
    address = "tcp://127.0.0.1:*"
    for options, error, match in (
        ({"endpoint": 5557}, TypeError, "endpoint is 5557, expected a string"),
        ({"replay": 5558}, TypeError, "replay is 5558, expected a string"),
        ({"topic": b"kv"}, TypeError, "topic is b'kv', expected a string"),
        ({"rank": "first"}, TypeError, "rank is 'first', expected an integer"),
        ({"rank": -1}, ValueError, "rank is -1, expected at least 0"),
        ({"max_batches": 0}, ValueError, "max_batches is 0, expected at least 1"),
    ):
        with pytest.raises(error, match=match):
            EventPublisher(**{"endpoint": address} | options)
    with EventPublisher(address, rank=np.int32(3)) as publisher:  # type: ignore
        for events in (EVENTS[0], [["AllBlocksCleared"]]):
            with pytest.raises(TypeError, match=r"events(\[0\])? is .*, expected"):
                publisher.publish(events)  # type: ignore
        publisher.publish(EVENTS)
        with pytest.raises(
            ValueError, match="an EventPublisher is attached to an engine without prefix cach"
        ):
            publisher.begin(kv.CacheConfig([kv.FullAttention(1, 5)], max_seqs=1, max_seq_len=8))


def test_an_absent_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ImportError, match=r"needs zmq, of the extra `events`: pip install"):
        EventPublisher("tcp://127.0.0.1:*")
