"""Questions on a set of documents, each with its one right answer.

- ``single``: one fact of one document.
- ``compare``: two facts of two documents, and the one of the two that is greater or earlier.
- ``count``: over all documents.
- ``unstated``: a fact that no document states.
- ``form``: one fact, in the form that an instruction asks for.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from inlay_lab.eval.documents import Attribute, Document, Kind, Wordings, kinds
from inlay_lab.eval.words import Split, Value, Words

TASKS = ("single", "compare", "count", "unstated", "form")

FRAMES = Wordings(
    (
        "What is the {p} of {n}?",
        "Tell me the {p} of {n}.",
        "Please tell me the {p} of {n}.",
        "Give the {p} of {n}.",
        "I want to know the {p} of {n}.",
        "What do the documents say about the {p} of {n}?",
        "Please give the {p} of {n}.",  # held out
    ),
    (
        "The {p} of {n}, please.",
        "Can you tell me the {p} of {n}?",
        "Which {p} do the documents give for {n}?",
        "Please name the {p} of {n}.",
        "Please look up the {p} of {n}.",
        "Find the {p} of {n}.",
        "Give me the {p} that is stated for {n}.",
        "Please give me what is stated as the {p} of {n}.",
    ),
)
KIND_COUNTS = Wordings(
    (
        "How many of these are {many}?",
        "How many {many} are described?",
        "How many documents are about {many}?",
        "How many of the documents are about {many}?",  # held out
    ),
    (
        "How many {many} are there?",
        "How many {many} do the documents describe?",
        "Count the {many}.",
        "How many of the things described are {many}?",
        "About how many {many} do you know?",
        "What is the number of {many}?",
        "How many of the texts are about {many}?",
        "How many documents describe {many}?",
        "How many of the documents describe {many}?",
        "In how many documents do you read about {many}?",
        "How many of the records are on {many}?",
        "Of the documents, how many are on {many}?",
    ),
)


class Form(Enum):
    """The form of an answer. An instruction asks for each but PLAIN. SENTENCE is the document's own sentence."""

    PLAIN = "plain"
    CAPITALS = "capitals"
    WORD = "word"
    SENTENCE = "sentence"


INSTRUCTIONS = {
    Form.CAPITALS: Wordings(
        (
            "Answer in capitals.",
            "Write the answer in capital letters.",
            "Use capital letters.",
            "Give the answer in capitals.",
            "Answer in capital letters.",  # held out
        ),
        (
            "All in capitals, please.",
            "Only use capital letters.",
            "Write in capitals.",
            "The answer has to be in capitals.",
        ),
    ),
    Form.WORD: Wordings(
        (
            "Answer in one word.",
            "Give the answer in one word.",
            "Use one word.",
            "Answer with a single word.",
            "Write the answer in one word.",  # held out
        ),
        ("One word, please.", "Only use one word.", "Write a single word.", "The answer has to be one word."),
    ),
    Form.SENTENCE: Wordings(
        (
            "Answer with the full sentence.",
            "Answer in a full sentence.",
            "Write the full sentence.",
            "Use a full sentence.",
            "Give the full sentence.",  # held out
        ),
        (
            "A full sentence, please.",
            "Only use full sentences.",
            "Write a full sentence.",
            "Give the sentence that states it.",
        ),
    ),
}
_UNSTATED = {
    Form.PLAIN: "not stated",
    Form.CAPITALS: "NOT STATED",
    Form.WORD: "unknown",
    Form.SENTENCE: "The documents do not state this.",
}


@dataclass(frozen=True)
class Question:
    """A question and its right answer.

    Attributes:
        task: One of TASKS.
        answer: The exact right answer.
        result: The end of the answer that follows from the rest, like " Bravel" of a comparison; else empty.
        subtask: Of ``count``, "kind" or "value". Of ``unstated``, the missing "attribute" or "thing". Of ``form``, the
            form.
    """

    task: str
    text: str
    answer: str
    result: str = ""
    subtask: str = ""


def compared(task: str, text: str, attribute: Attribute, two: list[tuple[str, Value]]) -> Question:
    """A question on two names with their values of an attribute. The answer repeats both, then names one."""
    best, _ = max(two, key=lambda each: (each[1].order or 0) * (1 if attribute.greatest else -1))
    stated = ", ".join(f"{name}: {value.text}" for name, value in two)
    return Question(task, text, f"{stated}, so {best}", f" {best}")


def _count(text: str, counted: int, subtask: str) -> Question:
    return Question("count", text, str(counted), str(counted), subtask)


