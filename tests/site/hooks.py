"""What mkdocs does beside rendering `docs/`: it adds pages of the API and of files that documents link."""

import os
import re

from jupyter_client.manager import KernelManager
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tests.site import public_names, repository_links
from tests.support.sources import ROOT

NAMES = public_names.public_names()
# The notebook's kernel listens to a port of this machine; it would warn that anybody could read along.
KernelManager.transport_encryption.default_value = "auto"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for place, text in public_names.pages().items():
        files.append(File.generated(config, place, content=text))
    for name, place in repository_links.PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for target, place in repository_links.linked_files().items():
        if place.endswith(".md"):
            page = repository_links.file_page(target)
            file = File.generated(config, place, content=page, inclusion=InclusionLevel.NOT_IN_NAV)
        else:
            file = File.generated(config, place, abs_src_path=str(ROOT / target))
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    sources = {there: name for name, there in repository_links.documents().items()}
    if place in sources:
        base = os.path.dirname(sources[place])
        markdown = repository_links.rewrite(base, place, markdown)
        markdown = public_names.link_names(markdown, {name.place: name for name in NAMES})
    return markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leaves out the program for formulas that notebooks would load from another host; there are none."""
    return re.sub(r"<script data-mkdocs-jupyter-mathjax.*?</script>", "", output, flags=re.DOTALL)
