"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings

_SHARE = 4


def examples(number: int) -> int:
    """Return this number for `make test-all`, and a quarter of it for targets that try the same examples every time."""
    return max(number // _SHARE, 10) if settings.get_current_profile_name() == "ci" else number
