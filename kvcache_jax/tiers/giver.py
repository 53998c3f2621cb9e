"""Blocks of prompts offered to other processes for a while: prefill here, decode there."""

import collections
import contextlib
import dataclasses
import http.server
import json
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.number_checks import positive_seconds, static_count
from kvcache_jax.core import token_arguments
from kvcache_jax.core.attachment import Attachment, require_prefix_caching, shard_of
from kvcache_jax.core.config import CacheConfig, require_config
from kvcache_jax.core.state import Cache
from kvcache_jax.prefix.group_links import link_places
from kvcache_jax.tiers.block_store import checked_limit
from kvcache_jax.tiers.published import (
    Keyed,
    NamedBlocks,
    keyed_by,
    namespaces_of,
    published_block,
    read_blocks,
)
from kvcache_jax.tiers.save_blocks import (
    checked_weights,
    namespace_digits,
    read_contents,
    require_pools_alone,
    require_stored,
    scopes_of,
)
from kvcache_jax.tiers.stored_block import BlockName, Scope, config_digest, pack_block

_MOST_REQUEST_BYTES = 2**20
_MISS = -1


class Ticket(NamedTuple):
    """All that a taker needs of an offer; it goes through JSON as a list: `Ticket(*json.loads(text))`.

    Attributes:
      host: Of the giver.
      port: Of the giver.
      epoch: Names the giver's process; one that was started later at the same address is another.
      number: Of the offer.
      weights: Digest of the weights.
      config: Digest of the config, whose sizes of pools and tables do not count.
    """

    host: str
    port: int
    epoch: str
    number: int
    weights: str
    config: str


def as_ticket(ticket: Any) -> Ticket:
    """Takes a ticket, also as the list that JSON makes of it."""
    try:
        found = Ticket(*ticket)
    except TypeError:
        found = None
    kinds = Ticket.__annotations__.values()
    if found is None or not all(map(isinstance, found, kinds)):
        raise TypeError(f"ticket is {ticket!r}, expected a Ticket, or its fields in a list")
    if not found.host.isprintable() or " " in found.host:
        raise ValueError(f"the ticket's host is {found.host!r}, expected a name or an address")
    return found


@dataclasses.dataclass
class _Offer:
    """A prompt's blocks as bytes by key, and when its lease ends."""

    names: dict[str, BlockName]  # of the group that prefixes are found by, in the prompt's order
    ends_at: float
    is_whole: bool = False
    values: dict[str, bytes] = dataclasses.field(default_factory=dict)


