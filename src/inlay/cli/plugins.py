"""Commands of other distributions, through the entry-point group ``inlay.commands``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from inlay.errors import InlayError

GROUP = "inlay.commands"
#: The commands of inlay-lab, with their help.
LAB = {
    "bench": "Measure speed and memory (inlay-lab).",
    "eval": "Measure answers with reuse against answers without (inlay-lab).",
    "reproduce": "Run the experiments of both papers (inlay-lab).",
    "simulate": "Simulate the routing of a cluster (inlay-lab).",
}
_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_plugins(app: typer.Typer) -> None:
    """Add every command of the group ``inlay.commands``.

    An entry names a ``typer.Typer`` (a group of commands) or a function (one command). Missing commands of inlay-lab
    answer with the line that installs them.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in sorted(found):
        command = found[name].load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name=name)(command)
    for name in LAB.keys() - found.keys():
        app.command(name=name, help=LAB[name], context_settings=_ANY_ARGUMENTS)(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    def command() -> None:
        raise InlayError(
            f"'inlay {name}' is a command of inlay-lab, which is not installed; "
            "run pip install inlay-lab (in a checkout: pip install ./lab)",
            code="parameter.missing_package",
        )

    return command
