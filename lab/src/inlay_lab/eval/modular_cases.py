"""The cases of ``modular-qa``: questions on a few documents out of a schema's many, with the right answers.

Names, wordings and combinations do not occur in the bundled model's training.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from inlay.errors import Place
from inlay.pml import Module, Prompt, PromptBuilder, Scaffold, Schema, Text, Turn, Union, numbered
from inlay_lab.eval.across import Pair, ask, import_pair, write_paired
from inlay_lab.eval.conversations import SYSTEM
from inlay_lab.eval.documents import Document, write_documents
from inlay_lab.eval.questions import INSTRUCTIONS, TASKS, Asker, Form
from inlay_lab.eval.words import Split, Words

SCHEMA = "modular-qa"
_PER_TASK = 2  # cases of each task over one schema
_TRIES = 50  # at a question of one task, before other documents are written
_PLACE = Place(SCHEMA)
_FORMS = tuple(INSTRUCTIONS)  # forms with an instruction
_PAIRED = (("conflict",), ("shared",))  # their documents contain planted pairs
_GROUPS = (TASKS, ("superlative", "sort"), *_PAIRED)  # tasks that share schemas


@dataclass(frozen=True)
class Case:
    """One question: its task and subtask, the form of its answer, and the exact right answer.

    Attributes:
        imported: The numbers of the documents in its prompt, in order. The question is on these only.
    """

    task: str
    subtask: str
    form: Form
    imported: tuple[int, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Round:
    """The parts of one schema, and the cases asked over it.

    Attributes:
        system: The sentence of the system turn.
        instructions: The instruction for each form; prompts import at most one.
    """

    system: str
    instructions: Mapping[Form, str]
    documents: tuple[Document, ...]
    cases: tuple[Case, ...]

    def of(self, tasks: Collection[str]) -> Round:
        """This round with only the cases of these tasks."""
        return replace(self, cases=tuple(case for case in self.cases if case.task in tasks))

    def schema(self, *, scaffolds: bool = False) -> Schema:
        """A union of instructions in the system turn, and a module for each document in the user turn.

        Args:
            scaffolds: Name the imported documents of each case in a scaffold.
        """
        forms = tuple(_module(form.value, text) for form, text in self.instructions.items())
        texts = tuple(_module(_name(number), document.text) for number, document in enumerate(self.documents))
        system = Turn("system", (Text(self.system + "\n", _PLACE), Union(forms, _PLACE)), _PLACE)
        together = dict.fromkeys(case.imported for case in self.cases) if scaffolds else ()
        named = tuple(Scaffold(tuple(map(_name, imported)), _PLACE) for imported in together)
        return Schema(SCHEMA, numbered((system, Turn("user", texts, _PLACE))), named, source=SCHEMA)

    def prompt(self, case: Case) -> Prompt:
        """The instruction for the case's form, if any, its documents, and its question at the end of the user turn."""
        builder = PromptBuilder.for_schema(SCHEMA)
        if case.form in self.instructions:
            builder = builder.use(case.form.value)
        for number in case.imported:
            builder = builder.use(_name(number))
        return builder.text(case.question).build()


def draw_rounds(
    *,
    documents: int,
    spare: int,
    questions: int,
    seed: int,
    tasks: Sequence[str] = TASKS,
    permuted: bool = False,
    per_schema: int = _PER_TASK,
) -> list[Round]:
    """Draw cases, equally many of each task; equal arguments give equal cases.

    A task's cases do not depend on the other tasks. Fewer questions are a prefix of more.

    Args:
        documents: Documents that a prompt imports; at least 2, since tasks compare them.
        spare: Further documents in its schema.
        questions: Cases over all tasks, rounded up to a multiple of the number of tasks.
        seed: Of all random draws.
        tasks: From ALL_TASKS.
        permuted: Put a prompt's documents in random order instead of the schema's.
        per_schema: Cases of each task over one schema.
    """
    each = -(-questions // len(tasks))
    drawn = []
    for group in _GROUPS:
        if asked := set(group).intersection(tasks):
            rng = random.Random(seed if group == TASKS else f"{seed} {' '.join(group)}")
            for left in range(each, 0, -per_schema):
                drawn.append(_draw_round(rng, documents, spare, min(left, per_schema), group, permuted).of(asked))
    return drawn


def _draw_round(
    rng: random.Random, documents: int, spare: int, each: int, tasks: Sequence[str], permuted: bool
) -> Round:
    while True:  # some documents allow no question of some task
        words = Words(rng, Split.HELD_OUT)
        if tasks in _PAIRED:
            written, pairs = write_paired(words, documents + spare, tasks[0])
        else:
            written, pairs = write_documents(words, documents + spare), []
        cases = _draw_cases(_Draw(rng, written, pairs, documents, permuted), tasks, each)
        if cases is not None:
            instructions = {form: rng.choice(INSTRUCTIONS[form].of(Split.HELD_OUT)) for form in _FORMS}
            return Round(rng.choice(SYSTEM), instructions, tuple(written), cases)


@dataclass(frozen=True)
class _Draw:
    """The documents that a round's cases are drawn from. ``pairs`` has the planted pairs; each case uses one."""

    rng: random.Random
    written: list[Document]
    pairs: list[Pair]
    documents: int
    permuted: bool

    def case(self, task: str) -> Case | None:
        """A case on randomly chosen documents, or None if they allow no such question."""
        rng, count = self.rng, len(self.written)
        if self.pairs:
            pair = self.pairs[0] if task == "conflict" else rng.choice(self.pairs)
            numbers = import_pair(rng, pair, count, self.documents)
        else:
            numbers = rng.sample(range(count), self.documents)
        imported = tuple(numbers if self.permuted else sorted(numbers))
        form = rng.choice(_FORMS) if task == "form" else Form.PLAIN
        asker = Asker(Words(rng, Split.HELD_OUT), [self.written[number] for number in imported], form)
        asked = ask(asker, task)
        return None if asked is None else Case(task, asked.subtask, form, imported, asked.text, asked.answer)


def _draw_cases(draw: _Draw, tasks: Sequence[str], each: int) -> tuple[Case, ...] | None:
    """``each`` different cases of every task, or None if they cannot be found."""
    cases: list[Case] = []
    for task in tasks:
        found: dict[tuple[tuple[int, ...], str], Case] = {}
        for _ in range(_TRIES):
            case = draw.case(task)
            if case is not None:
                found.setdefault((case.imported, case.question), case)
            if len(found) == each:
                break
        else:
            return None
        cases += found.values()
    return tuple(cases)


def _name(number: int) -> str:
    return f"document-{number + 1}"


def _module(name: str, text: str) -> Module:
    return Module(name, (Text(text + "\n", _PLACE),), _PLACE)
