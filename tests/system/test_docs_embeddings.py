"""docs/guides/embeddings.md: its examples run, and its fields are those of the bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from inlay import AsyncLLM
from inlay.api.embeddings import EmbeddingsBody, RerankBody
from tests.model.api.tool_templates import tool_model
from tests.pages import DOCS, blocks
from tests.server.server.conftest import Site, running

PAGE = DOCS / "guides" / "embeddings.md"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    llm = AsyncLLM(tool_model("qwen"), kv_memory="16MiB", seed=1)
    with running(llm) as found:
        yield found
    llm.shutdown()


def test_its_client_gets_vectors(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks(PAGE) if "from openai" in block.text)
    text = example.text.replace("http://127.0.0.1:8000", site.base.removesuffix("/v1"))
    exec(compile(text, str(example), "exec"), {"MODEL": "tiny"})
    assert capsys.readouterr().out.startswith("2 ")


def test_its_command_ranks_documents(site: Site) -> None:
    (command,) = (block.text for block in blocks(PAGE) if "curl" in block.text)
    found = re.search(r"8000(\S+) .* -d '(.*)'", command)
    assert found
    answer = site.post(found[1], **json.loads(found[2]))
    assert len(answer["results"]) == 1


def test_its_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks(PAGE) if "from inlay" in block.text)
    exec(compile(example.text, str(example), "exec"), {"MODEL": tool_model("qwen")})
    assert int(capsys.readouterr().out) > 0


def test_page_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert {*EmbeddingsBody.model_fields, *RerankBody.model_fields} <= named
