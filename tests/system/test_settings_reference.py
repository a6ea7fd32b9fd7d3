"""docs/reference/settings.md is generated from the declarations of settings."""

from __future__ import annotations

from tests.settings_reference import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.settings_reference"
