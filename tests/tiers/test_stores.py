"""Stores of bytes: what every store does, directories that processes share, and writers that are killed."""

import contextlib
import functools
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from unittest.mock import Mock

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.tiers import directory_store
from kvcache_jax.tiers.directory_store import DirectoryStore
from tests.tiers.store_writers import kill_writers
from tests.tiers.valkey_server import serving

KEYS = [f"{i * 2654435761 % 2**32:08x}{i:056x}" for i in range(40)]


# A server that is installed here is tried, beside the part of one in `valkey_server.py`.
SERVERS = [name for name in ("redis-server", "valkey-server") if shutil.which(name)]
STORES = ["memory", "directory", "ocdbt", "limited ocdbt", "tensorstore file", "mooncake", "valkey", *SERVERS]


@contextlib.contextmanager
def opened(name, folder):
    if name in ("memory", "directory"):
        yield kv.tiers.MemoryStore() if name == "memory" else DirectoryStore(folder / "a" / "b")
    elif name.endswith("ocdbt"):
        yield kv.tiers.TensorStore(folder / "a" / "b", max_bytes=2**20 if "limited" in name else None)
    elif name == "tensorstore file":
        yield kv.tiers.TensorStore({"driver": "file", "path": f"{folder}/a/"})
    elif name == "mooncake":
        with mooncake_pool(folder) as master, contextlib.closing(join(master)) as store:
            yield store
    else:
        path = folder / "socket"
        with serving(path) if name == "valkey" else running(name, path):
            yield kv.tiers.ValkeyStore(f"unix://{path}", timeout=30.0)


def join(master):
    return kv.tiers.MooncakeStore(master, segment_bytes=2**26, buffer_bytes=2**22)


def is_served(port):
    with socket.socket() as opened:
        return opened.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def mooncake_pool(folder):
    """Runs a master of Mooncake's pool; skips the test where it cannot be imported."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, other = (each.getsockname()[1] for each in (first, second))
    options = [f"--rpc_port={port}", f"--metrics_port={other}", "--rpc_address=127.0.0.1"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "mooncake.cli", *options], stdout=log, stderr=log)
        try:
            while not is_served(port):
                assert process.poll() is None
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(server, path):
    """Runs a server at a unix socket."""
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(path.parent)]
    process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(params=STORES)
def store(request, tmp_path_factory):
    with opened(request.param, tmp_path_factory.mktemp("s")) as store:
        yield store


def read(store, keys):
    return [None if value is None else bytes(value) for value in store.get(keys)]


def test_what_is_put_is_read_until_it_is_removed(store):
    values = [bytes([i]) * i for i in range(8)]  # an empty one too
    store.put([*zip(KEYS[:8], values, strict=True)])
    assert read(store, KEYS[5:10]) == [*values[5:], None, None]
    assert [*store.contains([KEYS[9], KEYS[0], KEYS[7]])] == [False, True, True]
    before = store.get(KEYS[3:4])[0]
    store.put([(KEYS[3], memoryview(b"another")), (KEYS[4], bytearray(b"one"))])
    assert read(store, KEYS[3:5]) == [b"another", b"one"] and bytes(before) == values[3]
    store.remove([KEYS[3], KEYS[30]])
    assert read(store, KEYS[3:5]) == [None, b"one"] and bytes(before) == values[3]
    store.put([])
    assert store.get([]) == store.contains([]) == []
    assert isinstance(store, kv.tiers.BlockStore) and not isinstance(object(), kv.tiers.BlockStore)


def test_a_value_is_replaced_if_it_is_still_there(store):
    """Where a store can tell; of two that replace the same one, the second is told."""
    if not hasattr(store, "replace"):
        pytest.skip("lists of several processes are lost")
    assert store.replace(KEYS[0], None, b"first") and store.replace(KEYS[1], None, b"")
    is_limited = bool(getattr(store, "max_bytes", None))
    for before, after in ((None, b"second"), (b"other", b"second"), (b"firs", b"second")):
        assert store.replace(KEYS[0], before, after) == is_limited
    if not is_limited:
        assert read(store, KEYS[:2]) == [b"first", b""]
    assert store.replace(KEYS[0], store.get(KEYS[:1])[0], memoryview(b"third"))
    assert read(store, KEYS[:1]) == [b"third"]


def test_of_what_threads_replace_at_once_nothing_is_lost(store):
    """Each adds one to a number again and again; they have a directory's files open as processes have."""
    if not hasattr(store, "replace") or getattr(store, "max_bytes", None):
        pytest.skip("lists of several processes are lost")
    store.put([(KEYS[0], b"0")])

    def add():
        for _ in range(25):
            before = store.get(KEYS[:1])[0]
            while not store.replace(KEYS[0], before, b"%d" % (int(bytes(before)) + 1)):
                before = store.get(KEYS[:1])[0]

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(store, KEYS[:1]) == [b"100"]


