"""The documentation as a whole: its links and anchors lead somewhere, and the site has every page and public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import inlay
from tests.pages import DOCS

ROOT = DOCS.parent
PAGES = sorted(DOCS.rglob("*.md"))
VLLM = "docs/usage/metrics.md"  # a page of vLLM that a source names
READ = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lost = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def test_pages_named_in_sources_exist() -> None:
    lost = set()
    for folder in ("src", "lab", "tests", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|json)\b", file.read_text(encoding="utf-8")):
                if name != VLLM and not (ROOT / name).exists():
                    lost.add(f"{file.relative_to(ROOT)}: {name}")
    assert lost == set()


def test_the_api_page_has_every_public_name() -> None:
    text = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: ([\w.]+)\.(\w+)$", text, re.MULTILINE)
    public = [name for module, name in listed if module != "inlay.client.options"]  # the options of calls, by name
    assert sorted(public) == sorted(inlay.__all__)
    for module, name in listed:
        found = getattr(import_module(module), name)
        assert name not in public or found is getattr(inlay, name)


def test_the_navigation_has_every_page() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