class Giver(Attachment):
    """Offers the blocks of prompts, and gives them to takers until a lease ends: `engine.attach(giver)`.

    What is given are copies in host memory, made as pieces of a prompt are published, so an offer holds no
    block of the cache, and a taker that dies, stops or comes late costs these copies until the lease ends.
    Whatever a taker reads was offered under its ticket: after the lease it finds a miss.

    Blocks go unencrypted to all that show a ticket: bind to an address that only readers of prompts reach.

    Attributes:
      address: Host and port.
      num_dropped: Blocks that `max_bytes` had no room for.

    Example:
      giver = kv.tiers.Giver(config, weights=kv.tiers.digest(params))
      engine.attach(giver)
      ticket = giver.offer(prompt)  # to the other process, which calls kv.tiers.take(ticket, ...)
      engine.push([kv.GenerationRequest(prompt, max_new_tokens=1)])
      ...  # after the request's last event
      giver.finish(ticket)
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        weights: str,
        host: str = "127.0.0.1",
        port: int = 0,
        lease: float = 60.0,
        max_bytes: int | None = 2**30,
    ):
        """Binds the address.

        Args:
          config: Of the cache.
          weights: Digest, as of `save`.
          host: Name or address of this machine by which takers reach it; tickets have it.
          port: 0 for a free one.
          lease: Seconds for which an offer is held after its last block came.
          max_bytes: Bytes of all that is offered.

        Raises:
          ValueError, TypeError: no digest, a lease that is no positive number, no limit, no address.
          OSError: an address that is in use, or none.
        """
        require_config("Giver", config)
        self._weights, self._config = checked_weights(weights), config
        self._lease, self._max_bytes = positive_seconds("lease", lease), checked_limit(max_bytes)
        if not isinstance(host, str) or host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"host is {host!r}, expected a name or address by which takers reach this machine"
            )
        if static_count("port", port, least=0) >= 2**16:
            raise ValueError(f"port is {port}, expected one below {2**16}, or 0 for a free one")
        self._epoch = secrets.token_hex(16)
        self._offers: dict[int, _Offer] = {}
        self._num_offers = 0
        self._lock = threading.Lock()
        # By shard of a mesh.
        self._named: dict[int, NamedBlocks[Keyed]] = collections.defaultdict(NamedBlocks)
        self.num_dropped = 0
        try:
            self._server = _Server(self, host, port)
        except OSError as error:
            raise OSError(
                f"{host}:{port} cannot be bound ({error}), expected a free address of this machine"
            ) from error
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvcache_jax giver", daemon=True
        )
        self._thread.start()

    def offer(self, prompt: Sequence[int] | np.ndarray, *, namespace: ArrayLike | None = None) -> Ticket:
        """Offers what `look` will find of a prompt; its last token is the taker's to compute.

        Args:
          prompt: Token ids.
          namespace: u32[4], the prompt's. Default: 0.

        Returns:
          The ticket, which may be handed on at once.

        Raises:
          ValueError, TypeError: no token ids, no namespace.
        """
        tokens = token_arguments.host_tokens("prompt", prompt).tolist()
        config = config_digest(self._config)
        scope, group_id = (
            Scope(self._weights, config, namespace_digits(namespace) or "0" * 32),
            self._config.indexed_group,
        )
        block_size = self._config.groups[group_id].block_size
        names, parent = {}, ""
        for start in range(0, (len(tokens) - 1) // block_size * block_size, block_size):
            name = BlockName(scope, parent, tuple(tokens[start : start + block_size]), group_id)
            names[parent := name.key] = name
        with self._lock:
            number, self._num_offers = self._num_offers, self._num_offers + 1
            self._offers[number] = _Offer(names, self._end_of_lease())
        return Ticket(*self.address, self._epoch, number, self._weights, config)

    def begin(self, config: CacheConfig) -> None:
        """Refuses an engine of another config; forgets the blocks of the engine before, not its offers."""
        require_prefix_caching("a Giver", config)
        self._require(config)
        self._named.clear()

    def check_shards(self, config: CacheConfig) -> None:
        """Refuses a mesh's caches that keep blocks outside of their pools."""
        require_pools_alone(self, config)

    def look(self, cache: Cache) -> None:
        """Copies what the cache has of the offers that are not finished; takers get it at once.

        Raises:
          ValueError: a cache of another config: nothing of it would be found under the tickets.
        """
        self._require(cache.config)
        self.expire()
        with self._lock:
            offers = [offer for offer in self._offers.values() if not offer.is_whole]
        if not offers:
            return
        require_stored("look", cache)
        cache = cache.config.keeper.settle(cache)
        blocks = read_blocks(cache)
        scopes = scopes_of(cache, self._weights, namespaces_of(blocks))
        named = self._named[shard_of(cache)]
        named.update(blocks, keyed_by(scopes, cache.config.indexed_group))
        places = {keyed[0]: (at, keyed) for at, keyed in enumerate(named.names) if keyed}
        wanted = {key: places[key] for offer in offers for key in offer.names if key in places}
        found = {key: published_block(blocks, *place, 0) for key, place in wanted.items()}
        known = {key: value for offer in offers for key, value in offer.values.items()}
        new = [block for block in found.values() if not all(entry.key in known for entry in block.entries)]
        room = np.inf if self._max_bytes is None else self._max_bytes - self.num_bytes
        for _, contents in read_contents(cache, new):
            for name, key, arrays in contents:
                if key not in known and room > 0:
                    value = pack_block(name, arrays)
                    room -= len(value)
                    if room >= 0:
                        known[key] = value
        with self._lock:
            for offer in offers:
                for key in (entry.key for at in offer.names if at in found for entry in found[at].entries):
                    if key not in known:  # takers are not to wait for what there is no room for
                        self.num_dropped += 1
                        offer.is_whole = True
                    elif key not in offer.values:
                        offer.values[key], offer.ends_at = known[key], self._end_of_lease()

    def finish(self, ticket: Ticket, cache: Cache | None = None) -> None:
        """Says that no more blocks come, after a last look at a cache if there is one; takers wait no more.

        Of windows and states what the end of the prompt needs is offered from now on, and nothing else.
        """
        if cache is not None:
            self.look(cache)
        ticket = as_ticket(ticket)
        with self._lock:
            if offer := self._offer_of(ticket):
                offer.is_whole, offer.ends_at = True, self._end_of_lease()
                _keep_tail(offer, self._config)

    def release(self, ticket: Ticket) -> None:
        """Ends a lease now; one that has ended is left alone."""
        ticket = as_ticket(ticket)
        with self._lock:
            if self._offer_of(ticket):
                del self._offers[ticket.number]

    def expire(self) -> None:
        """Forgets the offers whose leases have ended; called by itself ten times a second."""
        with self._lock:
            now = time.monotonic()
            self._offers = {number: offer for number, offer in self._offers.items() if offer.ends_at > now}

    @property
    def num_offers(self) -> int:
        """Offers whose leases go on."""
        return len(self._offers)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is offered; what several prompts share counts once."""
        with self._lock:
            shared = collections.ChainMap(*(offer.values for offer in self._offers.values()))
            return sum(map(len, shared.values()))

    def close(self) -> None:
        """Ends all leases, and the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._offers.clear()

    def __enter__(self) -> "Giver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, epoch: str, number: str, what: str, keys: Sequence[str]) -> tuple[int, list[bytes]]:
        """Answers a taker: the status of HTTP, and the parts of the body."""
        self.expire()
        with self._lock:
            offer = self._offers.get(int(number)) if epoch == self._epoch and number.isdecimal() else None
            if offer is None:
                return 410, [b"the lease has ended, or was another process's"]
            if what == "contains":
                found = {"is_whole": offer.is_whole, "found": [key in offer.values for key in keys]}
                return 200, [json.dumps(found).encode()]
            if what == "get":
                values = [offer.values.get(key) for key in keys]
                sizes = [_MISS if value is None else len(value) for value in values]
                return 200, [struct.pack(f"<{len(sizes)}q", *sizes), *filter(None, values)]
            if what == "release":
                del self._offers[int(number)]
                return 200, []
        return 404, [b"expected contains, get or release"]

    def _require(self, config: CacheConfig) -> None:
        own, other = config_digest(self._config), config_digest(config)
        if own != other:
            raise ValueError(
                f"the cache's config is {other[:12]} and the Giver's {own[:12]}, expected "
                "Giver(cache.config, ...): only sizes of pools and tables may differ"
            )

    def _offer_of(self, ticket: Ticket) -> _Offer | None:
        return self._offers.get(ticket.number) if ticket.epoch == self._epoch else None

    def _end_of_lease(self) -> float:
        return time.monotonic() + self._lease


