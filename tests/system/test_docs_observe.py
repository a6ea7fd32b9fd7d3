"""docs/guides/observe.md and web-page.md: their lines, spans and pictures are those of the program."""

from __future__ import annotations

import re

from inlay.cli.top import Rates, ServerSample, line
from inlay.server.traces import phases
from inlay.types import RequestMetrics
from tests.pages import DOCS, blocks, rows

OBSERVE, PAGE = DOCS / "guides" / "observe.md", DOCS / "guides" / "web-page.md"


def test_the_shown_lines_have_the_fields_of_inlay_top():
    sample = ServerSample(0.0, {}, {"pool": {"used_chunks": 0, "chunks": 1}})
    fields = re.findall(r" ([\w/]+)=", line(Rates(None, sample)))
    (shown,) = (block for block in blocks(OBSERVE) if block.language == "text")
    for row in shown.text.splitlines():
        assert re.findall(r" ([\w/]+)=", row) == fields


def test_the_table_of_spans_has_every_phase():
    metrics = RequestMetrics(ttft_s=1.0, encode_s=0.3, total_s=3.0, queue_s=0.1, fetch_s=0.2, compute_s=0.7)
    names = [row[0].strip("`") for row in rows(OBSERVE, "span", "from, to")]
    assert names == ["llm_request", *(phase.name for phase in phases(metrics))]


def test_the_pictures_are_small():
    names = re.findall(r"\]\(\.\./images/([\w.-]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(names) >= 3
    assert sum((DOCS / "images" / name).stat().st_size for name in names) < 300_000