def test_a_process_that_was_stopped_while_it_replaced_a_value_keeps_none_waiting(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(directory_store, "_LOCK_SECONDS", 0.05)
    store = DirectoryStore(tmp_path)
    with open(tmp_path / "kvcache_jax_blocks.json", "rb") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        assert store.replace(KEYS[0], None, b"value") and read(store, KEYS[:1]) == [b"value"]


@pytest.mark.parametrize("key", ["../../../../etc/passwd", "/etc/passwd", "", "ab", "G" * 64, "0" * 65, None])
def test_a_key_never_leaves_the_store(store, key):
    calls = [store.contains, store.get, store.remove, lambda keys: store.put([(keys[0], b"x")])]
    if hasattr(store, "replace"):
        calls.append(lambda keys: store.replace(keys[0], None, b"x"))
    for call in calls:
        with pytest.raises(ValueError, match="key is .*, expected 64 hexadecimal digits"):
            call([key])


def test_a_store_of_the_network_that_is_down(tmp_path):
    store = kv.tiers.ValkeyStore(f"unix://{tmp_path}/nowhere", timeout=1.0)
    with pytest.raises(Exception, match="onnect"):
        store.get(KEYS[:1])


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (kv.tiers.TensorStore, "tensorstore"),
        (kv.tiers.ValkeyStore, "valkey"),
        (kv.tiers.MooncakeStore, "mooncake"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, make, package):
    for name in (package, f"{package}.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"of the extra `{package}`: pip install 'kvcache_jax\[{package}\]'"
    ):
        make("unix:///nowhere")


def test_a_value_that_there_is_no_room_for_leaves_the_old_one(tmp_path):
    """A limit on the size of files in place of a full disk: the write ends in the middle."""
    store, (soft, hard) = DirectoryStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    store.put([(KEYS[0], b"old")])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.put([(KEYS[0], bytes(4000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bytes(store.get([KEYS[0]])[0] or b"") == b"old"
    assert [file.name for file in (tmp_path / KEYS[0][:2]).iterdir()] == [KEYS[0][2:]]


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, "1", True])
def test_a_limit_that_is_none_is_refused(tmp_path, max_bytes):
    for make in (
        kv.tiers.MemoryStore,
        lambda max_bytes: DirectoryStore(tmp_path, max_bytes=max_bytes),
        lambda max_bytes: kv.tiers.TensorStore(tmp_path, max_bytes=max_bytes),
    ):
        with pytest.raises(ValueError, match="max_bytes is .*, expected a positive int"):
            make(max_bytes=max_bytes)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "5", None])
def test_a_time_that_is_none_is_refused(timeout):
    """Else each call of the store would fail, and cost hits without a word."""
    for make in (functools.partial(kv.tiers.ValkeyStore, "unix:///nowhere"), kv.tiers.PeerStore):
        with pytest.raises(ValueError, match="timeout is .*, expected a (positive|finite) number"):
            make(timeout=timeout)


def test_an_address_that_is_none_is_refused():
    for name, options in (("url", dict(url=5)), ("prefix", dict(url="unix:///nowhere", prefix=b"a"))):
        with pytest.raises(TypeError, match=f"{name} is .*, expected a string"):
            kv.tiers.ValkeyStore(**options)
    with pytest.raises(ValueError, match="url is .*, expected one without decode_responses"):
        kv.tiers.ValkeyStore("unix:///nowhere?decode_responses=true")


def test_a_directory_of_others_is_read(tmp_path, monkeypatch):
    """Who may not write there cannot note the time of a use."""
    DirectoryStore(tmp_path).put([(KEYS[0], b"value")])
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    found = None
    with contextlib.suppress(OSError):
        found = read(DirectoryStore(tmp_path), KEYS[:2])
    assert found == [b"value", None]
    os.utime.assert_called_once()  # type: ignore


def test_a_file_that_cannot_be_read_costs_no_other(tmp_path):
    """Of a bad sector or without rights: here a folder."""
    store, found = DirectoryStore(tmp_path), None
    store.put([(KEYS[0], b"value")])
    (tmp_path / KEYS[1][:2] / KEYS[1][2:]).mkdir(parents=True)
    with contextlib.suppress(OSError):
        found = read(store, KEYS[:3])
    assert found == [b"value", None, None]
    with pytest.raises(IsADirectoryError):
        store.get(KEYS[1:2])


def test_values_used_longest_ago_make_room(tmp_path):
    limited = [kv.tiers.MemoryStore(100), DirectoryStore(tmp_path, max_bytes=100)]
    for store in limited:
        for key in KEYS[:10]:
            store.put([(key, b"x" * 10)])
            time.sleep(0.01)  # a file's time of use
        read(store, KEYS[:3])
        for key in KEYS[10:14]:
            store.put([(key, b"x" * 10)])
        assert [*store.contains(KEYS[:14])] == [True] * 3 + [False] * 4 + [True] * 7
        store.put([(KEYS[20], b"x" * 1000)])  # more than there is room for
        assert not any(store.contains(KEYS[20:21]))


def test_a_pool_of_mooncake_serves_all_who_joined_it(tmp_path):
    with mooncake_pool(tmp_path) as master:
        reader, writer = join(master), join(master)
        large = np.random.default_rng(0).bytes(900_000)
        writer.put([(key, large) for key in KEYS[:6]])  # more than a buffer
        assert read(reader, KEYS[:7]) == [large] * 6 + [None]
        keys = [f"{nth:064x}" for nth in range(270)]
        for nth in range(0, 270, 9):
            with contextlib.suppress(OSError):  # full, until the master has made room
                writer.put([(key, large) for key in keys[nth : nth + 9]])
        assert 20 < sum(writer.contains(keys)) < 2 * 2**26 // 900_000
        reader.close()
        with pytest.raises(OSError, match="the pool was left"):
            reader.contains(KEYS[:1])
    for call in (lambda: join(master), lambda: writer.contains(keys), lambda: writer.put([(keys[0], b"")])):
        with pytest.raises(OSError, match="refused|expected a master and room in the pool"):
            call()


def test_a_pool_of_mooncake_that_does_not_remove_says_so(monkeypatch):
    """Its codes are -704 for no value, and -703 for one that is being written."""
    pool = Mock(setup=Mock(return_value=0), batch_remove=Mock(return_value=[0, -704]))
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: pool)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, module)
    with socket.create_server(("127.0.0.1", 0)) as master:
        store = kv.tiers.MooncakeStore(f"127.0.0.1:{master.getsockname()[1]}")
    said = []
    for codes in ([0, -704], [-704, -703]):
        pool.batch_remove.return_value = codes
        try:
            store.remove(KEYS[:2])
        except OSError as error:
            said.append(str(error))
    assert len(said) == 1 and "batch_remove gives the code -703, expected a master" in said[0]
    store.remove([])
    assert pool.batch_remove.call_count == 2


