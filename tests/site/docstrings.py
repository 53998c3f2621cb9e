"""How griffe reads the library's docstrings: as its own Google style, but for two sections."""

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Prepares docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)  # a section of code
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            # What is before a colon would be read as the type.
            text = re.sub(r"(?m)^Returns:\n\s+", lambda match: f"{match.group()}{obj.returns}: ", text)
        obj.docstring.value = text
