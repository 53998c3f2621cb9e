"""Folders of stores in which something else lies, was left, or was spoilt, and clocks that were set back."""

import contextlib
import os
import pathlib
import time
from unittest.mock import Mock

import pytest

import kvcache_jax as kv

KEYS = [f"{i:02x}" * 32 for i in range(40)]
LIMIT = 100


def place(folder, key):
    """The file of a key, in a folder that is there."""
    file = pathlib.Path(folder) / key[:2] / key[2:]
    file.parent.mkdir(exist_ok=True)
    return file


def num_bytes(store):
    return sum(len(value) for value in store.get(KEYS) if value is not None)


def put_folder(folder):
    place(folder, KEYS[0]).mkdir()
    return place(folder, KEYS[0])


def put_loop(folder):
    place(folder, KEYS[0]).symlink_to(place(folder, KEYS[0]).name)
    return place(folder, KEYS[0])


def put_pipe(folder):
    """To which nothing is ever written."""
    os.mkfifo(place(folder, KEYS[0]))
    return place(folder, KEYS[0])


def put_notes(folder):
    (folder / "notes").mkdir()
    file = folder / "notes" / KEYS[0]
    file.write_bytes(b"x" * 1000)
    return file


def put_note(folder):
    file = place(folder, KEYS[0]).with_name("note.txt")
    file.write_bytes(b"x" * 1000)
    return file


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("put", [put_folder, put_loop, put_pipe, put_notes, put_note])
def test_what_is_no_value_is_left_alone_and_costs_no_value(tmp_path, put, is_old):
    """It is neither what was used longest ago, nor does it take room."""
    store = kv.tiers.DirectoryStore(tmp_path, max_bytes=LIMIT)
    other, used_at = put(tmp_path), 0 if is_old else time.time() + 1800
    os.utime(other, (used_at, used_at), follow_symlinks=False)
    for key in KEYS[1:]:
        store.put([(key, b"x" * 10)])
        assert store.contains([KEYS[0], key]) == [False, True]
    assert store.get([KEYS[0], KEYS[-1]]) == [None, b"x" * 10]
    assert 50 <= num_bytes(store) <= LIMIT
    assert other.is_symlink() or other.exists()


def test_a_value_that_cannot_be_written_costs_no_other_and_counts_for_the_limit(tmp_path):
    """A file lies where its folder was to be: it is the first, and what is written after it takes room."""
    store = kv.tiers.DirectoryStore(tmp_path, max_bytes=LIMIT)
    (tmp_path / KEYS[0][:2]).write_bytes(b"")
    for some in zip(KEYS[1:20], KEYS[20:], strict=False):
        with pytest.raises(FileExistsError):
            store.put([(KEYS[0], b"x"), *((key, b"x" * 10) for key in some)])
        assert store.contains(some) == [True, True]
    assert 50 <= num_bytes(store) <= LIMIT
    with pytest.raises(NotADirectoryError):
        store.remove([KEYS[0], *KEYS[1:]])
    assert num_bytes(store) == 0


def test_a_value_that_may_not_go_keeps_no_other_from_being_written(tmp_path, monkeypatch):
    store, num_written = kv.tiers.DirectoryStore(tmp_path, max_bytes=LIMIT), 0
    monkeypatch.setattr(pathlib.Path, "unlink", Mock(side_effect=PermissionError(1, "Not permitted")))
    for key in KEYS:
        with contextlib.suppress(PermissionError):
            store.put([(key, b"x" * 10)])
            num_written += 1
    assert num_written == len(KEYS) and all(store.contains(KEYS))


def test_values_used_before_the_clock_was_set_back_make_room_first(tmp_path):
    store, tomorrow = kv.tiers.DirectoryStore(tmp_path, max_bytes=LIMIT), time.time() + 86400
    for key in KEYS[:10]:
        store.put([(key, b"x" * 10)])
        os.utime(place(tmp_path, key), (tomorrow, tomorrow))
    for key in KEYS[10:]:
        store.put([(key, b"x" * 10)])
        time.sleep(0.002)  # a file's time of use
    assert store.contains(KEYS) == [False] * 30 + [True] * 10


@pytest.mark.parametrize("max_bytes", [None, 10_000])
def test_what_a_killed_writer_left_is_removed_later(tmp_path, max_bytes):
    """With the first value that a process writes beside it; with a limit also with later ones."""

    def left(nth):
        return place(tmp_path, KEYS[0]).with_name(f".{KEYS[0][2:]}.{nth:016x}")

    store, two_hours_ago = kv.tiers.DirectoryStore(tmp_path, max_bytes=max_bytes), time.time() - 7200
    for nth in range(2):
        left(nth).write_bytes(b"half")
    os.utime(left(0), (0, two_hours_ago))
    store.put([(KEYS[0], b"x" * 1000)])
    assert not left(0).exists() and left(1).exists()  # its writer may be at work
    os.utime(left(1), (0, two_hours_ago))
    store.put([(KEYS[0], b"x" * 1000)])
    assert left(1).exists() == (max_bytes is None) and store.get(KEYS[:1]) == [b"x" * 1000]
    kv.tiers.DirectoryStore(tmp_path).put([(KEYS[0], b"x")])
    assert not left(1).exists()


