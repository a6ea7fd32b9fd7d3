"""Common functions for figures with matplotlib, and the figure of the memory of a cached token."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import ParameterError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 110  # of PNG files


def check_plot_file(path: Path) -> None:
    """Raise ParameterError if no drawing can be saved to the file, or if matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ParameterError(
            f"--plot is '{path}'; use a name that ends in {' or '.join(SUFFIXES)}", code="parameter.invalid_path"
        )
    if not path.parent.is_dir():
        raise ParameterError(
            f"--plot is '{path}' and there is no folder '{path.parent}'; make it first", code="parameter.invalid_path"
        )
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ParameterError(
            "drawing needs matplotlib; install it with: pip install 'inlay-llm[plots]'",
            code="parameter.missing_package",
        ) from None


def save(figure: Figure, path: Path, *, option: str = "--plot") -> None:
    """Write a figure; equal figures give equal SVG and PDF files. Raises ParameterError that names the option."""
    from matplotlib import rc_context

    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix.lower()]
    with rc_context({"svg.hashsalt": "inlay"}):
        try:
            figure.savefig(path, dpi=DPI, metadata=metadata)
        except OSError as error:
            raise ParameterError(
                f"{option} {path} cannot be written: {error.strerror or error}", code="parameter.unwritable_file"
            ) from error


@contextmanager
def one_font_warning(path: Path) -> Iterator[None]:
    """Log one warning for a whole figure if the font lacks characters, instead of one for each character."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if any("missing from font" in str(warning.message) for warning in caught):
        logger.warning("%s: the font lacks some characters of the names, which are drawn as boxes", path)


# Okabe and Ito's blue, and a light grey.
_KEPT, _OTHER = "#0072B2", "#BBBBBB"
_MARGIN = 1.12  # room for the numbers after the bars
_FONT = 9.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """MiB of one token of a model. ``kept`` is None if the model keeps nothing. ``other`` is a comparison, or None."""

    model: str
    kept: float | None
    other: float | None = None


def draw_memory(sizes: Sequence[Sizes], path: Path, *, kept: str, other: str = "") -> None:
    """Draw bars into a PNG, SVG or PDF file, with ``kept`` and ``other`` as legend. Raises ParameterError."""
    from matplotlib.figure import Figure

    with one_font_warning(path):
        compared = any(one.other is not None for one in sizes)
        figure = Figure(figsize=(8, 1.3 + (0.5 if compared else 0.3) * len(sizes)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.38 if compared else 0.6
        for place, values, colour, label in (
            (height / 2 if compared else 0.0, [one.kept for one in sizes], _KEPT, kept),
            (-height / 2, [one.other for one in sizes], _OTHER, other),
        ):
            drawn = [(number + place, value) for number, value in enumerate(values) if value is not None]
            if drawn:
                bars = axes.barh([y for y, _ in drawn], [v for _, v in drawn], height, color=colour, label=label)
                axes.bar_label(bars, [f"{value:,.4f}" for _, value in drawn], padding=3, fontsize=_FONT)
        axes.set_yticks(range(len(sizes)), [one.model for one in sizes], fontsize=_FONT, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(0, _MARGIN * max(value for one in sizes for value in (one.kept, one.other) if value is not None))
        axes.set_xlabel("MiB a token", fontsize=_FONT)
        axes.tick_params(axis="x", labelsize=_FONT)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=_FONT)
        save(figure, path)
