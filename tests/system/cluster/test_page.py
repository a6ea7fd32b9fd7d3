"""The page of a cluster, in Chromium: what works, and the messages for what does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inlay_lab.bench.deployed import Deployed, deployed
from tests.browsing import add_examples, ask, chromium, expect, opened

pytest.importorskip("ray", reason="Ray is not installed: pip install 'inlay-llm[cluster]'")
pytestmark = pytest.mark.slow

TEXT = "Monar is a town. The mayor of Monar is Pavel Brinos."
PML = f'<schema name="docs"><user><module name="monar">{TEXT}</module></user></schema>'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed(tmp_path_factory.mktemp("cluster")) as one:
        assert one.call("POST", "/v1/schemas", {"pml": PML})[0] == 201
        yield one


def test_cluster_page_works_in_a_browser(cluster: Deployed):
    url = f"http://127.0.0.1:{cluster.port}/"
    with chromium() as browser, opened(browser, url, allowed=("400",)) as page:
        add_examples(page)
        turn = ask(page, "Who is the mayor of Bravel?")
        expect(turn.locator(".answer .text")).to_contain_text("Rosa Tilen")
        expect(turn.locator(".figures")).to_contain_text("from the cache")
        page.keyboard.press("Tab")
        page.goto(f"{url}#/cache")
        expect(page.locator(".empty")).to_contain_text("Each replica has its own cache")
        expect(page.locator(".problem")).to_have_count(0)
        page.goto(f"{url}#/requests")
        expect(page.locator(".request").first).to_contain_text("chat/completions")
        page.goto(f"{url}#/schemas")
        page.locator(".names button", has_text="docs").click()
        expect(page.locator(".tree")).to_contain_text("monar")
        expect(page.locator(".problem")).to_have_count(0)
