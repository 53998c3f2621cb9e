"""The server over real HTTP: answers, streams, refusals, clients that leave, and failures."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import select
import signal
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from models import checkpoint
from models.tokenizer import ByteTokenizer, FileTokenizer
from tests.experiments import asgi, tiny
from tests.support.trained_tokenizer import byte_level_bpe

for package in ("fastapi", "jinja2", "uvicorn"):
    pytest.importorskip(package)

from experiments.decode_speed import dense_decoder  # noqa: E402
from experiments.server import __main__ as command  # noqa: E402
from experiments.server import app, chat_template, engine_thread  # noqa: E402
from experiments.server.tokens import QuietTokenizer  # noqa: E402

MODEL, KEY, STOP = "tiny", "a key", 10
ROWS, QUEUE, BLOCK_SIZE, MAX_LEN = 4, 256, 16, 4096
CHAT = {"messages": [{"role": "user", "content": "a"}]}
DEADLINE = 60.0
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / MODEL
    checkpoint.save(path, tiny.decoder(**tiny.ONE_LAYER, max_seq_len=MAX_LEN), ByteTokenizer([STOP]))
    return path


@pytest.fixture(scope="module")
def service(folder):
    options = ["--checkpoint", str(folder), "--rows", str(ROWS), "--queue", str(QUEUE), "--api-key", KEY]
    options += ["--max-body", "20000", "--block-size", str(BLOCK_SIZE), "--chat-template", "plain"]
    service = command.make_service(command.make_parser().parse_args(options), send_s=3.0)
    with command.bound("127.0.0.1", 0) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the system holds little
        server = app.Server(service)
        thread = threading.Thread(target=server.run, args=([listening],))
        listening.listen(512)
        thread.start()
        service.__dict__["port"] = listening.getsockname()[1]
        service.__dict__["connections"] = server.server_state.connections
        yield service
        connection, answer = opened(
            service, "/v1/completions", {"prompt": TEXT, "max_tokens": 900, "n": 128, "stream": True}
        )
        answer.readline()
        server.handle_exit(signal.SIGINT, None)
        with contextlib.closing(connection):
            *_, last, done = [line for line in answer.read().decode().split("\n\n") if line]
        assert "the server ends" in last and done == "data: [DONE]"
        thread.join(DEADLINE)
        assert not thread.is_alive()


def opened(service, path, body=None, key=KEY):
    """Sends a request, and returns the connection and the answer's head."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE)
    body = body if body is None or isinstance(body, bytes) else json.dumps({"model": MODEL} | body)
    connection.request(
        "GET" if body is None else "POST", path, body, {"authorization": f"Bearer {key}"} if key else {}
    )
    return connection, connection.getresponse()


def ask(service, path, body=None, key=KEY):
    connection, answer = opened(service, path, body, key)
    with contextlib.closing(connection):
        text = answer.read().decode()
        return answer.status, json.loads(text) if text[:1] == "{" else text


def complete(service, prompt, num_tokens=8, **more):
    """The answer to a prompt, greedy unless `more` says otherwise."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    status, answer = ask(service, "/v1/completions", body | more)
    assert status == 200, answer
    return answer


def stream(service, path, body):
    """The events of a stream, whose last line says that it is whole."""
    connection, answer = opened(service, path, body | {"stream": True})
    with contextlib.closing(connection):
        lines = [line for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def changed(service, **changes):
    """The application of a service that needs no key and differs in some values."""
    return app.make_app(dataclasses.replace(service, api_key=None, **changes))


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def in_thread(service, function):
    """What a function says between two dispatches."""
    return service.thread._post(function).result(DEADLINE)


def wait_for(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def expect_nothing_held(service):
    """No request, no row, no block of a row, and no number that a request had."""
    thread = service.thread
    wait_for(lambda: in_thread(service, lambda: not thread._engine.num_unfinished))
    state = ask(service, "/state")[1]
    assert state["rows"] == state["waiting"] == []
    assert {kind for group in state["groups"] for kind in group["state"]} <= {"free", "cached"}
    assert not (thread._channels or thread._continuations or thread._numbers or thread._num_left)
    assert in_thread(service, lambda: kv.check_invariants(thread._engine.state.cache)) == []


@jax.jit
def next_token(decoder, tokens, length):
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return dense_decoder.run(decoder, tokens, positions, dense_decoder.causal_attention, length - 1).argmax()


def alone(service, prompts, num_new):
    """The text of each prompt's most probable tokens, by the model without a cache."""
    found, decoder = [], service.thread._engine.params
    for prompt in prompts:
        tokens, end = np.pad([[*prompt.encode()]], ((0, 0), (0, 250 - len(prompt)))), len(prompt)
        while end < len(prompt) + num_new and (token := next_token(decoder, tokens, np.int32(end))) != STOP:
            tokens[0, end], end = token, end + 1
        found.append(ByteTokenizer().decode(tokens[0, len(prompt) : end].tolist()))
    return found


