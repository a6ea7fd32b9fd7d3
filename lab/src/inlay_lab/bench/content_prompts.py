"""Prompts with repeated text for ``inlay bench content``, each as chat messages with marked parts.

- ``rag``: questions over documents that a retriever chose. Documents have several paragraphs and no title. Few are
  popular, so they come again in other combinations and orders.
- ``agent``: a coding agent's sessions. The system prompt begins with the session's date. Each step reads a file or runs
  the tests, and its prompt is the session so far. Sessions read the same files, and some steps read a file again.
- ``repeat``: a new text, asked again and again behind another first line.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.errors import ParameterError
from inlay.retrieval.rerank import marked_parts
from inlay_lab.eval.collection import SYSTEM, Retriever, generated, joined

WORKLOADS = ("rag", "agent", "repeat")

STEPS = 6  # of an agent's session
SIGHTINGS = 5  # of a text of ``repeat``

_AGAIN = 0.25  # the share of steps that read a file of this session again
_TESTS = 0.15  # the share of steps that run the tests
_FILES = (
    *("textwrap", "statistics", "random", "bisect", "heapq", "shlex", "fnmatch", "glob", "csv", "sched", "calendar"),
    *("colorsys", "copy", "queue", "string", "tempfile", "configparser", "difflib", "fractions", "gettext", "graphlib"),
)
_RULES = (
    "# Rules\nYou are a coding agent. Work in small steps and read a file before you change it. Keep changes small. Do "
    "not rename what others use. Write a test for each fault that you mend.\n\n"
    "# Tools\nread(path) returns the text of a file. write(path, text) replaces it. test() runs all tests and returns "
    "their report. Call one tool in each answer, and wait for its result before the next one.\n\n"
    "# Answers\nSay in one sentence why you call the tool. When all tests pass, describe the change in three sentences "
    "and name the files that you changed. If you cannot go on, say which information is missing.\n"
)
_MARK = {"cache_control": {"type": "ephemeral"}}

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a workload. Raises ParameterError.

    Attributes:
        prompts: their number.
        documents: in the collection of ``rag``.
        paragraphs: of a document, and of a text of ``repeat``. Each has about 55 tokens of the bundled model.
        chosen: documents of a prompt.
        characters: the most of a file that an agent reads at once.
    """

    prompts: int = 1_000
    documents: int = 400
    paragraphs: int = 4
    chosen: int = 4
    characters: int = 800
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"prompts": 2, "paragraphs": 1, "chosen": 2, "documents": self.chosen, "characters": 100}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ParameterError(
                    f"{name} is {getattr(self, name)}; give at least {number}", code="parameter.out_of_range"
                )


def write_prompts(workload: str, sizes: Sizes) -> list[Messages]:
    """Return the prompts of a workload, one of WORKLOADS."""
    made: dict[str, Callable[[Sizes], Iterator[Messages]]] = {"rag": _rag, "agent": _agent, "repeat": _repeat}
    return list(made[workload](sizes))


def without_marks(messages: Messages) -> Messages:
    """Return messages with the same text and no parts."""
    return [{**message, "content": _text(message["content"])} for message in messages]


def repeated_texts(prompts: Sequence[Messages]) -> set[str]:
    """Return the marked texts of all prompts."""
    contents = [message["content"] for messages in prompts for message in messages]
    parts = [part for content in contents if not isinstance(content, str) for part in content]
    return {part["text"] for part in parts if "cache_control" in part}


def _text(content: str | Sequence[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _rag(sizes: Sizes) -> Iterator[Messages]:
    found = generated(sizes.documents * sizes.paragraphs, sizes.prompts, seed=sizes.seed)
    texts = joined(found.texts, sizes.paragraphs)
    retriever, draw = Retriever(texts), random.Random(sizes.seed)
    for ask in found.asks:
        best, _ = retriever.best(ask.text, sizes.chosen)
        draw.shuffle(best)
        yield _chat(SYSTEM, marked_parts([texts[index] for index in best], ask.text))


def _repeat(sizes: Sizes) -> Iterator[Messages]:
    texts = -(-sizes.prompts // SIGHTINGS)
    found = generated(max(2, texts * sizes.paragraphs), texts, seed=sizes.seed)
    written = joined(found.texts, sizes.paragraphs)
    for number in range(sizes.prompts):
        text, sighting = divmod(number, SIGHTINGS)
        first = {"type": "text", "text": f"Read this for the {sighting + 1}. time, in round {text + 1}.\n\n"}
        parts = marked_parts([written[text]], found.asks[text].text)
        yield _chat(SYSTEM, [first, *parts])


def _agent(sizes: Sizes) -> Iterator[Messages]:
    files = {f"{name}.py": _source(name, sizes.characters) for name in _FILES}
    for number in range(0, sizes.prompts, STEPS):
        session = _session(random.Random(f"{sizes.seed} {number}"), number // STEPS, files)
        for _ in range(min(STEPS, sizes.prompts - number)):
            yield next(session)


def _session(draw: random.Random, number: int, files: dict[str, str]) -> Iterator[Messages]:
    """Yield the prompt of each step: all messages so far."""
    date = f"Session {number + 1}, 2026-{number // 28 % 12 + 1:02}-{number % 28 + 1:02}.\n\n"
    messages = _chat([{"type": "text", "text": date}, _marked(_RULES)], f"Mend the fault in {draw.choice(_FILES)}.py.")
    read: list[str] = []
    while True:
        yield list(messages)
        kind = draw.random()
        if kind < _TESTS:
            call, result = "test()", _report(draw)
        else:
            again = kind < _TESTS + _AGAIN and read
            name = draw.choice(read if again else list(files))
            read.append(name)
            call, result = f"read({name})", files[name]
        answer = f"Step {len(messages) // 2}, to see more of the code: {call}"
        shown = [{"type": "text", "text": f"Result of {call}:\n"}, _marked(result)]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": shown}]


def _source(name: str, characters: int) -> str:
    """Return the start of a module of Python's library, in whole lines."""
    text = inspect.getsource(importlib.import_module(name))[:characters]
    return text[: text.rfind("\n") + 1]


def _report(draw: random.Random) -> str:
    """Return the report of the tests. One of three tests fails."""
    fails = draw.choice(_FILES[:3])
    lines = [f"tests/test_{name}.py ... {'FAILED' if name == fails else 'ok'}\n" for name in _FILES[:12]]
    return "".join((*lines, f"1 failed, 11 passed in {draw.uniform(1, 2):.2f} s\n"))


def _chat(system: str | list[dict[str, Any]], user: str | list[dict[str, Any]]) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, **_MARK}
