"""The prompts of ``inlay check``: four kinds of modules, in several numbers and lengths.

The texts are in ``corpus.json``: generated documents with questions, Python functions and classes, and prose of several
genres. The corpus does not change with the code, so two versions of inlay measure the same prompts. For a user's
schema, the prompts are random combinations of its modules.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from inlay.errors import Place, PMLError
from inlay.pml import (
    Argument,
    Import,
    ImportSet,
    Module,
    Param,
    Prompt,
    PromptTurn,
    Schema,
    Text,
    Turn,
    Union,
    numbered,
    resolve,
)
from inlay.prompt.inputs import Conversation

#: The kinds of generated prompts, in the order of a pass.
KINDS = ("facts", "counting", "code", "prose")

_PLACE = Place("check")
_DOCUMENTS = (6, 2, 12)  # Imported by a prompt, pass by pass. The schema has twice as many.
_PIECES = (4, 2, 6)  # Pieces of code and prose in a prompt.
_SIZES = ((200, 600), (600, 1200), (1200, 2400))  # Characters of a piece, pass by pass.
_COUNTED = 4  # Counting questions for one schema.
_FACTS = {"single": 2, "compare": 2, "unstated": 2, "form": 2}  # Questions of each task for one schema.
_ASKED = 6  # Prompts for pieces of code or prose.
_SYSTEM = "Answer from the texts below."
_TRIES = 200

_OF_CODE = (
    "What does {0} return?",
    "Which of the pieces of code above call something that is called {0}?",
    "How many of the pieces of code above are classes?",
    "Write a short test for {0}.",
    "Which errors are raised above, and where?",
    "Name the pieces of code above in their order.",
)
_OF_PROSE = (
    "Summarize the texts above in one sentence.",
    "What is said of {0}?",
    "What do the texts above have in common?",
    "Which of the texts above is about {0}, and what is the main point of it?",
    "How many texts stand above?",
    "Repeat the first sentence of what is said of {0}.",
)
_OF_ANYTHING = (
    "Summarize what stands above in one sentence.",
    "What is the most important point above, and why?",
    "What is said of {0}?",
    "List what stands above, in order.",
    "What does {0} have to do with the rest?",
    "Which questions does the text above leave open?",
)
_ARGUMENTS = ("two", "red", "Monday", "Lisbon", "seven", "north")


@dataclass(frozen=True)
class Batch:
    """Prompts of one schema, or chat messages with marked parts.

    ``kind`` is one of KINDS, the name of a user's schema, or "messages". ``schema`` is None for messages.
    """

    kind: str
    schema: Schema | None
    prompts: tuple[Prompt | Conversation, ...]


def draw_batches(number: int, seed: int, *, turns: bool, small: bool = False) -> list[Batch]:
    """Draw one pass over all kinds of generated prompts. Equal arguments give equal prompts.

    Args:
        number: The number of the pass, from 0. It chooses the lengths.
        seed: The seed of the random draws.
        turns: The model has a chat template, so modules and questions are put into turns.
        small: Use the fewest and shortest modules.
    """
    found: list[Batch] = []
    for kind in KINDS:
        rng = random.Random(f"{seed} {kind} {number}")
        if kind in ("facts", "counting"):
            found.append(_of_documents(rng, kind, 2 if small else _DOCUMENTS[number % len(_DOCUMENTS)]))
        else:
            size = _SIZES[0 if small else number % len(_SIZES)]
            found.append(_of_pieces(rng, kind, 2 if small else rng.choice(_PIECES), size))
    return found if turns else [without_turns(batch) for batch in found]


def without_turns(batch: Batch) -> Batch:
    """Return the batch of a schema without chat turns, with each question as plain text."""
    assert batch.schema is not None, "it is generated"
    children: list[Text | Module | Union | Turn] = []
    for child in batch.schema.children:
        children += child.children if isinstance(child, Turn) else (child,)  # type: ignore[arg-type]
    asked = tuple(
        replace(prompt, children=(*prompt.children[:-1], _with_answer(prompt.children[-1])))
        for prompt in batch.prompts
        if isinstance(prompt, Prompt)
    )
    return Batch(batch.kind, replace(batch.schema, children=numbered(tuple(children))), asked)


def _with_answer(last: Text | Import | ImportSet | PromptTurn) -> Text:
    assert isinstance(last, Text), "a question stands at the end"
    return replace(last, text=f"\nQuestion: {last.text}\nAnswer:")


def _of_documents(rng: random.Random, kind: str, count: int) -> Batch:
    """Draw one schema of documents and its questions.

    Args:
        kind: ``facts`` asks for one or two documents; ``counting`` asks for all documents of a prompt.
        count: Documents in a prompt. The schema has twice as many.
    """
    corpus = _corpus()
    questions = [one for one in corpus["questions"] if (one["task"] == "count") == (kind == "counting")]
    rng.shuffle(questions)
    chosen: set[int] = set()
    for one in questions:  # the first questions choose the documents of the schema
        if len(chosen.union(one["documents"])) <= 2 * count:
            chosen.update(one["documents"])
    rest = sorted(set(range(len(corpus["documents"]))) - chosen)
    numbers = sorted(chosen.union(rng.sample(rest, 2 * count - len(chosen))))
    left = {"count": _COUNTED} if kind == "counting" else dict(_FACTS)
    prompts = []
    for one in questions:
        if left[one["task"]] and set(one["documents"]) <= set(numbers):
            left[one["task"]] -= 1
            others = [number for number in numbers if number not in one["documents"]]
            imported = sorted([*one["documents"], *rng.sample(others, count - len(one["documents"]))])
            names = [f"document-{number}" for number in imported]
            if "instruction" in one:
                names.insert(0, one["instruction"])
            imports = tuple(Import(name, (), (), _PLACE) for name in names)
            prompts.append(Prompt("check", (*imports, Text(one["question"], _PLACE)), "check"))
    instructions = tuple(_module(name, text) for name, text in corpus["instructions"].items())
    system = Turn("system", (Text(corpus["system"] + "\n", _PLACE), Union(instructions, _PLACE)), _PLACE)
    texts = tuple(_module(f"document-{number}", corpus["documents"][number]) for number in numbers)
    schema = Schema("check", numbered((system, Turn("user", texts, _PLACE))), source="check")
    return Batch(kind, schema, tuple(prompts))


def _module(name: str, text: str) -> Module:
    return Module(name, (Text(text + "\n", _PLACE),), _PLACE)


def _of_pieces(rng: random.Random, kind: str, count: int, size: tuple[int, int]) -> Batch:
    """Draw a schema of code or prose, and questions on random parts of it."""
    fitting = [piece for piece in pieces(kind) if size[0] <= len(piece[1]) < size[1]]
    chosen = dict(rng.sample(fitting, min(2 * count, len(fitting))))
    modules = tuple(
        Module(f"text-{number + 1}", (Text(f"## {name}\n{text}\n\n", _PLACE),), _PLACE)
        for number, (name, text) in enumerate(chosen.items())
    )
    turns = (Turn("system", (Text(_SYSTEM + "\n", _PLACE),), _PLACE), Turn("user", modules, _PLACE))
    schema = Schema(f"check-{kind}", numbered(turns), source="check")
    questions = _OF_CODE if kind == "code" else _OF_PROSE
    prompts = []
    for question in questions[:_ASKED]:
        numbers = sorted(rng.sample(range(len(modules)), count))
        named = list(chosen)[rng.choice(numbers)]
        imports = tuple(Import(modules[at].name, (), (), _PLACE) for at in numbers)
        prompts.append(Prompt(schema.name, (*imports, Text(question.format(named), _PLACE)), "check"))
    return Batch(kind, schema, tuple(prompts))


def pieces(kind: str) -> list[tuple[str, str]]:
    """Return the corpus's pieces of a kind, ``code`` or ``prose``: (name, text)."""
    return [(name, text) for name, text in _corpus()[kind]]


