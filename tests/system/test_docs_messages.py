"""docs/guides/messages-and-responses.md: its examples run with the official clients, and its tables are complete."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

import pytest

from inlay import AsyncLLM
from inlay.api.anthropic.bodies import NO_EFFECT as MESSAGES_NO_EFFECT
from inlay.api.anthropic.bodies import MessagesBody
from inlay.api.reading import CommonBody
from inlay.api.responses.bodies import NO_EFFECT as RESPONSES_NO_EFFECT
from inlay.api.responses.bodies import ResponsesBody
from inlay.server.routes import ROUTES
from inlay.server.settings import ServerSettings
from tests.model.api.tool_templates import tool_model
from tests.pages import DOCS, blocks, rows
from tests.server.server.conftest import Site, running

PAGE = DOCS / "guides" / "messages-and-responses.md"
SOURCES = DOCS.parent / "src" / "inlay"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", chunk_size=8, seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


@pytest.mark.parametrize("client", ["anthropic", "openai"])
def test_its_examples_run(site: Site, client: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    (example,) = (block for block in blocks(PAGE) if block.language == "python" and f"from {client}" in block.text)
    text = example.text.replace("http://127.0.0.1:8000", site.base.removesuffix("/v1"))
    exec(compile(text, str(example), "exec"), {"MODEL": "tiny", "HANDBOOK": "The warranty is two years. " * 5})
    assert capsys.readouterr().out.strip()


def test_fields_equal_the_bodies() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT)) | {"model", "stream"}
    own = {*MessagesBody.model_fields, *ResponsesBody.model_fields} - set(CommonBody.model_fields)
    assert {*own, *MESSAGES_NO_EFFECT, *RESPONSES_NO_EFFECT} - {"comparison_response_id"} <= named


def test_paths_equal_the_servers() -> None:
    told = {tuple(path.strip("`").split()) for path, _ in rows(PAGE, "path", "API")}
    table = {(method, route.path.replace("{name}", "{id}")) for route in ROUTES for method in route.methods}
    assert told == {one for one in table if one[1].startswith(("/v1/messages", "/v1/responses"))}


def test_codes_equal_the_sources() -> None:
    sources = [*(SOURCES / "api").rglob("*.py"), SOURCES / "server" / "stored_responses.py"]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    listed = {code.strip("`") for _, code, _ in rows(PAGE, "status", "code", "")}
    assert all(f'"{code}"' in text for code in listed)
    assert {*re.findall(r'code="(\w+)"', sources[-1].read_text(encoding="utf-8"))} <= listed


def test_limits_equal_the_servers() -> None:
    settings = ServerSettings()
    told = re.search(
        r"at most ([\d,]+) responses and (\d+) MiB, for (\d+) hours,\s+and all tenants together (\d+) MiB", TEXT
    )
    assert told is not None
    assert told.groups() == (
        f"{settings.max_stored_responses:,}",
        str(settings.max_stored_bytes >> 20),
        f"{settings.stored_response_s / 3600:.0f}",
        str(settings.max_stored_bytes_total >> 20),
    )
