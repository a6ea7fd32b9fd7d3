"""Error messages about prompts and misplaced tags. Each states the fault and then the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inlay.errors import Place
from inlay.pml.attributes import TAGS, is_name
from inlay.pml.nodes import MAX_SET, ROLES, Import, ImportSet, Text
from inlay.pml.problems import Problems, whereabouts
from inlay.pml.rules import choice
from inlay.wording import clip, listed, quote


def other_schema(named: str, schema: str) -> str:
    """The prompt names another schema."""
    return f'the prompt is for schema {quote(named)}, not for {quote(schema)}; write <prompt schema="{clip(schema)}">'


def unknown_module(name: str, near: str | None, schema: str, modules: Iterable[str]) -> str:
    """The schema has no such module."""
    names = listed(modules)
    remedy = f"did you mean {_tag(near)}?" if near else f"its modules are {names}" if names else "it has no modules"
    return f"schema {quote(schema)} has no module {quote(name)}; {remedy}"


def unknown_parameter(module: str, name: str, near: str | None, params: Iterable[str]) -> str:
    """The module has no such parameter."""
    names = listed(params)
    remedy = f"did you mean {quote(near)}?" if near else f"it takes {names}" if names else "it takes none"
    return f"{_tag(module)} has no parameter {quote(name)}; {remedy}"


def no_arguments(module: str, names: Sequence[str]) -> str:
    """Parameters without a default get no argument."""
    needed = ", ".join(map(quote, names[:8])) + (", …" if len(names) > 8 else "")
    written = " ".join(f'{clip(name)}="…"' for name in names[:8]) + (" …" if len(names) > 8 else "")
    have = "has no default" if len(names) == 1 else "have no defaults"
    return f"{_tag(module)} needs {needed}, which {have}; write <{clip(module)} {written}/>"


def argument_twice(module: str, name: str) -> str:
    """A parameter gets two arguments."""
    return f"{_tag(module)} is given {quote(name)} twice; keep one of them"


def repeated(name: str, first: Place) -> str:
    """A module is imported a second time."""
    return f"{_tag(name)} is imported twice, first {whereabouts(first)}; keep one of them"


def one_union(name: str, other: str) -> str:
    """Two members of one union are imported."""
    return f"{_tag(name)} and {_tag(other)} are members of one union; keep one of them"


def misnested(name: str, parents: tuple[str, ...], inside: str | None) -> str:
    """A module is imported without its parent, or inside another module."""
    stands = "at the top level" if inside is None else f"inside <{clip(inside)}>"
    if not parents:
        return f"{_tag(name)} stands {stands}, but the schema has it in no module; write it outside"
    nested = _tag(name)
    for parent in reversed(parents):
        nested = f"<{clip(parent)}>{nested}</{clip(parent)}>"
    return f"{_tag(name)} stands {stands}, but the schema has it inside <{clip(parents[-1])}>; write {nested}"


def ambiguous(name: str, paths: Iterable[str], inside: str | None) -> str:
    """Several modules have this name, but none of them at this level."""
    stands = "at the top level" if inside is None else f"inside <{clip(inside)}>"
    return f"{_tag(name)} stands {stands}, where the schema has none; it has {choice(paths)}"


def turns_in_turn(name: str, role: str) -> str:
    """A module with chat turns is imported inside a prompt's turn."""
    return f"{_tag(name)} stands inside <{role}>, and has chat turns of its own; write it outside <{role}>, before it"


def out_of_order(name: str, after: str, movable: bool) -> str:
    """A module is imported after one that follows it in the schema."""
    message = f"{_tag(name)} stands after {_tag(after)}, but the schema has it before; write {_tag(name)} first"
    return f"{message} (with packed positions, their order is free)" if movable else message


def text_in_set() -> str:
    """Text stands among the imports of a set."""
    return "text stands directly inside <set>, where only imports change places; write it outside, or inside an import"


