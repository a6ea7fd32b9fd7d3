"""docs/reference/pml.md, and errors.md beside this file: every example shows real output, and every error has one."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from inlay.errors import InlayError, PMLError, Problem
from inlay.pml import Schema, Text
from inlay.pml import nodes as limits
from inlay.pml.sources import UnreadableError
from tests.pages import DOCS, Block, blocks, rows
from tests.unit.pml.examples import MODES, PAGES, WrongExampleError, outputs

Line = tuple[str, int]  # a file and a line of it

SRC = DOCS.parent / "src" / "inlay"
REFERENCE, ERRORS = PAGES
#: Other forms than PML, with their errors on pages of their own; and advice, in docs/guides/schema-advice.md.
ELSEWHERE = ("json*.py", "writer*.py", "variables.py")
FILES = sorted(path for path in (SRC / "pml").glob("*.py") if not any(path.match(pattern) for pattern in ELSEWHERE))
#: Errors that no example can show, by words of theirs, and why. The last table of the page names them.
NOT_SHOWN = {
    "permission denied": "the operating system refuses nothing to root, who may run the tests",
    "this becomes": "it takes a model and a tokenizer that do not belong together",
    "turns come with": "it takes a chat template that refuses some orders of roles",
}
#: The files with the other messages of that table.
WITH_A_MODEL = (
    SRC / "pml" / "sources.py",
    SRC / "prompt/layout.py",
    SRC / "prompt/processor.py",
    SRC / "prompt/model_info.py",
    SRC / "prompt/placement.py",
    SRC / "client" / "llm.py",
    SRC / "client" / "schemas.py",
)


@dataclass(frozen=True)
class Pages:
    """The output of the examples, by page, and the lines of inlay that raised errors meanwhile."""

    given: dict[Path, list[tuple[Block, str]]]
    lines: set[Line]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    with pytest.MonkeyPatch.context() as patch:
        lines = _recorded(patch)
        given = {}
        for page in PAGES:
            patch.chdir(tmp_path_factory.mktemp(page.stem))
            given[page] = list(outputs(page))
    return Pages(given, lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_show_real_output(page: Path, pages: Pages) -> None:
    given = pages.given[page]
    assert [f"{block}\n{block.text}" for block, _ in given] == [f"{block}\n{text}" for block, text in given]
    assert len(given) == sum(block.language == "text" and block.note in MODES for block in blocks(page)) > 20


SCHEMA = '```xml\n<schema name="s"><module name="m">M</module></schema>\n```\n'
PROMPT = '```xml\n<prompt schema="s"><m/></prompt>\n```\n'
BROKEN = {
    "a language that nothing runs": ("```json\n{}\n```\n", "page.md:1: nothing runs a block of json"),
    "no language": ("\n```\ntext\n```\n", "page.md:2: nothing runs a block of no language"),
    "XML that is neither": ("```xml other.xml\n<a/>\n```\n", "page.md:1: nothing runs a block of xml other.xml"),
    "a mode that is none": (SCHEMA + "```text scheme\n```\n", "page.md:4: nothing runs a block of text scheme"),
    "a prompt without what it gives": (SCHEMA + PROMPT, "page.md:4: no block of text shows what this gives"),
    "Python that prints": ("```python\nprint(1)\n```\n" + SCHEMA, "page.md:1: no block of text shows what this gives"),
    "text about nothing": ("```text\nM\n```\n", "page.md:1: nothing above this block gives anything"),
    "text twice": (SCHEMA + PROMPT + "```text\nM\n```\n" * 2, "page.md:10: nothing above this block gives anything"),
    "a schema that is right": (SCHEMA + "```text\n```\n", "page.md:4: the schema above is right, and there is nothing"),
}


@pytest.mark.parametrize(("text", "problem"), BROKEN.values(), ids=BROKEN.keys())
def test_inconsistent_page_is_rejected(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(WrongExampleError) as error:
        list(outputs(tmp_path / "page.md"))
    assert str(error.value).startswith(problem)


def test_invalid_schema_without_an_error_block_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("```xml\n<schema/>\n```\n")
    with pytest.raises(PMLError):
        list(outputs(tmp_path / "page.md"))


WHITE = rows(REFERENCE, "between two tags", "text", "rule")


@pytest.mark.parametrize(("run", "text"), [row[:2] for row in WHITE])
def test_white_space(run: str, text: str) -> None:
    schema = Schema.from_string(f'<schema name="s"><module name="m">{_unquoted(run)}</module></schema>')
    texts = [child.text for child in schema.modules["m"].children if isinstance(child, Text)]
    assert "".join(texts) == _unquoted(text)


def _unquoted(cell: str) -> str:
    return str(json.loads(cell.strip("`")))


def test_every_rule_of_white_space_has_a_row() -> None:
    assert {number for row in WHITE for number in re.findall(r"\d", row[2])} == set("1234")


def test_the_limits() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    assert (limits.MAX_BYTES, limits.MAX_SOURCE_BYTES) == (16 * 2**20, 64 * 2**20)
    for limit in (limits.MAX_DEPTH, limits.MAX_PROBLEMS, limits.MAX_NAME_CHARACTERS):
        assert f"| {limit}" in page
    for limit in (limits.MAX_ELEMENTS, limits.MAX_ATTRIBUTES, limits.MAX_ATTRIBUTE_CHARACTERS, limits.MAX_PARAM_LENGTH):
        assert f"{limit:,}" in page


# every error has an example: its words stand on a page, and the line that makes it runs when the pages do


def test_every_error_wording_is_on_a_page() -> None:
    shown = "".join(block.text for page in PAGES for block in blocks(page) if block.language == "text")
    missing = [
        f"{path.name}: {words}"
        for path in FILES
        for words in _phrases(path.read_text(encoding="utf-8"))
        if not re.search(_pattern(words), shown) and not _is_not_shown(words)
    ]
    assert missing == [], "give each an example in tests/unit/pml/errors.md"


def test_every_error_line_runs_in_an_example(pages: Pages) -> None:
    missing = {
        f"{path.name}:{line}": code
        for path in [*FILES, *(SRC / "prompt" / f"{name}.py" for name in ("layout", "placement", "turns"))]
        for line, code in _making(path.read_text(encoding="utf-8"))
        if (str(path), line) not in pages.lines and not _is_not_shown(code)
    }
    assert missing == {}, "give each an example in tests/unit/pml/errors.md"
    assert len(pages.lines) > 60


def test_errors_without_an_example_are_in_a_table() -> None:
    table = [row[0].strip("`") for row in rows(ERRORS, "message", "cause")]
    known = [words for path in WITH_A_MODEL for words in _phrases(path.read_text(encoding="utf-8"))]
    for message in table:
        assert any(re.fullmatch(_pattern(words), message) for words in known), message
    for words in NOT_SHOWN:
        assert any(words in message for message in table), words
        assert any(
            words in phrase for path in [*FILES, *WITH_A_MODEL] for phrase in _phrases(path.read_text(encoding="utf-8"))
        ), words


SOURCE = '''
def check(self, a):
    """No message."""
    self._problems.add(a.place, f"{quote(a)} is odd; {'write one' if a else f'leave {a} out'}")
    known.update("a b")
    if a:
        raise Error(
            "this too"
            " is one"
        )
'''


def test_error_wordings_and_lines_are_detected() -> None:
    """The two tests above look at the right things."""
    assert set(_phrases(SOURCE)) == {"…… is odd; ……", "write one", "leave …… out", "a b", "this too is one"}
    assert re.search(_pattern("…… is odd; ……"), 'x.xml:1:1: "b" is odd; write one')
    assert not re.search(_pattern("a …… b"), "a\nb b")
    assert sorted(line for line, _ in _making(SOURCE)) == [4, 7]


def _is_not_shown(code: str) -> bool:
    return any(words in code for words in NOT_SHOWN)


def _phrases(source: str) -> Iterator[str]:
    """Yield the strings of a file that contain words, with …… for filled-in parts. Docstrings and reprs are left
    out.
    """
    tree = ast.parse(source)
    quiet = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    reprs = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__repr__")
    quiet.update(id(inside) for node in reprs for inside in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            quiet.update(map(id, node.values))
            quiet.update(id(value.format_spec) for value in node.values if isinstance(value, ast.FormattedValue))
            words = "".join(str(v.value) if isinstance(v, ast.Constant) else "……" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value
        else:
            continue
        if id(node) not in quiet and re.search("[a-z] | [a-z]", words):
            yield words


def _pattern(words: str) -> str:
    return ".*".join(map(re.escape, words.split("……")))


def _making(source: str) -> Iterator[tuple[int, str]]:
    """The calls of a file that make an error: line and code."""
    tree = ast.parse(source)
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (id(node) in raised or _records(node)):
            yield node.lineno, ast.get_source_segment(source, node) or ""


def _records(node: ast.Call) -> bool:
    """Whether this is problems.add(place, message), self._stop(place, message) or Problem(place, message)."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in ("add", "_stop", "Problem") and len(node.args) == 2


def _recorded(patch: pytest.MonkeyPatch) -> set[Line]:
    """The lines of inlay that are being run, on every level, whenever an error is made from now on."""
    lines: set[Line] = set()

    def record(make: Callable[..., None]) -> Callable[..., None]:
        def recording(*arguments: Any, **keywords: Any) -> None:
            frame: FrameType | None = sys._getframe()
            while frame := frame and frame.f_back:
                if Path(frame.f_code.co_filename).is_relative_to(SRC):
                    lines.add((frame.f_code.co_filename, frame.f_lineno))
            make(*arguments, **keywords)

        return recording

    for made in (Problem, InlayError, UnreadableError):
        patch.setattr(made, "__init__", record(made.__init__))
    return lines
