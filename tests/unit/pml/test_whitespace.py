import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.pml import Prompt, Schema, Text
from inlay.pml.parser import settle

RUNS = {
    "white space alone, with a line break, is layout": ("\n  ", ""),
    "also where the break is in the middle": (" \n\t\n ", ""),
    "white space alone without a line break is text": (" \t ", " \t "),
    "text on one line stays": (" a ", " a "),
    "lines of its own end in one line break": ("\n    a\n  ", "a\n"),
    "white space before the first break goes": (" \t\n  a\n", "a\n"),
    "only the first break goes: blank lines are meant": ("\n\n  a\n", "\na\n"),
    "blank lines at the end are meant": ("\n  a\n\n  ", "a\n\n"),
    "common indentation goes, the rest stays": ("\n    a\n      b\n    c\n  ", "a\n  b\nc\n"),
    "blank lines do not count for it and lose theirs": ("\n    a\n \n          \n    b\n", "a\n\n\nb\n"),
    "the first line does not begin in the run": ("a\n    b\n      c\n", "a\nb\n  c\n"),
    "nor does it keep the others from losing theirs": ("  a\n    b", "  a\nb"),
    "white space at the end of lines stays": ("\n  a  \n  b \n", "a  \nb \n"),
    "a last line with text on it keeps its end": ("\n  a\n  b ", "a\nb "),
    "tabs and spaces are different": ("\n\ta\n  b\n", "\ta\n  b\n"),
    "tabs in common go": ("\n\t\ta\n\t b\n", "\ta\n b\n"),
    "no-break space is text": ("\n \u00a0\n", "\u00a0\n"),
    "other line separators are text": ("\u2028 \u0085", "\u2028 \u0085"),
}


@pytest.mark.parametrize(("run", "text"), RUNS.values(), ids=RUNS.keys())
def test_a_run(run: str, text: str) -> None:
    assert settle(run) == text


@settings(deadline=None)
@given(st.text(" \t\na", max_size=30))
def test_visible_text_stays_in_order(run: str) -> None:
    assert settle(run).replace(" ", "").replace("\t", "").strip("\n").replace("\n", "") == run.translate(
        {ord(" "): None, ord("\t"): None, ord("\n"): None}
    )


@settings(deadline=None)
@given(st.lists(st.text("ab c", min_size=1).filter(lambda line: line.strip() == line), min_size=1), st.text(" \t"))
def test_indented_lines_are_dedented(lines: list[str], indentation: str) -> None:
    run = "\n" + "".join(f"{indentation}{line}\n" for line in lines) + indentation[:-1]
    assert settle(run) == "".join(f"{line}\n" for line in lines)


@settings(deadline=None)
@given(st.text(" \t\n\u00a0a", max_size=30))
def test_text_without_layout_is_unchanged(text: str) -> None:
    lines = [line.strip(" \t") for line in text.split("\n")]
    plain = "x" + "\n".join(lines)
    assert settle(plain) == plain


def texts(body: str, attributes: str = "") -> list[str]:
    schema = Schema.from_string(f'<schema name="s" {attributes}>{body}</schema>')
    found = [child.text for child in schema.children if isinstance(child, Text)]
    return found + [
        child.text for module in schema.modules.values() for child in module.children if isinstance(child, Text)
    ]


XML = {
    "a comment does not end a run": ("\n  a<!-- note -->b\n  c\n", ["ab\nc\n"]),
    "nor do comments beside white space make text of it": ("\n <!-- note --> \n", []),
    "a comment on a line of its own leaves that line empty": ("\n  a\n  <!-- note -->\n  b\n", ["a\n\nb\n"]),
    "CDATA takes part like other text": ("<![CDATA[\n  a]]>\n  <![CDATA[<b>\n]]>", ["a\n<b>\n"]),
    "references take part like what they stand for": ("&#10;&#32; a &amp; b&#x0a;", ["a & b\n"]),
    "CRLF is one line break": ("\r\n  a\r\n  b\r\n", ["a\nb\n"]),
    "CR is one too": ("\r  a\r", ["a\n"]),
    "the five entities": ("&lt;&gt;&amp;&quot;&apos;", ["<>&\"'"]),
    "a tag ends a run": ("a\n<scaffold modules='m n'/>\n  b<module name='m'/><module name='n'/>", ["a\n", "b"]),
    "no text": ("", []),
}


@pytest.mark.parametrize(("body", "expected"), XML.values(), ids=XML.keys())
def test_runs_in_a_schema(body: str, expected: list[str]) -> None:
    assert texts(body) == expected


def test_module_on_own_lines_ends_with_one_line_break() -> None:
    assert texts('\n  <module name="m">\n    One.\n    Two.\n  </module>\n') == ["One.\nTwo.\n"]


def test_a_parameter_in_the_middle_of_a_line() -> None:
    body = '<module name="m">\n    For <param name="p" len="3"/> days,\n    or <param name="q" len="3"/>\n  </module>'
    assert texts(body) == ["For ", " days,\nor "]


PRESERVE = 'xml:space="preserve"'


def test_preserve_keeps_all_white_space_and_is_inherited() -> None:
    assert texts('\n <module name="m">\n  a\n </module>', PRESERVE) == ["\n ", "\n  a\n "]


def test_default_switches_back() -> None:
    assert texts('<module name="m" xml:space="default">\n  a\n </module>\n', PRESERVE) == ["\n", "a\n"]


def test_preserve_passes_through_a_union() -> None:
    body = f'<module name="m" {PRESERVE}><union> \n <module name="n"> a </module> </union></module>'
    assert texts(body) == [" a "]


def test_preserve_on_a_turn() -> None:
    schema = Schema.from_string(f'<schema name="s"><user {PRESERVE}>\n a\n</user> <user>\n a\n</user></schema>')
    assert [turn.children[0].text for turn in schema.children] == ["\n a\n", "a\n"]


def test_preserved_white_space_between_turns_is_dropped() -> None:
    schema = Schema.from_string(f'<schema name="s" {PRESERVE}> <user>a</user> \n <user>b</user> </schema>')
    assert [type(child).__name__ for child in schema.children] == ["Turn", "Turn"]
    prompt = Prompt.from_string(f'<prompt schema="s" {PRESERVE}> <user>a</user> <user>b</user>\n</prompt>')
    assert [type(child).__name__ for child in prompt.children] == ["PromptTurn", "PromptTurn"]


def test_prompts_follow_the_same_rule() -> None:
    text = f'<prompt schema="s">\n  <a/>\n  one\n    two\n  <b> </b><c {PRESERVE}>\n c</c>\n</prompt>'
    a, one, b, c = Prompt.from_string(text).children
    assert one.text == "one\n  two\n"
    assert [child.text for child in b.children] == [" "]
    assert [child.text for child in c.children] == ["\n c"]
    assert a.children == ()
