"""What clients get, in OpenAI's form, made of the events of their requests; whole, or piece by piece."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

import kvcache_jax as kv
from experiments.server.tokens import ContinuingTokenizer, QuietTokenizer
from models.tokenizer import TextStream


@dataclasses.dataclass
class Piece:
    """What an event adds to a choice."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    offsets: list[int]  # of each token's text in the choice's
    finish_reason: str | None


class Choice:
    """Follows the text of one continuation."""

    def __init__(self, index: int, tokenizer: QuietTokenizer):
        self._index, self._stream = index, TextStream(tokenizer)
        self._text_len = 0  # of the characters that are complete

    def add(self, event: kv.engine.TokenEvent) -> Piece:
        """Takes in the next event."""
        offsets, text = [], ""
        for token in event.tokens:
            offsets.append(self._text_len)
            new_text = self._stream.push(token)
            self._text_len += len(new_text)
            text += new_text
        if event.finish_reason is not None:
            text += self._stream.finish()
        if event.text is not None:  # which stop strings cut, or hold back
            text = event.text
        return Piece(
            self._index,
            text,
            event.tokens,
            event.logprobs,
            event.top_logprobs or [{} for _ in event.tokens],
            offsets,
            event.finish_reason,
        )


@dataclasses.dataclass
class Usage:
    """Counts tokens; of a prompt once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def note(self, event: kv.engine.TokenEvent) -> None:
        """Takes in an event; the first sample's last one says what the cache had."""
        self.completion_tokens += len(event.tokens)
        if event.sample_id == 0:
            self.cached_tokens += event.num_cached_tokens or 0

    def as_dict(self) -> dict[str, Any]:
        """Returns it in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form:
    """Answers of /v1/completions.

    Args:
      model: Its name.
      tokenizer: Gives tokens their texts.
      wants_logprobs: Whether they are told.

    Attributes:
      tokenizer: Decodes answers: of a completion as what follows its prompt, of a chat as texts of their own.
    """

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"
    _decoder = ContinuingTokenizer

    def __init__(self, model: str, tokenizer: QuietTokenizer, wants_logprobs: bool):
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._model, self._created = model, int(time.time())
        self.tokenizer, self._wants_logprobs = self._decoder(tokenizer.inner), wants_logprobs

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """Makes a whole answer of the pieces of each choice."""
        choices = [self._choice(_joined(of_one), is_whole=True) for of_one in pieces]
        return self._frame(self.whole, choices) | {"usage": usage.as_dict()}

    def event(self, piece: Piece, is_first: bool, wants_usage: bool) -> dict[str, Any] | None:
        """Makes an event of a stream; None of a piece that says nothing yet."""
        says_logprobs = self._wants_logprobs and piece.tokens
        if not (piece.text or says_logprobs or piece.finish_reason):
            return None
        found = self._frame(self.chunk, [self._choice(piece, is_first=is_first)])
        return found | ({"usage": None} if wants_usage else {})

    def last_event(self, usage: Usage) -> dict[str, Any]:
        """Makes the event that tells the usage."""
        return self._frame(self.chunk, []) | {"usage": usage.as_dict()}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, piece: Piece, *, is_whole: bool = False, is_first: bool = False) -> dict[str, Any]:
        return self._said(piece.text, is_whole, is_first) | {
            "index": piece.index,
            "logprobs": self._logprobs(piece) if self._wants_logprobs else None,
            "finish_reason": piece.finish_reason,
        }

    def _said(self, text: str, is_whole: bool, is_first: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        name = self.tokenizer.name
        return {
            "tokens": [name(token)[0] for token in piece.tokens],
            "token_logprobs": piece.logprobs,
            "top_logprobs": [{name(token)[0]: x for token, x in top.items()} for top in piece.top_logprobs],
            "text_offset": piece.offsets,
        }


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _decoder = QuietTokenizer

    def _said(self, text: str, is_whole: bool, is_first: bool) -> dict[str, Any]:
        said = {"content": text} | ({"role": "assistant"} if is_whole or is_first else {})
        return {"message": said | {"refusal": None}} if is_whole else {"delta": said}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text, data = self.tokenizer.name(token)
            return {"token": text, "logprob": logprob, "bytes": data}

        entries = zip(piece.tokens, piece.logprobs, piece.top_logprobs, strict=True)
        return {
            "content": [
                entry(token, logprob) | {"top_logprobs": [entry(*one) for one in top.items()]}
                for token, logprob, top in entries
            ]
        }


def _joined(pieces: Sequence[Piece]) -> Piece:
    names = "tokens", "logprobs", "top_logprobs", "offsets"
    joined = {name: [x for piece in pieces for x in getattr(piece, name)] for name in names}
    text, last = "".join(piece.text for piece in pieces), pieces[-1]
    return Piece(last.index, text, finish_reason=last.finish_reason, **joined)
