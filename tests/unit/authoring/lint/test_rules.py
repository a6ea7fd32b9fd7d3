"""Every rule on a schema that breaks it and on one that does not. One token a character."""

from __future__ import annotations

import pytest

from inlay.authoring.lint import RULES, Finding, lint_schema
from inlay.errors import ParameterError, PMLError
from inlay.models.shapes import bytes_tokenizer
from inlay.pml import Prompt, Schema
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.layout import lay_out_schema
from inlay.prompt.tokens import TextEncoder

TOKENIZER = bytes_tokenizer()
ENCODER, TEMPLATE = TextEncoder(TOKENIZER), ChatTemplate(TOKENIZER)


def text(tokens: int, seed: str = "a") -> str:
    """That many characters, of which no long stretch repeats another seed's."""
    words = "".join(f"{seed}{number}." for number in range(tokens))
    return words[:tokens]


def module(name: str, tokens: int, inner: str = "") -> str:
    return f'<module name="{name}">{text(tokens, name)}{inner}</module>'


def union(*members: str) -> str:
    return f"<union>{''.join(members)}</union>"


def lint(body: str, *prompts: str, **settings: int) -> list[Finding]:
    schema = Schema.from_string(f'<schema name="s">{body}</schema>', source="s.xml")
    written = [
        Prompt.from_string(f'<prompt schema="s">{prompt}</prompt>', source=f"p{number}.xml")
        for number, prompt in enumerate(prompts)
    ]
    return lint_schema(lay_out_schema(schema, ENCODER, TEMPLATE), ENCODER, written, **settings)


HOLE = '<param name="n" len="{}"/>'
PARAM = HOLE.format(4)

