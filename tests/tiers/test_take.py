"""Blocks that go from one cache to another under a lease: hits that are right, or misses in bounded time."""

import collections
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.tiers.giver import _Handler
from kvcache_jax.tiers.stored_block import unpack
from tests.support.helpers import leaf_bytes
from tests.support.prefix_user import CONFIG, TENANT_A, PrefixUser

WINDOWS = dataclasses.replace(
    CONFIG, layers=[kv.SlidingWindow(1, 5, window=6, block_size=2, num_blocks=48), kv.FullAttention(1, 5)]
)
NUM_TOKENS = 17  # four blocks, and the token that the taker computes


class Recorder(kv.tiers.Giver):
    """A giver that notes what it was asked for, and may do something before it answers."""

    def __init__(self, config=CONFIG, **options):
        self.asked, self.before, self.after = collections.defaultdict(list), None, None
        super().__init__(config, weights="w", **options)

    def answer(self, epoch, number, what, keys):
        self.asked[what].append(list(keys))
        if self.before:
            self.before(what)
        status, parts = super().answer(epoch, number, what, keys)
        return status, self.after(what, parts) if self.after else parts


@pytest.fixture
def giver():
    with Recorder() as giver:
        yield giver


def offered(giver, text, config=CONFIG, namespace=None):
    """A user whose row 0 has the text, and the ticket of it; nothing more of it comes."""
    user, ticket = PrefixUser(config), giver.offer(text, namespace=namespace)
    user.start(0, text, namespace)
    giver.finish(ticket, user.cache)
    return user, ticket


def take(ticket, user, text, **options):
    user.cache, report = kv.tiers.take(ticket, user.cache, text, **{"weights": "w"} | options)
    user.check()
    return report


def text_of(start, length=NUM_TOKENS):
    return PrefixUser.new_text(None, start, length)  # type: ignore


@pytest.mark.parametrize("namespace", [None, TENANT_A], ids=["open", "tenant"])
def test_a_prompt_is_found_as_if_it_had_been_computed_here(giver, namespace):
    text = text_of(1)
    before, ticket = offered(giver, text, namespace=namespace)
    ticket = kv.tiers.Ticket(*json.loads(json.dumps(ticket)))
    user = PrefixUser(CONFIG)
    report = take(ticket, user, text, namespace=namespace)
    assert report.num_loaded == 4 and not report.reasons
    assert user.start(0, text, namespace) == 16
    assert giver.num_offers == giver.num_bytes == 0  # the lease was given back
    assert before.num_used() == 5


def test_what_the_taker_has_does_not_travel(giver):
    text = text_of(1)
    _, ticket = offered(giver, text)
    user = PrefixUser(CONFIG)
    user.start(1, text[:9])
    assert take(ticket, user, text).num_loaded == 2 and len(sum(giver.asked["get"], [])) == 2
    assert user.start(0, text) == 16


def test_blocks_travel_while_the_giver_computes_those_that_follow(giver):
    """The giver goes on once the taker asked for what there was."""
    text, source, has_read = text_of(1), PrefixUser(CONFIG), threading.Event()
    ticket, user, reports = giver.offer(text), PrefixUser(CONFIG), []
    giver.after = lambda what, parts: (what == "get" and has_read.set()) or parts
    taker = threading.Thread(target=lambda: reports.append(take(ticket, user, text, timeout=60)))
    taker.start()
    source.admit(0, text)
    try:
        for end in (8, 12, 16):
            source.append({0: text[len(source.texts[0]) : end]})
            source.commit(0)
            has_read.clear()
            giver.look(source.cache)
            assert has_read.wait(20)
    finally:
        giver.finish(ticket)
        taker.join(60)
    assert reports[0].num_loaded == 4 and not reports[0].reasons
    assert [*map(len, giver.asked["get"])] == [2, 1, 1]
    assert user.start(0, text) == 16


@pytest.mark.slow
def test_of_windows_the_tail_alone_travels():
    text = text_of(1, 41)
    with Recorder(WINDOWS) as giver:
        source, ticket = offered(giver, text, WINDOWS)
        assert int(np.asarray(source.cache.control.block_pools[0].cached.is_published).sum()) > 3
        user = PrefixUser(WINDOWS)
        assert take(ticket, user, text).num_loaded == 10 + 3  # a window of 6 sees 5 tokens before the next
        assert user.start(0, text) == 40


