"""The server without a model: its command, chat templates, and an engine that fails for good."""

import asyncio
import json
import socket

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