def _keep_tail(offer: _Offer, config: CacheConfig) -> None:
    """Forgets the blocks beside the indexed ones that the longest usable prefix of an offer does not need."""
    keys, unit = [*offer.names], config.prefix_unit
    block_size = config.groups[config.indexed_group].block_size
    num_found = next((n for n, key in enumerate(keys) if key not in offer.values), len(keys))
    for length in range(num_found * block_size // unit * unit, 0, -unit):
        tail = {
            offer.names[keys[column]]._replace(group_id=g, slot=slot).key
            for column, g, slot in _needed_places(config, length)
        }
        if tail <= offer.values.keys():
            kept = tail.union(keys)
            offer.values = {key: value for key, value in offer.values.items() if key in kept}
            return


def _needed_places(config: CacheConfig, length: int) -> Iterator[tuple[int, int, int]]:
    """Lists the linked blocks that a prefix needs: the indexed column, the group and the slot of each."""
    for g, group in enumerate(config.groups):
        if g != config.indexed_group and group.span.is_in_prefix:
            first, end = map(int, group.span.needed_columns(jnp.int32(length), group.block_size))
            columns, slots = link_places(end, g, config)
            for at in {*range(min(group.num_sink_blocks, end)), *range(first, end)}:
                yield int(columns[at]), g, int(slots[at])


class _Server(http.server.ThreadingHTTPServer):
    """Answers takers, each in a thread."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, giver: Giver, host: str, port: int):
        self.giver = giver
        super().__init__((host, port), _Handler)

    def service_actions(self) -> None:
        self.giver.expire()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a taker that has gone


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers `POST /epoch/number/what` with a list of keys in JSON."""

    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds after which a taker that says or reads nothing has gone

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        status, parts = 400, [b"expected /epoch/number/what and a list of keys"]
        with contextlib.suppress(ValueError):
            _, epoch, number, what = self.path.split("/")
            if 0 <= int(size) <= _MOST_REQUEST_BYTES:
                keys = json.loads(self.rfile.read(int(size)))
                if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
                    assert isinstance(self.server, _Server)
                    status, parts = self.server.giver.answer(epoch, number, what, keys)
        self.close_connection = status == 400
        self.send_response(status)
        self.send_header("Content-Length", str(sum(map(len, parts))))
        self.end_headers()
        for part in parts:
            self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass
