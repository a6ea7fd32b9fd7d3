"""Logs in common formats, and errors in some lines."""

from __future__ import annotations

import gzip
import json
import os
import threading

import pytest

from inlay.authoring.extract import LogError, LoggedTurn, LogReader
from inlay.authoring.extract import log as module
from tests.commands import pipe
from tests.raising import raises

HELLO = (LoggedTurn(None, "Hello"),)
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
TURNS = (LoggedTurn("system", "Be kind."), LoggedTurn("user", "Hi"))


@pytest.fixture
def log(tmp_path):
    def write(*lines: object, raw: bytes | None = None, name: str = "log.jsonl") -> str:
        path = tmp_path / name
        data = "".join(json.dumps(line) + "\n" for line in lines).encode() if raw is None else raw
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return write


def turns(path: str, **options: bool) -> list[tuple[LoggedTurn, ...]]:
    return [prompt.turns for prompt in LogReader(path, **options)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Hello", HELLO),
        ({"prompt": "Hello", "completion": "Hi"}, HELLO),
        ({"messages": MESSAGES, "model": "m"}, TURNS),
        ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}, TURNS),
        ({"custom_id": "2", "body": {"prompt": "Hello"}}, HELLO),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            (LoggedTurn("user", "ab"),),
        ),
        ({"messages": [{"role": "developer", "content": ""}]}, (LoggedTurn("system", ""),)),
    ],
)
def test_forms(log, line, expected):
    assert turns(log(line)) == [expected]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{oops", "this is not JSON (Expecting property name enclosed in double quotes); write {"),
        (b'"\xff"', "byte 2 of the line is not UTF-8; save the log as UTF-8"),
        (b"7", "the line is a number; write {"),
        (b"null", "the line is null; write {"),
        (b'{"text": "x"}', "the line has neither a prompt nor messages; write {"),
        (b'{"prompt": ["x"]}', "the prompt is a list; write a string"),
        (b'{"prompt": "x", "messages": []}', "the line has both a prompt and messages; keep one of them"),
        (b'{"messages": []}', "messages is no list of messages; write [{"),
        (b'{"messages": ["x"]}', 'message 1 is a string; write {"role": "user", "content": "'),
        (
            b'{"messages": [{"role": "critic", "content": "x"}]}',
            'message 1 has the role "critic", for which PML has no turn; use system, user, assistant, developer, tool',
        ),
        (b'{"messages": [{"content": "x"}]}', "message 1 has the role null,"),
        (b'{"messages": [{"role": "user"}]}', "the content of message 1 is null; write a string"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 'holds a part of type "image_url";'),
        (
            b'{"prompt": "ab\\ud83d"}',
            "the prompt holds half a character (\\ud83d) at index 2; cut texts between characters",
        ),
        (b"[" * 100_000, "the JSON is nested too deeply; write {"),
        (b"1" * 5_000, "this is not JSON ("),
    ],
)
def test_invalid_line_is_one_sentence(log, line, sentence):
    path = log(raw=b'"Hello"\n\n' + line + b'\n"Hello"\n')
    with pytest.raises(LogError) as error:
        turns(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    reader = LogReader(path, skip_bad=True)
    assert [(prompt.line, prompt.turns) for prompt in reader] == [(1, HELLO), (4, HELLO)]
    assert reader.skipped == 1
    assert reader.first_skipped == str(error.value)


def test_compressed_files_whatever_their_name(log, tmp_path):
    path = log("Hello", "Hello", name="log.jsonl.gz")
    assert turns(path) == [HELLO] * 2
    renamed = tmp_path / "log"
    renamed.write_bytes((tmp_path / "log.jsonl.gz").read_bytes())
    assert turns(str(renamed)) == [HELLO] * 2


def test_truncated_compressed_file_is_rejected(log, tmp_path):
    path = tmp_path / log("Hello" * 1000, name="log.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with raises("prompt.unreadable_log", LogError) as caught:
        turns(str(path))
    assert "log.jsonl.gz" in str(caught.value)


def test_blank_lines_a_byte_order_mark_crlf_and_no_last_line_break(log):
    assert turns(log(raw=b'\xef\xbb\xbf"Hello"\r\n  \r\n"Hello"')) == [HELLO] * 2
    assert turns(log(raw=b"")) == []


def test_standard_input(monkeypatch):
    pipe(monkeypatch, '"Hello"\n7\n')
    with raises("prompt.invalid_log_line", LogError, names="<stdin>:2"):
        turns("-")


def test_overlong_line_is_skipped_or_rejected(log, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    path = log("x" * 350, "Hello")
    assert turns(path, skip_bad=True) == [HELLO]
    with raises("prompt.invalid_log_line", LogError, names="log.jsonl:1"):
        turns(path)


def test_unreadable_files_are_rejected(tmp_path):
    with raises("prompt.unreadable_log", LogError) as caught:
        turns(str(tmp_path / "none.jsonl"))
    assert "none.jsonl: no such file" in str(caught.value)
    with raises("prompt.unreadable_log", LogError) as caught:
        LogReader(tmp_path).check()
    assert "Is a directory" in str(caught.value)


def test_a_pipe_is_opened_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b'"Hello"\n'))
    writer.start()
    reader = LogReader(path)
    reader.check()
    assert [prompt.turns for prompt in reader] == [HELLO]
    writer.join()


def test_progress_in_bytes(log):
    path = log("Hello", "Hello")
    seen: list[tuple[int, int]] = []
    assert len(list(LogReader(path, progress=lambda done, total: seen.append((done, total))))) == 2
    assert seen[-1] == (16, 16)


def test_the_content_of_a_call_is_null(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (tmp_path / "log").write_text(json.dumps({"messages": messages}))
    (prompt,) = LogReader(tmp_path / "log")
    assert [(turn.role, turn.text) for turn in prompt.turns] == [("user", "Hi"), ("assistant", "")]


def test_tool_results_count_as_user_text(tmp_path):
    call = {"name": "look_up", "arguments": "{}"}
    rows = [
        [{"role": "assistant", "content": None, "function_call": call}, {"role": "function", "content": "It rains."}],
        [{"role": "user", "content": "Hi"}],
        [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "It is dry."}]}],
    ]
    (tmp_path / "log").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    reader = LogReader(tmp_path / "log")
    turns = [[(turn.role, turn.text) for turn in prompt.turns] for prompt in reader]
    assert turns == [[("assistant", ""), ("user", "It rains.")], [("user", "Hi")], [("user", "It is dry.")]]
    assert reader.tool_turns == 2
