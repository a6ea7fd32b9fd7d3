"""docs/store.md: its example runs, prints what the page says, and its tables name what there is."""

from __future__ import annotations

import re

from inlay.config import EngineConfig

from .pages import DOCS, blocks

PAGE = DOCS / "store.md"


def test_the_second_start_encodes_nothing(tmp_path, capsys):
    (block,) = [block for block in blocks(PAGE) if block.language == "python"]
    assert "/tmp/inlay-store" in block.text
    exec(block.text.replace("/tmp/inlay-store", str(tmp_path)), {})
    (first, none), (zero, read) = [tuple(map(int, line.split())) for line in capsys.readouterr().out.splitlines()]
    assert (none, zero) == (0, 0)
    assert first == read > 0


def test_every_setting_has_a_row():
    rows = re.findall(r"^\| `(store\w*)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [name for name in EngineConfig.__dataclass_fields__ if name.startswith("store")]