#: rule → what is written, with ¶ at the place of the advice, and a part of it
BROKEN: dict[str, tuple[str, str]] = {
    "small-module": ("¶" + module("a", 15), "module 'a' has 15 tokens, too few to save time"),
    "small-module in a union": (union("¶" + module("a", 1), module("b", 16)), "module 'a' has 1 token, too few"),
    "small-module with a parameter": ("¶" + module("a", 15, PARAM), "has 15 tokens"),
    "no-text": ('¶<module name="a"/>', "module 'a' is empty, so nothing"),
    "no-text but a parameter": (f'¶<module name="a">{PARAM}</module>', "holds parameters alone"),
    "template-variable": (
        f'<module name="a">{text(20)}<param name="n" len="5"/>¶({{{{ city }}}}).</module>',
        'write <param name="city" len="…"/>',
    ),
    "union-of-one": ("¶" + union(module("a", 20)), "has one member, 'a'"),
    "uneven-union": (
        "¶" + union(module("a", 100), module("b", 68)),
        "because 'a' does, and 'b' needs 68. Under 'schema' positions, a prompt with 'b' wastes 32",
    ),
    "uneven-union by a child and a hole": (
        "¶" + union(module("a", 20, module("c", 16, HOLE.format(30))), module("b", 20)),
        "'b' needs 20. Under 'schema' positions, a prompt with 'b' wastes 46",
    ),
    "early-parameter": (
        f'<module name="a">{text(20)}¶{PARAM}{text(32, "b")}</module>',
        "32 positions of module 'a' stand behind its parameter 'n', so they are encoded without the argument. Under "
        "'packed' positions, an argument of fewer than 4 tokens also shifts them",
    ),
    "early-parameter before modules": (module("a", 20, f"¶{PARAM}{module('b', 40)}"), "40 positions of module 'a'"),
    "argument-first": (
        "¶" + module("a", 20, PARAM) + module("b", 32),
        "module 'a' takes an argument, and 32 tokens of modules without arguments stand behind it",
    ),
    "argument-first in a union": (
        union(module("c", 20), "¶" + module("a", 20, module("d", 16, PARAM))) + union(module("b", 32), module("e", 32)),
        "module 'a' takes an argument, and 32 tokens",
    ),
    "late-text": (
        f"{text(20)}{module('a', 20)}¶{text(32, 'z')}",
        "32 tokens of always-present text stand behind module 'a', so it is encoded without them. Under 'packed' "
        "positions each import of the module also shifts them",
    ),
    "late-text in a turn": (
        f"<system>S</system><user>{module('a', 20)}¶{text(32, 'z')}</user>",
        "32 tokens of always-present text",
    ),
    "late-text in a module": (
        f'<module name="p">{text(20)}{union(module("a", 20), module("b", 20))}¶{text(32, "z")}</module>',
        "32 tokens of the text of module 'p' stand behind module 'p/a'",
    ),
    "hidden-scaffold": (
        f'{module("a", 20)}{module("b", 20)}<scaffold modules="a b"/>¶<scaffold modules="b a"/>',
        "is never used, because the one in line 1 comes first in every prompt; delete one",
    ),
    "hidden-scaffold, in part": (
        f'{module("a", 20)}{module("b", 20)}{module("c", 20)}<scaffold modules="b c"/>\n¶<scaffold modules="a b c"/>',
        "is never used for 'b', 'c', because the one in line 1 comes first; put the longer scaffold first",
    ),
    "union-scaffold": (
        f'¶<union scaffold="a">{module("a", 20)}{module("b", 20)}</union>',
        "scaffold='a' has no effect: no module is encoded behind a member of a union; leave it out",
    ),
    "no-role": (
        "<system>S</system>¶Loose.<user>U</user>",
        "this text stands between chat turns without a role, and most chat templates support no such text; put it",
    ),
    "no-role, of a module": (f"<system>S</system>¶{module('a', 20)}", "this can stand between chat turns"),
    "no-role, in a module with turns": (
        f'<module name="a"><system>{text(20)}</system>¶{text(20)}</module>',
        "this text stands between chat turns",
    ),
    "repeated-text": (
        f'<module name="a">{text(40)}{text(9, "y")}</module>\n<module name="b">¶{text(9, "z")}{text(40)}</module>',
        "40 tokens of this text also stand in module 'a' (line 1), so they are stored twice; write them into",
    ),
    "repeated-text, of an ancestor": (
        f'<module name="p">{text(40)}<module name="a">¶{text(40)}</module></module>',
        "also stand in module 'p' (line 1), so they are stored twice; delete them here",
    ),
    "repeated-text, always present": (
        f'{text(40)}<module name="a">¶{text(20, "q")}{text(40)}</module>',
        "40 tokens of this text also stand in the always-present text (line 1)",
    ),
    "repeated-text behind another context": (
        f'{module("p", 20, f"""<module name="a">{text(40)}</module>""")}<module name="b">¶{text(40)}</module>',
        "40 tokens of this text also stand in module 'p/a' (line 1)",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_schema_that_breaks_the_rule(name):
    body, part = BROKEN[name]
    before, after = body.split("¶")
    (finding,) = [found for found in lint(before + after) if found.rule == name.replace(",", " ").split()[0]]
    lines = f'<schema name="s">{before}'.split("\n")
    assert str(finding) == f"s.xml:{len(lines)}:{len(lines[-1]) + 1}: {finding.rule}: {finding.message}"
    assert part in finding.message
    assert "; " in finding.message  # the remedy


#: no rule has a finding here
SOUND = {
    "nothing": "",
    "text alone": text(100),
    "a module of 16 tokens": module("a", 16),
    "a parent of little text": f'<module name="p">Hi.{module("a", 20)}{module("b", 20)}</module>',
    "a parent without text": f'<module name="p">{module("a", 20)}</module>',
    "a union of like members": union(module("a", 100), module("b", 76)),
    "a union of unlike members that wastes little": union(module("a", 47), module("b", 16)),
    "a parameter at the end": module("a", 60, PARAM),
    "a parameter with a little behind it": f'<module name="a">{text(20)}{PARAM}{text(31, "b")}</module>',
    "an argument behind modules that take none": module("b", 90) + module("a", 20, PARAM),
    "an argument before modules that take one too": module("a", 20, PARAM) + module("b", 90, PARAM),
    "an argument before little": module("a", 20, PARAM) + module("b", 31),
    "text before modules": text(90) + module("a", 20),
    "a little text behind modules": module("a", 20) + text(31),
    "text of the next turn": f"<system>{module('a', 20)}</system><user>{text(90, 'z')}</user>",
    "a scaffold of more modules behind one of others": (
        module("a", 20) + module("b", 20) + module("c", 20) + '<scaffold modules="a b"/><scaffold modules="b c"/>'
    ),
    "the longer scaffold first": (
        module("a", 20) + module("b", 20) + module("c", 20) + '<scaffold modules="a b c"/><scaffold modules="b c"/>'
    ),
    "the same whole text in the same context": "".join(f'<module name="{n}">{text(60)}</module>' for n in "ab"),
    "the same whole text behind text": text(9, "z") + "".join(f'<module name="{n}">{text(60)}</module>' for n in "ab"),
    "little of the same text": "".join(f'<module name="{n}">{text(31)}{text(20, n)}</module>' for n in "ab"),
    "words again and again": f'<module name="a">{"na " * 60}</module>',
}


@pytest.mark.parametrize("name", list(SOUND))
def test_sound_schema_has_no_findings(name):
    assert [str(finding) for finding in lint(SOUND[name], max_positions=4096)] == []


def test_a_module_may_repeat_itself():
    body = f'<module name="a">{text(40)}{module("b", 20)}{text(40)}</module>'
    assert "repeated-text" not in [finding.rule for finding in lint(body)]


def test_every_rule_is_broken_by_some_schema():
    beside = {"beyond-context", "long-argument", "wide-parameter"}  # these need more than a schema
    rules = {name.replace(",", " ").split()[0] for name in BROKEN} | beside
    assert len(RULES) == len(rules)


def test_size_limit_of_small_modules():
    body = module("a", 5) + module("b", 25)
    assert [f.message.split("'")[1] for f in lint(body, small=26) if f.rule == "small-module"] == ["a", "b"]
    assert lint(body, small=5) == lint(body, small=0) == []
    with pytest.raises(ParameterError, match="small is -1"):
        lint(body, small=-1)


def test_shift_is_mentioned_only_if_a_segment_moves():
    """Without any text before it, a piece has no place that it could be displaced from."""
    assert ENCODER.bos == ()
    (finding,) = lint(module("a", 20) + text(32, "z"))
    assert (finding.rule, "shifts" in finding.message) == ("late-text", False)
    (finding,) = lint(f'<module name="a">{PARAM}{text(32)}</module>')
    assert (finding.rule, "shifts" in finding.message) == ("early-parameter", False)


def test_overlong_arguments_are_found():
    body = module("a", 20, HOLE.format(5))
    assert lint(body, '<a n="12345"/>') == []
    findings = lint(body, '<a n="12345"/>', '<a n="123456"/>', '<a n="1234567"/>')
    assert [str(finding) for finding in findings] == [
        f"p{number}.xml:1:23: long-argument: the argument 'n' is {tokens} tokens long and its len is 5, so this prompt "
        f'fails; shorten it, or write len="{tokens}" in the schema'
        for number, tokens in ((1, 6), (2, 7))
    ]


def test_oversized_parameters_are_found():
    body = module("a", 20, HOLE.format(20))
    assert [finding.rule for finding in lint(body)] == []
    assert [finding.rule for finding in lint(body, "now")] == []
    assert [finding.rule for finding in lint(body, '<a n="1234"/>', '<a n="12345"/>')] == []  # 15 positions
    (finding,) = lint(body, '<a n="1234"/>', '<a n=""/>', "now")
    assert (finding.rule, finding.place.line, finding.place.column) == ("wide-parameter", 1, 55)
    assert "has len 20, and the given prompts use at most 4" in finding.message
    assert "wastes 16 positions or more" in finding.message
    assert 'write len="4"' in finding.message
    wide = module("a", 20, HOLE.format(100))
    assert [finding.rule for finding in lint(wide, f'<a n="{"x" * 51}"/>')] == []  # more than half


def test_defaults_fill_parameters_too():
    body = module("a", 20, '<param name="n" len="30" default="twenty characters..."/>')
    assert [finding.rule for finding in lint(body, "<a/>")] == []
    assert "use at most 2" in lint(body, '<a n="12"/>')[0].message


def test_prompts_of_another_schema_are_rejected():
    with pytest.raises(PMLError, match=r"p0\.xml:1:20: .*nowhere"):
        lint(module("a", 20), "<nowhere/>")


def test_reordered_imports_have_no_finding():
    assert lint(module("a", 20) + module("b", 20), "<b/><a/>") == []


def test_schema_longer_than_the_context_is_found():
    body = text(10) + module("p", 30, module("a", 61)) + module("b", 60)
    assert lint(body, max_positions=161) == []
    (finding,) = lint(body, max_positions=160)
    assert (finding.rule, str(finding.place)) == ("beyond-context", "s.xml:1:28")
    assert "takes 161 positions and the model's context is 160" in finding.message
    first, second = lint(body, max_positions=100)
    assert "takes 161 positions" in first.message
    assert second.message.startswith("module 'p/a' has 101 tokens with the text around it")
    assert lint(body) == []


def test_findings_are_sorted_by_place():
    body = f'<module name="a"/>\n{module("b", 3)}\n{union(module("c", 5))}'
    assert [str(finding.place).split(":", 1)[1] for finding in lint(body)] == ["1:18", "2:1", "3:1", "3:8"]