# --- answers ---


def test_answers_are_those_of_each_prompt_alone_whole_and_streamed(service):
    prompts = [TEXT[i : i + length] for i, length in enumerate((1, 15, 16, 17, 40, 3))] + [TEXT * 3]
    expected = alone(service, prompts, 12)

    def streamed(prompt):
        events = stream(service, "/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0})
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        return "".join(event["choices"][0]["text"] for event in events)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        whole = pool.map(lambda prompt: texts(complete(service, prompt, 12))[0], prompts)
        assert [*whole] == expected
        assert [*pool.map(streamed, prompts)] == expected
    together = complete(service, prompts, 12)
    assert texts(together) == expected and [one["index"] for one in together["choices"]] == [*range(7)]
    ids = [list(prompt.encode()) for prompt in prompts[:2]]
    assert texts(complete(service, ids, 12)) == texts(complete(service, prompts[:2], 12))


def test_a_stop_string_ends_the_text_before_it(service):
    [text] = texts(complete(service, TEXT, 40, ignore_eos=True))
    middle = text[20:23]
    answer = complete(service, TEXT, 40, ignore_eos=True, stop=["not there", middle])
    assert texts(answer) == [text[: text.index(middle)]]
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] <= 20


def test_samples_are_drawn_by_their_seed(service):
    drawn = dict(num_tokens=12, temperature=1.0, n=3, ignore_eos=True)
    first, again, other = (complete(service, TEXT, seed=seed, **drawn) for seed in (3, 3, 4))
    assert texts(first) == texts(again) != texts(other) and len({*texts(first)}) == 3
    assert first["usage"]["prompt_tokens"] == len(TEXT) and first["usage"]["completion_tokens"] == 36
    unseeded = [texts(complete(service, TEXT, **drawn)) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_log_probabilities_and_their_places_in_the_text(service):
    [choice] = complete(service, TEXT, 10, logprobs=3, ignore_eos=True)["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["text_offset"]) == 10
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert len(top) <= 3 and max(top.values()) == pytest.approx(logprob, abs=1e-4) and token in top
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert complete(service, TEXT, 2)["choices"][0]["logprobs"] is None


def test_cached_tokens_are_told_within_a_salt_and_once_for_all_samples(service):
    prompt = "".join(reversed(TEXT))
    counts = [
        complete(service, prompt, 2, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for more in (
            {},
            {},
            {"cache_salt": "mine"},
            {"cache_salt": "mine", "n": ROWS + 2},
            {"cache_salt": "yours"},
        )
    ]
    held = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert counts == [0, held, 0, held, 0]


def test_a_stream_tells_its_usage_last(service):
    body = {"prompt": TEXT, "max_tokens": 5, "stream_options": {"include_usage": True}}
    *events, last = stream(service, "/v1/completions", body)
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == len(TEXT)
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events)
    assert len({event["id"] for event in [*events, last]}) == 1


def test_a_chat_is_the_completion_of_its_template(service):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]},
    ]
    body = {"messages": messages, "max_completion_tokens": 9, "temperature": 0, "logprobs": True}
    status, answer = ask(service, "/v1/chat/completions", body | {"top_logprobs": 2})
    assert status == 200 and answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    prompt = "system: Be brief.\nuser: Hello, you\nassistant: "
    assert [choice["message"]["content"]] == texts(complete(service, prompt, 9))
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    content = choice["logprobs"]["content"]
    assert all(one["top_logprobs"][0]["bytes"] == one["bytes"] for one in content)
    said = bytes(byte for one in content for byte in one["bytes"] if byte != STOP)
    assert said.decode(errors="replace") == choice["message"]["content"]
    deltas = [event["choices"][0]["delta"] for event in stream(service, "/v1/chat/completions", body)]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


