"""The catalog: settings are plain values, and published figures agree with other places in the papers."""

from __future__ import annotations

import json

import pytest

from inlay.authoring.memory import ARCHITECTURES
from inlay_lab.eval.longbench.paper import PUBLISHED
from inlay_lab.reproduce import published
from inlay_lab.reproduce.catalog import EXPERIMENTS
from inlay_lab.reproduce.experiment import Published, Scale
from inlay_lab.reproduce.first_token import LONGBENCH_SHAPES
from inlay_lab.reproduce.kernels import complexity


@pytest.mark.parametrize("each", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_settings_are_plain_values(each):
    assert set(each.settings) == set(Scale)
    for settings in each.settings.values():
        assert json.loads(json.dumps(dict(settings))) == dict(settings)
    assert each.settings[Scale.QUICK].keys() == each.settings[Scale.FULL].keys()


def test_every_source_has_its_experiments():
    sources = [each.source for each in EXPERIMENTS.values()]
    figures = (
        "figures 4, 12 and 13",
        "figures 3 and 9 to 11",
        "cache, figure 5",
        "figures 6 to 8",
        "figure 5 and table 4",
    )
    tables = ("table 2", "tables 1 and 3", "ChunkAttention, table 1", "ChunkAttention, table 3")
    for named in (*figures, *tables, "§5.4", "§6", "ChunkAttention, figure 3", "ChunkAttention, figure 4"):
        assert any(named.lower() in source.lower() for source in sources), named
    assert sources.count(published.COMMENTARY) == 3


@pytest.mark.parametrize("batch", published.ROOFLINE)
def test_table_1_equals_its_formulas(batch):
    for (flops, moved, intensity, _), counted in zip(published.ROOFLINE[batch], complexity(batch), strict=True):
        assert counted[0] / 1e6 == pytest.approx(flops, abs=0.01)
        assert counted[1] / 1e6 == pytest.approx(moved, abs=0.01)
        assert counted[0] / counted[1] == pytest.approx(intensity, abs=0.01)


def test_table_3_has_the_ratios_of_the_text():
    times = [star / chunk for (_, shared), (*_, star, chunk) in published.KERNELS.items() if shared >= 1024]
    full = [published.KERNELS[n, n] for n in (1024, 2048, 4096)]
    assert [round(row[4] / row[5], 1) for row in full] == [2.8, 3.1, 3.2], "§4.1: 2.8 to 3.2"
    assert min(times) > 1
    naive, *_, star, chunk = published.KERNELS[4096, 4096]
    assert (round(naive / chunk, 1), round(naive / star, 1)) == (6.6, 2.1)


def test_the_papers_datasets_have_their_shapes():
    assert LONGBENCH_SHAPES.keys() == PUBLISHED.keys()


def test_every_published_figure_names_its_source():
    every = [value for value in vars(published).values() if isinstance(value, Published)]
    for table in (published.THROUGHPUT_TIMES, published.LATENCY_TIMES, published.KV_SAVED, published.HIT_RATE_TIMES):
        every += table.values()
    assert len(every) > 35
    assert all(each.where for each in every)
    assert [one.paper for one in ARCHITECTURES.values()] == [0.03, 0.18, 0.50, 0.78, 1.31, 1.87, 2.5, 4.53]


def test_token_memory_is_the_papers_table(tmp_path):
    each = EXPERIMENTS["token-memory"]
    found = each.measure({})
    assert [row.published.value for row in found.rows] == [one.paper for one in ARCHITECTURES.values()]
    assert [row.differs for row in found.rows] == [True] + [False] * 7, "0.0352 is printed as 0.03"
    assert all(row.why for row in found.rows)
    each.draw(found.data, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000