def test_a_limited_tensorstore_is_within_its_folder_and_keeps_what_is_newer(tmp_path):
    store, other = (
        kv.tiers.TensorStore({"driver": "ocdbt", "base": f"file://{tmp_path}/cache"}, max_bytes=20_000)
        for _ in range(2)
    )
    store.put([(KEYS[0], b"old"), (KEYS[1], bytes(9000))])
    store.put([(KEYS[2], b"of the next half")])
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    write = store._write

    def write_later(*arguments):
        other.put([(KEYS[0], b"new")])
        store._write = write
        write(*arguments)

    store._write = write_later
    assert read(store, KEYS[:1]) == [b"old"] and read(store, KEYS[:1]) == [b"new"]
    # What a process that was killed left of an older half goes with the next.
    (tmp_path / "cache" / f"{0:012}").mkdir()
    (tmp_path / "cache" / f"{0:012}" / "file").write_bytes(bytes(3))
    for key in KEYS[:4]:
        store.put([(key, bytes(8000))])
    assert not (tmp_path / "cache" / f"{0:012}" / "file").exists()


@pytest.mark.parametrize("call", ["get", "contains"])
def test_a_value_that_moves_while_it_is_looked_for_is_found(tmp_path, call):
    """Another process reads it in the older half, and so begins a newer one."""
    store, other = (kv.tiers.TensorStore(tmp_path, max_bytes=20_000) for _ in range(2))
    for key in KEYS[:2]:
        store.put([(key, bytes(8000))])
    half = store._half

    def half_late(number):
        if number == 1:
            store._half = half
            assert read(other, KEYS[:1]) == [bytes(8000)]
        return half(number)

    store._half = half_late
    assert [bool(found) for found in getattr(store, call)(KEYS[:3])] == [True, True, False]
    assert store._half == half