def test_a_checkpoints_tokenizer_gives_each_token_its_own_bytes(service, tmp_path):
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    tokenizer = QuietTokenizer(FileTokenizer(tmp_path / "tokenizer.json"))
    one = changed(service, tokenizer=tokenizer, template=chat_template.ChatTemplate("xé y"))
    body = CHAT | {"model": MODEL, "max_tokens": 30, "seed": 1, "logprobs": True}
    status, answer = asgi.ask(one, "/v1/chat/completions", body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == len("xé y".encode())
    [choice] = answer["choices"]
    data = [bytes(one["bytes"]) for one in choice["logprobs"]["content"]]
    assert b"".join(data).decode(errors="replace") == choice["message"]["content"]
    assert max(byte for one in data for byte in one) >= 0x80


# --- refusals ---

LONG = "x" * (MAX_LEN + 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("completions", b"{no json", 400, "the body is no JSON"),
        ("completions", b'"' + b"x" * 30000 + b'"', 413, "expected at most as many"),
        ("completions", b"[1]", 400, "expected a JSON object"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "expected 'tiny'"),
        ("completions", {}, 400, "prompt is missing"),
        ("completions", {"prompt": LONG}, 400, f"{MAX_LEN + 1} tokens and 16 are to follow"),
        ("completions", {"prompt": TEXT, "max_tokens": MAX_LEN}, 400, "shorten it, or lower max_tokens"),
        ("completions", {"prompt": TEXT, "max_tokens": MAX_LEN + 1}, 400, f"at most {MAX_LEN}"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
        ("completions", {"prompt": ""}, 400, "prompt has no token"),
        ("completions", {"prompt": [256]}, 400, "expected them below 256"),
        ("completions", {"prompt": "\ud800"}, 400, "the body is no JSON"),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo is not supported here, got True"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias is not supported here"),
        ("completions", {"prompt": "a", "logprobs": 6}, 400, "expected at most 5"),
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature is 3"),
        ("completions", {"prompt": "a", "stop": ["a", ""]}, 400, "none of them empty"),
        ("completions", {"prompt": ["a"] * 9, "n": 64}, 400, "9 prompts with n = 64, expected at most 260"),
        ("chat/completions", {"messages": []}, 400, "messages is []"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "type",
        ),
        ("chat/completions", {"messages": [{"role": "user"}], "tools": [{}]}, 400, "tools is not supported"),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"self": 1}}, 400, "has 'self', expected names"),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}, 400, "itself: leave it out"),
        ("nothing", {}, 404, "not found"),
    ],
)
def test_bad_input_is_one_sentence_in_the_form_of_openai(service, path, body, status, said):
    found, answer = ask(service, f"/v1/{path}", body)
    assert found == status, answer
    error = answer["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert said in error["message"] and "\n" not in error["message"]


def test_neutral_values_of_what_is_not_supported_are_taken(service):
    assert complete(service, "a", 1, frequency_penalty=0, logit_bias={}, echo=False, suffix=None, user="me")


def test_without_the_key_only_the_page_its_metrics_and_health_are_told(service):
    for path in ("/v1/models", "/state", "/v1/models/tiny"):
        assert ask(service, path, key="wrong")[0] == ask(service, path, key=None)[0] == 401
        assert ask(service, path)[0] == 200
    assert ask(service, "/v1/completions", {"prompt": "a"}, key=None)[0] == 401
    assert [ask(service, path, key=None)[0] for path in ("/", "/health", "/metrics")] == [200] * 3


def test_the_page_loads_nothing_from_elsewhere():
    text = app.PAGE.read_text()
    assert "://" not in text and "src=" not in text and "@import" not in text and "innerHTML" not in text


def test_a_chat_without_a_template_is_refused(service):
    body = CHAT | {"model": MODEL}
    status, answer = asgi.ask(changed(service, template=None), "/v1/chat/completions", body)
    assert status == 400 and "has no chat template" in answer["error"]["message"]


def test_what_the_engine_refuses_is_one_sentence(service):
    class Vast(ByteTokenizer):
        vocab_size = 2**40

    body = {"model": MODEL, "prompt": [2**31], "max_tokens": 1}
    status, answer = asgi.ask(changed(service, tokenizer=QuietTokenizer(Vast())), "/v1/completions", body)
    assert status == 400 and "the token id 2147483648, expected" in answer["error"]["message"]


def test_a_completion_without_max_tokens_has_at_most_as_many_as_the_server_allows(service):
    body = {"model": MODEL, "prompt": TEXT, "ignore_eos": True}
    for most, expected in ((8, 8), (17, 16)):
        status, answer = asgi.ask(changed(service, max_tokens=most), "/v1/completions", body)
        assert status == 200 and answer["usage"]["completion_tokens"] == expected


# --- clients that leave, and those that crowd ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(service, stream):
    def num_cancelled():
        text = ask(service, "/metrics")[1]
        lines = [line for line in text.splitlines() if 'finished_reason="cancelled"' in line]
        return float(lines[0].split()[-1]) if lines else 0.0

    before = num_cancelled()
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 4000, "n": 2, "ignore_eos": True, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE)
    connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": f"Bearer {KEY}"})
    wait_for(lambda: len(ask(service, "/state")[1]["rows"]) == 2)
    state = ask(service, "/state")[1]
    if state["rows"]:
        assert [row["is"]["prompt_tokens"] for row in state["rows"]] == [len(TEXT)] * 2
        shared = state["groups"][0]["state"].count("shared")
        assert shared == len({*state["rows"][0]["blocks"][0]} & {*state["rows"][1]["blocks"][0]}) > 0
    connection.close()
    wait_for(lambda: num_cancelled() == before + 2)
    expect_nothing_held(service)


