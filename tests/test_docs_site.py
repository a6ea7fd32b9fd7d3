"""The site that ``make docs`` builds: the API page has every public name, and the navigation has every page."""

from __future__ import annotations

import re
from importlib import import_module

import inlay

from .pages import DOCS


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: ([\w.]+)\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(name for _, name in listed) == sorted(inlay.__all__)
    for module, name in listed:
        assert getattr(import_module(module), name) is getattr(inlay, name)


def test_the_navigation_has_every_page() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))
