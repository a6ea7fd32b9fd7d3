"""Which names PML reserves, and which names authors may give."""

from __future__ import annotations

import re
from xml.parsers import expat

from inlay.pml.limits import MAX_NAME_CHARACTERS
from inlay.pml.nodes import ROLES
from inlay.pml.problems import quote

TAGS = ("schema", "prompt", "module", "union", "param", "parameter", "scaffold", *ROLES)

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_OTHER_ASCII = re.compile(r"(?![A-Za-z0-9_.\-])[\x00-\x7f]")


def is_name(name: str) -> bool:
    """Whether this is an XML name without a colon, so that a prompt can write it as a tag or an attribute."""
    if _PLAIN.fullmatch(name):
        return True
    return not _OTHER_ASCII.search(name) and _expat_takes(name)


def objection(name: str) -> str | None:
    """What is wrong with the name of a module or a parameter, and what to write instead; None if it is fine."""
    if len(name) > MAX_NAME_CHARACTERS:
        return f"the name {quote(name)} has {len(name)} characters; write at most {MAX_NAME_CHARACTERS}"
    if not is_name(name):
        return f'{quote(name)} is not a name; write letters, digits, "_", "-" and ".", with a letter or "_" first'
    return None


def _expat_takes(name: str) -> bool:
    # expat knows an older and narrower table of letters than the current XML: ask the parser that will read the prompts
    try:
        expat.ParserCreate("UTF-8").Parse(f"<{name}/>".encode(), True)
    except (expat.ExpatError, UnicodeEncodeError):
        return False
    return True