def test_a_value_that_a_smaller_limit_forbids_stays_in_the_older_half(tmp_path):
    store = kv.tiers.TensorStore(tmp_path, max_bytes=100_000)
    for key in KEYS[:2]:
        store.put([(key, bytes(30_000))])
    smaller = kv.tiers.TensorStore(tmp_path, max_bytes=40_000)
    assert read(smaller, KEYS[:1]) == [bytes(30_000)] and smaller._newest()[0] == 2


def num_bytes_in(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("num_bytes", [20, 200])
def test_small_values_that_are_put_one_by_one_take_no_more_than_the_limit(tmp_path, num_bytes):
    """Though each `put` of a database writes all its keys again."""
    store, limit = kv.tiers.TensorStore(tmp_path, max_bytes=24_000), 24_000
    for nth, key in enumerate(KEYS):
        store.put([(key, bytes([nth]) * num_bytes)])
        assert num_bytes_in(tmp_path) <= limit
    assert read(store, KEYS[-8:]) == [bytes([nth]) * num_bytes for nth in range(len(KEYS) - 8, len(KEYS))]
    store.put([(KEYS[0], bytes(11_400)), (KEYS[1], bytes(11_600))])  # with its key it is more than a half
    assert read(store, KEYS[:2]) == [bytes(11_400), None]


@pytest.mark.parametrize("driver", ["ocdbt", "file", "memory"])
def test_what_was_not_read_for_half_of_the_limit_makes_room_in_a_tensorstore(tmp_path, driver):
    """Two processes share it, by turns; a new one goes on with what they left."""
    memory, files = {"driver": "memory"}, {"driver": "file", "path": f"{tmp_path}/"}
    place = {"ocdbt": tmp_path, "file": files, "memory": memory}[driver]
    limit, value = 240_000 if driver == "ocdbt" else 200_000, np.random.default_rng(0).bytes(10_000)
    stores = [kv.tiers.TensorStore(place, max_bytes=limit) for _ in range(1 if driver == "memory" else 2)]
    for nth, key in enumerate(KEYS):
        store = stores[nth % len(stores)]
        store.put([(key, value[nth:])])
        assert read(store, KEYS[:1]) == [value]  # of use all the time
        assert num_bytes_in(tmp_path) <= limit + 10
    if driver == "file":  # one that may only read finds what is in the older half
        old = next(key for key in KEYS if stores[0].contains([key])[0] and key != KEYS[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kv.tiers.TensorStore, "_write", Mock(side_effect=ValueError("PERMISSION_DENIED")))
            assert read(stores[0], [old]) != [None]
    if driver != "memory":
        stores.append(kv.tiers.TensorStore(place, max_bytes=limit))
    for store in stores:
        held = [*store.contains(KEYS)]
        assert held[0] and not any(held[1:20]) and all(held[-9:]) and 10 <= sum(held) <= 20
        assert read(store, KEYS) == [value[nth:] if is_held else None for nth, is_held in enumerate(held)]
        store.remove(KEYS[-2:])
        store.put([(KEYS[-3], b"x" * limit)])  # more than there is room for
        assert read(store, KEYS[-3:]) == [None] * 3
        store.put([(key, value[nth:]) for nth, key in enumerate(KEYS)][-3:])


def test_a_directory_of_something_else_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="has 'thesis.tex' and no blocks, expected a new or an empty"):
        DirectoryStore(other)
    with pytest.raises(OSError, match="is no directory that can be read and written"):
        DirectoryStore(other / "thesis.tex")
    with pytest.raises(OSError, match="is no directory that can be read and written"):
        DirectoryStore(other / "thesis.tex" / "below")
    assert sorted(entry.name for entry in other.iterdir()) == ["thesis.tex"]
    made = DirectoryStore(tmp_path / "made").path / "kvcache_jax_blocks.json"
    for text, error in (
        ('{"format_version": 2}', "has blocks of format 2, expected 1: read it with the kvcache_jax that"),
        ('{"format_ver', "is broken, expected a format version there"),
        ("[]", "is broken, expected a format version there"),
        ("\xff\xfe\0", "is broken, expected a format version there"),
        ("[" * 9999, "is broken, expected a format version there"),
    ):
        made.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=error):
            DirectoryStore(made.parent)