def test_a_client_that_leaves_within_its_body_is_no_error(service, caplog):
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        head = (
            "POST /v1/completions HTTP/1.1",
            "host: a",
            f"authorization: Bearer {KEY}",
            "content-length: 99",
        )
        client.sendall("\r\n".join([*head, "", "{"]).encode())
        time.sleep(0.1)
    assert complete(service, "a", 1)
    assert [record for record in caplog.records if record.name == "uvicorn.error"] == []


def test_a_full_queue_is_429_and_takes_all_prompts_or_none(service):
    body = {"prompt": TEXT, "max_tokens": 4000, "n": 128, "ignore_eos": True, "stream": True}
    held = [opened(service, "/v1/completions", body) for _ in range(2)]
    assert [answer.status for _, answer in held] == [200, 200]
    status, answer = ask(service, "/v1/completions", {"prompt": ["a"] * (ROWS + 1)})
    assert status == 429 and "queue is full" in answer["error"]["message"]
    for connection, _ in held:
        connection.close()
    expect_nothing_held(service)
    assert complete(service, "a", 1)


async def crowd(service, prompts, num_tokens):
    """Texts of the prompts' answers; of every third one the client leaves after a moment."""

    async def one(i, prompt):
        await asyncio.sleep(0.001 * (i * 7 % 40))
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": i % 2 == 0,
        }
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1", "host: a", f"authorization: Bearer {KEY}", "connection: close"
        writer.write("\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data)
        await writer.drain()
        if i % 3 == 0:
            if i % 2 == 0:
                await reader.readline()
            await asyncio.sleep(0.01 * (i % 5))
            writer.close()
            return None
        said = (await reader.read()).decode()
        writer.close()
        assert said.startswith("HTTP/1.1 200"), said
        if i % 2:
            return json.loads(said[said.index("{") : said.rindex("}") + 1])["choices"][0]["text"]
        events = [line.partition("data: ")[2] for line in said.splitlines() if "data: {" in line]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


def test_of_200_clients_a_third_leaves_and_the_others_are_right(service):
    kinds = [TEXT[:i] for i in (5, 17, 33, 48, 64)] + [TEXT * 2]
    expected = dict(zip(kinds, alone(service, kinds, 24), strict=True))
    prompts = [kinds[i % len(kinds)] for i in range(200)]
    found = asyncio.run(crowd(service, prompts, 24))
    stayed = [i for i in range(200) if i % 3]
    assert [found[i] for i in stayed] == [expected[prompts[i]] for i in stayed]
    expect_nothing_held(service)


def test_events_that_are_not_read_are_bounded(service):
    async def flood():
        request = kv.GenerationRequest([1], 2, id="not pushed")
        channel = engine_thread.Channel(service.thread, [request], most_unread=3)
        event = kv.engine.TokenEvent("not pushed", 0, [65], [0.0], [], None)
        for _ in range(5):
            channel._put(event)
        assert channel._events.qsize() == 4
        with pytest.raises(engine_thread.Stopped, match="unread"):
            async for one in channel.events():
                assert one == event

    asyncio.run(flood())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_loses_its_connection(service, stream, caplog):
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 300, "ignore_eos": True, "stream": stream}
    data = json.dumps(body | {"logprobs": 5}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", service.port))
        address = client.getsockname()
        head = "POST /v1/completions HTTP/1.1", "host: a", f"authorization: Bearer {KEY}"
        client.sendall("\r\n".join([*head, f"content-length: {len(data)}", "", ""]).encode() + data)
        told = select.poll()
        told.register(client, select.POLLHUP)  # neither what it could read nor the end of what it is sent
        assert told.poll(1000 * DEADLINE)
    wait_for(lambda: all(one.client != address for one in service.connections))
    [said] = [one.getMessage() for one in caplog.records if one.name.endswith("server.connection")]
    assert said.endswith(f":{address[1]} did not read for 3 seconds: its connection ends")
    expect_nothing_held(service)
    assert complete(service, "a", 1)


# --- failures ---


def test_a_failure_of_the_device_loses_no_answer(service, monkeypatch):
    engine = service.thread._engine
    drain, num_drains = engine.drain, [0]

    def fragile():
        num_drains[0] += 1
        if num_drains[0] == 2:
            raise kv.engine.EngineFailed("a failure that is made up")
        drain()

    [expected] = alone(service, [TEXT[:30]], 40)
    monkeypatch.setattr(engine, "drain", fragile)
    assert texts(complete(service, TEXT[:30], 40)) == [expected] and num_drains[0] > 2
    monkeypatch.undo()
    expect_nothing_held(service)
