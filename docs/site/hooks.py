"""Hooks of the documentation site: its navigation, pages for files outside of docs/, and checks of what is built.

Pages link to files of the repository by relative paths, which GitHub resolves. Here each such file gets a page: those
with the ending .md at the top of the repository under project/, all others under files/, as code.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTIONS = {
    "Tutorials": "tutorials",
    "How-to guides": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Examples": "examples",
}
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=#[^)\s]*\)|\))")
NAMES = re.compile(r"<!-- generated: names (.*?) -->.*?<!-- end -->", re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
LOG = logging.getLogger("mkdocs.autopar")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation: the sections, each with the pages of its folder in the order of its index."""
    folders = [(title, DOCS / name) for title, name in SECTIONS.items()]
    sections = [{title: list(_pages(folder))} for title, folder in folders if folder.exists()]
    config.nav = ["index.md", *sections, {"Project": [_uri(ROOT / name) for name in PROJECT]}]
    return config


def _pages(folder: Path) -> Iterator[str]:
    """Yield the pages of a folder: its index, those that the index links to, and all others."""
    index = folder / "index.md"
    linked = [folder / target for target in LINK.findall(index.read_text())] if index.exists() else []
    pages = dict.fromkeys([index, *linked, *sorted(folder.rglob("*.md"))])
    yield from (str(page.relative_to(DOCS)) for page in pages if page.exists() and page.parent == folder)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for the files outside of docs/ that pages link to, directly or through one another."""
    left = [ROOT / name for name in PROJECT]
    left += [target for page in files.documentation_pages() for target in _linked(DOCS / page.src_uri)]
    while left:
        path = left.pop()
        if files.get_file_from_path(_uri(path)) is None:
            files.append(File.generated(config, _uri(path), content=_content(path)))
            left += _linked(path)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files outside of docs/ to their pages, and tables of names into the documentation of these."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix("project/") if uri.startswith("project/") else DOCS / uri

    def turned(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        return os.path.relpath(_uri(target), os.path.dirname(uri)) if target else link[1]

    documented = NAMES.sub(lambda names: "\n".join(f"::: {name}\n" for name in names[1].split()), markdown)
    return documented if uri.startswith("files/") else LINK.sub(turned, documented)


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas, which are TeX on GitHub, to MathML, which browsers show by themselves."""

    def formula(tex: re.Match[str]) -> str:
        return convert(unescape(tex[2]).strip(), display="block" if tex[1] == "div" else "inline")

    return FORMULA.sub(formula, html)


def _linked(source: Path) -> list[Path]:
    """Return the files that a page links to and that are no pages or pictures of docs/ themselves."""
    if source.is_dir():
        return [each for each in source.iterdir() if each.is_file()]
    targets = [_target(source, link) for link in LINK.findall(source.read_text())] if source.suffix == ".md" else []
    return [each for each in targets if each and not _is_of_site(each)]


def _target(source: Path, link: str) -> Path | None:
    """Return the file of the repository that a page links to, if there is one."""
    found = Path(os.path.normpath(source.parent / unquote(link)))
    return found if found.exists() and found.is_relative_to(ROOT) else None


def _is_of_site(path: Path) -> bool:
    return path.is_relative_to(DOCS) and path.suffix in (".md", ".png", ".svg", ".ipynb")


def _uri(path: Path) -> str:
    """Return the page of a file in the site."""
    if _is_of_site(path):
        return str(path.relative_to(DOCS))
    if path.parent == ROOT and path.suffix == ".md":
        return f"project/{path.name}"
    return f"files/{path.relative_to(ROOT)}.md"


def _content(path: Path) -> str:
    """Return the page of a file outside of docs/: Markdown as it is, a folder as a list, all else as code."""
    if _uri(path).startswith("project/"):
        return path.read_text()
    title = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(f"- [{each.name}]({path.name}/{each.name}.md)\n" for each in sorted(_linked(path)))
    return f"{title}~~~~~~ {path.suffix.lstrip('.') or 'text'}\n{path.read_text()}\n~~~~~~\n"


_ANCHOR = re.compile(r'\s(?:id|name)="([^"]+)"')
_LINKED = re.compile(r'<a\s[^>]*?\bhref="([^"]+)"')
_LOADED = re.compile(r'<(?!a\s)\w+\s[^>]*?\b(?:href|src)="([^"]+)"')


class Built:
    """One page as it is built: the anchors that it has, the addresses that it links to, and those that it loads."""

    def __init__(self, text: str) -> None:
        self.anchors = {"", "__top", *map(unescape, _ANCHOR.findall(text))}
        self.links = {*map(unescape, _LINKED.findall(text))}
        self.loaded = {*map(unescape, _LOADED.findall(text))}


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of links and anchors of the built pages that lead nowhere; a warning ends a strict build."""
    site = Path(config.site_dir)
    pages = {page: Built(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    for fault in faults(pages):
        LOG.warning(fault)


def faults(pages: dict[Path, Built]) -> Iterator[str]:
    """Yield what is wrong with the links of built pages."""
    for page, built in pages.items():
        yield from (f"{page} loads {each} from elsewhere" for each in built.loaded if "//" in each)
        for link in sorted(built.links | built.loaded):
            where = urlsplit(link)
            if where.scheme or where.netloc:
                continue
            path = Path(os.path.normpath(page.parent / unquote(where.path))) if where.path else page
            if not path.exists():
                yield f"{page} links to {link}, which is not there"
            elif path in pages and unquote(where.fragment) not in pages[path].anchors:
                yield f"{page} links to {link}; no such anchor"
