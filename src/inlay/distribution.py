"""What pip calls this package: ``inlay-llm``. Its name in Python is that of another project in the package index.

Both bring a package ``inlay``: where both are installed, files of the one lie over those of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

NAME = "inlay-llm"

_COMMAND = "inlay.cli.main:entry"


def other_project(installed: Iterable[Distribution] | None = None) -> str | None:
    """What is wrong where another project's ``inlay`` is installed, and the remedy; None where it is not.

    installed: the distributions to look through; None for those that Python finds.
    """
    for one in distributions(name="inlay") if installed is None else installed:
        if any(point.value == _COMMAND for point in one.entry_points):
            continue  # this project under its former name, as in old checkouts
        return (
            f"another project named inlay ({one.version}) is installed, and its files lie among those of {NAME}; run "
            f"pip uninstall --yes inlay {NAME}, then pip install {NAME}"
        )
    return None