@dataclass
class Asker:
    """Asks questions on documents.

    Attributes:
        words: As of the documents; sets the split of wordings.
        form: The form that the current instruction asks for.
    """

    words: Words
    documents: list[Document]
    form: Form = Form.PLAIN

    @property
    def rng(self) -> random.Random:
        return self.words.rng

    def ask(self, task: str) -> Question | None:
        """A question of a task, or None if these documents allow none."""
        return _ASK[task](self)

    def wording(self, wordings: Wordings) -> str:
        return self.rng.choice(wordings.of(self.words.split))

    def about(self, attribute: Attribute, name: str) -> str:
        """A question on one attribute of one thing."""
        if self.rng.random() < 0.4:
            return self.wording(FRAMES).format(p=self.rng.choice(attribute.phrases), n=name)
        return self.wording(attribute.questions).format(n=name)

    def single(self) -> Question | None:
        document = self.rng.choice(self.documents)
        stated = [a for a in document.kind.attributes if a.key in document.facts and self._answerable(document, a)]
        if not stated:
            return None
        attribute = self.rng.choice(stated)
        task, subtask = ("single", "") if self.form is Form.PLAIN else ("form", self.form.value)
        return Question(task, self.about(attribute, document.name), self._answer(document, attribute), subtask=subtask)

    def unstated(self) -> Question | None:
        document = self.rng.choice(self.documents)
        if self.rng.random() < 0.3:  # a thing that no document describes
            name = self.words.name(document.kind.names)
            if any(name == other.name for other in self.documents):
                return None
            subtask, missing = "thing", list(document.kind.attributes)
        else:
            name = document.name
            subtask, missing = "attribute", [a for a in document.kind.attributes if a.key not in document.facts]
        missing = [a for a in missing if self._in_split(document.kind.name, a)]
        if not missing:
            return None
        text = self.about(self.rng.choice(missing), name)
        return Question("unstated", text, _UNSTATED[self.form], subtask=subtask)

    def compare(self) -> Question | None:
        pairs = [
            (attribute, a, b)
            for index, a in enumerate(self.documents)
            for b in self.documents[index + 1 :]
            for attribute in (a.kind.attributes if a.kind is b.kind else ())
            if attribute.compare and attribute.key in a.facts and attribute.key in b.facts
            if a.facts[attribute.key].order != b.facts[attribute.key].order
        ]
        if not pairs:
            return None
        attribute, *two = self.rng.choice(pairs)
        self.rng.shuffle(two)
        assert attribute.compare is not None
        first, second = two
        text = self.wording(attribute.compare).format(a=first.name, b=second.name)
        stated = [(document.name, document.facts[attribute.key]) for document in two]
        return compared("compare", text, attribute, stated)

    def count(self) -> Question | None:
        if self.rng.random() < 0.3:
            kind = self.rng.choice(self.documents).kind if self.rng.random() < 0.8 else self.rng.choice(kinds())
            return self.count_of(kind)
        options = [
            (attribute, document.facts[attribute.key].text)
            for document in self.documents
            for attribute in document.kind.attributes
            if attribute.count and attribute.key in document.facts
        ]
        if not options:
            return None
        attribute, value = self.rng.choice(options)
        if self.rng.random() < 0.2:
            value = self.words.value(attribute.value).text
        assert attribute.count is not None
        counted = sum(
            attribute in document.kind.attributes
            and attribute.key in document.facts
            and document.facts[attribute.key].text == value
            for document in self.documents
        )
        return _count(self.wording(attribute.count).format(v=value), counted, "value")

    def count_of(self, kind: Kind) -> Question:
        """The number of documents about things of a kind."""
        counted = sum(document.kind is kind for document in self.documents)
        return _count(self.wording(KIND_COUNTS).format(many=kind.many), counted, "kind")

    def _answerable(self, document: Document, attribute: Attribute) -> bool:
        """True if the form fits the value, and the pair of attribute and form belongs to the split."""
        if self.form is Form.WORD and document.facts[attribute.key].word is None:
            return False
        return self._in_split(document.kind.name, attribute)

    def _in_split(self, kind: str, attribute: Attribute) -> bool:
        """One in four pairs of attribute and form is held out from inlay_lab.train, if it can be inferred from others.

        Listed words and units in capitals cannot be inferred, so they are not held out.
        """
        if self.form is Form.PLAIN:
            return True
        kept = zlib.crc32(f"{kind} {attribute.key} {self.form.value}".encode()) % 4 == 0
        if self.form is Form.CAPITALS and attribute.value.split()[0] in ("choice", "number"):
            kept = False
        return kept == (self.words.split is Split.HELD_OUT)

    def _answer(self, document: Document, attribute: Attribute) -> str:
        value = document.facts[attribute.key]
        if self.form is Form.CAPITALS:
            return value.text.upper()
        if self.form is Form.WORD:
            assert value.word is not None
            return value.word
        if self.form is Form.SENTENCE:
            return document.sentences[attribute.key]
        return value.text


_ASK: dict[str, Callable[[Asker], Question | None]] = {
    "single": Asker.single,
    "form": Asker.single,
    "unstated": Asker.unstated,
    "compare": Asker.compare,
    "count": Asker.count,
}
