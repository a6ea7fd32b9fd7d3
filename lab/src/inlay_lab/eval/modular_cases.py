"""The cases of ``modular-qa``: questions on a few documents out of a schema's many, with the right answers.

Names, wordings and combinations are those that the bundled model never saw in training.
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
_FORMS = tuple(INSTRUCTIONS)  # those that an instruction asks for
_PAIRED = (("conflict",), ("shared",))  # their documents have pairs planted in them
_GROUPS = (TASKS, ("superlative", "sort"), *_PAIRED)  # the tasks that are asked over the same schemas


@dataclass(frozen=True)
class Case:
    """One question: its task and subtask, the form of its answer, and the answer that is right to the letter.

    imported: the numbers of the documents that its prompt imports, in its order; it is on these alone.
    """

    task: str
    subtask: str
    form: Form
    imported: tuple[int, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Round:
    """One schema, as what it is made of, and the cases that are asked over it.

    system: the sentence of the system turn. instructions: what asks for each form; prompts import at most one.
    """

    system: str
    instructions: Mapping[Form, str]
    documents: tuple[Document, ...]
    cases: tuple[Case, ...]

    def of(self, tasks: Collection[str]) -> Round:
        """This round with the cases of these tasks alone."""
        return replace(self, cases=tuple(case for case in self.cases if case.task in tasks))

    def schema(self, *, scaffolds: bool = False) -> Schema:
        """A union of instructions in the system turn, and a module for each document in the user turn.

        scaffolds: whether the documents that a case imports are named in a scaffold, case by case.
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
    """Draw cases: the same ones for the same arguments, as many of each task.

    A task's cases are the same whichever others are asked, and fewer questions are the beginning of more.

    Arguments:
        documents: how many documents a prompt imports, at least 2 (or nothing could be compared).
        spare: how many more its schema holds.
        questions: how many cases there are over all tasks; rounded up to a multiple of their number.
        seed: of all that is drawn.
        tasks: of ALL_TASKS.
        permuted: whether documents stand in any order in a prompt, or in that of the schema.
        per_schema: how many cases of each task are asked over one schema.
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
    """What the cases of a round are drawn from. pairs: of documents that were written as such; each case has one."""

    rng: random.Random
    written: list[Document]
    pairs: list[Pair]
    documents: int
    permuted: bool

    def case(self, task: str) -> Case | None:
        """One on documents of its own choice, or None where these allow no such question."""
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
    """``each`` cases of every task, none twice; None where they fail."""
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
