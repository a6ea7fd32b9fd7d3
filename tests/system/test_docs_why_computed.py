"""docs/guides/why-computed.md: its example runs, and its table has every kind of cause."""

from __future__ import annotations

from inlay.diagnostics import CAUSES
from inlay.types import MISS_REASONS
from tests.pages import DOCS, blocks, rows

PAGE = DOCS / "guides" / "why-computed.md"


def test_its_example_prints_the_cause(capsys):
    (example,) = (block for block in blocks(PAGE) if block.language == "python")
    exec(compile(example.text, str(example), "exec"), {})
    first, *_ = capsys.readouterr().out.splitlines()
    assert "date or number messages[0] Put the date or number behind the marked part" in first


def test_its_table_has_every_kind():
    kinds = {kind for row in rows(PAGE, "kind", "cause", "remedy") for kind in row[0].replace("`", "").split(", ")}
    assert kinds == CAUSES.keys() - (set(MISS_REASONS) - {"evicted", "expired"})
