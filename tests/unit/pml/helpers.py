"""Shared by the tests of PML: problems as sentences, items in shorthand, and the schemas that several tests use."""

from collections.abc import Callable

import pytest

from inlay.errors import PMLError
from inlay.pml import Filled, NewText, Prompt, PromptBuilder, Resolved, Schema, SchemaText, TurnEnd, TurnStart, resolve

TRAVEL = """\
<schema name="travel">
  <system>
    You plan trips.
  </system>
  <user>
    <module name="travel-plan">
      Plan a trip of <param name="duration" len="5"/>.
      <union>
        <module name="domestic">
          Stay in the country, in <param name="city" len="10"/>.
        </module>
        <module name="overseas">
          Go overseas.
          <union>
            <module name="miami">
              To Miami.
            </module>
            <module name="maldives">
              To the Maldives.
            </module>
          </union>
        </module>
      </union>
    </module>
  </user>
  <assistant>
    Which budget?
  </assistant>
</schema>
"""

# two zones at the top level, and three inside a
LEVELS = """\
<schema name="s">
  <module name="a">A<module name="a1">1</module><module name="a2">2</module><param name="p" len="3" default="d"/>\
<module name="a3">3</module></module>
  <module name="b">B</module>
  <union><module name="u1">U</module><module name="u2">V</module></union>
  Text.
  <module name="c">C</module>
</schema>
"""

ALONE = '<schema name="s"><module name="a">A</module><union><module name="b">B</module></union></schema>'


def sentences(call: Callable[[], object]) -> list[str]:
    """The problems of the PMLError that the call raises, one string each."""
    with pytest.raises(PMLError) as error:
        call()
    assert str(error.value) == "\n".join(map(str, error.value.problems))
    return [str(problem) for problem in error.value.problems]


def faults(call: Callable[[], object]) -> list[str]:
    """The code of each problem, with its place in the document if it has one."""
    with pytest.raises(PMLError) as error:
        call()
    places = [str(problem.place).removeprefix(problem.place.source).lstrip(": ") for problem in error.value.problems]
    return [f"{one.code} {place}".strip() for one, place in zip(error.value.problems, places, strict=True)]


def schema_problems(text: str) -> list[str]:
    return sentences(lambda: Schema.from_string(text, source="s.xml"))


def prompt_problems(text: str) -> list[str]:
    return sentences(lambda: Prompt.from_string(text, source="p.xml"))


def resolved(schema: str, prompt: str | PromptBuilder, *, moves: bool = False) -> Resolved:
    built = Prompt.from_string(prompt, source="p.xml") if isinstance(prompt, str) else prompt.build()
    return resolve(Schema.from_string(schema, source="s.xml"), built, moves=moves)


def resolve_problems(schema: str, prompt: str, *, moves: bool = False) -> list[str]:
    return sentences(lambda: resolved(schema, prompt, moves=moves))


def shorthand(result: Resolved) -> list[str]:
    """One string an item: text as it is, new text with +, arguments in [], defaults in (), turns as <user </user."""
    strings = []
    for item in result.items:
        match item:
            case SchemaText(node):
                strings.append(node.text)
            case Filled(_, text, is_default):
                strings.append(f"({text})" if is_default else f"[{text}]")
            case NewText(text):
                strings.append(f"+{text}")
            case TurnStart(role, own):
                strings.append(f"+<{role}" if own else f"<{role}")
            case TurnEnd(role, own):
                strings.append(f"+</{role}" if own else f"</{role}")
    return strings
