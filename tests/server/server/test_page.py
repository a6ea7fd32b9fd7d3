"""The page at /: its files, the headers that keep it apart from other origins, and the ways to disable it."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inlay.server.app import build_app
from inlay.server.page_files import FOLDER, page_files
from inlay.server.run import Server, StartingApp, listen
from inlay.server.settings import ServerSettings
from tests.model.server import site as tenants
from tests.server.server.conftest import Site, running, small_model

OURS = [path for path in sorted(FOLDER.glob("*.mjs")) if path.name not in ("preact.mjs", "hooks.mjs", "htm.mjs")]
#: The parts from npm, as they were published.
VENDORED = {
    "preact.mjs": "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55",
    "hooks.mjs": "e862ab2973aa6455eaa0f77c5d832d2157d6be59a17c8ba546550a575b58c6b4",
    "htm.mjs": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
}


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tenants.Site]:
    yield from tenants.with_keys(tmp_path_factory.mktemp("keys"))


def policy_of(heads: dict[str, str]) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in heads["content-security-policy"].split("; "))


def test_the_page_runs_only_its_own_files(site: Site):
    status, heads, text = site.call("GET", "/")
    assert (status, heads["content-type"]) == (200, "text/html; charset=utf-8")
    policy = policy_of(heads)
    assert policy["default-src"] == "'none'"
    assert (policy["connect-src"], policy["style-src"], policy["img-src"]) == ("'self'",) * 3
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in heads["content-security-policy"]
    (inline,) = re.findall(r"<script(?![^>]*src)[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert heads["x-content-type-options"] == "nosniff"
    assert heads["referrer-policy"] == "no-referrer"


def test_every_file_that_a_file_names_is_served_with_the_same_headers(site: Site):
    page = site.call("GET", "/")[2]
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"|"\./page/([^"]+)"', page))
    names = {one or other for one, other in named}
    for file in OURS:
        names |= set(re.findall(r'from "\./([^"]+)"', file.read_text()))
    assert names >= {"app.mjs", "style.css", "icon.svg", "preact.mjs", "hooks.mjs", "htm.mjs", "playground.mjs"}
    for name in names:
        status, heads, _ = site.call("GET", f"/page/{name}")
        assert status == 200, name
        assert "default-src 'none'" in heads["content-security-policy"]
        kind = {"mjs": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
        assert heads["content-type"].startswith(kind)


def test_page_needs_no_recent_browser():
    """Newer methods would leave an older browser with an empty page, and newer colours with none at all."""
    newer = re.compile(r"\b(groupBy|toReversed|toSorted|toSpliced|withResolvers|fromAsync)\b")
    assert [(file.name, found[0]) for file in OURS if (found := newer.search(file.read_text()))] == []
    style = (FOLDER / "style.css").read_text()
    pairs = dict(re.findall(r"(--[a-z-]+): light-dark\((#\w+), #\w+\);", style))
    (without,) = re.findall(r"@supports not \(color: light-dark\(#000, #fff\)\) \{(.*?)\n\}", style, re.DOTALL)
    assert dict(re.findall(r"(--[a-z-]+): (#\w+);", without)) == pairs
    assert style.count("light-dark(#") == len(pairs) + 1, "every pair is a variable"


def test_browser_revalidates_without_a_second_download(site: Site):
    _, heads, _ = site.call("GET", "/page/app.mjs")
    assert heads["cache-control"] == "no-cache"
    status, _, text = site.call("GET", "/page/app.mjs", If_None_Match=heads["etag"])
    assert (status, text) == (304, "")
    assert site.call("HEAD", "/")[0] == 200


@pytest.mark.parametrize("name", ["nothing.mjs", "..%2fservice.py", "%2e%2e/service.py", "page_files.py", ""])
def test_no_other_file_is_served(site: Site, name: str):
    status, _, answer = site.call("GET", f"/page/{name}")
    assert status in (307, 404)
    if status == 404:
        assert answer["error"]["code"] == "not_found"


def test_the_page_needs_no_key_and_its_data_do(with_keys: tenants.Site):
    assert with_keys.call("GET", "/", key=None)[0] == 200
    assert with_keys.call("GET", "/page/app.mjs", key=None)[0] == 200
    for path in ("/v1/requests", "/v1/cache", "/v1/cache/segments", "/v1/schemas", "/v1/schemas/x/advice"):
        tenants.refused(with_keys.call("GET", path, key=None), 401, "invalid_api_key")


def test_unknown_host_name_gets_no_page(site: Site):
    assert site.call("GET", "/", Host="evil.example")[0] == 421


def test_page_can_be_disabled():
    llm = small_model()
    with running(llm, page=False) as site:
        for path in ("/", "/page/app.mjs"):
            status, _, answer = site.call("GET", path)
            assert (status, answer["error"]["code"]) == (404, "not_found")
    llm.shutdown()


def test_page_is_served_while_the_model_loads():
    llm = small_model()
    go_on, is_ready = threading.Event(), threading.Event()

    def load(_):
        assert go_on.wait(30)
        return build_app(llm, ServerSettings(root_path="/llm"))

    with listen("127.0.0.1", 0, network=False) as listener:
        server = Server(StartingApp(load, "/llm", page=True), is_ready.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        site = Site(server, None, "", listener.getsockname()[1])
        loading = site.call("GET", "/llm/")
        assert loading[0] == 200
        assert site.call("GET", "/llm/page/app.mjs")[0] == 200
        assert site.call("GET", "/llm/v1/requests")[0] == 503
        go_on.set()
        assert is_ready.wait(30)
        assert site.call("GET", "/llm/")[2] == loading[2]
        server.loop.call_soon_threadsafe(server.stop)
        thread.join(30)
    llm.shutdown()


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_scripts_make_no_html_from_text_and_name_no_other_host(file: Path):
    text = file.read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "localStorage.setItem(KEY",
    ):
        assert word not in text, word
    assert not re.findall(r"https?://", text)


def test_vendored_files_equal_the_published_ones():
    found = {name: hashlib.sha256(page_files()[name].content).hexdigest() for name in VENDORED}
    assert found == VENDORED
    notes = page_files()["LICENSES.txt"].content.decode()
    for words in ("Preact 11.2.0", "The MIT License", "htm 3.1.1", "Apache License"):
        assert words in notes


def test_the_page_is_small():
    assert sum(len(file.content) for file in page_files().values()) < 150_000
