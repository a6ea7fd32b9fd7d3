"""The pages on the server: curl lines and Python run, answers are real, and no field or code is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from inlay import AsyncLLM, Schema
from inlay.api.foreign import IGNORED
from inlay.api.openai.bodies import NO_EFFECT, ChatBody, CompletionBody
from inlay.server.tokens import FIELDS
from tests.pages import DOCS, blocks, curl, rows
from tests.server.server.conftest import Site, running

GUIDE, PAGE = DOCS / "guides/run-a-server.md", DOCS / "reference/http.md"
ROOT = DOCS.parent
BLOCKS = [*blocks(GUIDE), *blocks(PAGE)]
LINES = [line for block in BLOCKS if block.note == "curl" for line in block.text.splitlines()]
#: The sources of errors in the reference; other pages list their own codes.
SOURCES = [f"server/{name}.py" for name in ("errors", "service", "app", "completions")] + ["api/failures.py"]
ELSEWHERE = {"internal_error", "rate_limit_exceeded", "unknown_field", "unsupported_content", "unsupported_field"}


@pytest.fixture(scope="module")
def demo() -> Iterator[Site]:
    llm = AsyncLLM("demo", kv_memory="64MiB", reuse="exact", seed=0)
    schema = Schema.from_file(ROOT / "examples/records/records.xml")
    with running(llm, [schema], served_names=("demo",)) as site:
        yield site
    llm.shutdown()


@pytest.fixture(scope="module")
def answers(demo: Site) -> dict[str, str]:
    """The output of every line of the pages."""
    return {line: curl(line.replace(":8000", f":{demo.port}")) for line in LINES}


def test_every_line_is_answered(answers: dict[str, str]):
    failed = [line for line, answer in answers.items() if answer.startswith('{"error"')]
    assert failed == LINES[-2:]
    assert json.loads(answers[LINES[-1]])["error"]["code"] == "deadline_exceeded"
    shown = next(block for block in blocks(PAGE) if block.note == "answer")
    assert json.loads(answers[LINES[-2]]) == json.loads(shown.text)


def test_modules_are_reused_and_answers_are_right(answers: dict[str, str]):
    captain, phone = (json.loads(answer) for line, answer in answers.items() if '"reuse"' in line)
    assert captain["choices"][0]["text"] == "Rolan Fader"
    assert phone["choices"][0]["message"]["content"] == "48213"
    for answer in (captain, phone):
        assert answer["inlay"]["exact_tokens"] + answer["inlay"]["module_tokens"] > 20


def test_usage_has_the_shown_fields(answers: dict[str, str]):
    shown = json.loads(next(block for block in blocks(PAGE) if block.note == "usage").text)
    came = json.loads(answers[LINES[0]])
    for part in shown:
        assert list(shown[part]) == list(came[part])
    assert list(shown["inlay"]["timing"]) == list(came["inlay"]["timing"])
    assert shown["usage"]["prompt_tokens"] == shown["inlay"]["exact_tokens"] + sum(
        shown["inlay"][name] for name in ("module_tokens", "computed_tokens")
    )


def test_stream_ends_as_shown(answers: dict[str, str]):
    (stream,) = (answer for line, answer in answers.items() if " -N " in line)
    events = stream.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    last = json.loads(events[-3].removeprefix("data: "))
    assert (last["choices"], set(last) >= {"usage", "inlay"}) == ([], True)


def test_python_example_runs(demo: Site, capsys: pytest.CaptureFixture[str]):
    (code,) = (block.text for block in blocks(GUIDE) if block.language == "python")
    exec(compile(code.replace("127.0.0.1:8000", f"127.0.0.1:{demo.port}"), str(GUIDE), "exec"), {})
    first, second, _ = capsys.readouterr().out.splitlines()
    assert int(first.split()[-1]) < 10 < 200 < int(second.split()[-1])


def test_page_names_every_field_path_and_code(demo: Site):
    named = {name for cells in rows(PAGE, "fields", "") for name in re.findall(r"`(\w+)`", cells[0])}
    assert named == {*ChatBody.model_fields, *CompletionBody.model_fields, *NO_EFFECT}
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in IGNORED)
    paths = demo.call("GET", "/openapi.json")[2]["paths"]
    assert all(f" {path}`" in text or path.startswith("/v1/schemas") for path in paths), list(paths)
    assert all(f"`{name}`" in text for name in FIELDS)
    sources = "".join((ROOT / "src/inlay" / source).read_text() for source in SOURCES)
    codes = {*re.findall(r'code="(\w+)"', sources), *re.findall(r'\d\d\d[,:] "(\w+)"[,}]', sources), *ELSEWHERE}
    listed = {name for cells in rows(PAGE, "status", "code", "") for name in re.findall(r"`(\w+)`", cells[1])}
    assert listed == codes
