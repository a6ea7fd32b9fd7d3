"""The example of docs/guides/speculation.md runs as it stands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pages import DOCS, blocks


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [one for one in blocks(DOCS / "guides" / "speculation.md") if one.language == "python"]
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)
    drafted, accepted = map(int, capsys.readouterr().out.split())
    assert 0 < accepted <= drafted
