"""The endpoints: OpenAI's, metrics, health, and the page."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import fastapi
import starlette.exceptions
import starlette.requests
import uvicorn
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import kvcache_jax as kv
from experiments.common import prometheus
from experiments.server.answers import ChatForm, Choice, Form, Usage
from experiments.server.chat_template import ChatTemplate
from experiments.server.connection import Connection
from experiments.server.engine_thread import Channel, Continuation, EngineThread, Stopped
from experiments.server.protocol import ChatOptions, CompletionOptions, Options, Refused, parse
from experiments.server.tokens import QuietTokenizer

PAGE = Path(__file__).with_name("page.html")
_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
_SHOWN = 120  # characters of a row's text on the page


@dataclasses.dataclass(frozen=True)
class Service:
    """What is served, and its limits.

    Attributes:
      model: Its name.
      thread: Owns the engine.
      tokenizer: The checkpoint's, without texts of stop tokens.
      max_len: Tokens of a row.
      max_requests: Continuations that wait or run.
      max_tokens: Of an answer.
      max_logprobs: Most probable tokens that a client may ask for; as many as the engine has.
      max_body: Bytes.
      template: Of chats; None where the checkpoint has none.
      api_key: Without it nothing but the page, its health and metrics is told.
      send_s: Seconds in which a client has to read what it is sent, or its connection ends.
    """

    model: str
    thread: EngineThread
    tokenizer: QuietTokenizer
    max_len: int
    max_requests: int
    max_tokens: int
    max_logprobs: int = 0
    max_body: int = 2**20
    template: ChatTemplate | None = None
    api_key: str | None = None
    send_s: float = 30.0

    def requests(
        self,
        options: Options,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        name: str,
        form: Form,
    ) -> list[kv.GenerationRequest]:
        """Makes the engine's requests of prompts; without `max_tokens` answers may fill the row.

        Raises:
          Refused: one does not fit.
        """
        if len(prompts) * options.n > self.max_requests:
            raise Refused(
                f"{name} has {len(prompts)} prompts with n = {options.n}, expected at most "
                f"{self.max_requests} answers: lower one of the two",
                param="n",
            )
        if (options.num_logprobs or 0) > self.max_logprobs:
            raise Refused(
                f"got {options.num_logprobs} most probable tokens, expected at most {self.max_logprobs}",
                param="logprobs",
            )
        if max_tokens is not None and max_tokens > self.max_tokens:
            raise Refused(
                f"max_tokens is {max_tokens}, expected at most {self.max_tokens}", param="max_tokens"
            )
        shared: dict[str, Any] = dict(
            sampling=options.sampling(),
            stop_tokens=() if options.ignore_eos else self.tokenizer.stop_tokens,
            namespace=kv.namespace(tenant=options.cache_salt) if options.cache_salt else None,
            num_samples=options.n,
            num_top_logprobs=options.num_logprobs or 0,
            stop_strings=kv.engine.StopStrings(options.stop, form.tokenizer.decode) if options.stop else None,
        )
        return [
            kv.GenerationRequest(prompt, self._room(prompt, max_tokens, name), id=f"{form.id}-{i}", **shared)
            for i, prompt in enumerate(prompts)
        ]

    def _room(self, prompt: Sequence[int], max_tokens: int | None, name: str) -> int:
        """Returns the most tokens of the prompt's answer; the last one is not stored."""
        room = self.max_len + 1 - len(prompt)
        if not prompt:
            raise Refused(f"{name} has no token, expected at least one", param=name)
        if not 0 <= min(prompt) <= max(prompt) < self.tokenizer.vocab_size:
            raise Refused(
                f"{name} has tokens from {min(prompt)} to {max(prompt)}, expected them below "
                f"{self.tokenizer.vocab_size}",
                param=name,
            )
        if room < (max_tokens or 1):
            raise Refused(
                f"{name} has {len(prompt)} tokens and {max_tokens or 1} are to follow, expected at most "
                f"{self.max_len + 1} in all: shorten it, or lower max_tokens",
                param=name,
                code="context_length_exceeded",
            )
        return min(room, self.max_tokens) if max_tokens is None else max_tokens


