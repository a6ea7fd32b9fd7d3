"""Text files as marked parts of a conversation."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import ParameterError
from inlay.wording import clip, listed

if TYPE_CHECKING:
    from inlay.client.async_llm import AsyncLLM
    from inlay.client.llm import LLM

#: The suffixes of files with a schema or a prompt program.
SCHEMA_SUFFIXES = (".xml", ".json", ".py")

_MARK = {"type": "ephemeral"}
_PLAIN = "{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Document:
    """A text file.

    Args:
        name: the name that the user types.
        text: its content, with a line break at the end.
    """

    name: str
    path: Path
    text: str

    @property
    def part(self) -> dict[str, Any]:
        """The marked part of a message."""
        return {"type": "text", "text": self.text, "cache_control": _MARK}


def read_documents(patterns: Iterable[str]) -> list[Document]:
    """Read text files by path or glob pattern. Raises ParameterError for a missing, binary or empty file."""
    found: dict[str, Document] = {}
    for pattern in patterns:
        paths = [pattern]
        if not Path(pattern).exists() and glob.has_magic(pattern):
            paths = sorted(path for path in glob.glob(pattern) if Path(path).is_file()) or paths
        for path in map(Path, paths):
            name = path.name if path.name not in found or found[path.name].path == path else str(path)
            found[name] = Document(name, path, _text(path))
    return list(found.values())


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ParameterError(f"{path}: no such file; check the path", code="document.unreadable") from None
    except IsADirectoryError:
        raise ParameterError(
            f"{path} is a folder; name files in it, such as '{path}/*.txt'", code="document.unreadable"
        ) from None
    except OSError as error:
        raise ParameterError(
            f"{path}: cannot be read ({error.strerror}); make the file readable", code="document.unreadable"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ParameterError(
            f"{path} is a binary file or not UTF-8; convert it to UTF-8 text first", code="document.not_text"
        )
    if not text.strip():
        raise ParameterError(f"{path} is empty; leave it out", code="document.empty")
    return text if text.endswith("\n") else f"{text}\n"


@dataclass(slots=True)
class Question:
    """A question with the names of the documents in front of it. ``answer`` is None until it is complete."""

    text: str
    documents: list[str]
    answer: str | None = None


@dataclass(slots=True)
class DocumentChat:
    """Questions and answers about documents.

    Args:
        system: the text of a system turn. None for no such turn.
        documents: all documents by name. Dropped ones stay here.
        asked: the answered questions.
        coming: the names of the documents in front of the next question.
    """

    system: str | None = None
    documents: dict[str, Document] = field(default_factory=dict)
    asked: list[Question] = field(default_factory=list)
    coming: list[str] = field(default_factory=list)

    @property
    def seen(self) -> list[str]:
        """Return the names of the documents in the next prompt, in their order."""
        return [*(name for question in self.asked for name in question.documents), *self.coming]

    def add(self, documents: Iterable[Document]) -> list[str]:
        """Put documents in front of the next question and return their names. A known file is read again."""
        names = []
        for one in documents:
            known = self.documents.get(one.name)
            name = one.name if known is None or known.path == one.path else str(one.path)
            names.append(name)
            self.documents[name] = Document(name, one.path, one.text)
        self._hide(names)
        self.coming += names
        return names

    def use(self, names: Sequence[str]) -> None:
        """Put only these documents into the next prompts, in this order. Raises ParameterError for an unknown name."""
        self._check(names)
        self._hide(self.seen)
        self.coming = list(dict.fromkeys(names))

    def drop(self, names: Sequence[str]) -> None:
        """Hide documents from later questions. Raises ParameterError for an unknown name."""
        self._check(names)
        self._hide(names)

    def clear(self) -> None:
        """Forget questions and answers. The documents move in front of the next question."""
        self.coming = self.seen
        self.asked.clear()

    def next(self, text: str) -> Question:
        """Return a new question behind the documents that were added since the last one."""
        return Question(text, list(self.coming))

    def keep(self, question: Question) -> None:
        """Record an answered question."""
        self.asked.append(question)
        self.coming = [name for name in self.coming if name not in question.documents]

    def messages(self, question: Question) -> list[dict[str, Any]]:
        """Return the conversation up to a question as chat messages. Documents are marked parts."""
        made: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for one in (*self.asked, question):
            parts = [self.documents[name].part for name in one.documents]
            made.append(
                {"role": "user", "content": [*parts, {"type": "text", "text": one.text}] if parts else one.text}
            )
            if one.answer is not None:
                made.append({"role": "assistant", "content": one.answer})
        return made

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.documents:
                known = f"the documents are {listed(self.documents)}" if self.documents else "add one with /add FILE"
                raise ParameterError(f"there is no document {clip(name)!r}; {known}", code="document.unknown")

    def _hide(self, names: Sequence[str]) -> None:
        hidden = set(names)
        for question in self.asked:
            question.documents = [name for name in question.documents if name not in hidden]
        self.coming = [name for name in self.coming if name not in hidden]


def plain_text(llm: LLM | AsyncLLM) -> str | None:
    """Let a model without a chat template continue conversations as plain text.

    Returns:
        A sentence for the user, or None if the model has a chat template.
    """
    if llm.processor.template.exists:
        return None
    tokenizer = llm.processor.tokenizer
    opens = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    tokenizer.chat_template = "{{ bos_token }}" * opens + _PLAIN
    return f"{clip(llm.model_name)} has no chat template, so it continues documents and questions as plain text"


def is_schema(name: str) -> bool:
    """True if a command's first argument is a file with a schema, not a model."""
    return name.endswith(SCHEMA_SUFFIXES) and Path(name).is_file()