def empty_set() -> str:
    """A set holds no import."""
    return "<set> is empty; put the imports into it whose order is free"


def large_set(imports: int) -> str:
    """A set holds too many imports."""
    return f"<set> has {imports} imports; write at most {MAX_SET} into one"


def nested_set() -> str:
    """A set is nested in another set, directly or through an import."""
    return "<set> stands inside another, whose imports move with all that they hold; delete the inner one"


def turns_in_set(name: str) -> str:
    """A module with chat turns is imported in a set."""
    return f"{_tag(name)} stands inside <set>, and has chat turns, which keep their order; write it outside <set>"


def loose_after_turn(node: Text | Import | ImportSet, role: str) -> str:
    """A node outside chat tags follows a chat tag."""
    what = _what(node)
    return f"{what} stands after <{role}> and outside chat tags; write it before <{role}>, or inside a chat tag"


def loose_beside_turns(node: Text | Import | ImportSet, schema: str) -> str:
    """A node stands outside the chat tags of a prompt, and the prompt's schema has only modules."""
    remedy = "write everything inside chat tags, or nothing"
    return f"{_what(node)} stands outside chat tags, and schema {quote(schema)} is modules alone; {remedy}"


def import_in_turn(name: str, schema: str, has: str, role: str) -> str:
    """A prompt's turn imports a module, but the schema needs it outside the turn."""
    why = f"schema {quote(schema)} has {has} of its own"
    return f"{_tag(name)} stands inside <{role}>, but {why}; write it outside <{role}>, before it"


def _what(node: Text | Import | ImportSet) -> str:
    if isinstance(node, ImportSet):
        return "<set>"
    return _tag(node.name) if isinstance(node, Import) else "text"


def _tag(name: str) -> str:
    return f"<{clip(name)}/>"


def misplaced_text(parent: str) -> str:
    """Text is in a tag that holds none, such as <union>."""
    return f"text stands directly inside <{parent}>; put it into a <module>"


def misplaced_tag(tag: str, parent: str, problems: Problems, *, turn: str | None) -> str:
    """A schema's tag is in a parent that does not take it. ``turn`` is the role of the enclosing chat tag, or None."""
    if tag not in TAGS:
        return _unknown(tag, problems)
    inside = f"<{tag}> stands inside <{parent}>"
    if tag == "schema":
        return f"{inside}; keep one <schema> in a file, as its outermost tag"
    if tag == "prompt":
        return f"{inside}; write prompts into files of their own"
    if tag == "set":
        return (
            f"{inside}; prompts have sets, and a schema says no order that is free: delete it around what stands in it"
        )
    if tag == "meta":
        return f"<meta> stands behind other content of <{parent}>; move it to the front"
    if tag in ("param", "parameter"):
        return f"<{tag}> stands outside a module; move it into a <module>"
    if tag == "scaffold":
        return f"{inside}; move it to the top level of the schema"
    if tag in ROLES and turn:
        return f"<{tag}> stands inside <{turn}>; chat tags stand in no other: close <{turn}> first"
    if tag in ROLES:
        return f"{inside}; chat tags stand at the top level of a schema, or in a <module>: put the <{parent}> inside it"
    return f"{inside}; list all members in one <union>, or put the inner one into a <module>"


#: Tags that people write who look for a place for tools.
_TOOLS = frozenset(
    name + ending
    for name in ("tool", "function", "tool_call", "tool-call", "tool_result", "tool-result")
    for ending in ("", "s")
)


def _unknown(tag: str, problems: Problems) -> str:
    unknown = f"<{clip(tag)}> is not a tag of PML"
    if tag.lower() in _TOOLS:
        return f'{unknown}; a request gives tools beside its messages, as "tools": […], and a schema holds none'
    if near := problems.near(tag, TAGS):
        return f"{unknown}; did you mean <{near}>?"
    if is_name(tag):
        return f'{unknown}; write <module name="{clip(tag)}"> to define a module'
    return f"{unknown}; write &lt; for a < that is text"