def test_offers_of_one_beginning_keep_it_once_and_hold_no_block(giver):
    texts = [text_of(1), [*text_of(1)[:12], *text_of(2)[12:]]]
    source, tickets = PrefixUser(CONFIG), [giver.offer(text) for text in texts]
    for row, text in enumerate(texts):
        source.start(row, text)
    giver.look(source.cache)
    size = giver.num_bytes
    source.free(0, 1)
    assert source.num_used() == 0
    giver.finish(tickets[0])
    giver.release(tickets[1])
    giver.release(tickets[1])
    assert 1.2 * giver.num_bytes < size < 1.3 * giver.num_bytes and giver.num_offers == 1  # 5 blocks, not 8
    source.start(0, text_of(3, 40))
    user = PrefixUser(CONFIG)
    assert take(tickets[0], user, texts[0]).num_loaded == 4
    assert take(tickets[1], user, texts[1]).reasons == {"LeaseEndedError": 1}


def test_a_lease_that_ended_costs_other_offers_nothing(giver):
    tickets = [offered(giver, text_of(start))[1] for start in (1, 2)]
    with Recorder() as other:
        peers = kv.tiers.PeerStore(*tickets, timeout=60)
        giver.release(tickets[0])
        keys = [[*giver._offers[tickets[1].number].names], ["0" * 64]]
        assert [*map(peers.contains, keys)] == [[True] * 4, [False]]
        giver.release(tickets[1])
        peers.expect(offered(other, text_of(3))[1])
        assert [peers.contains(each) for each in keys] == [[False] * 4, [False]]
        num_asked = len(giver.asked["contains"])
        assert peers.contains(keys[1]) == [False] and len(giver.asked["contains"]) == num_asked
        peers.release()


def test_an_offer_without_room_is_finished_short():
    text = text_of(1)
    with Recorder(max_bytes=2000) as giver:  # two blocks
        ticket, user = giver.offer(text), PrefixUser(CONFIG)
        source = PrefixUser(CONFIG)
        source.start(0, text)
        giver.look(source.cache)
        report = take(ticket, user, text)
        assert report.num_loaded == 2 and not report.reasons and giver.num_dropped == 2
        assert user.start(0, text) == 8


# --- leases, and givers that fail ---


def seconds_of(function):
    start = time.monotonic()
    return function(), time.monotonic() - start


def test_a_lease_ends_by_itself():
    with Recorder(lease=0.2) as giver:
        _, ticket = offered(giver, text_of(1))
        end = time.monotonic() + 10
        while giver.num_offers:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert giver.num_bytes == 0
        assert take(ticket, PrefixUser(CONFIG), text_of(1)).reasons == {"LeaseEndedError": 1}


def test_a_lease_that_ends_while_the_taker_reads_is_a_miss(giver):
    _, ticket = offered(giver, text_of(1))
    giver.before = lambda what: giver.release(ticket) if what == "get" else None
    user = PrefixUser(CONFIG)
    before = leaf_bytes(user.cache)
    assert take(ticket, user, text_of(1)).reasons["LeaseEndedError"] == 4
    assert leaf_bytes(user.cache) == before


@pytest.mark.parametrize("field, value", [("number", 7), ("epoch", "0" * 32)])
def test_a_ticket_of_no_offer_is_a_miss(giver, field, value):
    _, ticket = offered(giver, text_of(1))
    user = PrefixUser(CONFIG)
    assert take(ticket._replace(**{field: value}), user, text_of(1)).reasons == {"LeaseEndedError": 1}
    assert giver.num_offers == 1


def test_what_is_no_ticket_is_refused_by_name(giver):
    ticket = giver.offer(text_of(1))
    users = [
        giver.finish,
        giver.release,
        kv.tiers.PeerStore().expect,
        lambda ticket: kv.tiers.take(ticket, kv.init(CONFIG), text_of(1), weights="w"),
    ]
    for use in users:
        for bad in (ticket._replace(weights=None), 3, ticket[:5], [1] * 6):
            with pytest.raises(TypeError, match=r"^ticket is .*, expected a Ticket, or its fields in a list"):
                use(bad)
        with pytest.raises(ValueError, match="the ticket's host is 'a b', expected a name or an address"):
            use(ticket._replace(host="a b"))
    giver.release([*ticket])
    assert giver.num_offers == 0


