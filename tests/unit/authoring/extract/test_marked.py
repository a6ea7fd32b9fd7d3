"""Parts that requests marked with ``cache_control`` are modules, whole, before anything else is looked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from inlay.authoring.extract import Corpus, Extraction, ExtractionSettings, LogReader, extract
from tests.unit.authoring.extract.helpers import encode, turns_of

SYSTEM = "You answer questions from documents, and name the document that the answer is from."
_SENTENCES = [
    f"Sentence {number} of the handbook says what to do about case {number * 7 % 50}." for number in range(50)
]


def document(number: int) -> str:
    """A dozen sentences of a pool, so that documents share most of their text in other orders."""
    return f"# Document {number}\n" + " ".join(random.Random(number).sample(_SENTENCES, 12))


def part(text: str, mark: str | None) -> dict[str, Any]:
    value = {"type": "ephemeral"} if mark == "cache_control" else {"mode": "explicit"}
    return {"type": "text", "text": text, **({} if mark is None else {mark: value})}


def request(number: int, mark: str | None = "cache_control", documents: int = 3) -> dict[str, Any]:
    draw = random.Random(1000 + number)
    parts = [part(document(one), mark) for one in draw.sample(range(20), documents)]
    question = part(f"What is said about case {draw.randrange(10**6)}, asked by guest {draw.randrange(10**6)}?", None)
    return {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": [*parts, question]}]}


def extracted(folder: Path, lines: list[Any], **settings: int) -> Extraction:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return extract(Corpus.of(LogReader(path), "log.jsonl"), encode, name="log", settings=ExtractionSettings(**settings))


def texts(result: Extraction) -> set[str]:
    return {piece.text for piece in result.proposal.choice.pieces}


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
def test_marked_documents_are_the_modules(tmp_path: Path, mark: str):
    """Without their marks they share so many sentences that the modules are fragments."""
    marked = extracted(tmp_path, [request(number, mark) for number in range(60)])
    plain = extracted(tmp_path, [request(number, None) for number in range(60)])
    assert texts(marked) == {document(number) for number in range(20)}
    assert texts(plain) != texts(marked)
    assert marked.saving.by_schema > plain.saving.by_schema
    assert marked.saving.tokens == plain.saving.tokens
    share = marked.saving.by_schema / marked.saving.tokens
    in_documents = 1 - 20 / (3 * 60)  # of the documents' text, all but its first occurrence
    assert share > 0.9 * in_documents
    for number in range(60):
        content = request(number)["messages"][1]["content"]
        expected = [("system", SYSTEM), ("user", "".join(one["text"] for one in content))]
        assert turns_of(marked.proposal.schema, marked.proposal, number) == expected


def test_equal_text_without_a_mark_is_the_same_module(tmp_path: Path):
    lines = [request(number, "cache_control" if number % 3 else None) for number in range(60)]
    result = extracted(tmp_path, lines)
    assert texts(result) == {document(number) for number in range(20)}
    contents = [[one["text"] for one in line["messages"][1]["content"]] for line in lines]
    for piece in result.proposal.choice.pieces:
        assert piece.prompts == sum(piece.text in content for content in contents)


def test_common_prefix_of_marked_documents_stays_in_them(tmp_path: Path):
    """The always-present text ends before a marked part, not after the words with which all of them begin."""
    opening = "This is one of the documents of the handbook, in the version of this year, for all guests of the house. "
    lines = []
    for number in range(20):
        text = opening + document(number % 4)
        content = [part(text, "cache_control"), part(f" Why {number}?", None)]
        lines.append({"messages": [{"role": "user", "content": content}]})
    assert texts(extracted(tmp_path, lines)) == {opening + document(number) for number in range(4)}


def test_rarely_marked_text_is_found_like_unmarked_text(tmp_path: Path):
    shared = " ".join(_SENTENCES[:10])
    lines = [
        {"messages": [{"role": "user", "content": [part(f"Letter {number} to {number}: {shared}", "cache_control")]}]}
        for number in range(10)
    ]
    (found,) = texts(extracted(tmp_path, lines))
    assert shared[20:] in found


def test_mark_on_a_message_marks_its_last_part(tmp_path: Path):
    mark = {"cache_control": {"type": "ephemeral"}}
    lines = []
    for number in range(12):
        parts = [part(f"{number}.", None), part(document(2 + number % 2), None)]
        messages = [
            {"role": "system", "content": f"{number}", **mark},
            {"role": "user", "content": document(number % 2), **mark},
            {"role": "user", "content": parts, **mark},
        ]
        lines.append({"messages": messages})
    assert texts(extracted(tmp_path, lines)) == {document(number) for number in range(4)}


def test_marked_text_without_xml_form_is_left_out(tmp_path: Path):
    text = document(1).replace("Sentence", "Sen\x01tence")
    lines = [{"messages": [{"role": "user", "content": [part(text, "cache_control")]}]} for _ in range(5)]
    assert not any("\x01" in found for found in texts(extracted(tmp_path, lines)))
