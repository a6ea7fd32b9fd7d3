"""``inlay chat``: questions about text files, its commands, and its errors, without a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from inlay.cli.documents import Document, DocumentChat, read_documents
from inlay.models.shapes import bytes_tokenizer
from inlay.wording import printable
from tests.commands import pipe, run
from tests.conftest import tiny
from tests.raising import raises

DOCUMENTS = Path("examples/folder/documents").resolve()
BRAVEL, SHIP = DOCUMENTS / "bravel.txt", DOCUMENTS / "star-of-gamin.txt"
MODEL = ("random:tiny", "--max-tokens", "3", "--store", "off")


def chat(capsys, monkeypatch, *lines: str, arguments: tuple[str, ...] = MODEL) -> tuple[int, str, str]:
    pipe(monkeypatch, "".join(f"{line}\n" for line in lines))
    return run(capsys, "chat", *arguments)


def cached(out: str) -> list[dict[str, tuple[int, int, str]]]:
    """The tables of /explain: by document its tokens, its cached tokens and their source."""
    tables: list[dict[str, tuple[int, int, str]]] = []
    for line in out.splitlines():
        cells = re.split(r"  +", line)
        if cells[0] == "document":
            tables.append({})
        elif tables and len(cells) >= 3 and cells[1].isdigit():
            tables[-1][cells[0]] = (int(cells[1]), int(cells[2]), " ".join(cells[3:]))
    return tables


def test_reordered_documents_are_found_in_the_cache(capsys, monkeypatch):
    status, out, err = chat(
        capsys,
        monkeypatch,
        f"/add {BRAVEL} {SHIP}",
        "Who is the mayor of Bravel?",
        "/explain",
        "/use star-of-gamin.txt bravel.txt",
        "Who is the captain of Star of Gamin?",
        "/explain",
        "/stats",
        arguments=("demo", "--store", "off"),
    )
    assert status == 0, err
    assert [line for line in out.splitlines() if line in ("Rosa Tilen", "Rolan Fader")] == ["Rosa Tilen", "Rolan Fader"]
    first, second = cached(out)
    for name in ("bravel.txt", "star-of-gamin.txt"):
        assert first[name][1:] == (0, "never seen")
        assert second[name] == (first[name][0], first[name][0], "pool")
    assert list(second)[:2] == ["star-of-gamin.txt", "bravel.txt"]
    assert len(re.findall(r"s to the first token, .*% of .* prompt tokens cached", err)) == 2
    assert "2 questions" in out


def test_a_dropped_document_is_not_in_the_prompt_and_stays_cached(capsys, monkeypatch):
    lines = (f"/add {BRAVEL} {SHIP}", "One?", "/drop bravel.txt", "Two?", "/explain", "/use bravel.txt", "Three?")
    _, out, _ = chat(capsys, monkeypatch, *lines, "/explain")
    without, again = cached(out)
    assert set(without) == {"star-of-gamin.txt", "other text"}
    assert (
        again["bravel.txt"][0]
        == again["bravel.txt"][1]
        == len(BRAVEL.read_text()) + (not BRAVEL.read_text().endswith("\n"))
    )


@pytest.mark.parametrize(("reuse", "place"), [("exact", "exact prefix"), ("off", "no such prefix")])
def test_reuse_sets_the_policy_of_later_questions(capsys, monkeypatch, reuse, place):
    lines = (f"/reuse {reuse}", f"/add {BRAVEL}", "One?", "/clear", "One?", "/explain")
    _, out, _ = chat(capsys, monkeypatch, *lines)
    (table,) = cached(out)
    tokens, found, source = table["bravel.txt"]
    assert (found, source) == (tokens if reuse == "exact" else 0, place)
    assert f"; reuse {reuse}; positions packed" in out


def test_recomputation_is_counted(capsys, monkeypatch):
    _, out, _ = chat(capsys, monkeypatch, "/reuse modular linked:4", f"/add {BRAVEL} {SHIP}", "One?", "/explain")
    assert int(re.search(r"(\d+) recomputed", out)[1]) >= 4
    assert "reuse modular, recompute linked:4" in out


def test_a_trailing_backslash_continues_a_question(capsys, monkeypatch):
    _, _, err = chat(capsys, monkeypatch, "One\\", "two?")
    assert err.count("to the first token") == 1


def test_quit_ends_the_session(capsys, monkeypatch):
    status, out, err = chat(capsys, monkeypatch, "/help", "/quit", "One?")
    assert status == 0
    assert "/drop NAME…" in out
    assert "to the first token" not in err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("/ad x", "/add"),
        ("/add", "/add FILE…"),
        ("/explain all", "/explain"),
        ("/explain", "ask a question first"),
        ("/add 'x", "quotation"),
        ("/use bravel.txt", "bravel.txt"),
        ("/add none.txt", "none.txt"),
        ("/reuse much", "much"),
        ("/reuse modular 3", "recompute"),
    ],
)
def test_invalid_command_gives_one_sentence(capsys, monkeypatch, line, named):
    status, _, err = chat(capsys, monkeypatch, line)
    assert status == 2
    told = ("random weights", "still loading")  # a slow machine reports its progress
    (sentence,) = [each for each in err.splitlines() if not any(text in each for text in told)]
    assert sentence.startswith("inlay: ")
    assert named in sentence


def test_schema_instead_of_a_model_is_rejected(capsys, monkeypatch):
    status, _, err = chat(capsys, monkeypatch, arguments=("examples/docs/docs.xml",))
    assert status == 2
    assert "inlay run" in err


def test_options_set_the_first_documents_and_the_system_turn(capsys, monkeypatch):
    arguments = (*MODEL, "--document", str(BRAVEL))
    _, out, _ = chat(capsys, monkeypatch, "One?", "/explain", arguments=arguments)
    _, with_system, _ = chat(capsys, monkeypatch, "One?", "/explain", arguments=(*arguments, "--system", "Be short."))
    (plain,), (longer,) = cached(out), cached(with_system)
    assert plain["bravel.txt"] == longer["bravel.txt"]
    assert longer["other text"][0] >= plain["other text"][0] + len("Be short.")


def test_text_cannot_send_terminal_control_codes(capsys, monkeypatch, tmp_path):
    assert printable("a\tb\n\x1b[2J\x9b\x07\r\u202ec") == "a\tb\n\\x1b[2J\\x9b\\x07\\r\\u202ec"
    file = tmp_path / "\x1b[31m.txt"
    file.write_text("Bravel is a town.")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = chat(capsys, monkeypatch, f"/add '{file}'")
    status, _, err = chat(capsys, monkeypatch, "/use '\x1b[31m'")
    assert status == 2
    assert "\x1b" not in out + err
    assert "added \\x1b[31m.txt" in out


def test_two_adapters_are_refused(capsys, monkeypatch):
    status, _, err = chat(capsys, monkeypatch, arguments=("random:tiny", "--adapter", "a=x", "--adapter", "b=y"))
    assert status == 2
    assert "--adapter" in err


def test_a_model_without_a_chat_template_gets_plain_text(capsys, monkeypatch, tmp_path):
    tiny("llama").model.save_pretrained(tmp_path)
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    lines = (f"/add {BRAVEL}", "One?", "/clear", "Two?", "/explain")
    _, out, err = chat(capsys, monkeypatch, *lines, arguments=(str(tmp_path), *MODEL[1:]))
    assert err.count("has no chat template") == 1
    tokens, found, _ = cached(out)[0]["bravel.txt"]
    assert tokens == found > 0


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, "document.unreadable"),
        (b"a\0b", "document.not_text"),
        (b"\xff\xfe", "document.not_text"),
        (b" \n", "document.empty"),
    ],
)
def test_non_text_file_is_rejected(tmp_path, data, code):
    file = tmp_path / "file"
    if data is not None:
        file.write_bytes(data)
    with raises(code, names=str(file)):
        read_documents([str(file)])


def test_folder_is_rejected_and_a_pattern_is_expanded(tmp_path):
    with raises("document.unreadable", names=str(tmp_path)):
        read_documents([str(tmp_path)])
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    assert [each.name for each in read_documents([f"{tmp_path}/*.txt"])] == ["a.txt", "b.txt"]


def test_files_with_equal_names_are_kept_separately(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    conversation = DocumentChat()
    for folder in ("one", "two"):
        conversation.add(read_documents([str(tmp_path / folder / "a.txt")]))
    assert [each.text for each in conversation.documents.values()] == ["one\n", "two\n"]


def test_documents_stay_before_their_question():
    conversation = DocumentChat("Be short.")
    a, b = (Document(name, Path(name), f"{name}\n") for name in "ab")
    conversation.add([a])
    first = conversation.next("One?")
    first.answer = "Yes."
    conversation.keep(first)
    conversation.add([b])
    messages = conversation.messages(conversation.next("Two?"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert [part["text"] for part in messages[1]["content"]] == ["a\n", "One?"]
    assert [part["text"] for part in messages[3]["content"]] == ["b\n", "Two?"]
    assert [bool(part.get("cache_control")) for part in messages[3]["content"]] == [True, False]
    conversation.drop(["a"])
    assert conversation.messages(conversation.next("Two?"))[1]["content"] == "One?"
    conversation.clear()
    assert conversation.seen == ["b"]
