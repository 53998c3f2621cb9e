"""The server without a model: its command, chat templates, and an engine that fails for good."""

import asyncio
import json
import socket
import threading
import time

import pytest

import kvcache_jax as kv
from models import checkpoint
from models.tokenizer import ByteTokenizer
from tests.experiments import asgi, tiny

for package in ("fastapi", "jinja2", "uvicorn"):
    pytest.importorskip(package)

from experiments.server import __main__ as command  # noqa: E402
from experiments.server import app, chat_template, engine_thread, protocol  # noqa: E402
from experiments.server.tokens import QuietTokenizer  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "tiny"
    checkpoint.save(path, tiny.decoder(**tiny.ONE_LAYER, max_seq_len=1024), ByteTokenizer())
    return path


def test_a_template_is_the_checkpoints_and_reaches_nothing(tmp_path):
    assert chat_template.read(tmp_path, None) is None
    source = "{{ bos_token }}{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    config = {"chat_template": source, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = chat_template.read(tmp_path, None)
    assert found.render([{"role": "user", "content": "é<"}]) == '<s>"é<"'
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only users') }}")
    with pytest.raises(protocol.Refused, match="only users"):
        chat_template.read(tmp_path, None).render([])
    reaching = "{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"
    for source in (*reaching, "{{ 1 / 0 }}", "{{ tools | dictsort }}"):
        with pytest.raises(protocol.Refused, match="does not take these messages"):
            chat_template.ChatTemplate(source).render([], {"tools": 5})


def test_the_server_listens_on_this_machine_alone_unless_told_otherwise():
    with command.bound(command.make_parser().parse_args([]).host, 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": ["a", 1]}, "prompt is ['a', 1]: expected a text, token ids, or a list of either"),
        ({"prompt": [True]}, "prompt is [True]: expected a text, token ids, or a list of either"),
        ({"prompt": "a", "logprobs": False}, "logprobs is False: input should be a valid integer"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens is '5': input should be a valid integer"),
        ({"prompt": "a", "stream": 1}, "stream is 1: input should be a valid boolean"),
        (
            {"prompt": "a", "stream_options": {"include_usage": 1}},
            "stream_options.include_usage is 1: input should be a valid boolean",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content is [{'type': 'image_url'}]: expected a text, or a list of "
            "{'type': 'text', 'text': TEXT} alone",
        ),
    ],
)
def test_what_a_value_may_be_is_named_and_another_kind_is_not_taken_for_it(body, said):
    kind = protocol.ChatOptions if "messages" in body else protocol.CompletionOptions
    with pytest.raises(protocol.Refused) as refused:
        protocol.parse(kind, json.dumps({"model": "tiny"} | body).encode(), "tiny")
    assert str(refused.value) == said and refused.value.param == said.split(" is ")[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "from 0 to 65535"),
        (["--host", "no host"], "cannot listen on no host"),
        (["--blocks", "3"], "got --blocks 3, expected at least 64"),
        (["--policy", "none"], "policy"),
        (["--chat-template", "missing.jinja"], "missing.jinja, which cannot be read"),
    ],
)
def test_the_command_refuses_in_one_line(folder, capsys, options, said):
    with pytest.raises(SystemExit) as ended:
        command.main(["--checkpoint", str(folder), "--port", "0", *options])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and said in lines[0]


