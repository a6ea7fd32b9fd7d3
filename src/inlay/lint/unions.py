"""Rules about unions."""

from __future__ import annotations

from collections.abc import Iterator

from inlay.lint.checked import WORTH, Checked, Finding

_SHARE = 0.25


def unions_of_one(checked: Checked) -> Iterator[Finding]:
    """A module is optional by itself."""
    for union in checked.unions:
        if len(union.members) == 1:
            name = union.members[0].name
            yield Finding(
                "union-of-one",
                union.place,
                f"the union has one member, '{name}', and modules are optional without one; delete <union> around it",
            )


def uneven_unions(checked: Checked) -> Iterator[Finding]:
    """Members start together and the union is as long as its longest one (``layout.py``): shorter ones leave a gap."""
    for union in checked.unions:
        lengths = {member.name: _length(checked, member.name) for member in union.members}
        longest = max(lengths, key=lambda name: lengths[name])
        shortest = min(lengths, key=lambda name: lengths[name])
        wasted = lengths[longest] - lengths[shortest]
        if wasted >= WORTH and wasted > _SHARE * lengths[longest]:
            yield Finding(
                "uneven-union",
                union.place,
                f"the union is {lengths[longest]:,} positions long, as '{longest}' is, and '{shortest}' takes "
                f"{lengths[shortest]:,}: under 'schema' positions {wasted:,} stay unused with it; use positions "
                "'packed', or make the members more alike in length",
            )


def _length(checked: Checked, name: str) -> int:
    extent = checked.layout.extents[name]
    return extent.end - extent.start
