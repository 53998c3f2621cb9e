"""A built site: entries of all public names, links and anchors that lead somewhere, nothing from elsewhere.

python -m tests.site.built_pages build/site
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

from tests.site.public_names import Name, public_names

LOADED = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Reference(NamedTuple):
    """An address in a page, and whether a browser loads it without being asked."""

    address: str
    is_loaded: bool


class PageReader(html.parser.HTMLParser):
    """Collects a page's ids and references."""

    def __init__(self):
        super().__init__()
        self.ids: set[str] = set()
        self.references: list[Reference] = []
        self.in_script = False

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        is_hint = tag == "link" and values.get("rel") in ("canonical", "prev", "next")
        for name in ("href", "src"):
            if name in values:
                self.references.append(Reference(values[name], (tag, name) in LOADED and not is_hint))
        self.in_script = tag == "script"
        if self.in_script:
            self.handle_data(" ".join(values.values()))

    def handle_data(self, data):
        if self.in_script:
            self.references += [
                Reference(address, True) for address in re.findall(r"https?://[\w./@-]+", data)
            ]

    def handle_endtag(self, tag):
        self.in_script = False


def read(folder: pathlib.Path) -> dict[pathlib.Path, PageReader]:
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = PageReader()
        pages[path].feed(path.read_text())
    return pages


def faults(site: str | pathlib.Path, names: Sequence[Name]) -> list[str]:
    """Returns a sentence for each fault of a site."""
    folder = pathlib.Path(site).resolve()
    pages = read(folder)
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder).as_posix()
        if name == "404.html":  # it is shown in any folder, and its addresses begin at the root
            continue
        for address, is_loaded in page.references:
            parts = urllib.parse.urlsplit(address)
            if parts.scheme or parts.netloc:
                if is_loaded and parts.scheme != "data":
                    found.append(f"{name} loads {address}, expected a file of the site")
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                found.append(f"{name} links {address}, which is not there")
            elif anchor and target in pages and anchor not in pages[target].ids:
                found.append(f"{name} links {address}, and that page has no such anchor")
    for public in names:
        entry = folder / "api" / public.room / "index.html"
        if entry not in pages or public.anchor not in pages[entry].ids:
            found.append(f"kv.{public.place} has no entry in {entry.relative_to(folder)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    [site] = sys.argv[1:] if arguments is None else arguments
    names = public_names()
    found = faults(site, names)
    print(*found, sep="\n", end="\n" if found else "")
    num_pages = len(list(pathlib.Path(site).rglob("*.html")))
    print(f"{num_pages} pages, {len(names)} public names, {len(found)} faults")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