@pytest.mark.parametrize("how", ["gone", "silent", "trickling", "trickling before all else"])
def test_a_giver_that_fails_is_a_miss_in_bounded_time(giver, how):
    _, ticket = offered(giver, text_of(1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if how == "gone":
            server.close()

        def trickle():
            taker, _ = server.accept()
            with taker:
                taker.sendall(b"HTTP/1.1 200 OK\r\n")
                if how == "trickling":
                    taker.sendall(b"Content-Length: 1000\r\n\r\n")
                while True:
                    time.sleep(0.05)
                    try:
                        taker.sendall(b" ")
                    except OSError:
                        return

        if "trickling" in how:
            threading.Thread(target=trickle, daemon=True).start()
        user = PrefixUser(CONFIG)
        report, seconds = seconds_of(lambda: take(ticket._replace(port=port), user, text_of(1), timeout=0.5))
    assert report.reasons == {"ConnectionRefusedError" if how == "gone" else "TimeoutError": 1}
    assert seconds < 5


def test_a_giver_that_hangs_costs_the_offers_of_others_one_call(giver):
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, ticket = offered(giver, text_of(1))
        peers = kv.tiers.PeerStore(ticket._replace(port=server.getsockname()[1]), ticket, timeout=0.5)
        keys, found = [*giver._offers[ticket.number].names], []
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                found.append(peers.contains(keys))
        assert found == [[False] * 4, [True] * 4]
        peers.release()


def test_a_connection_that_its_giver_ended_is_made_again(giver, monkeypatch):
    """After a while in which nothing was said; the lease goes on."""
    monkeypatch.setattr(_Handler, "timeout", 0.05)
    _, ticket = offered(giver, text_of(1))
    peers, keys = kv.tiers.PeerStore(ticket, timeout=60), [*giver._offers[ticket.number].names]
    found = []
    for ask in (peers.contains, peers.get):
        with contextlib.suppress(ConnectionError):
            ask([])
            time.sleep(0.5)
            found.append([bool(each) for each in ask(keys)])
    assert found == [[True] * 4] * 2
    peers.release()
    assert giver.num_offers == 0


def test_a_giver_that_never_finishes_is_waited_for_no_longer_than_told(giver):
    text, source = text_of(1), PrefixUser(CONFIG)
    ticket, user = giver.offer(text), PrefixUser(CONFIG)
    source.start(0, text[:9])
    giver.look(source.cache)
    report, seconds = seconds_of(lambda: take(ticket, user, text, timeout=0.5))
    assert report.num_loaded == 2 and report.reasons == {"TimeoutError": 1} and seconds < 5


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "wrong checksum"),
        (lambda data: data[:-5], "another length"),
    ],
    ids=["flipped", "short"],
)
def test_what_a_giver_says_is_verified(giver, change, reason):
    """The first block is spoilt, and those after it are dropped."""
    _, ticket = offered(giver, text_of(1))
    offer = giver._offers[ticket.number]
    first = min(offer.values, key=lambda key: unpack(offer.values[key])[0]["parent"] != "")
    offer.values[first] = change(offer.values[first])
    user = PrefixUser(CONFIG)
    report = take(ticket, user, text_of(1))
    assert report.num_loaded == 0 and any(reason in each for each in report.reasons), report
    assert user.start(0, text_of(1)) == 0


# --- other configs, and bad input ---


def num_usable(prompt, text):
    """The tokens of a prompt, but its last one, that whole blocks of a text have."""
    length = 0
    while length + 4 < min(len(prompt), len(text) + 1) and prompt[: length + 4] == text[: length + 4]:
        length += 4
    return length


PROMPTS = {
    "shorter": text_of(1)[:11],
    "a block shorter": text_of(1)[:16],
    "a whole block": text_of(1)[:4],
    "longer": [*text_of(1), *range(9)],
    "parts in a block": [*text_of(1)[:10], *text_of(2, 30)[10:]],
    "parts between blocks": [*text_of(1)[:8], *text_of(2)[8:]],
    "parts at the last token": [*text_of(1)[:16], 7],
    "parts at once": [7, *text_of(1)[1:]],
    "goes on before it": text_of(1)[4:],
    "one token": text_of(1)[:1],
    "none": [],
}


def test_a_taker_of_another_prompt_finds_what_both_begin_with(giver):
    """What its row computes and what came are compared with its own text."""
    user, hits = PrefixUser(CONFIG), {}
    for name, prompt in PROMPTS.items():
        _, ticket = offered(giver, text_of(1))
        user.cache, _ = kv.reset_prefix_cache(user.cache)
        report = take(ticket, user, prompt)
        hits[name] = 4 * report.num_loaded
        assert not report.reasons and user.lookup(prompt) == hits[name] == num_usable(prompt, text_of(1))
        if prompt:
            assert user.start(0, prompt) == hits[name]
            user.free(0)
    assert {*hits.values()} == {0, 8, 12, 16} and giver.num_offers == 0