class Answer(Response):
    """Tells the events of a channel, whole or as a stream; cancels the requests when the client leaves."""

    def __init__(self, service: Service, channel: Channel, form: Form, options: Options):
        self._service, self._channel, self._form, self._options = service, channel, form, options
        n = options.n
        self._first = {request.id: i * n for i, request in enumerate(channel.requests)}
        self._choices = [Choice(i, form.tokenizer) for i in range(n * len(channel.requests))]
        self._usage = Usage(sum(len(request.prompt) for request in channel.requests))
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        tell = self._stream if self._options.stream else self._whole
        work, gone = (
            asyncio.ensure_future(tell(scope, receive, send)),
            asyncio.ensure_future(_until_gone(receive)),
        )
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._channel.close()
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _pieces(self) -> AsyncIterator[Any]:
        async for event in self._channel.events():
            if event.finish_reason not in (None, "stop", "length"):
                raise Stopped(f"the answer ended without a token to go on with: {event.finish_reason}")
            self._usage.note(event)
            yield self._choices[self._first[event.id] + event.sample_id].add(event)

    async def _whole(self, scope: Any, receive: Any, send: Any) -> None:
        pieces: list[list] = [[] for _ in self._choices]
        try:
            async for piece in self._pieces():
                pieces[piece.index].append(piece)
        except Stopped as error:
            status = 503 if self._service.thread.end else 500
            await _error(Refused(str(error), status))(scope, receive, send)
            return
        await JSONResponse(self._form.answer(pieces, self._usage))(scope, receive, send)

    async def _stream(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        wants_usage, is_new = self._options.stream_options.include_usage, [True] * len(self._choices)

        async def tell(event: dict[str, Any] | None) -> None:
            data = f"data: {'[DONE]' if event is None else json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": event is not None})

        try:
            async for piece in self._pieces():
                event = self._form.event(piece, is_new[piece.index], wants_usage)
                if event is not None:
                    is_new[piece.index] = False
                    await tell(event)
            if wants_usage:
                await tell(self._form.last_event(self._usage))
        except Stopped as error:
            await tell(Refused(str(error), 500).as_dict())
        await tell(None)