def test_a_directory_without_rights_is_refused(tmp_path):
    user = os.geteuid()
    tmp_path.chmod(0o500)
    if not user:  # nothing is refused to root
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match="is no directory that can be read and written"):
            DirectoryStore(tmp_path / "new")
    finally:
        os.seteuid(user)


def test_many_open_a_new_directory_at_once(tmp_path):
    """Threads in place of processes: each has a store of its own."""
    errors, stores = [], []

    def open_it():
        try:
            stores.append(DirectoryStore(tmp_path / "new"))
            stores[-1].put([(KEYS[0], b"value")])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and read(stores[0], KEYS[:1]) == [b"value"]
    assert len(list((tmp_path / "new").rglob("*"))) == 3  # the marker, a folder and the value


@pytest.mark.quick_cases("DirectoryStore")
@pytest.mark.parametrize("make", [DirectoryStore, kv.tiers.TensorStore], ids=lambda make: make.__name__)
def test_a_writer_that_is_killed_leaves_whole_values(tmp_path, make):
    """What is there is a value that was put, and what `put` returned from is there; 10 kills."""
    rng = np.random.default_rng(0)
    items = {f"{rng.bytes(32).hex()}": rng.bytes(int(rng.integers(1, 4000))) for _ in range(300)}
    assert kill_writers(make, tmp_path, [*items.items()], 10, lambda store: check_values(store, items)) > 0


def check_values(store, items):
    for (key, value), found in zip(items.items(), read(store, [*items]), strict=True):
        assert found in (None, value), key
