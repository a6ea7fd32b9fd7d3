"""Tags → text that is pleasant to read: the white-space rule the other way round.

Every run of text is laid out on indented lines if the rule brings exactly that text back, which is tried with the rule
itself. Where no layout does, the tag around the text gets ``xml:space="preserve"``, and nothing is added within.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from inlay.pml.whitespace import settle

_INDENTATION = "  "
_WIDTH = 100  # characters of a line that several imports share
_IN_TEXT = str.maketrans({"&": "&amp;", "<": "&lt;", "\r": "&#13;"})  # a bare carriage return would become a line feed
_IN_VALUE = str.maketrans({"&": "&amp;", "<": "&lt;", '"': "&quot;", "\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})


class Flow(Enum):
    """Where a tag stands among others."""

    BLOCK = "on lines of its own"
    IMPORT = "on lines of its own, or beside others where there is little"
    INLINE = "in the middle of a text"
    TURN = "on lines of its own, and white space alone beside it is layout in any case"


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag to be written. No two texts among ``children`` are neighbours, and none is empty.

    only_layout: white space alone is layout in it in any case, and it holds no text.
    """

    name: str
    attributes: tuple[tuple[str, str], ...] = ()
    children: tuple[Tag | str, ...] = ()
    flow: Flow = Flow.BLOCK
    only_layout: bool = False


def laid_out(root: Tag) -> str:
    """The document, which ends in a line break."""
    return _written(root, 0, preserve=False) + "\n"


def _written(tag: Tag, level: int, *, preserve: bool) -> str:
    """The tag with all that is in it. ``preserve``: whether the tags around it keep white space."""
    if not tag.children:
        return f"<{tag.name}{_attributes(tag)}/>"
    if (line := _on_one_line(tag, level)) is not None:
        return line
    runs = _on_lines(tag, level)
    keeps = preserve if tag.only_layout else runs is None
    space = "" if keeps == preserve else f' xml:space="{"preserve" if keeps else "default"}"'
    runs = _verbatim(tag, level) if runs is None else runs
    inner = (_written(child, level + 1, preserve=keeps) for child in tag.children if isinstance(child, Tag))
    content = "".join(piece for pair in zip_longest(map(_text, runs), inner, fillvalue="") for piece in pair)
    return f"<{tag.name}{_attributes(tag)}{space}>{content}</{tag.name}>"


def _on_one_line(tag: Tag, level: int) -> str | None:
    """The whole tag on one line, which keeps every text without a line break; None where lines read better."""
    inner = [child for child in tag.children if isinstance(child, Tag)]
    if any(child.flow is not Flow.INLINE and (child.flow is not Flow.IMPORT or child.children) for child in inner):
        return None
    if any("\n" in child for child in tag.children if isinstance(child, str)):
        return None
    pieces = (_text(child) if isinstance(child, str) else _written(child, 0, preserve=False) for child in tag.children)
    line = f"<{tag.name}{_attributes(tag)}>{''.join(pieces)}</{tag.name}>"
    crowded = level == 0 or len(line) > _WIDTH
    return None if crowded and any(child.flow is Flow.IMPORT for child in inner) else line


def _on_lines(tag: Tag, level: int) -> list[str] | None:
    """The runs of a tag laid out on indented lines, or None where some text would not come back from that."""
    settled: list[str] = []
    for text, before, after in _runs(tag):
        own_line = any(one is None or one.flow is not Flow.INLINE for one in (before, after))
        end = _INDENTATION * (level if after is None else level + 1)
        run = _run(text, before, _INDENTATION * (level + 1), end) if text else _layout(own_line, end)
        if run is None:
            return None
        settled.append(run)
    return settled


def _verbatim(tag: Tag, level: int) -> list[str]:
    """The runs of a tag that keeps white space: nothing is added, but beside chat tags."""
    kept: list[str] = []
    for text, before, after in _runs(tag):
        own_line = any(one is not None and one.flow is Flow.TURN for one in (before, after))
        kept.append(text or _layout(own_line, _INDENTATION * (level if after is None else level + 1)))
    return kept


def _runs(tag: Tag) -> Iterator[tuple[str, Tag | None, Tag | None]]:
    """The texts before, between and after the inner tags, empty ones too, each with the tag before it and after it.

    None stands for the start and the end of ``tag`` itself.
    """
    text, before = "", None
    for child in tag.children:
        if isinstance(child, str):
            text = child
        else:
            yield text, before, child
            text, before = "", child
    yield text, before, None


def _layout(own_line: bool, indentation: str) -> str:
    return f"\n{indentation}" if own_line else ""


def _run(text: str, before: Tag | None, indentation: str, end: str) -> str | None:
    """A run that stands for the text: on lines of its own, or else begun where the tag before it ends; or None."""
    lines = text.split("\n")
    indented = [line and indentation + line for line in lines]
    if len(lines) > 1 and not lines[-1]:
        indented[-1] = end
    here = "\n".join([lines[0], *indented[1:]])
    own = "\n" + "\n".join(indented)
    inline = before is not None and before.flow is Flow.INLINE
    runs = (here, own) if inline else (own, here)
    return next((run for run in runs if settle(run) == text), None)


def _attributes(tag: Tag) -> str:
    return "".join(f' {name}="{value.translate(_IN_VALUE)}"' for name, value in tag.attributes)


def _text(text: str) -> str:
    return text.translate(_IN_TEXT).replace("]]>", "]]&gt;")
