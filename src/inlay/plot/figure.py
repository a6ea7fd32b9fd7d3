"""Making and saving figures: what is asked of matplotlib, and one sentence where that cannot be."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.errors import ParameterError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 110  # of PNG files


def check_plot_file(path: Path) -> None:
    """Raise ParameterError for a file that no drawing can be saved to, and where matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ParameterError(f"--plot is '{path}'; use a name that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ParameterError(f"--plot is '{path}' and there is no folder '{path.parent}'; make it first")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ParameterError("drawing needs matplotlib; install it with: pip install 'inlay[plots]'") from None


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the same figure gives the same SVG and PDF again. Raises ParameterError."""
    from matplotlib import rc_context

    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix.lower()]
    with rc_context({"svg.hashsalt": "inlay"}):
        try:
            figure.savefig(path, dpi=DPI, metadata=metadata)
        except OSError as error:
            raise ParameterError(f"--plot {path} cannot be written: {error.strerror or error}") from error


@contextmanager
def one_font_warning(path: Path) -> Iterator[None]:
    """Say once, for a whole figure, that the font lacks characters, in place of a warning for each of them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if any("missing from font" in str(warning.message) for warning in caught):
        logger.warning("%s: the font lacks some characters of the names, which are drawn as boxes", path)
