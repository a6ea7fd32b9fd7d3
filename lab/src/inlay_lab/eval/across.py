"""Questions about several documents, beside the five tasks of questions.py.

- ``superlative``: the one of several documents with the highest value.
- ``sort``: several documents in order of a value.
- ``conflict``: whether two documents on one thing agree on a value that both state.
- ``shared``: the value that two documents state.

Documents for the last two contain planted pairs: two on one thing, or two with a common value.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from inlay_lab.eval.documents import FACTS, Attribute, Document, Kind, Wordings, describe, write_documents
from inlay_lab.eval.questions import TASKS, Asker, Question
from inlay_lab.eval.words import Value, Words

ACROSS_TASKS = ("superlative", "sort", "conflict", "shared")
ALL_TASKS = (*TASKS, *ACROSS_TASKS)

MOST_RANKED = 3  # documents in an answer: three in order take some seventy tokens

SUPERLATIVES = Wordings(
    (
        "Which of {names} has the {most} {p}?",
        "Which has the {most} {p} of {names}?",
        "Which has the {most} {p}: {names}?",
        "Of {names}, which one has the {most} {p}?",  # held out
    ),
    (
        "Of {names}, name the one with the {most} {p}.",
        "Name the one of {names} that has the {most} {p}.",
        "Among {names}, which has the {most} {p}?",
        "Take {names}: which one has the {most} {p}?",
        "Look at {names}. Which has the {most} {p}?",
        "Whose {p} is the {most} of {names}?",
        "Which one of {names} comes first, with the {most} {p}?",
    ),
)
SORTS = Wordings(
    (
        "List {names} by {p}, {most} first.",
        "Sort {names} by {p}, {most} first.",
        "Put {names} in order of {p}, {most} first.",
        "Give {names} in order of {p}, {most} first.",  # held out
    ),
    (
        "Order {names} by {p}, {most} first.",
        "Name {names} in order of {p}, {most} first.",
        "Rank {names} by {p}, with the {most} first.",
        "Give me a list of {names} by {p}, {most} first.",
        "List {names} in the order of {p}, {most} first.",
        "Give {names} by {p}, {most} first.",
        "In order of {p}, {most} first, list {names}.",
        "Please sort {names}: by {p}, {most} first.",
    ),
)
CONFLICTS = Wordings(
    (
        "Do the documents agree on the {p} of {n}?",
        "Is the {p} of {n} the same in both documents?",
        "Do two documents state the same {p} of {n}?",
        "Do both documents agree on the {p} of {n}?",  # held out
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
    """A question of any task of ALL_TASKS, or None if the documents allow none."""
    return _ASK[task](asker) if task in _ASK else asker.ask(task)


def superlative(asker: Asker) -> Question | None:
    """The document with the highest or earliest number. The answer compares two at a time, then names the one."""
    found = _ranked(asker)
    return superlative_of(asker, *found) if found else None


def superlative_of(asker: Asker, attribute: Attribute, stating: Sequence[Document]) -> Question:
    """The question ``superlative`` on these documents, which state the attribute."""
    text = _ask_rank(asker, SUPERLATIVES, attribute, stating)
    said, best = _choose(attribute, stating)
    return Question("superlative", text, said, f" {best.name}")


def sort(asker: Asker) -> Question | None:
    """Several documents in order of a number. The answer picks the first of those left, step by step, then the
    order.
    """
    found = _ranked(asker)
    return sort_of(asker, *found) if found else None


def sort_of(asker: Asker, attribute: Attribute, stating: Sequence[Document]) -> Question:
    """The question ``sort`` on these documents, which state the attribute."""
    text = _ask_rank(asker, SORTS, attribute, stating)
    left, names, steps = list(stating), [], []
    while len(left) > 1:
        said, best = _choose(attribute, left)
        steps.append(said)
        names.append(best.name)
        left.remove(best)
    order = ", ".join([*names, left[0].name])
    return Question("sort", text, f"{'; '.join(steps)}; {order}", f" {order}")


def conflict(asker: Asker) -> Question | None:
    """A question on the agreement of two documents on one thing. Prefers pairs that disagree."""
    options = stated_twice(asker.documents)
    differing = [option for option in options if not _agree(*option)]
    return conflict_of(asker, *asker.rng.choice(differing or options)) if options else None


def conflict_of(asker: Asker, attribute: Attribute, two: Sequence[Document]) -> Question:
    """The question ``conflict`` on two documents on one thing. The answer repeats both values and says if they
    agree.
    """
    text = asker.wording(CONFLICTS).format(p=asker.rng.choice(attribute.phrases), n=two[0].name)
    stated = ", ".join(document.facts[attribute.key].text for document in two)
    result = " yes" if _agree(attribute, two) else " no"
    return Question("conflict", text, f"{stated}, so{result}", result)


def stated_twice(documents: Sequence[Document]) -> list[tuple[Attribute, list[Document]]]:
    """The attributes that both of two documents on one thing state, with the two documents."""
    told: dict[str, list[Document]] = {}
    for document in documents:
        told.setdefault(document.name, []).append(document)
    return [
        (attribute, two)
        for two in told.values()
        if len(two) == 2
        for attribute in two[0].kind.attributes
        if all(attribute.key in document.facts for document in two)
    ]


def _agree(attribute: Attribute, documents: Sequence[Document]) -> bool:
    return len({document.facts[attribute.key].text for document in documents}) == 1


def shared(asker: Asker) -> Question | None:
    """The value of an attribute that exactly two documents state."""
    options = shareable(asker.documents)
    return shared_of(asker, *asker.rng.choice(options)) if options else None


def shareable(documents: Sequence[Document]) -> list[tuple[Kind, Attribute, str]]:
    """The attributes with exactly one repeated value, which exactly two documents state, with that value."""
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


def write_paired(words: Words, count: int, task: str) -> tuple[list[Document], list[Pair]]:
    """Documents for ``conflict`` or ``shared``, at least 2, with the numbers of their pairs.

    For ``conflict``, the first pair contradicts itself with a chance of one half; other pairs never do.
    """
    rng = words.rng
    written = write_documents(words, count)
    numbers = rng.sample(range(count), k=2 * max(1, count // 4))
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    for index, (first, second) in enumerate(pairs):
        if task == "conflict":
            written[second] = write_again(words, written[first], contradicting=index == 0 and rng.random() < 0.5)
        else:
            taken = {document.name for document in written}
            written[second] = write_sharing(words, written[first], taken)
    return written, pairs


def import_pair(rng: random.Random, pair: Pair, count: int, imported: int) -> list[int]:
    """The numbers of ``imported`` out of ``count`` documents in random order, among them both of a pair."""
    others = [number for number in range(count) if number not in pair]
    numbers = [*pair, *rng.sample(others, k=imported - 2)]
    return rng.sample(numbers, k=imported)


def rankable(documents: Sequence[Document]) -> list[tuple[Attribute, list[Document]]]:
    """The comparable attributes, each with at least two documents that state different values of it."""
    options = []
    for kind in dict.fromkeys(document.kind for document in documents):
        of_kind = [document for document in documents if document.kind is kind]
        for attribute in kind.attributes if len({d.name for d in of_kind}) == len(of_kind) else ():
            stating = [document for document in of_kind if attribute.key in document.facts]
            told_apart = len({_order(document, attribute) for document in stating}) == len(stating)
            if attribute.compare and told_apart and len(stating) >= 2:
                options.append((attribute, stating))
    return options


def _ranked(asker: Asker) -> tuple[Attribute, list[Document]] | None:
    """An attribute that many documents state, with up to MOST_RANKED of them in random order."""
    options = rankable(asker.documents)
    if not options:
        return None
    most = min(MOST_RANKED, max(len(stating) for _, stating in options))
    attribute, stating = asker.rng.choice([option for option in options if len(option[1]) >= most])
    return attribute, asker.rng.sample(stating, k=most)


def _ask_rank(asker: Asker, wordings: Wordings, attribute: Attribute, documents: Sequence[Document]) -> str:
    """A question on some documents. The attribute sets the direction: the earliest year or the highest number."""
    earlier, greater = ("earliest", "latest") if attribute.value.startswith("year") else ("lowest", "highest")
    names = [document.name for document in documents]
    return asker.wording(wordings).format(
        names=f"{', '.join(names[:-1])} and {names[-1]}",
        p=asker.rng.choice(attribute.phrases),
        most=greater if attribute.greatest else earlier,
    )


def _choose(attribute: Attribute, documents: Sequence[Document]) -> tuple[str, Document]:
    """The first of some documents in rank, and the comparisons that lead to it, two documents at a time."""
    best, *others = documents
    said = _stated(best, attribute)
    for other in others:
        best = max(best, other, key=lambda document: _order(document, attribute) * (1 if attribute.greatest else -1))
        following = f", so {best.name}" if other is others[-1] else f", so {_stated(best, attribute)}"
        said += f", {_stated(other, attribute)}{following}"
    return said, best


def _stated(document: Document, attribute: Attribute) -> str:
    return f"{document.name}: {document.facts[attribute.key].text}"


def _order(document: Document, attribute: Attribute) -> int:
    return document.facts[attribute.key].order or 0


def write_again(words: Words, document: Document, *, contradicting: bool) -> Document:
    """Another document on the same thing with some of its facts and others. ``contradicting`` changes one value."""
    rng, kind = words.rng, document.kind
    common = rng.sample(list(document.facts), k=rng.randint(1, len(document.facts) - 1 or 1))
    facts = {key: document.facts[key] for key in common}
    if contradicting:
        facts[common[0]] = _other(words, kind.attributes, common[0], document.facts[common[0]])
    unstated = [attribute for attribute in kind.attributes if attribute.key not in document.facts]
    for attribute in rng.sample(unstated, k=min(len(unstated), max(0, len(document.facts) - len(common)))):
        facts[attribute.key] = words.value(attribute.value)
    return _shuffled(words, document, document.name, facts)


def write_sharing(words: Words, document: Document, taken: set[str]) -> Document:
    """A document on another thing of the kind, with one common value that is unlikely to repeat by chance."""
    rng, kind = words.rng, document.kind
    name = words.name(kind.names)
    while name in taken:
        name = words.name(kind.names)
    own = [attribute for attribute in kind.attributes if attribute.count is None]
    common = [attribute for attribute in own if attribute.key in document.facts]
    stated = rng.sample(kind.attributes, k=min(rng.choice(FACTS), len(kind.attributes) - 1))
    facts = {attribute.key: words.value(attribute.value) for attribute in stated}
    if common:  # the only fact of a document may be from a short list
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
