"""Questions that need sight across documents, beside the five of questions.py.

``superlative`` (which of all that state it has the highest value), ``sort`` (those that state it, in order),
``conflict`` (whether two documents on one thing contradict each other, and in what) and ``shared`` (the value that two
documents state). Documents for the last two have pairs planted in them: two on one thing, or two that share a value.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from inlay.quality.documents import FACTS, Attribute, Document, Kind, Wordings, describe, write_documents
from inlay.quality.questions import TASKS, Asker, Question
from inlay.quality.words import Value, Words

ACROSS_TASKS = ("superlative", "sort", "conflict", "shared")
ALL_TASKS = (*TASKS, *ACROSS_TASKS)

MOST_LISTED = 4  # documents in an answer: each takes about ten tokens

SUPERLATIVES = Wordings(
    (
        "Which of the {many} has the {most} {p}?",
        "Which has the {most} {p} of all {many}?",
        "Of all {many}, which has the {most} {p}?",
        "Of the {many}, which one has the {most} {p}?",  # held out
    )
)
SORTS = Wordings(
    (
        "List the {many} by {p}, {most} first.",
        "Sort the {many} by {p}, {most} first.",
        "Put the {many} in order of {p}, {most} first.",
        "Give the {many} in order of {p}, {most} first.",  # held out
    )
)
CONFLICTS = Wordings(
    (
        "Do two of the documents contradict each other?",
        "Is there a contradiction between two documents?",
        "Does one document contradict another?",
        "Is there a document that contradicts another?",  # held out
    )
)
CONFLICTS_ON = Wordings(
    (
        "Do the documents contradict each other on {n}?",
        "Is there a contradiction in what is said about {n}?",
        "Does one document contradict another on {n}?",
        "Is there a contradiction on {n}?",  # held out
    )
)
SHARED = Wordings(
    (
        "Which {p} do two of the {many} share?",
        "Two of the {many} have the same {p}: which?",
        "Which {p} is stated of two {many}?",
        "Which {p} do two {many} have in common?",  # held out
    )
)

#: Numbers of two documents that were written as a pair.
Pair = tuple[int, int]


def ask(asker: Asker, task: str) -> Question | None:
    """A question of any task of ALL_TASKS, or None where the documents allow none."""
    return _ASK[task](asker) if task in _ASK else asker.ask(task)


def superlative(asker: Asker) -> Question | None:
    """Which of those that state a number has the highest or lowest: all of them with it, and then the one."""
    found = _listed(asker)
    return superlative_of(asker, *found) if found else None


def superlative_of(asker: Asker, attribute: Attribute, stating: Sequence[Document]) -> Question:
    """The question ``superlative`` about these documents, which are all that state the attribute."""
    greatest = asker.rng.random() < 0.5
    text = _asked(asker, SUPERLATIVES, stating[0], attribute, greatest)
    best = sorted(stating, key=lambda document: _order(document, attribute), reverse=greatest)[0].name
    return Question("superlative", text, f"{_list(stating, attribute)}, so {best}", f" {best}")


def sort(asker: Asker) -> Question | None:
    """Those that state a number, in its order."""
    found = _listed(asker)
    return sort_of(asker, *found) if found else None


def sort_of(asker: Asker, attribute: Attribute, stating: Sequence[Document]) -> Question:
    """The question ``sort`` about these documents, which are all that state the attribute."""
    greatest = asker.rng.random() < 0.5
    text = _asked(asker, SORTS, stating[0], attribute, greatest)
    ordered = sorted(stating, key=lambda document: _order(document, attribute), reverse=greatest)
    return Question("sort", text, _list(ordered, attribute))


def conflict(asker: Asker) -> Question | None:
    """Whether any documents contradict each other, or those on one thing; None where more than one pair does."""
    conflicting = _conflicting(asker.documents)
    if len(conflicting) > 1:
        return None
    subtask = asker.rng.choice(("any", "thing"))
    if subtask == "any":
        text, found = asker.wording(CONFLICTS), list(conflicting.values())
    else:
        told = Counter(document.name for document in asker.documents)
        twice = [name for name, times in told.items() if times == 2]
        name = asker.rng.choice(twice if twice and asker.rng.random() < 0.75 else list(told))
        return conflict_on(asker, name)
    return _whether(text, found, subtask)


def conflict_on(asker: Asker, name: str) -> Question:
    """Whether the documents on one thing contradict each other, and in what."""
    conflicting = _conflicting([document for document in asker.documents if document.name == name])
    return _whether(asker.wording(CONFLICTS_ON).format(n=name), list(conflicting.values()), "thing")


def _whether(text: str, found: Sequence[Attribute], subtask: str) -> Question:
    return Question("conflict", text, f"yes, {found[0].phrases[0]}" if found else "no", subtask=subtask)


def shared(asker: Asker) -> Question | None:
    """The one value of an attribute that exactly two documents state."""
    options = shareable(asker.documents)
    return shared_of(asker, *asker.rng.choice(options)) if options else None


def shareable(documents: Sequence[Document]) -> list[tuple[Kind, Attribute, str]]:
    """The attributes of which just one value stands in two documents, and in no third, with that value."""
    options = []
    for kind in dict.fromkeys(document.kind for document in documents):
        of_kind = [document for document in documents if document.kind is kind]
        for attribute in kind.attributes:
            values = Counter(d.facts[attribute.key].text for d in of_kind if attribute.key in d.facts)
            twice = [value for value, times in values.items() if times > 1]
            if attribute.count is None and len(twice) == 1 and values[twice[0]] == 2:  # short lists repeat anyway
                options.append((kind, attribute, twice[0]))
    return options


def shared_of(asker: Asker, kind: Kind, attribute: Attribute, value: str) -> Question:
    """The question ``shared`` about a value that two documents state."""
    text = asker.wording(SHARED).format(p=asker.rng.choice(attribute.phrases), many=kind.many)
    return Question("shared", text, value)


_ASK: dict[str, Callable[[Asker], Question | None]] = {
    "superlative": superlative,
    "sort": sort,
    "conflict": conflict,
    "shared": shared,
}


def write_paired(
    words: Words, count: int, task: str, facts: tuple[int, ...] = FACTS
) -> tuple[list[Document], list[Pair]]:
    """Documents for ``conflict`` or ``shared``, at least 2, with the numbers of their pairs.

    Of the pairs for ``conflict`` the first contradicts itself in one case of two; the others never do.
    """
    rng = words.rng
    written = write_documents(words, count, facts)
    numbers = rng.sample(range(count), k=2 * max(1, count // 4))
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    for index, (first, second) in enumerate(pairs):
        if task == "conflict":
            written[second] = write_again(words, written[first], contradicting=index == 0 and rng.random() < 0.5)
        else:
            taken = {document.name for document in written}
            written[second] = write_sharing(words, written[first], taken, facts)
    return written, pairs


def import_pair(rng: random.Random, pair: Pair, count: int, imported: int) -> list[int]:
    """The numbers of ``imported`` out of ``count`` documents, both of a pair among them, in no order."""
    others = [number for number in range(count) if number not in pair]
    numbers = [*pair, *rng.sample(others, k=imported - 2)]
    return rng.sample(numbers, k=imported)


def listable(documents: Sequence[Document]) -> list[tuple[Attribute, list[Document]]]:
    """The comparable attributes with the documents that state each, of different values: what an answer may list."""
    options = []
    for kind in dict.fromkeys(document.kind for document in documents):
        of_kind = [document for document in documents if document.kind is kind]
        for attribute in kind.attributes if len({d.name for d in of_kind}) == len(of_kind) else ():
            stating = [document for document in of_kind if attribute.key in document.facts]
            told_apart = len({_order(document, attribute) for document in stating}) == len(stating)
            if attribute.compare and told_apart and 2 <= len(stating) <= MOST_LISTED:
                options.append((attribute, stating))
    return options


def _listed(asker: Asker) -> tuple[Attribute, list[Document]] | None:
    """Of the longest lists that the documents allow, one."""
    options = listable(asker.documents)
    if not options:
        return None
    most = max(len(stating) for _, stating in options)
    return asker.rng.choice([option for option in options if len(option[1]) == most])


def _order(document: Document, attribute: Attribute) -> int:
    return document.facts[attribute.key].order or 0


def _list(documents: Sequence[Document], attribute: Attribute) -> str:
    return ", ".join(f"{document.name}: {document.facts[attribute.key].text}" for document in documents)


def _asked(asker: Asker, wordings: Wordings, document: Document, attribute: Attribute, greatest: bool) -> str:
    first, last = ("earliest", "latest") if attribute.value.startswith("year") else ("lowest", "highest")
    phrase = asker.rng.choice(attribute.phrases)
    return asker.wording(wordings).format(many=document.kind.many, p=phrase, most=last if greatest else first)


def _conflicting(documents: Sequence[Document]) -> dict[str, Attribute]:
    """The things on which two documents state different values of an attribute, with the first such attribute."""
    found: dict[str, Attribute] = {}
    for index, first in enumerate(documents):
        for second in documents[index + 1 :]:
            for attribute in first.kind.attributes if first.name == second.name else ():
                one, other = first.facts.get(attribute.key), second.facts.get(attribute.key)
                if one is not None and other is not None and one.text != other.text:
                    found.setdefault(first.name, attribute)
    return found


def write_again(words: Words, document: Document, *, contradicting: bool) -> Document:
    """Another document on the same thing: some of its facts, one of them with another value if need be, and others."""
    rng, kind = words.rng, document.kind
    common = rng.sample(list(document.facts), k=rng.randint(1, len(document.facts) - 1 or 1))
    facts = {key: document.facts[key] for key in common}
    if contradicting:
        facts[common[0]] = _other(words, kind.attributes, common[0], document.facts[common[0]])
    unstated = [attribute for attribute in kind.attributes if attribute.key not in document.facts]
    for attribute in rng.sample(unstated, k=min(len(unstated), max(0, len(document.facts) - len(common)))):
        facts[attribute.key] = words.value(attribute.value)
    return _shuffled(words, document, document.name, facts)


def write_sharing(words: Words, document: Document, taken: set[str], numbers: tuple[int, ...] = FACTS) -> Document:
    """A document on another thing of the kind, which shares one value that would not be drawn twice by chance."""
    rng, kind = words.rng, document.kind
    name = words.name(kind.names)
    while name in taken:
        name = words.name(kind.names)
    own = [attribute for attribute in kind.attributes if attribute.count is None]
    common = [attribute for attribute in own if attribute.key in document.facts]
    stated = rng.sample(kind.attributes, k=min(rng.choice(numbers), len(kind.attributes) - 1))
    facts = {attribute.key: words.value(attribute.value) for attribute in stated}
    if common:  # of a document of one fact, it may be the one of a short list
        attribute = rng.choice(common)
        facts.pop(next(iter(facts)) if attribute.key not in facts else attribute.key)
        facts[attribute.key] = document.facts[attribute.key]
    return _shuffled(words, document, name, facts)


def _other(words: Words, attributes: Sequence[Attribute], key: str, value: Value) -> Value:
    (attribute,) = [attribute for attribute in attributes if attribute.key == key]
    while (other := words.value(attribute.value)).text == value.text:
        pass
    return other


def _shuffled(words: Words, like: Document, name: str, facts: dict[str, Value]) -> Document:
    keys = words.rng.sample(list(facts), k=len(facts))
    pronoun = words.rng.choice(like.kind.pronouns)
    return describe(words, like.kind, name, pronoun, {key: facts[key] for key in keys})
