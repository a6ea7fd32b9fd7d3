"""A batch answers requests of every dialect, each in its own form."""

from __future__ import annotations

from pathlib import Path

from tests.system.batch.helpers import CHAT, bodies, line, read, run, write

ASKED = [{"role": "user", "content": "Hello"}]


def test_each_line_is_answered_in_the_dialect_of_its_url(tmp_path: Path) -> None:
    rows = [
        line("chat", CHAT, messages=ASKED),
        line("message", "/v1/messages", messages=ASKED),
        {
            **line("response"),
            "url": "/v1/responses",
            "body": {"input": "Hello", "max_output_tokens": 4, "temperature": 0},
        },
    ]
    run(write(tmp_path / "in", rows), tmp_path / "out")
    found = bodies(tmp_path / "out")
    said = found["chat"]["choices"][0]["message"]["content"]
    assert "".join(block["text"] for block in found["message"]["content"]) == said
    assert found["response"]["output"][0]["content"][0]["text"] == said


def test_a_batch_has_no_stored_responses(tmp_path: Path) -> None:
    row = {**line("a"), "url": "/v1/responses", "body": {"input": "Hello", "previous_response_id": "resp_1"}}
    run(write(tmp_path / "in", [row]), tmp_path / "out")
    (answer,) = read(tmp_path / "out")
    assert answer["response"]["body"]["error"]["code"] == "response_not_found"


def test_a_batch_embeds_texts(tmp_path: Path) -> None:
    row = {**line("a"), "url": "/v1/embeddings", "body": {"input": ["Hello", "there"]}}
    run(write(tmp_path / "in", [row]), tmp_path / "out")
    assert [len(one["embedding"]) > 0 for one in bodies(tmp_path / "out")["a"]["data"]] == [True, True]
