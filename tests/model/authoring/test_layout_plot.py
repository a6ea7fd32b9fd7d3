"""The drawing of a layout: the contents of its rows, and readable output."""

from __future__ import annotations

import builtins
import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from inlay.authoring.plot import MAX_ROWS, Bar, Box, check_plot_file, draw_layout, layout_figure, rows_of
from inlay.errors import ParameterError
from inlay.prompt.layout import SchemaLayout
from tests.commands import run
from tests.raising import raises
from tests.unit.prompt.test_layout import lay_out

ROOT = Path(__file__).parents[3]


def test_rows_of_a_schema_without_turns():
    found = rows_of(
        lay_out(
            'xx<module name="a">AA<param name="p" len="5"/>a<union><module name="b">BBBB</module>'
            '<module name="c">C</module></union></module>y'
        )
    )
    assert [(row.depth, row.label, row.note) for row in found.rows] == [
        (0, "always present", "3 tokens"),
        (0, "a", "3 tokens, len 5"),
        (1, "a/b", "4 tokens"),
        (1, "a/c", "1 token, 3 unused"),
    ]
    assert found.rows[0].bars == (Bar(0, 2, "always"), Bar(14, 1, "always"))
    assert found.rows[1].bars == (Bar(2, 2, "module"), Bar(4, 5, "parameter"), Bar(9, 1, "module"))
    assert found.rows[3].bars == (Bar(10, 1, "module"), Bar(11, 3, "unused"))
    assert found.boxes == [Box(1, 3, 2, 14, 0, union=False), Box(2, 3, 10, 14, 1, union=True)]


def test_rows_of_turns():
    layout = lay_out('<system>S<module name="a">AA</module>s</system><user><module name="b">B</module>uu</user>')
    found = rows_of(layout)
    assert [(row.depth, row.label) for row in found.rows] == [(0, "<system>"), (1, "a"), (0, "<user>"), (1, "b")]
    always = [[bar.length for bar in row.bars if bar.kind == "always"] for row in found.rows]
    assert always == [[1, 1], [], [2], []]
    template = sum(bar.length for row in found.rows for bar in row.bars if bar.kind == "template")
    assert template == len("".join(layout.turn_pieces).encode()) - sum(
        len(name) - 1 for name in ("<|bos|>", *("<|start|>", "<|turn|>") * 2, "<|end|>")
    )
    assert not found.boxes


def test_a_schema_of_modules_alone_has_no_row_of_text():
    assert [row.label for row in rows_of(lay_out('<module name="a">A</module>')).rows] == ["a"]
    assert rows_of(lay_out("")).rows == []


def test_every_position_of_text_is_in_one_bar():
    layout = generated(40, seed=3)
    for run_ in layout.runs:
        name = "/".join(run_.owner) if run_.owner else "always present"
        (row,) = [row for row in rows_of(layout).rows if row.label == name]
        spans = [(bar.start, bar.start + bar.length) for bar in row.bars if bar.kind != "unused"]
        assert any(start <= run_.start and run_.end <= end for start, end in joined(spans))


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def generated(modules: int, *, seed: int) -> SchemaLayout:
    """A schema of about that many modules, with unions in unions."""
    draw, names = random.Random(seed), iter(range(10**6))

    def module(depth: int) -> str:
        inner = "x" * draw.choice([3, 30, 200])
        if draw.random() < 0.2:
            inner += '<param name="p" len="20"/>'
        if depth < 4 and draw.random() < 0.35:
            children = "".join(module(depth + 1) for _ in range(draw.randint(1, 4)))
            inner += f"<union>{children}</union>" if draw.random() < 0.7 else children
        return f'<module name="module-{next(names)}{"-of-a-long-name" * draw.randint(0, 2)}">{inner}</module>'

    body = "Always. "
    while next(names) < modules:
        body += f"<union>{module(1)}{module(1)}</union>" if draw.random() < 0.3 else module(0)
    return lay_out(body + "At the end.")


