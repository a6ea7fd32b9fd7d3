"""The page in Chromium, for tests of one server and of a cluster.

It needs the package ``playwright``, and Chromium of the system or of Playwright. Without one of them its tests are
skipped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser within a block. Skips the test if there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"there is no Chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, allowed: tuple[str, ...] = (), **options: Any) -> Iterator[Any]:
    """A page of the server within a block. Errors in its console and requests to other hosts fail the test.

    Args:
        allowed: words of errors that are expected.
        options: of the browser's context.
    """
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    page = context.new_page()
    page.set_default_timeout(30_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url.split("/")[2]))
    page.goto(url)
    yield page
    context.close()
    assert [text for text in wrong if not any(word in text for word in allowed)] == []
    assert asked == {url.split("/")[2]}, "nothing comes from elsewhere"


def ask(page: Any, question: str) -> Any:
    """Ask, wait for the end of the answer, and return its turn."""
    turns = page.locator(".turn").count()
    page.fill("#question", question)
    page.keyboard.press("Enter")
    turn = page.locator(".turn").nth(turns)
    expect(turn).to_have_attribute("aria-busy", "false")
    return turn


def number(text: str) -> int:
    """The first number of a text."""
    found = re.search(r"[\d,]+", text)
    assert found is not None, text
    return int(found[0].replace(",", ""))


def add_examples(page: Any) -> None:
    """Add the three example documents. A question that is sent before they are shown goes without them."""
    page.click("text=Examples")
    expect(page.locator(".chip")).to_have_count(3)