def test_the_command_refuses_a_port_in_use_and_a_model_without_a_tokenizer(folder, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit) as ended:
        command.main(["--checkpoint", str(folder), "--port", str(other.getsockname()[1])])
    assert ended.value.code == 2 and "Address already in use: take another --port" in capsys.readouterr().err
    checkpoint.save(tmp_path / "small", tiny.decoder(**tiny.ONE_LAYER | {"vocab_size": 100}))
    with pytest.raises(SystemExit) as ended:
        command.main(["--checkpoint", str(tmp_path / "small"), "--port", "0"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "no tokenizer.json" in error and len(error.splitlines()) == 1


def test_an_engine_that_fails_for_good_ends_all_requests_and_says_so():
    class Broken:
        """An engine that takes one request, and fails."""

        num_unfinished = num_drains = 0

        def push(self, requests):
            self.num_unfinished = 1
            return len(requests)

        def cancel(self, request_id):
            raise AssertionError("the engine is gone")

        def drain(self):
            self.num_drains += 1
            if self.num_drains > 10:
                raise RuntimeError("tried too often")
            raise kv.engine.EngineFailed(f"failure {self.num_drains}")

        def reset(self):
            pass

        def take_events(self):
            return []

        def metrics(self):
            return {}

    thread = engine_thread.EngineThread(Broken())

    async def serve():
        channel = engine_thread.Channel(thread, [kv.GenerationRequest([1], 2, id="a")])
        await thread.submit(channel)
        with pytest.raises(engine_thread.Stopped, match="the engine failed: failure 3"):
            async for _ in channel.events():
                pass
        with pytest.raises(engine_thread.Stopped):
            await thread.metrics()

    service = app.Service("tiny", thread, QuietTokenizer(ByteTokenizer()), 8, 1, 8)
    thread.start()
    assert asgi.ask(app.make_app(service), "/health") == (200, {"status": "ok"})
    asyncio.run(serve())
    assert asgi.ask(app.make_app(service), "/health") == (503, {"status": "the engine failed: failure 3"})
    thread.close()


class Scripted:
    """An engine whose drains and resets are what a test says; a drain waits for its gate."""

    def __init__(self):
        self.num_unfinished, self.calls, self.events = 0, [], []
        self.gate, self.drains = threading.Event(), threading.Event()
        self.failures = []  # of the next calls of `drain` and `reset`: an error, or None

    def push(self, requests):
        self.calls.append(("push", *(request.id for request in requests)))
        self.num_unfinished += len(requests)
        return len(requests)

    def cancel(self, request_id):
        self.calls.append(("cancel", request_id))
        self.end(request_id, "cancelled")

    def end(self, request_id, reason="length"):
        self.events.append(kv.engine.TokenEvent(request_id, 0, [7], [0.0], [], reason))
        self.num_unfinished -= 1

    def drain(self):
        self.drains.set()
        assert self.gate.wait(60)
        self.fail("drain")

    def reset(self):
        self.fail("reset")

    def fail(self, call):
        self.calls.append(call)
        if error := self.failures.pop(0) if self.failures else None:
            raise error

    def take_events(self):
        events, self.events = self.events, []
        return events

    def metrics(self):
        return {"calls": len(self.calls)}


@pytest.fixture
def scripted():
    engine = Scripted()
    thread = engine_thread.EngineThread(engine)
    thread.start()
    yield engine, thread
    engine.gate.set()
    thread.close()
    assert not (thread._channels or thread._asked)


def channel_of(thread, *names):
    return engine_thread.Channel(thread, [kv.GenerationRequest([1], 2, id=name) for name in names])


async def all_of(channel):
    """Ids and reasons of all events, and why no more come."""
    found = []
    try:
        async for event in channel.events():
            found.append((event.id, event.finish_reason))
    except engine_thread.Stopped as error:
        found.append(str(error))
    return found


def run(clients):
    """Runs what clients do; it has an end, and tells none of them that the server ends, unless it says so."""
    try:
        asyncio.run(asyncio.wait_for(clients, 30))
    except (TimeoutError, engine_thread.Stopped) as error:
        raise AssertionError(f"clients were not served: {error!r}") from error


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_who_comes_and_who_leaves_does_not_wait_for_a_drain(scripted):
    engine, thread = scripted

    async def serve():
        first, second = channel_of(thread, "a"), channel_of(thread, "b", "c")
        assert await thread.submit(first)
        await asyncio.to_thread(engine.drains.wait, 60)
        assert await thread.submit(second)
        assert await thread.metrics() == {"calls": 2}
        first.close()
        await until(lambda: ("cancel", "a") in engine.calls)
        assert engine.calls == [("push", "a"), ("push", "b", "c"), ("cancel", "a")]
        engine.end("b")
        engine.end("c")
        engine.gate.set()
        assert await all_of(second) == [("b", "length"), ("c", "length")]

    run(serve())


def test_an_event_that_comes_before_its_push_is_over_finds_its_client(scripted):
    engine, thread = scripted
    push = engine.push
    engine.gate.set()

    def slow(requests):
        num_taken = push(requests)
        engine.end("a")
        thread._wake()
        time.sleep(0.1)
        return num_taken

    engine.push = slow

    async def serve():
        channel = channel_of(thread, "a")
        assert await thread.submit(channel)
        assert await all_of(channel) == [("a", "length")]

    run(serve())
    assert thread.end is None and not thread._num_left


def test_a_client_that_leaves_before_its_push_is_not_pushed(scripted):
    engine, thread = scripted

    async def serve():
        channel = channel_of(thread, "a")
        channel.close()
        with pytest.raises(engine_thread.Stopped, match="left before"):
            await thread.submit(channel)

    run(serve())
    assert ("push", "a") not in engine.calls


def test_an_end_that_no_drain_brings_is_delivered(scripted):
    """Of a request that the device never heard of: nothing is unfinished any more."""
    engine, thread = scripted

    async def serve():
        engine.gate.set()
        channel = channel_of(thread, "a")
        push, engine.push = engine.push, lambda requests: push(requests) and engine.end("a") or 1
        assert await thread.submit(channel)
        assert await all_of(channel) == [("a", "length")]
        await until(lambda: not thread._numbers)

    run(serve())


def test_when_the_server_ends_clients_hear_of_it_at_once_and_their_requests_end(scripted):
    engine, thread = scripted

    async def serve():
        channel = channel_of(thread, "a", "b")
        assert await thread.submit(channel)
        await asyncio.to_thread(engine.drains.wait, 60)
        thread.stop()
        assert await all_of(channel) == ["the server ends"]
        await until(lambda: engine.calls[1:] == [("cancel", "a"), ("cancel", "b")])
        with pytest.raises(engine_thread.Stopped, match="the server ends"):
            await thread.submit(channel_of(thread, "c"))
        assert thread._thread.is_alive()  # in a drain

    run(serve())


def test_when_the_server_ends_an_answer_that_is_no_stream_says_that_it_is_not_there(scripted):
    engine, thread = scripted
    service = app.Service("tiny", thread, QuietTokenizer(ByteTokenizer()), 8, 1, 8)
    ends = threading.Thread(target=lambda: engine.drains.wait(60) and thread.stop())
    ends.start()
    status, answer = asgi.ask(app.make_app(service), "/v1/completions", {"model": "tiny", "prompt": "a"})
    assert (status, answer["error"]["message"]) == (503, "the server ends")
    ends.join()


def test_an_engine_that_cannot_be_reset_is_reset_again(scripted):
    engine, thread = scripted
    failed, fail = kv.engine.EngineFailed, engine.fail
    engine.failures += [failed("in a drain"), failed("in a reset")]

    def end_in_the_second_drain(call):
        fail(call)
        if engine.calls.count("drain") == 2:
            engine.end("a")

    engine.fail = end_in_the_second_drain

    async def serve():
        channel = channel_of(thread, "a")
        assert await thread.submit(channel)
        engine.gate.set()
        assert await all_of(channel) == [("a", "length")]
        assert engine.calls[1:5] == ["drain", "reset", "reset", "drain"]

    run(serve())
    assert thread.end is None


def test_an_error_of_a_requests_own_function_ends_that_request_alone(scripted):
    """As often as it comes; one that ends nothing ends the server, the third time."""
    engine, thread = scripted
    fail, names = engine.fail, [f"{i}" for i in range(5)]

    def fail_with(call):
        for name in names[:1]:
            engine.end(names.pop(0), "cancelled")
            raise UnicodeDecodeError("utf-8", b"", 0, 0, f"of {name}")
        fail(call)

    engine.fail = fail_with

    async def serve():
        channel, last = channel_of(thread, *names), channel_of(thread, "last")
        assert await thread.submit(channel) and await thread.submit(last)
        engine.gate.set()
        assert await all_of(channel) == [(f"{i}", "cancelled") for i in range(5)]
        assert thread.end is None
        engine.failures += [MemoryError("no room")] * 3
        assert await all_of(last) == ["the engine failed: no room"]

    run(serve())