@cache
def _corpus() -> dict[str, Any]:
    corpus: dict[str, Any] = json.loads(files("inlay.check").joinpath("corpus.json").read_text(encoding="utf-8"))
    return corpus


def draw_prompts(schema: Schema, count: int, seed: int) -> list[Prompt]:
    """Draw prompts of a user's schema: random combinations of its modules, each followed by a question.

    Returns fewer than ``count`` prompts if the schema allows no more.
    """
    rng, found = random.Random(f"{seed} {schema.name}"), dict[str, Prompt]()
    for _ in range(_TRIES + 10 * count):
        imports = _imports(rng, schema.children, rng.uniform(0.15, 1.0))
        if not imports:
            continue
        question = rng.choice(_OF_ANYTHING).format(rng.choice(imports).name)
        for last in (Text(question, _PLACE), PromptTurn("user", (Text(question, _PLACE),), _PLACE)):
            prompt = Prompt(schema.name, (*imports, last), "check")
            try:
                resolve(schema, prompt)
            except PMLError:
                continue
            found.setdefault(repr((imports, question)), prompt)
            break
        if len(found) == count:
            break
    return list(found.values())


def _imports(
    rng: random.Random, children: Sequence[Text | Param | Module | Union | Turn], share: float
) -> tuple[Import, ...]:
    """Draw about that share of the modules, with inner modules, and with arguments for parameters without a default."""
    found: list[Import] = []
    for child in children:
        if isinstance(child, Turn):
            found += _imports(rng, child.children, share)
        elif isinstance(child, Module | Union) and rng.random() < share:
            module = rng.choice(child.members) if isinstance(child, Union) else child
            needed = [one for one in _params(module.children) if one.default is None]
            arguments = tuple(Argument(one.name, rng.choice(_ARGUMENTS), _PLACE) for one in needed)
            found.append(Import(module.name, arguments, _imports(rng, module.children, share), _PLACE))
    return tuple(found)


def _params(children: Sequence[Text | Param | Module | Union | Turn]) -> Iterator[Param]:
    """Yield the parameters of a module, including those in its turns."""
    for child in children:
        if isinstance(child, Param):
            yield child
        elif isinstance(child, Turn):
            yield from _params(child.children)