def boxes_of_text(figure: Figure) -> dict[str, tuple[float, float, float, float]]:
    """Where each piece of text is drawn, in pixels: left, bottom, right, top. Names and numbers stay off the bars."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (axes,) = figure.axes
    bars = axes.get_window_extent(renderer)
    names, notes = axes.texts[::2], axes.texts[1::2]
    assert all(text.get_window_extent(renderer).x1 < bars.x0 for text in names)
    assert all(text.get_window_extent(renderer).x0 > bars.x1 for text in notes)
    ticks = [tick for tick in (*axes.get_xticklabels(), axes.xaxis.label) if tick.get_text()]
    texts = [*axes.texts, *figure.texts, *figure.legends[0].get_texts(), *ticks]
    return {f"{n} {text.get_text()}": text.get_window_extent(renderer).extents for n, text in enumerate(texts)}


@pytest.mark.parametrize("modules", [1, 3, 60])
def test_labels_do_not_overlap_or_leave_the_figure(modules):
    figure = layout_figure(generated(modules, seed=modules))
    found = boxes_of_text(figure)
    assert len(found) >= 2 * modules + 2
    width, height = figure.get_size_inches() * figure.dpi
    for name, (left, bottom, right, top) in found.items():
        assert 0 <= left < right <= width, name
        assert 0 <= bottom < top <= height, name
    for (one, a), (other, b) in combinations(found.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)


def test_outer_boxes_enclose_inner_ones():
    """Of two boxes around the same rows no two edges lie on each other."""
    nested = "".join(f'<module name="m{n}">x' for n in range(6)) + "</module>" * 6
    (axes,) = layout_figure(lay_out(nested)).axes
    boxes = [patch for patch in axes.patches if patch.get_zorder() < 2]
    assert len(boxes) == 5
    for outer, inner in pairwise(boxes):
        assert outer.get_y() + outer.get_height() > inner.get_y() + inner.get_height()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"layout{suffix}"
    draw_layout(lay_out('<module name="a">A</module>'), path)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix.lower()]
    assert path.read_bytes().startswith(start)


def test_the_same_schema_gives_the_same_file(tmp_path):
    layout = generated(5, seed=1)
    for name in ("one.svg", "two.svg"):
        draw_layout(layout, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_missing_glyphs_are_logged_once(tmp_path, caplog, recwarn):
    draw_layout(lay_out('<module name="旅行">A</module><module name="計画">B</module>'), tmp_path / "a.png")
    assert [record.message.split(": ")[-1][:30] for record in caplog.records] == ["the font lacks some characters"]
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_names_are_no_formulas(tmp_path):
    layout = lay_out('<module name="a">A</module>')
    object.__setattr__(layout.schema, "name", "$x_1$ and $")
    draw_layout(layout, tmp_path / "a.png")


def test_too_many_modules_are_refused():
    layout = lay_out("".join(f'<module name="m{number}"/>' for number in range(MAX_ROWS + 1)))
    with raises("schema.too_large_to_draw", ParameterError):
        layout_figure(layout)


def test_matplotlib_is_optional(monkeypatch):
    real = builtins.__import__

    def without(name: str, *arguments: object, **named: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with raises("parameter.missing_package", ParameterError, names="'inlay-llm[plots]'"):
        check_plot_file(Path("a.png"))


def test_show_prints_the_tree_and_draws_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    schema = str(ROOT / "examples/trip/trip.xml")
    status, out, _ = run(capsys, "schema", "show", schema, "--plot", "trip.svg")
    assert status == 0
    assert "module plan/miami" in out
    assert Path("trip.svg").read_text().count("<path") > 20


@pytest.mark.parametrize(
    ("plot", "sentence"),
    [
        ("trip.gif", "--plot is 'trip.gif'; use a name that ends in .png or .svg or .pdf"),
        ("trip", "--plot is 'trip'; use a name"),
        ("nowhere/trip.png", "--plot is 'nowhere/trip.png' and there is no folder 'nowhere'; make it first"),
        ("folder.png", "--plot folder.png cannot be written: Is a directory"),
    ],
)
def test_plot_errors_are_one_sentence(tmp_path, monkeypatch, capsys, plot, sentence):
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    Path("s.xml").write_text('<schema name="s">Hi.</schema>')
    status, out, err = run(capsys, "schema", "show", "s.xml", "--model", "random:tiny", "--plot", plot)
    assert (status, out) == (2, "")
    assert err == f"inlay: {err[7:]}"
    assert len(err.splitlines()) == 1
    assert sentence in err