class Server(uvicorn.Server):
    """A server on an address that is taken; what is asked to end ends its streams first.

    Args:
      service: What is served.
    """

    def __init__(self, service: Service):
        http: Any = functools.partial(Connection, seconds=service.send_s)
        super().__init__(
            uvicorn.Config(
                make_app(service), http=http, log_level="warning", ws="none", timeout_graceful_shutdown=5
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._service.thread.stop()
        super().handle_exit(sig, frame)


def make_app(service: Service) -> fastapi.FastAPI:
    """Makes the application; its engine's thread runs as long as it does."""

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await asyncio.to_thread(service.thread.close)

    async def has_key(request: fastapi.Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if service.api_key and not hmac.compare_digest(given.encode(), service.api_key.encode()):
            raise Refused("the key is missing or wrong, expected it as: Authorization: Bearer KEY", 401)

    # Pages of FastAPI's own load scripts from elsewhere.
    app = fastapi.FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(Stopped, _on_stopped)
    app.add_exception_handler(starlette.exceptions.HTTPException, _on_http_error)
    guarded = [fastapi.Depends(has_key)]
    model = {"id": service.model, "object": "model", "owned_by": "kvcache_jax", "created": 0}
    model["max_model_len"] = service.max_len

    async def submit(
        options: Options, prompts: Sequence[Sequence[int]], max_tokens: int | None, name: str, form: Form
    ) -> Response:
        try:
            channel = Channel(service.thread, service.requests(options, prompts, max_tokens, name, form))
            try:
                is_taken = await service.thread.submit(channel)
            except BaseException:
                channel.close()
                raise
        except ValueError as error:
            raise Refused(str(error)) from None
        if not is_taken:
            raise Refused("the queue is full: try again later", 429, code="queue_full")
        return Answer(service, channel, form, options)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(request: fastapi.Request) -> Response:
        options = parse(CompletionOptions, await _read_body(request, service.max_body), service.model)
        prompts = await asyncio.to_thread(_encoded, options.prompts, service.tokenizer)
        form = Form(service.model, service.tokenizer, options.num_logprobs is not None)
        max_tokens = options.max_tokens or min(_DEFAULT_TOKENS, service.max_tokens)
        return await submit(options, prompts, max_tokens, "prompt", form)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(request: fastapi.Request) -> Response:
        options = parse(ChatOptions, await _read_body(request, service.max_body), service.model)
        if service.template is None:
            raise Refused(
                "the model has no chat template: give the server a --chat-template, or ask /v1/completions"
            )
        prompt = await asyncio.to_thread(_rendered, options, service.template, service.tokenizer)
        form = ChatForm(service.model, service.tokenizer, options.num_logprobs is not None)
        max_tokens = options.max_completion_tokens or options.max_tokens
        return await submit(options, [prompt], max_tokens, "messages", form)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def one_model(name: str) -> dict[str, Any]:
        if name != service.model:
            raise Refused(f"there is no model {name[:100]!r}, expected {service.model!r}", 404, "model")
        return model

    @app.get("/metrics")
    async def metrics() -> Response:
        found = prometheus.exposition(await service.thread.metrics(), model_name=service.model)
        return PlainTextResponse(found, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/health")
    async def health() -> Response:
        end = service.thread.end
        return JSONResponse({"status": end or "ok"}, 200 if end is None else 503)

    @app.get("/state", dependencies=guarded)
    async def state() -> dict[str, Any]:
        found = await service.thread.view()
        rows = [row | {"is": _shown(row["is"], service.tokenizer)} for row in found["rows"]]
        waiting = [_shown(one, service.tokenizer) for one in found["waiting"]]
        return found | {"model": service.model, "rows": rows, "waiting": waiting}

    @app.get("/")
    async def page() -> Response:
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        )
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"content-security-policy": policy})

    return app


def _encoded(prompts: Sequence[Any], tokenizer: QuietTokenizer) -> list[list[int]]:
    """Returns the tokens of prompts, which may be tokens."""
    return [prompt if isinstance(prompt, list) else tokenizer.encode(prompt) for prompt in prompts]


def _rendered(options: ChatOptions, template: ChatTemplate, tokenizer: QuietTokenizer) -> list[int]:
    """Returns the tokens of a chat, whose template says itself what comes in front of the text."""
    messages = [message.for_template() for message in options.messages]
    text = template.render(messages, options.chat_template_kwargs)
    return tokenizer.encode(text, is_whole=True)


def _shown(one: Continuation, tokenizer: QuietTokenizer) -> dict[str, Any]:
    """Describes a continuation for the page."""
    text = tokenizer.inner.decode([*one.request.prompt.tolist()[-_SHOWN:], *one.tokens][-_SHOWN:])  # type: ignore
    return {
        "id": str(one.request.id),
        "sample": one.sample_id,
        "prompt_tokens": len(one.request.prompt),
        "tokens": len(one.tokens),
        "max_tokens": one.request.max_new_tokens,
        "text": text,
    }


async def _read_body(request: fastapi.Request, most: int) -> bytes:
    body = bytearray()
    try:
        async for data in request.stream():
            body += data
            if len(body) > most:
                raise Refused(f"the body has more than {most} bytes, expected at most as many", 413)
    except starlette.requests.ClientDisconnect:
        raise Refused("the client left before its request was whole") from None
    return bytes(body)


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(refused: Refused) -> Response:
    headers = {"retry-after": "1"} if refused.status == 429 else None
    return JSONResponse(refused.as_dict(), refused.status, headers)


async def _on_refused(_: fastapi.Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error)


async def _on_stopped(_: fastapi.Request, error: Exception) -> Response:
    return _error(Refused(str(error), 503))


async def _on_http_error(_: fastapi.Request, error: Exception) -> Response:
    assert isinstance(error, starlette.exceptions.HTTPException)
    return _error(Refused(f"{error.detail}".lower(), error.status_code))
