"""The pages that `make docs` adds to `docs/`, and what it refuses of the site that it built."""

import json
import re
import tomllib

import pytest

import kvcache_jax as kv
from tests.site import built_pages, devices, public_names, repository_links
from tests.support.sources import ROOT

NAMES = {name.place: name for name in public_names.public_names()}


def test_every_public_name_has_one_entry():
    spaces = [name for name in kv.__all__ if name not in NAMES]
    assert len(spaces) == 12 and len(kv.__all__) - len(spaces) == 67
    doors = [name for name in NAMES if name.startswith("integrations.")]
    classes = {"lm_eval.Model", "flax_nnx.MultiHeadAttention", "tunix.Rollout"}
    assert {*doors} == {f"integrations.{name}" for name in classes}
    assert len(NAMES) - len(doors) == 67 + sum(len(getattr(kv, space).__all__) for space in spaces)
    pages = public_names.pages()
    written = "\n".join(text for place, text in pages.items() if place != "api/index.md")
    for name in NAMES.values():
        assert written.split().count(name.anchor) == pages[name.page].split().count(name.anchor) == 1
        assert f"[`{name.code}`][{name.anchor}]" in pages["api/index.md"]


def test_the_site_lists_every_page():
    listed = (ROOT / "mkdocs.yml").read_text()
    documents = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.*")]
    pages = [name for name in documents if name.endswith((".md", ".ipynb"))]
    assert {"index.md", "tour.ipynb", "guides/engine.md"} <= {*pages}
    for page in (*pages, *public_names.pages(), *repository_links.PAGES.values()):
        assert f" {page}\n" in listed, page


def test_the_table_of_extras_has_all_and_what_they_bring():
    """But for the extras that a clone alone needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    extras = {
        name: each for name, each in project["optional-dependencies"].items() if name not in ("tests", "dev")
    }
    assert dict(table).keys() == extras.keys() and len(table) == len(extras)
    for name, cell in table:
        named = [re.split(r"[>=\[]", each)[0] for each in extras[name] if "kvcache_jax" not in each]
        others = [each for extra in extras[name] for each in re.findall(r"kvcache_jax\[(.*)\]", extra)]
        own, _, brought = cell.partition(", and what")
        assert sorted(own.split(", ")) == sorted(named)
        assert sorted(re.findall(r"`(\w+)`", brought)) == sorted(
            ",".join(others).split(",") if others else []
        )


@pytest.mark.parametrize(
    ("markdown", "linked"),
    [
        ("`kv.fork` and `fork(cache, [0], [1])`", ["fork", "fork"]),
        ("`kv.chunks.store`", ["chunks.store"]),
        ("`forks`, `kv.no_name`, `cache.fork`, ``fork``", []),
        ("# `fork`\n    `fork`\n```python\n`fork`\n```\n[`fork`](fork.md)", []),
        ("| `free` | `kv.free` |", ["free"]),
    ],
)
def test_names_in_prose_are_links(markdown, linked):
    found = public_names.link_names(markdown, NAMES)
    assert found.count("][kvcache_jax.") == len(linked)
    for place in linked:
        assert f"][kvcache_jax.{place}]" in found


def test_links_into_the_repository_are_links_to_pages():
    text = "[a](../kvcache_jax/operations/fork.py#x) [b](measured.md#y) [c](../CHANGELOG.md) [d](https://e.org/f.py)"
    assert list(repository_links.links("docs", text)) == ["kvcache_jax/operations/fork.py", "CHANGELOG.md"]
    found = repository_links.rewrite("docs", "measured.md", text)
    assert "[a](files/kvcache_jax/operations/fork.py.md#x) [b](measured.md#y) [c](changelog.md)" in found
    found = repository_links.rewrite(
        "docs/guides", "guides/engine.md", "[a](../../experiments/results/serve.json)"
    )
    assert found == "[a](../files/serve.json)"


def test_linked_files_are_there_and_have_pages():
    linked = repository_links.linked_files()
    assert "kvcache_jax/operations/fork.py" in linked and len({*linked.values()}) == len(linked) > 30
    for target, place in linked.items():
        assert (ROOT / target).exists(), target
        if place.endswith(".md"):
            assert repository_links.file_page(target).count("\n") > 5
    assert "* `fork.py`: The operation `fork`" in repository_links.file_page("kvcache_jax/operations")


PAGE = '<h1 id="top">A</h1><a href="{link}">b</a><img src="{picture}"><script>{script}</script>'


def built(folder, link="other/#there", picture="p.png", script="", entry="kvcache_jax.fork"):
    """Writes a small site."""
    for name, text in {
        "index.html": PAGE.format(link=link, picture=picture, script=script),
        "other/index.html": '<p id="there"><a href="../#top">up</a>',
        "api/operations/index.html": f'<h2 id="{entry}">',
        "404.html": '<a href="/nowhere/">',
        "p.png": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return built_pages.faults(folder, [NAMES["fork"]])


def test_a_whole_site_has_no_fault(tmp_path):
    assert built(tmp_path) == []
    assert built(tmp_path, link="https://example.org/a") == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"link": "no/"}, "index.html links no/, which is not there"),
        ({"link": "other/#no"}, "index.html links other/#no, and that page has no such anchor"),
        ({"link": "#no"}, "index.html links #no, and that page has no such anchor"),
        ({"picture": "no.png"}, "index.html links no.png, which is not there"),
        (
            {"picture": "https://e.org/p.png"},
            "index.html loads https://e.org/p.png, expected a file of the site",
        ),
        (
            {"script": "x('https://e.org/s.js')"},
            "index.html loads https://e.org/s.js, expected a file of the site",
        ),
        ({"entry": "kvcache_jax.forks"}, "kv.fork has no entry in api/operations/index.html"),
    ],
)
def test_a_fault_of_a_site_is_found(tmp_path, options, fault):
    assert built(tmp_path, **options) == [fault]


@pytest.mark.slow
def test_the_page_of_devices_is_what_its_command_writes():
    assert devices.PAGE.read_text() == devices.page(), "run python -m tests.site.devices"


def test_a_record_of_a_gpu_is_in_the_table():
    [hopper] = [each for each in devices.ARCHITECTURES if each.name == "NVIDIA Hopper"]
    record = {"file": "gpu.json", "device": "NVIDIA H100 80GB HBM3", "machine": {"cpu": "any"}}
    assert hopper.row([])[-2:] == ["no", "no"]
    assert hopper.row([record])[-2:] == ["by the records", "1 records"]


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.extend(pyplot.get_fignums()) or pyplot.close("all"))
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * len(sources)
    namespace = {"__name__": "tour"}
    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), namespace)
    assert len(drawn) == 6