SIZES = {
    "shorter rows": (dict(max_seq_len=16), {"BAD_LENGTH": 3}, 16),
    "longer rows": (dict(max_seq_len=200, max_seqs=2), {}, 28),
    "few blocks": (dict(num_blocks=3), {"no room": 4}, 12),
    "one block": (dict(num_blocks=1), {"no room": 6}, 4),
    "many blocks": (dict(num_blocks=300, eviction_policy="lfu", partial_hits=True), {}, 28),
    "a host": (dict(num_blocks=8, extras=[kv.tiers.Host(8)]), {}, 28),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_taker_of_other_sizes_takes_what_it_has_room_for(giver, name):
    (sizes, reasons, hit), text = SIZES[name], text_of(1, 29)
    _, ticket = offered(giver, text)
    user = PrefixUser(dataclasses.replace(CONFIG, **sizes))
    report = take(ticket, user, text)
    assert (report.reasons, 4 * report.num_loaded) == (reasons, hit)
    prompt = text[: min(user.cache.config.max_seq_len, 4 * user.cache.config.num_blocks)]
    assert user.start(0, prompt) == num_usable(prompt, text)


FULL = kv.FullAttention(1, 5)
KINDS = {
    "dtype": dict(dtype=np.float16),
    "block size": dict(block_size=2),
    "another layer": dict(layers=[FULL] * 3),
    "heads": dict(layers=[kv.FullAttention(2, 5)] * 2),
    "window": dict(layers=[kv.SlidingWindow(1, 5, window=60)] * 2),
    "a layer's block size": dict(layers=[FULL, kv.FullAttention(1, 5, block_size=8)]),
    "int8": dict(layers=[kv.Quantised(FULL, "int8")] * 2),
    "fp8": dict(layers=[kv.Quantised(FULL, "fp8")] * 2),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_taker_of_another_kind_is_refused(giver, name):
    """By `take`; of a store of tickets, which sees keys alone, it is a miss."""
    _, ticket = offered(giver, text_of(1))
    other = kv.init(dataclasses.replace(CONFIG, **KINDS[name]))
    with pytest.raises(ValueError, match="offer is of config .*, expected .* as here: take from a giver of"):
        kv.tiers.take(ticket, other, text_of(1), weights="w")
    peers = kv.tiers.PeerStore(ticket)
    _, report = kv.tiers.load(peers, other, weights="w", prompts=[text_of(1)])
    assert report == kv.tiers.StoreReport()
    peers.release()


def test_a_taker_of_other_weights_is_refused(giver):
    _, ticket = offered(giver, text_of(1))
    with pytest.raises(ValueError, match="offer is of weights w, expected x as here"):
        take(ticket, PrefixUser(CONFIG), text_of(1), weights="x")


def test_a_taker_of_another_dtype_of_equal_bytes_is_refused():
    configs = [dataclasses.replace(CONFIG, dtype=dtype) for dtype in ("float16", "bfloat16")]
    with Recorder(configs[0]) as giver, pytest.raises(ValueError, match="offer is of config"):
        kv.tiers.take(giver.offer(text_of(1)), kv.init(configs[1]), text_of(1), weights="w")


def test_a_giver_refuses_what_it_cannot_do(giver):
    for options, says in (
        (dict(lease=0), "lease is 0, expected a positive number"),
        (dict(max_bytes=0), "max_bytes is 0, expected a positive int"),
        (dict(host="0.0.0.0"), "host is '0.0.0.0', expected a name or address by which takers reach"),
        (dict(weights=""), "weights is '', expected a digest"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            kv.tiers.Giver(CONFIG, **{"weights": "w"} | options)
    with pytest.raises(OSError, match="cannot be bound .*, expected a free address"):
        kv.tiers.Giver(CONFIG, weights="w", port=giver.address[1])
    with pytest.raises(TypeError, match="prompt"):
        giver.offer(["a"])
    other = kv.init(dataclasses.replace(CONFIG, block_size=8))
    bare = dataclasses.replace(CONFIG, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="a Giver is attached to an engine without prefix caching, expected"):
        giver.begin(bare)
    for see in (lambda: giver.look(other), lambda: giver.begin(other.config)):
        with pytest.raises(ValueError, match=r"config is .* and the Giver's .*, expected Giver\("):
            see()


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/", b"[]", 400),
        ("/a/0/get", b"[", 400),
        ("/a/0/get", b"[1]", 400),
        ("/a/0/get", b"[]", 410),
        ("/{epoch}/x/get", b"[]", 410),
        ("/{epoch}/0/look", b"[]", 404),
    ],
)
def test_a_stranger_is_answered_and_harms_none(giver, path, body, status):
    user, ticket = PrefixUser(CONFIG), giver.offer(text_of(1))
    with contextlib.closing(http.client.HTTPConnection(*giver.address, timeout=10)) as connection:
        connection.request("POST", path.format(epoch=ticket.epoch), body)
        assert connection.getresponse().status == status
    user.start(0, text_of(1))
    giver.finish(ticket, user.cache)
    assert take(ticket, PrefixUser(CONFIG), text_of(1)).num_loaded == 4
