"""The package's name for pip, ``inlay-llm``. In the package index, ``inlay`` is another project.

Both install a Python package ``inlay``, so their files overwrite each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

NAME = "inlay-llm"

_COMMAND = "inlay.cli.main:entry"


def other_project(installed: Iterable[Distribution] | None = None) -> str | None:
    """Return a message with the remedy if another project's ``inlay`` is installed, else None.

    ``installed`` are the distributions to check; None for all that Python finds.
    """
    for one in distributions(name="inlay") if installed is None else installed:
        if any(point.value == _COMMAND for point in one.entry_points):
            continue  # this project under its former name
        return (
            f"another project named inlay ({one.version}) is installed, and its files lie among those of {NAME}; run "
            f"pip uninstall --yes inlay {NAME}, then pip install {NAME}"
        )
    return None
