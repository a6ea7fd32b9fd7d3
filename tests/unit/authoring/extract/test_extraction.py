"""From logs to schemas: every prompt is reproduced exactly, and the counts are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inlay.authoring.extract import Corpus, Extraction, ExtractionSettings, LogError, LoggedPrompt, extract
from inlay.authoring.extract import find as find_module
from inlay.authoring.extract import runs as runs_module
from inlay.authoring.extract.extraction import describe
from inlay.errors import ParameterError
from inlay.pml import Module, NewText, Schema, SchemaText, Union, resolve
from tests.raising import raises
from tests.unit.authoring.extract.helpers import chat, corpus_of, encode, plain, turns_of

WORDS = (
    "harbour",
    "ferry",
    "island",
    "ticket",
    "winter",
    "north",
    "wind",
    "museum",
    "charts",
    "lamp",
    "church",
    "fish",
)


def document(seed: int, words: int = 30) -> str:
    draw = random.Random(seed)
    return f"# Guide {seed}\n{' '.join(draw.choices(WORDS, k=words))} {seed}.\n"


def extracted(prompts: list[LoggedPrompt], **options: int) -> Extraction:
    return extract(corpus_of(prompts), encode, name="log", settings=ExtractionSettings(**{"min_prompts": 2, **options}))


def tops(schema: Schema) -> list[Any]:
    """The modules at the top, in order; unions as lists."""
    children = [child for top in schema.children for child in getattr(top, "children", [top])]
    children = [child for child in schema.children if isinstance(child, Module | Union)] or children
    return [
        [member.name for member in child.members] if isinstance(child, Union) else child.name
        for child in children
        if isinstance(child, Module | Union)
    ]


# all sorts of text: repeated, unique, and with characters special to XML or chat templates
PIECES = st.sampled_from(
    [
        document(1),
        document(2),
        document(3)[:90],
        document(1)[40:],
        "天气很好我们去海边看日落吧" * 2,
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ",
        "a <b> & ]]> \"c\" 'd' &amp;\r\n\tif x < y:\r\n\t\treturn\r",
        "\0\x0c\ufffe",
        "👩‍💻 emoji\u00a0\u2028",
        " ",
        "\n\n",
        "  \n",
        "x",
        "",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=7).map("".join)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=3)
FRONTS = st.lists(st.tuples(st.sampled_from(["system", "user"]), PIECES), max_size=2)
LOGS = st.one_of(
    st.lists(TEXTS, min_size=1, max_size=6).map(lambda texts: plain(*texts)),
    st.lists(TURNS, min_size=1, max_size=6).map(lambda prompts: chat(*prompts)),
    st.tuples(FRONTS, st.lists(TURNS, min_size=1, max_size=6)).map(
        lambda log: chat(*[[*log[0], ("user", turns[0][1]), *turns[1:]] for turns in log[1]])
    ),
    st.tuples(st.lists(TEXTS, max_size=3), st.lists(TURNS, max_size=3)).map(
        lambda log: [*plain(*log[0]), *chat(*log[1])] or plain("")
    ),
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(prompts=LOGS, min_tokens=st.integers(4, 40), max_modules=st.integers(1, 20))
def test_every_prompt_is_reproduced(prompts, min_tokens, max_modules):
    result = extracted(prompts, min_tokens=min_tokens, max_modules=max_modules)
    proposal = result.proposal
    schema = Schema.from_string(proposal.schema.to_pml())
    for number, prompt in enumerate(prompts):
        if proposal.fits(number):
            expected = [(turn.role, turn.text) for turn in prompt.turns]
            assert turns_of(proposal.schema, proposal, number) == expected
            assert turns_of(schema, proposal, number) == expected  # the written files give the same
        else:
            assert proposal.prompt(number) is None
    assert len(proposal.choice.pieces) <= max_modules
    assert all(piece.tokens >= min_tokens for piece in proposal.choice.pieces)
    check_saving(result, prompts)


def check_saving(result: Extraction, prompts: list[LoggedPrompt]) -> None:
    """The savings counted once more, token by token: one token a byte."""
    proposal, saving = result.proposal, result.saving
    tokens = sum(len(turn.text.encode()) for prompt in prompts for turn in prompt.turns)
    by_schema, encoded = 0, set()
    for number in range(len(prompts)):
        written = proposal.prompt(number)
        items = [] if written is None else resolve(proposal.schema, written, moves=True).items
        here = sum(
            len(item.node.text.encode())
            for item in items
            if isinstance(item, SchemaText) and item.node.order in encoded
        )
        encoded.update(item.node.order for item in items if isinstance(item, SchemaText))
        new = sum(len(item.text.encode()) for item in items if isinstance(item, NewText))
        whole = sum(len(turn.text.encode()) for turn in prompts[number].turns)
        assert here + new <= whole or written is None
        by_schema += min(here, max(whole - 1, 0))
    assert (saving.tokens, saving.by_schema) == (tokens, by_schema)
    assert saving.by_schema == saving.always + sum(saving.by_module.values())
    assert saving.by_prefix == prefix_saving(prompts)


def prefix_saving(prompts: list[LoggedPrompt]) -> int:
    """Bytes that stand at the front of an earlier prompt as well, turn borders included but not counted."""
    saved = 0
    seen: list[list[str | int]] = []
    for prompt in prompts:
        elements = [one for turn in prompt.turns for one in ((turn.role or "plain"), *turn.text.encode())]
        best = 0
        for other in seen:
            length = 0
            while length < min(len(elements), len(other)) and elements[length] == other[length]:
                length += 1
            best = max(best, sum(isinstance(one, int) for one in elements[:length]))
        saved += min(best, max(sum(isinstance(one, int) for one in elements) - 1, 0))
        seen.append(elements)
    return saved


def test_documents_are_found_at_any_position_and_order():
    one, two, three = document(1), document(2), document(3)
    result = extracted(plain(f"a\n{one}b", f"{two}c{one}", f"{one}d{two}{three}", f"e{three}"))
    pieces = zip(result.proposal.names, result.proposal.choice.pieces, strict=True)
    found = {name: (piece.text, piece.prompts) for name, piece in pieces}
    assert found == {"guide-1": (one, 3), "guide-2": (two, 2), "guide-3": (three, 2)}
    assert result.saving.by_schema == len(one) * 2 + len(two) + len(three)
    assert result.saving.by_prefix == len("# Guide ")
    report = describe(result)
    assert report["modules"][0]["saved_tokens"] == len(one) * 2
    assert "1 pair of modules in both orders, such as guide-1 and guide-2 (1 and 1 times)" in report["notes"][0]
    assert report["prompts_out_of_order"] == 1


def test_a_template_with_a_variable_in_its_middle():
    before, after = (
        "Dear Mr. or Mrs. reader of this long letter, welcome aboard, ",
        ", and thank you for all the fish, always yours",
    )
    result = extracted(
        plain(*[f"{number} {before}{name}{after}" for number, name in enumerate(["Ann", "Bob", "Cy"])]), min_tokens=16
    )
    assert sorted(piece.text for piece in result.proposal.choice.pieces) == [f" {before.rstrip()}", after]


def test_chat_with_always_present_text_and_a_union():
    personas = [
        f"You are {name}, and {' '.join(random.Random(name).choices(WORDS, k=12))}.\n" for name in ("Ann", "Bob")
    ]
    prompts = chat(
        *[
            [
                ("system", "You help people who travel."),
                ("user", f"{personas[number % 2]}{document(number % 3)}Now {number}?"),
                *([("assistant", "Yes."), ("user", "Why?")] if number % 5 == 0 else []),
            ]
            for number in range(30)
        ]
    )
    result = extracted(prompts)
    assert [turn.role for turn in result.proposal.schema.children] == ["system", "user"]
    unions = [top for top in tops(result.proposal.schema) if isinstance(top, list)]
    assert sorted(map(sorted, unions)) == [["guide-0", "guide-1", "guide-2"], ["you-are-ann-and", "you-are-bob-and"]]
    assert result.proposal.moved == 0
    assert result.saving.fitting == 30
    assert result.saving.always_tokens == len("You help people who travel.")
    for number, prompt in enumerate(prompts):
        assert turns_of(result.proposal.schema, result.proposal, number) == [(t.role, t.text) for t in prompt.turns]
        written = result.proposal.prompt(number)
        assert written is not None
        assert resolve(result.proposal.schema, written)  # without moves


def test_modules_that_never_met_by_chance_are_no_union():
    prompts = plain(*[f"{number} {document(number // 2)}" for number in range(20)])
    assert describe(extracted(prompts))["unions"] == []


def test_modules_have_their_most_frequent_order():
    documents = [document(number) for number in range(4)]
    draw = random.Random(0)
    prompts = [
        f"{number}. " + "".join(documents[one] for one in sorted(draw.sample(range(4), 3))) for number in range(20)
    ]
    result = extracted(plain(*prompts))
    assert tops(result.proposal.schema) == ["guide-0", "guide-1", "guide-2", "guide-3"]
    assert result.proposal.moved == 0


def test_prompts_without_a_shared_prefix_have_their_own_turns():
    prompts = chat(
        *[[("system", f"{number} {document(1)}"), ("user", f"{document(2)}{number}")] for number in range(3)]
    )
    result = extracted(prompts)
    assert result.proposal.frame is None
    assert all(isinstance(child, Module) for child in result.proposal.schema.children)
    assert "write their own chat turns" in describe(result)["notes"][-1]
    assert "<system>" in result.proposal.prompt(0).to_pml()


def test_a_module_is_imported_once_in_a_prompt():
    result = extracted(plain(f"a{document(1)}b{document(1)}", f"{document(1)}c"))
    assert result.saving.by_schema == len(document(1))


def test_max_modules_keeps_the_most_useful_ones():
    prompts = plain(
        *[f"{n}{document(1, 50)}{n}{document(2, 20)}{n}" for n in range(3)], *[f"a{n}{document(3)}" for n in range(2)]
    )
    result = extracted(prompts, max_modules=1)
    assert result.proposal.names == ("guide-1",)
    assert "2 more texts would make modules" in describe(result)["notes"][0]


def test_a_schema_stays_within_the_size_of_a_file(monkeypatch):
    monkeypatch.setattr(find_module, "ROOM", len(document(1)) + 50)
    result = extracted(plain(*[f"{n}{document(1)}{n}{document(2)}{n}" for n in range(3)]))
    assert len(result.proposal.names) == 1
    assert "they are left out" in describe(result)["notes"][0]


def test_prompts_without_the_prefix_are_counted():
    prompts = chat(*[[("system", "You help."), ("user", f"{n}{document(1)}")] for n in range(19)], [("user", "Hi")])
    result = extracted(prompts)
    assert (result.saving.fitting, result.proposal.prompt(19)) == (19, None)
    assert "1 prompt cannot use the schema" in " ".join(describe(result)["notes"])


def test_control_characters_stay_new_text():
    result = extracted(plain(*[f"{n}{document(1)}\x0c{document(2)}" for n in range(3)]))
    assert sorted(piece.text for piece in result.proposal.choice.pieces) == [document(1), document(2)]
    assert "3 prompts hold control characters" in " ".join(describe(result)["notes"])


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        plain(""),
        plain("One prompt alone, however long it may be, repeats nothing at all."),
        plain(" \n", "\t ", "\n\n"),
        plain("", ""),
    ],
)
def test_log_without_repetition_gives_an_empty_schema(prompts):
    result = extracted(prompts, min_prompts=3)
    assert result.proposal.schema.children == ()
    assert result.saving.by_schema == 0
    assert "no text repeats" in describe(result)["notes"][0]


def test_conversations_logged_turn_by_turn():
    turns = [(role, document(number)) for number in range(4) for role in ("user", "assistant")]
    result = extracted(chat(*[turns[:length] for length in (1, 3, 5, 7)]))
    assert result.saving.by_prefix > result.saving.by_schema
    assert "a prefix cache alone saves more on this log" in " ".join(describe(result)["notes"])


def test_terminal_control_codes_are_not_shown():
    result = extracted(plain(*[f"{n}\n{document(1)[:20]}\x9b2J{document(1)}" for n in range(3)]))
    assert "·2J" in describe(result)["modules"][0]["text"]


def test_identical_prompts():
    result = extracted(plain(*[document(1)] * 4))
    assert (result.saving.by_schema, result.saving.by_prefix) == (3 * (len(document(1)) - 1),) * 2


def test_many_tiny_prompts():
    result = extracted(plain(*[f"Say {number}" for number in range(2_000)]))
    assert result.proposal.schema.children == ()


def test_the_same_log_gives_the_same_schema():
    prompts = plain(*[f"{n}{document(n % 3)}{document(n % 4)}{n}" for n in range(12)])
    assert extracted(prompts).proposal.schema.to_pml() == extracted(prompts).proposal.schema.to_pml()


@pytest.mark.parametrize("options", [{"min_prompts": 1}, {"min_tokens": 0}, {"max_modules": 5_001}])
def test_settings_out_of_range(options):
    with raises("parameter.out_of_range", ParameterError, names=next(iter(options))):
        ExtractionSettings(**options)


def test_too_large_log_is_rejected(monkeypatch):
    monkeypatch.setattr(runs_module, "MAX_WORDS", 5)
    with raises("prompt.log_too_large", LogError, names="log.jsonl"):
        Corpus.of(plain("one two", "three four"), "log.jsonl")
