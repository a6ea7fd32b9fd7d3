"""docs/errors.md lists every code and message; it is the only place where wording is compared."""

from __future__ import annotations

import re

from tests.error_reference import PAGE, entries, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.error_reference"


def test_codes_are_an_area_and_a_mistake():
    wrong = [code for code in entries() if not re.fullmatch(r"[a-z]+\.[a-z_]+", code)]
    assert not wrong