@pytest.mark.parametrize("text", [None, b"", b"-1", b"1_0", b"9" * 15, b"\xff", b"0"])
@pytest.mark.parametrize("driver", ["ocdbt", "file"])
def test_a_spoilt_number_of_the_newer_half_costs_no_value(tmp_path, driver, text):
    """Of a limited `TensorStore`: it is then the newest half that is there, and a new one can begin."""
    spec = tmp_path if driver == "ocdbt" else {"driver": "file", "path": f"{tmp_path}/"}
    store = kv.tiers.TensorStore(spec, max_bytes=20_000)
    for key in KEYS:
        store.put([(key, b"x" * 1000)])
    kept, newest = store.contains(KEYS), tmp_path / "newest"
    assert any(kept) and not all(kept)
    newest.unlink() if text is None else newest.write_bytes(text)
    for each in (store, kv.tiers.TensorStore(spec, max_bytes=20_000)):
        assert each.contains(KEYS) == kept
        assert [value is not None for value in each.get(KEYS)] == kept
    for key in KEYS:
        store.put([(key, b"y" * 1000)])
    assert newest.read_bytes().isdigit() and store.get(KEYS[-1:]) == [b"y" * 1000]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 30_000


@pytest.mark.parametrize("text", [b"", b"some", b"1 2 3"])
def test_a_half_of_a_spoilt_size_counts_as_full(tmp_path, text):
    """So that the next one begins, whose size is known."""
    store = kv.tiers.TensorStore({"driver": "file", "path": f"{tmp_path}/"}, max_bytes=4_000)
    store.put([(KEYS[0], b"x" * 1000)])
    [size] = tmp_path.glob("*/size of *")
    size.write_bytes(text)
    store.put([(KEYS[1], b"y" * 1000)])
    assert store.contains(KEYS[:2]) == [True, True] and (tmp_path / f"{2:012}" / KEYS[1]).exists()


@pytest.mark.parametrize("is_gone", [True, False])
def test_of_a_half_that_others_remove_no_value_is_empty(tmp_path, monkeypatch, is_gone):
    """Though its tree is still there, and the database says so."""
    store = kv.tiers.TensorStore(tmp_path, max_bytes=20_000)
    store.put([(KEYS[0], b"x" * 2000)])
    [*files] = (tmp_path / f"{1:012}" / "d").iterdir()
    store.put([(KEYS[1], b"y" * 2000)])
    for file in files:
        file.unlink()
    numbers, stamp = [1], store._newest()[1]
    monkeypatch.setattr(store, "_newest", lambda: (numbers.pop() if numbers else 4 if is_gone else 1, stamp))
    assert store.get(KEYS[:3]) == [None if is_gone else b"", b"y" * 2000, None]


class Gone:
    """A half of which the files were removed while it is looked at."""

    def fail(self, *_):
        raise ValueError("NOT_FOUND")

    read = list = with_transaction = fail


@pytest.mark.parametrize("half", [1, 4])
@pytest.mark.parametrize("call", ["contains", "get", "put", "remove"])
def test_a_half_that_others_removed_meanwhile_is_no_fault(tmp_path, monkeypatch, call, half):
    """A process that is slower than others looks again; of the newest half a fault is one."""
    slow, fast = (kv.tiers.TensorStore(tmp_path, max_bytes=20_000) for _ in range(2))
    newest, numbers, key = slow._newest, [slow._newest()], iter(KEYS)
    while newest()[0] < 4:
        fast.put([(last := next(key), b"x" * 2000)])
    other = KEYS[-1]
    monkeypatch.setattr(slow, "_newest", lambda: numbers.pop() if numbers else newest())
    monkeypatch.setattr(slow, "_halves", {half: Gone()})
    ask = {"put": lambda: slow.put([(other, b"y")])}.get(call, lambda: getattr(slow, call)([last, other]))
    if half == 4:
        numbers.clear()
    try:
        answer = ask()
    except ValueError as error:
        answer = str(error)
    if half == 4:
        assert answer == "NOT_FOUND"
    else:
        assert answer == {"contains": [True, False], "get": [b"x" * 2000, None]}.get(call)
        kept = [b"x" * 2000 if call != "remove" else None, b"y" if call == "put" else None]
        assert fast.get([last, other]) == kept
