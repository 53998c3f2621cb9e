"""Looks at a built site in headless Chromium, light and dark, on a desk and on a phone.

    python -m tests.site.browser build/site             # checks it
    python -m tests.site.browser build/site pictures    # and keeps a picture of each page looked at

Needs playwright and a Chromium on the PATH. Exit status 1 where a page is wider than its window or in other
colours than asked for, a script fails, a picture or a file is missing, something is asked of another host, or
the search does not find what it should.
"""

import argparse
import contextlib
import functools
import http.server
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence

PAGES = (
    "",
    "how_it_works/",
    "tour/",
    "guides/prefix_cache/",
    "guides/own_model/",
    "coming_from/",
    "api/",
    "api/operations/",
    "api/core/",
    "devices/",
    "measured/",
    "changelog/",
    "files/kvcache_jax/operations/fork.py/",
)
WINDOWS = {"desk": (1280, 900), "phone": (390, 844)}
SCHEMES = {"light": "default", "dark": "slate"}
SOUGHT = {"copy-on-write": "how_it_works", "key_rotation": "api/blocks"}


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[str]:
    """Serves a folder to this machine alone; gives its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def look(page, address: str, place: str, scheme: str) -> list[str]:
    """Opens a page and returns what is wrong with it."""
    found = []
    page.goto(address + place, wait_until="networkidle")
    is_scheme = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
    if is_scheme != SCHEMES[scheme]:
        found.append(f"is in the colours {is_scheme}, expected {SCHEMES[scheme]}")
    width, room = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    if width > room:
        found.append(f"is {width} wide in a window of {room}")
    broken = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)")
    return found + [f"does not show {each}" for each in broken]


def search(page, address: str, words: str, place: str) -> list[str]:
    """Types into the search of the start page; the first results must name the page."""
    page.goto(address, wait_until="networkidle")
    if page.is_visible("label.md-header__button[for=__search]"):  # on a phone the field is under it
        page.click("label.md-header__button[for=__search]")
    page.click("input.md-search__input")
    page.keyboard.type(words)
    page.wait_for_selector("a.md-search-result__link", timeout=10_000)
    page.wait_for_timeout(500)
    results = page.eval_on_selector_all("a.md-search-result__link", "links => links.map(link => link.href)")
    first = results[:5]
    return (
        [] if any(place in each for each in first) else [f"search {words!r} finds {first}, expected {place}"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit("the browser is driven by playwright: pip install playwright") from None
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("found no chromium on the PATH, expected one to look with")
    parser = argparse.ArgumentParser(description="Looks at a built site in headless Chromium.")
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("pictures", type=pathlib.Path, nargs="?")
    options = parser.parse_args(arguments)
    found, num_looks = [], 0
    with served(options.site.resolve()) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for window, (width, height) in WINDOWS.items():
            for scheme in SCHEMES:
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                told: list[str] = []
                page.on("pageerror", lambda error, told=told: told.append(f"script failed: {error}"))
                page.on("requestfailed", lambda request, told=told: told.append(f"no {request.url}"))
                page.on(
                    "response",
                    lambda response, told=told: (
                        told.append(f"{response.status} of {response.url}")
                        if response.status >= 400
                        else None
                    ),
                )
                page.on(
                    "request",
                    lambda request, told=told: (
                        told.append(f"asks {request.url}")
                        if not request.url.startswith((address, "data:", "blob:"))
                        else None
                    ),
                )
                for place in PAGES:
                    said = look(page, address, place, scheme)
                    found += [f"{window}, {scheme}: /{place} {each}" for each in said + told]
                    told.clear()
                    num_looks += 1
                    if options.pictures:
                        options.pictures.mkdir(parents=True, exist_ok=True)
                        name = place.strip("/").replace("/", "-") or "start"
                        page.screenshot(
                            path=options.pictures / f"{name}-{window}-{scheme}.png", full_page=False
                        )
                if scheme == "light":
                    for words, place in SOUGHT.items():
                        found += [f"{window}: {each}" for each in search(page, address, words, place)]
                page.close()
        browser.close()
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{num_looks} looks and {len(SOUGHT) * len(WINDOWS)} searches, {len(found)} faults")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
