"""docs/guides/schemas-over-http.md: its curl lines run in order, and no error or option is missing."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from inlay import AsyncLLM
from inlay.server.app import build_app
from inlay.server.schema_record import SchemaOptions
from inlay.server.settings import ServerSettings
from tests.pages import DOCS, blocks, curl, rows

SOURCES = DOCS.parent / "src/inlay/server"
PAGE = DOCS / "guides/schemas-over-http.md"
SHELL = [line for block in blocks(PAGE) if block.language == "sh" for line in block.text.splitlines()]


@pytest.fixture(scope="module")
def answers() -> Iterator[list[str]]:
    """Yield the output of every line of the page, in order, on a server that has just started."""
    llm = AsyncLLM("demo", kv_memory="64MiB")
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    one = uvicorn.Server(uvicorn.Config(build_app(llm, ServerSettings()), log_config=None, access_log=False))
    thread = threading.Thread(target=one.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not one.started:
        time.sleep(0.01)
    port = bound.getsockname()[1]
    yield [curl(line.replace(":8000", f":{port}")) for line in SHELL]
    one.should_exit = True
    thread.join()
    llm.shutdown()


def like(shown: Any, came: Any) -> bool:
    """Compare output with the page, except for numbers, which depend on the model, and text after "…"."""
    if isinstance(shown, dict):
        return (
            isinstance(came, dict) and list(shown) == list(came) and all(like(shown[key], came[key]) for key in shown)
        )
    if isinstance(shown, list):
        return isinstance(came, list) and len(shown) == len(came) and all(map(like, shown, came))
    if isinstance(shown, str) and "…" in shown and shown != came:
        return isinstance(came, str) and re.fullmatch(re.escape(shown).replace("…", ".*"), came) is not None
    return shown == came or (isinstance(shown, int) and isinstance(came, int))


def test_every_line_of_the_page_works(answers):
    failed = {line[:60]: answer for line, answer in zip(SHELL, answers, strict=True) if '"error"' in answer}
    assert list(failed) == [line[:60] for line in SHELL if "/etc/passwd" in line]
    assert json.loads(answers[1])["inlay"]["module_tokens"] + json.loads(answers[1])["inlay"]["exact_tokens"] > 20
    assert json.loads(answers[-7])["version"] == 2
    assert json.loads(answers[-6])["deleted"]
    assert json.loads(answers[-5])["object"] == "schema.encoding"
    assert answers[-4].endswith("data: [DONE]\n\n")
    assert json.loads(answers[-3])["pinned_bytes"] > 0
    assert json.loads(answers[-2])["was_pinned"]
    assert json.loads(answers[-1])["evicted_tokens"] > 20


def test_answers_equal_the_page(answers):
    wrong, trip = (json.loads(block.text) for block in blocks(PAGE) if block.note == "answer")
    came = [json.loads(answer) for answer, line in zip(answers, SHELL, strict=True) if "/etc/passwd" in line]
    assert [wrong] == came
    (shown,) = (json.loads(a) for a, line in zip(answers, SHELL, strict=True) if line.endswith("/v1/schemas/trip"))
    assert like(trip, shown), json.dumps(shown, indent=1)


def test_page_names_every_option():
    named = {name for cells in rows(PAGE, "option", "") for name in re.findall(r"`(\w+)`", cells[0])}
    assert named == set(SchemaOptions.model_fields)


def test_page_lists_every_error_code():
    listed = {code for cells in rows(PAGE, "status", "code", "") for code in re.findall(r"`(\w+)`", cells[1])}
    text = "".join((SOURCES / f"{name}.py").read_text() for name in ("schemas", "schema_catalog", "schema_record"))
    made = set(re.findall(r"""code["']?[=:] ?"(\w+)\"""", text)) | {"unknown_field"}
    assert listed - {"invalid_value", "kv_memory_exceeded"} == made - {"unexpected_body"}
