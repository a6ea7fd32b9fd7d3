"""What to say about a tag or a text that stands where it must not."""

from __future__ import annotations

from inlay.pml.names import TAGS, is_name
from inlay.pml.nodes import ROLES
from inlay.pml.problems import Problems, clip

_CHAT_TAGS = "<system>, <user> or <assistant>"


def misplaced_text(parent: str) -> str:
    """About text in a union, or outside the chat tags of a schema that has some."""
    if parent == "union":
        return "text stands directly inside <union>; put it into a <module>"
    return f"text stands outside the chat tags of this schema; move it into {_CHAT_TAGS}"


def misplaced_tag(tag: str, parent: str, problems: Problems) -> str:
    """About a tag of a schema that its parent does not take."""
    if tag not in TAGS:
        return _unknown(tag, problems)
    inside = f"<{tag}> stands inside <{parent}>"
    if tag == "schema":
        return f"{inside}; keep one <schema> in a file, as its outermost tag"
    if tag == "prompt":
        return f"{inside}; write prompts into files of their own"
    if tag in ("param", "parameter"):
        return f"<{tag}> stands outside a module; move it into a <module>"
    if tag == "scaffold":
        return f"{inside}; move it to the top level of the schema"
    if tag in ROLES:
        return f"{inside}; chat tags stand at the top level of a schema: {_untangle(tag, parent)}"
    if parent == "union":
        return f"{inside}; list all members in one <union>, or put the inner one into a <module>"
    return f"<{tag}> stands outside the chat tags of this schema; move it into {_CHAT_TAGS}"


def _untangle(tag: str, parent: str) -> str:
    return f"close <{parent}> first" if parent in ROLES else f"put the <{parent}> inside <{tag}>"


def _unknown(tag: str, problems: Problems) -> str:
    unknown = f"<{clip(tag)}> is not a tag of PML"
    if near := problems.near(tag, TAGS):
        return f"{unknown}; did you mean <{near}>?"
    if is_name(tag):
        return f'{unknown}; write <module name="{clip(tag)}"> to define a module'
    return f"{unknown}; write &lt; for a < that is text"
