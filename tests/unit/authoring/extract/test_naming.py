"""Names of modules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.authoring.extract.proposal import names_for, schema_name
from inlay.pml.attributes import TAGS, objection


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("# Company Policy\nAll staff …", "company-policy"),
        ("\n\nSome words here.\n\n## The Heading ##\nmore", "the-heading"),
        ("You are a careful assistant who", "you-are-a-careful"),
        ("<document>\n", "document"),
        ("2024 report", "text-2024-report"),
        ("Größe und Maß", "größe-und-maß"),
        ("система правил", "система-правил"),
        ("user", "user-2"),
        ("…!?", "text"),
        ("", "text"),
        ("A" * 100, "a" * 32),
        ("天气很好", "天气很好"),
    ],
)
def test_names(text, name):
    assert names_for([text]) == [name]


def test_names_are_unique():
    assert names_for(["One two", "one, two", "One Two!", "one two 2"]) == [
        "one-two",
        "one-two-2",
        "one-two-3",
        "one-two-2-2",
    ]


@settings(deadline=None)
@given(st.lists(st.text(max_size=40), max_size=6))
def test_names_are_names_of_pml(texts):
    names = names_for(texts)
    assert len(set(names)) == len(texts)
    assert not any(objection(name) or name in TAGS for name in names)
    assert names == names_for(texts)


def test_schema_name_comes_from_its_file():
    assert schema_name("Prod log (May)") == "prod-log-may"
