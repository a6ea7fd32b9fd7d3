import pytest

from inlay.errors import Place
from inlay.pml import Argument, Import, Prompt, PromptTurn, Text
from tests.unit.pml.helpers import prompt_problems

PROBLEMS = {
    "<prompt/>": ['p.xml:1:1: <prompt> has no schema; write <prompt schema="…">'],
    '<prompt schema=""/>': ['p.xml:1:9: <prompt> has an empty schema; write <prompt schema="…">'],
    '<prompt schma="s"/>': ['p.xml:1:9: <prompt> takes no attribute "schma"; did you mean "schema"?'],
    '<prompt schema="s"><user name="u"/></prompt>': [
        'p.xml:1:26: <user> takes no attribute "name"; it takes xml:space'
    ],
    '<prompt schema="s"><a xml:space="all"/></prompt>': [
        'p.xml:1:23: xml:space="all" is unknown; write "preserve" or "default"'
    ],
    '<prompt schema="s"><a><user>x</user></a></prompt>': [
        "p.xml:1:23: <user> stands inside <a>; chat tags stand at the top level of a prompt: close <a> first"
    ],
    '<prompt schema="s"><user><system/></user></prompt>': [
        "p.xml:1:26: <system> stands inside <user>; chat tags stand at the top level of a prompt: close <user> first"
    ],
    '<prompt schema="s"><prompt schema="t"/></prompt>': [
        "p.xml:1:20: <prompt> stands inside another; keep one <prompt> in a file, as its outermost tag"
    ],
    '<prompt schema="s"><module name="a"/><param/></prompt>': [
        "p.xml:1:20: <module> is a tag of schemas; to import a module write its name as a tag, as in <miami/>",
        "p.xml:1:38: <param> is a tag of schemas; to import a module write its name as a tag, as in <miami/>",
    ],
    '<schema name="s"/>': ["p.xml:1:1: the outermost tag is <schema>, not <prompt>; read it as a Schema"],
    "<html/>": ['p.xml:1:1: the outermost tag is <html>, not <prompt>; write <prompt schema="…"> around everything'],
}


@pytest.mark.parametrize(("text", "expected"), PROBLEMS.items())
def test_problems(text: str, expected: list[str]) -> None:
    assert prompt_problems(text) == expected


def test_nodes_and_their_locations() -> None:
    text = '<prompt schema="s">\n <plan days="3 or 4" note=""><miami/>\n  sunny </plan><user>Hi</user>\n</prompt>'
    assert Prompt.from_string(text, source="p") == Prompt(
        "s",
        (
            Import(
                "plan",
                (Argument("days", "3 or 4", Place("p", 2, 8)), Argument("note", "", Place("p", 2, 22))),
                (Import("miami", (), (), Place("p", 2, 30)), Text("sunny ", Place("p", 3, 3))),
                Place("p", 2, 2),
            ),
            PromptTurn("user", (Text("Hi", Place("p", 3, 22)),), Place("p", 3, 16)),
        ),
        "p",
    )


def test_white_space_between_imports_is_text_without_a_line_break() -> None:
    prompt = Prompt.from_string('<prompt schema="s"><a/> <b/>\n <c/></prompt>')
    assert [type(child).__name__ for child in prompt.children] == ["Import", "Text", "Import", "Import"]


def test_line_breaks_in_arguments_are_references() -> None:
    prompt = Prompt.from_string('<prompt schema="s"><a p="1\n2&#10;3"/></prompt>')
    assert [argument.value for argument in prompt.children[0].arguments] == ["1 2\n3"]
