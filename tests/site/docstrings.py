"""How griffe reads the library's docstrings: "Example:" is a section of code, as "Examples:" is."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section before docstrings are parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
