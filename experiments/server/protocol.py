"""What clients send, in OpenAI's form, checked: what does not fit is refused in one sentence."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

import kvcache_jax as kv

# Options that mean nothing with these values; with others they are refused by name.
_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "metadata": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
}


class Refused(Exception):  # noqa: N818
    """What a client sent is refused, or cannot be served; the message is for the client.

    Attributes:
      status: Of HTTP.
      param: Name of the option.
      code: For programs.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def as_dict(self) -> dict[str, Any]:
        """Returns it in OpenAI's form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _one_of(kinds: str) -> pydantic.WrapValidator:
    """Has an error name all kinds that a value may be of, not the first one alone."""

    def check(value: Any, validate: pydantic.ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except pydantic.ValidationError:
            raise ValueError(f"expected {kinds}") from None

    return pydantic.WrapValidator(check)


class StreamOptions(pydantic.BaseModel, extra="forbid", strict=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # which hides lengths of tokens from who listens; accepted, never done


class Options(pydantic.BaseModel, extra="forbid", strict=True):
    """Options that completions and chats have alike; a number is no text and no truth value."""

    model: str
    max_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float = pydantic.Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = pydantic.Field(1.0, gt=0, le=1)
    top_k: int = pydantic.Field(0, ge=0, lt=2**31)
    min_p: float = pydantic.Field(0.0, ge=0, le=1)
    n: int = pydantic.Field(1, ge=1, le=128)
    seed: int | None = pydantic.Field(None, ge=-(2**63), lt=2**64)
    stop: list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str = ""
    ignore_eos: bool = False
    user: str = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise ValueError("expected a JSON object")
        return {
            name: value
            for name, value in values.items()
            if value is not None and not (name in _NEUTRAL and value == _NEUTRAL[name])
        }

    @pydantic.field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        stop = [stop] if isinstance(stop, str) else stop
        if isinstance(stop, list) and (len(stop) > 16 or "" in stop):
            raise ValueError("expected at most 16 texts, none of them empty")
        return stop

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens beside each token; None without log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> kv.decoding.SamplingParams:
        """Makes the engine's parameters; without a seed the draws are others each time."""
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**64
        return kv.decoding.SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, seed)


class CompletionOptions(Options):
    """The body of /v1/completions."""

    prompt: Annotated[
        str | list[int] | list[str] | list[list[int]], _one_of("a text, token ids, or a list of either")
    ]
    logprobs: int | None = pydantic.Field(None, ge=0)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or more."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore


class Part(pydantic.BaseModel, extra="forbid"):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(pydantic.BaseModel, extra="allow"):
    """A message of a chat; the template sees all that it has."""

    role: str
    content: Annotated[
        str | list[Part], _one_of("a text, or a list of {'type': 'text', 'text': TEXT} alone")
    ] = ""

    def for_template(self) -> dict[str, Any]:
        """Returns it with its content as one text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return self.model_dump() | {"content": text}


class ChatOptions(Options):
    """The body of /v1/chat/completions."""

    messages: list[Message] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = pydantic.Field(0, ge=0)
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def parse[T: Options](kind: type[T], body: bytes, model: str) -> T:
    """Reads a body.

    Raises:
      Refused: it is no JSON, or not what is expected, or names another model than `model`.
    """
    try:
        found = kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _refused(error) from None
    if found.model != model:
        message = f"there is no model {found.model[:100]!r}, expected {model!r}"
        raise Refused(message, 404, "model", "model_not_found")
    return found


def _refused(error: pydantic.ValidationError) -> Refused:
    first = error.errors(include_url=False)[0]
    name, got = ".".join(map(str, first["loc"])), repr(first["input"])
    got = got if len(got) <= 60 else f"{got[:60]}..."
    match first["type"]:
        case "json_invalid":
            return Refused(f"the body is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
        case "extra_forbidden":
            return Refused(f"{name} is not supported here, got {got}: leave it out", param=name)
        case "missing":
            return Refused(f"{name} is missing, expected it in the body", param=name)
    message = first["msg"].removeprefix("Value error, ")
    return Refused(f"{name or 'the body'} is {got}: {message[:1].lower()}{message[1:]}", param=name or None)
