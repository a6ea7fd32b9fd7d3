"""Runs the examples of a page of docs: a block of text shows the output of the blocks above it.

A block in XML is the file schema.xml, or prompt.xml if its outermost tag is <prompt>, unless a name after the language
says otherwise. Another file name writes the block to that file. A block in Python runs in the folder of these files. It
sees the imports of all blocks above it and the names of its section.
A block of text shows the result of the last block: the problems of a schema; the resolution of a prompt against the
last schema; the printed output or exception of Python. With "schema" or "packed" after the language it shows
positions, with one token a byte. A schema without a block of text must be valid; any other block needs one.

``python -m tests.unit.pml.examples`` writes the outputs into the pages.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path

from inlay.errors import InlayError
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Filled, NewText, Prompt, Schema, SchemaText, TurnEnd, TurnStart, resolve
from inlay.pml.resolve import Item
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import Hole, SchemaLayout, TextRun, lay_out_schema
from inlay.prompt.placement import Placed, lay_out_prompt
from inlay.prompt.tokens import TextEncoder
from tests.pages import DOCS, Block, blocks

#: The reference, and the examples of all errors.
PAGES = (DOCS / "reference/pml.md", Path(__file__).parent / "errors.md")
MODES = ("", "schema", "packed")
_FORMS = ("schema.xml", "prompt.xml")
_FIRST_TAG = re.compile(r"<(\w+)")


class WrongExampleError(Exception):
    """The page breaks the rules above."""


def outputs(page: Path) -> Iterator[tuple[Block, str]]:
    """Yield every block of text of a page with its expected content. Writes files into the working folder."""
    shelf = _Shelf()
    lines = page.read_text(encoding="utf-8").splitlines()
    first = 0
    for block in blocks(page):
        if any(line.startswith("## ") for line in lines[first : block.line]):
            shelf.begin_section()
        first = block.line
        if block.language == "text" and block.note in MODES:
            yield block, shelf.shown(block)
        else:
            shelf.take(block)
    shelf.check_shown()


class _Shelf:
    """The files of a page so far, and the last block that gives something."""

    def __init__(self) -> None:
        self._last: Block | None = None
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._printed = ""

    def begin_section(self) -> None:
        """Forget the schemas and prompts that Python code has named. Imports stay."""
        self._names = {name: value for name, value in self._names.items() if name == "__name__" or callable(value)}

    def take(self, block: Block) -> None:
        """Write the block as a file, or run it."""
        self.check_shown()
        if block.language == "python" and not block.note:
            self._printed = self._run(block)
            self._last = block if self._printed else None
            return
        name = _file_name(block)
        Path(name).write_text(block.text, encoding="utf-8")
        if name in _FORMS:
            self._last = block

    def shown(self, block: Block) -> str:
        """The output of the last block."""
        if self._last is None:
            raise WrongExampleError(f"{block}: nothing above this block gives anything")
        last, self._last = self._last, None
        if last.language == "python":
            return self._printed
        try:
            if _file_name(last) == "schema.xml":
                return _join(_schema(block))
            return _join(_prompt(block.note))
        except InlayError as error:
            return f"{error}\n"

    def check_shown(self) -> None:
        """The last block has been shown, or is a schema that is right."""
        if self._last is None:
            return
        last, self._last = self._last, None
        if last.language != "xml" or _file_name(last) != "schema.xml":
            raise WrongExampleError(f"{last}: no block of text shows what this gives")
        Schema.from_file("schema.xml")

    def _run(self, block: Block) -> str:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                exec(compile(block.text, "prompt.py", "exec", dont_inherit=True), self._names)
        except InlayError as error:
            printed.write(f"{error}\n")
        return printed.getvalue()


def _file_name(block: Block) -> str:
    """The file that a block is."""
    if block.language == "xml" and not block.note:
        first = _FIRST_TAG.search(block.text)
        return "prompt.xml" if first and first[1] == "prompt" else "schema.xml"
    if not re.fullmatch(r"[\w-]+\.\w+", block.note) or (block.language == "xml" and block.note not in _FORMS):
        what = " ".join(filter(None, (block.language, block.note))) or "no language"
        raise WrongExampleError(f"{block}: nothing runs a block of {what}")
    return block.note


def _schema(block: Block) -> Iterable[str]:
    schema = Schema.from_file("schema.xml")
    if not block.note:
        raise WrongExampleError(f"{block}: the schema above is right, and there is nothing to say of it")
    layout, _, _ = _laid_out(schema)
    return (_positions(entry.start, _entry(entry)) for entry in layout.entries)


def _prompt(mode: str) -> Iterable[str]:
    prompt, schema = Prompt.from_file("prompt.xml"), Schema.from_file("schema.xml")
    resolved = resolve(schema, prompt, moves=mode == "packed")
    if not mode:
        return _items(resolved.items)
    layout, encoder, template = _laid_out(schema)
    placed = lay_out_prompt(resolved, layout, encoder, template, packed=mode == "packed")
    return (_positions(part.start, _part(part)) for part in placed.parts)


def _laid_out(schema: Schema) -> tuple[SchemaLayout, TextEncoder, ChatTemplate]:
    tokenizer = bytes_tokenizer()
    encoder, template = TextEncoder(tokenizer), ChatTemplate(tokenizer)
    return lay_out_schema(schema, encoder, template), encoder, template


def _items(items: Iterable[Item]) -> Iterator[str]:
    """A line for each item; inside turns indented."""
    indent = ""
    for item in items:
        match item:
            case SchemaText(node, owner):
                yield f"{indent}{_owned(owner)}{_quoted(node.text)}"
            case Filled(param, text, is_default, owner):
                default = " (default)" if is_default else ""
                yield f"{indent}{_owned(owner)}{param.name}={_quoted(text)}{default}"
            case NewText(text):
                yield f"{indent}+ {_quoted(text)}"
            case TurnStart(role, own):
                yield f"+ <{role}>" if own else f"<{role}>"
                indent = "  "
            case TurnEnd(role, own):
                yield f"+ </{role}>" if own else f"</{role}>"
                indent = ""


def _entry(entry: TextRun | Hole) -> tuple[int, str]:
    if isinstance(entry, Hole):
        return entry.length, f"{_owned(entry.owner)}{entry.param.name}"
    return len(entry.ids), _owned(entry.owner) + _quoted(_decoded(entry.ids))


def _part(part: Placed) -> tuple[int, str]:
    text = _quoted(_decoded(part.ids))
    if part.origin is None:
        return len(part.ids), f"+ {text}"
    name = f"{part.origin.param.name}=" if isinstance(part.origin, Hole) else ""
    return len(part.ids), f"{_owned(part.origin.owner)}{name}{text}"


def _positions(start: int, what: tuple[int, str]) -> str:
    length, text = what
    return f"{f'{start}…{start + length - 1}':<8}{text}"


def _decoded(ids: Iterable[int]) -> str:
    return str(bytes_tokenizer().decode(list(ids)))


def _owned(owner: tuple[str, ...]) -> str:
    return f"{'/'.join(owner)}: " if owner else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _join(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def rewrite(page: Path) -> None:
    """Write the actual output into every block of text."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
        for block, text in reversed(list(outputs(page))):
            lines[block.line : block.line + block.text.count("\n")] = [text]
        page.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for each in PAGES:
        rewrite(each)
