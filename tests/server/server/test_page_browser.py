"""The page in Chromium: documents, schemas, the cache, requests, keys, and text that looks like HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import AsyncLLM, Schema
from inlay.server.tenants import editing
from tests.browsing import PHONE, add_examples, ask, chromium, expect, number, opened
from tests.pages import DOCS
from tests.server.server.conftest import Site, running

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=\"document.title='broken'\">"
STORED = "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
EVIL_TEXT = '&lt;script&gt;document.title="broken"&lt;/script&gt; is a text.'
EVIL_PML = f'<schema name="evil"><module name="a">{EVIL_TEXT}</module></schema>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM("demo", kv_memory="64MiB", seed=0, profile="off")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def demo(llm: AsyncLLM) -> Iterator[Site]:
    examples = DOCS.parent / "examples"
    schemas = [Schema.from_file(examples / f"{name}/{name}.xml") for name in ("records", "trip")]
    with running(llm, [*schemas, Schema.from_string(EVIL_PML)], served_names=("demo",)) as site:
        yield site


@pytest.fixture
def page(browser: Any, demo: Site) -> Iterator[Any]:
    with opened(browser, f"http://127.0.0.1:{demo.port}/") as page:
        page.locator("#question").wait_for()
        yield page


def test_documents_are_reused_after_reordering(page: Any):
    add_examples(page)
    first = ask(page, "Who is the captain of Star of Gamin?")
    assert "Rolan Fader" in first.locator(".answer .text").inner_text()
    page.click("text=Clear")
    page.locator(".chip").first.focus()
    page.keyboard.press("Alt+ArrowDown")
    assert page.locator(".chip .name").all_inner_texts() == ["rosa.txt", "bravel.txt", "star.txt"]
    page.keyboard.press("Delete")
    assert page.locator(".chip .name").all_inner_texts() == ["rosa.txt", "star.txt"]
    turn = ask(page, "Where does Rosa Tilen live?")
    assert "Bravel" in turn.locator(".answer .text").inner_text()
    turn.locator("summary", has_text="Where the tokens came from").click()
    rows = [row.locator("td").all_inner_texts() for row in turn.locator(".diagnosis tbody tr").all()]
    assert [row[0] for row in rows] == ["rosa.txt", "star.txt"]
    assert {row[3] for row in rows} == {"Pool"}
    assert any(number(row[4]) for row in rows), "a document was moved"
    assert number(turn.locator(".figures b").nth(1).inner_text()) > 50


def test_full_prefill_is_compared_with_the_answer(page: Any):
    add_examples(page)
    page.get_by_role("switch").check()
    turn = ask(page, "Who is the mayor of Bravel?")
    reused, full = turn.locator(".answer").all()
    assert "Rosa Tilen" in reused.locator(".text").inner_text()
    assert "Rosa Tilen" in full.locator(".text").inner_text()
    assert full.locator(".figures b").nth(1).inner_text() == "0%"
    names, values = (turn.locator(f".compared {tag}").all_inner_texts() for tag in ("dt", "dd"))
    compared = dict(zip(names, values, strict=True))
    assert compared["Answer"] == "the same tokens"
    assert "nats per token" in compared["Divergence"]
    assert " instead of " in compared["Computed tokens"]


def test_schema_prompt_is_built_from_choices_and_arguments(page: Any, demo: Site):
    page.get_by_role("button", name="Schema", exact=True).click()
    page.get_by_role("combobox", name="Schema").select_option("trip")
    page.get_by_label("plan").check()
    page.get_by_label("miami").check()
    page.get_by_label("maui").check()
    assert not page.get_by_label("miami").is_checked(), "members of a union exclude each other"
    page.get_by_label("duration").fill("two days")
    with page.expect_request(lambda request: "completions" in request.url) as sent:
        ask(page, "Where do we go?")
    prompt = sent.value.post_data_json["prompt"]
    assert prompt == {
        "schema": "trip",
        "content": [
            {"import": "plan", "arguments": {"duration": "two days"}, "content": [{"import": "maui"}]},
            "Where do we go?",
        ],
    }


def test_cache_map_pins_and_evicts_tiles(page: Any, demo: Site):
    page.keyboard.press("2")
    tile = page.locator(".tile", has_text="rosa")
    tile.click()
    detail = page.locator(".detail")
    expect(detail.locator("pre")).to_contain_text("This is the record of Rosa Tilen.")
    detail.get_by_role("button", name="Pin").click()
    detail.get_by_role("button", name="Unpin").click()
    detail.get_by_role("button", name="Evict").click()
    expect(page.locator(".tile", has_text="rosa")).to_have_count(0)
    page.fill("input[type=search]", "bravel")
    expect(page.locator(".tile")).to_have_count(1)
    page.locator(".tile").focus()
    page.keyboard.press("Enter")
    expect(detail.locator("h2")).to_have_text("bravel")


def test_requests_are_listed_with_their_tokens(page: Any, demo: Site):
    answer = demo.post("/v1/completions", prompt="The ferry leaves at noon.", max_tokens=3)
    page.keyboard.press("3")
    row = page.locator(".request").first
    expect(row).to_contain_text("completions")
    assert number(row.locator(".answer").inner_text()) == answer["usage"]["completion_tokens"]


def test_schemas_have_versions_and_advice(page: Any):
    page.keyboard.press("4")
    page.locator(".names button", has_text="trip").click()
    page.get_by_role("tab", name=re.compile("Advice")).click()
    expect(page.locator(".advice")).to_contain_text("argument-first")
    page.get_by_role("tab", name="Source").click()
    expect(page.locator("pre.source")).to_contain_text('"name": "trip"')
    page.get_by_role("tab", name=re.compile("Versions")).click()
    expect(page.locator("tbody tr").first).to_contain_text("1")


def test_text_that_looks_like_html_stays_text(page: Any, tmp_path: Path):
    file = tmp_path / f"{EVIL[:20]}.txt".replace("/", "_")
    file.write_text(EVIL)
    page.set_input_files("input[type=file]", str(file))
    expect(page.locator(".chip .name")).to_have_text(file.name)
    ask(page, EVIL)
    assert page.locator(".question").inner_text() == EVIL
    page.keyboard.press("Tab")
    page.goto(page.url.split("#")[0] + "#/cache")
    page.locator(".tile", has_text="a").first.wait_for()
    page.locator(".group", has_text="evil").locator(".tile").first.click()
    page.goto(page.url.split("#")[0] + "#/schemas")
    page.locator(".names button", has_text="evil").click()
    page.get_by_role("tab", name="Source").click()
    expect(page.locator("pre.source")).to_contain_text("<script>document.title")
    assert page.title() == "demo · inlay"
    assert page.locator("main img, main script").count() == 0


def test_the_policy_forbids_html_from_text(browser: Any, demo: Site):
    tried = "() => { try { document.body.innerHTML = '<b>x</b>'; return 'done' } catch (e) { return e.name } }"
    with opened(browser, f"http://127.0.0.1:{demo.port}/", allowed=("TrustedHTML",)) as page:
        assert page.evaluate(tried) == "TypeError"


def test_server_with_keys_prompts_for_a_key(browser: Any, llm: AsyncLLM, tmp_path: Path):
    path = tmp_path / "keys.json"
    with editing(path) as file:
        key = file.add("ann")[0]
    with running(llm, keys_file=path, served_names=("demo",)) as site:
        url = f"http://127.0.0.1:{site.port}/"
        with opened(browser, url, allowed=("401",)) as page:
            page.get_by_label("API key").fill("wrong")
            page.get_by_role("button", name="Use this key").click()
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use this key").click()
            page.wait_for_selector("#question")
            page.keyboard.press("3")
            expect(page.locator("main")).to_contain_text("Running")
            stored = page.evaluate(STORED)
            assert key in stored[0]
            assert key not in str(stored[1:])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_layout_does_not_scroll_sideways(browser: Any, demo: Site, scheme: str):
    url = f"http://127.0.0.1:{demo.port}/"
    with opened(browser, url, viewport=PHONE, color_scheme=scheme, has_touch=True) as page:
        page.wait_for_selector("#question")
        for view in ("playground", "cache", "requests", "schemas"):
            page.click(f'nav a[href="#/{view}"]')
            page.locator(f".view.{view}").wait_for()
            page.wait_for_timeout(500)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
        page.click('nav a[href="#/playground"]')
        add_examples(page)
        turn = ask(page, "Who is the mayor of Bravel?")
        turn.locator("summary", has_text="Where the tokens came from").click()
        table = turn.locator(".diagnosis .scroll")
        expect(table.get_by_text("bravel.txt")).to_be_visible()
        assert table.evaluate("each => each.scrollWidth <= each.clientWidth"), "the table is cut off"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 380
        assert light == (scheme == "light")
