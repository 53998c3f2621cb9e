"""The template by which a checkpoint makes one text of a chat's messages."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from experiments.common.command import InputError
from experiments.server.protocol import Refused

PLAIN = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"
_OWN = {"messages", "self"}
_SPECIAL = "bos_token", "eos_token", "pad_token", "unk_token"


class ChatTemplate:
    """A template of Jinja, which runs where it can reach nothing.

    Args:
      source: Its text.
      special: Special tokens by the names that templates have for them.

    Raises:
      InputError: it is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now, **(special or {})}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """Makes the prompt of which the answer is the continuation.

        Args:
          messages: With a role and a content each.
          options: More variables of the template, by their names.

        Raises:
          Refused: the template does not take these messages, or an option has the name of what is its own.
        """
        options = dict(options or {})
        if taken := sorted(_OWN & options.keys()):
            raise Refused(
                f"chat_template_kwargs has {taken[0]!r}, expected names other than "
                f"{' and '.join(sorted(_OWN))}, which the template has itself: leave it out",
                param="chat_template_kwargs",
            )
        try:
            return self._template.render({"add_generation_prompt": True} | options | {"messages": messages})
        except Exception as error:  # a template is a program: its filters raise what they like
            raise Refused(
                f"the chat template does not take these messages: {error}", param="messages"
            ) from None


def read(folder: Path, given: str | None) -> ChatTemplate | None:
    """Reads the template that is given, "plain" or a file, else the checkpoint's; None if there is none.

    Raises:
      InputError: a file cannot be read.
    """
    values = _read_config(folder / _CONFIG)
    special = {name: text for name in _SPECIAL if (text := _text_of(values.get(name))) is not None}
    if given == "plain":
        return ChatTemplate(PLAIN)
    path = Path(given) if given else folder / _FILE
    if given or path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), special)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"got the chat template {path}, which cannot be read: {error}") from None
    source = values.get("chat_template")
    if isinstance(source, list):  # several, by their names
        source = {one.get("name"): one.get("template") for one in source}.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return values if isinstance(values, dict) else {}


def _text_of(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _as_json(value: Any, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **more)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
