"""Links out of the documents into the repository: on the site they lead to pages with the files' texts."""

import os
import pathlib
import posixpath
import re
from collections.abc import Iterator

from tests.support.sources import ROOT

# Documents outside of `docs/` that are pages, by their paths on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "pallas_kernels/NOTES.md": "kernels.md",
}
ASSETS = (".json", ".png")
LANGUAGES = {".py": "python", ".txt": "text", ".yml": "yaml"}
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?(?=\))")


def target_of(base: str, path: str) -> str:
    """Resolves a link of a document in the folder `base`, from the repository's root."""
    return posixpath.normpath(posixpath.join(base, path))


def place_of(target: str) -> str:
    """Names the page or asset of a file of the repository, from the folder of the documents."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target in PAGES:
        return PAGES[target]
    if target.endswith(ASSETS):
        return f"files/{posixpath.basename(target)}"
    return f"files/{target}.md"


def links(base: str, markdown: str) -> Iterator[str]:
    """Lists the files of the repository outside of `docs/` that a document links."""
    for match in LINK.finditer(markdown):
        target = target_of(base, match["path"])
        if not target.startswith("docs/"):
            yield target


def rewrite(base: str, place: str, markdown: str) -> str:
    """Points the links of a document at pages; `place` is the document's own path on the site."""

    def pointed(match: re.Match[str]) -> str:
        target = place_of(target_of(base, match["path"]))
        return posixpath.relpath(target, posixpath.dirname(place) or ".") + (match["anchor"] or "")

    return LINK.sub(pointed, markdown)


def file_page(target: str) -> str:
    """Writes the page of a file, or of a folder, which lists what its files say they are."""
    path = ROOT / target
    front = "---\nsearch:\n  exclude: true\n---\n"
    if path.is_dir():
        rows = [f"* `{each.name}`: {_first_line(each)}" for each in sorted(path.glob("*.py"))]
        return f"{front}# {target}\n\n" + "\n".join(rows) + "\n"
    language = LANGUAGES.get(path.suffix, "text")
    return f"{front}# {path.name}\n\n`{target}`\n\n~~~~~~{language}\n{path.read_text()}~~~~~~\n"


def _first_line(path: pathlib.Path) -> str:
    found = re.match(r'"""(.*?)(?:"""|\n)', path.read_text())
    return found.group(1) if found else ""


def documents() -> dict[str, str]:
    """Lists the documents, from the repository's root: those of `docs/` and those that are pages too."""
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    return {name: place_of(name) for name in [*found, *PAGES]}


def linked_files() -> dict[str, str]:
    """Lists all files of the repository that documents link, with their places on the site."""
    found = {}
    for name in documents():
        base = os.path.dirname(name)
        for target in links(base, (ROOT / name).read_text()):
            found[target] = place_of(target)
    return {target: place for target, place in sorted(found.items()) if target not in PAGES}
