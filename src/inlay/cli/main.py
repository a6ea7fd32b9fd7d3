"""The ``inlay`` command. Each subcommand has its own file, and errors are one sentence."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer

from inlay.cli.batch import batch
from inlay.cli.cache import app as cache_app
from inlay.cli.chat import chat
from inlay.cli.check import check
from inlay.cli.config import app as config_app
from inlay.cli.convert import convert, print_json_schema
from inlay.cli.deploy import deploy
from inlay.cli.explain import explain
from inlay.cli.keys import app as keys_app
from inlay.cli.lint_log import lint_log
from inlay.cli.memory import memory
from inlay.cli.models import app as models_app
from inlay.cli.models import pull
from inlay.cli.program import app as program_app
from inlay.cli.run import run
from inlay.cli.schema import app as schema_app
from inlay.cli.serve import serve
from inlay.cli.top import top
from inlay.distribution import other_project
from inlay.errors import InlayError, ParameterError

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


# Typer has its own copy of click and exports only this one of its errors. Its base class is found from it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="inlay",
    help="Serve language models and compute the attention states of every piece of text once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(chat)
app.command()(serve)
app.command()(deploy)
app.command()(batch)
app.command()(check)
app.command()(explain)
app.command(name="lint")(lint_log)
app.command()(top)
app.command()(memory)
app.command()(pull)
app.command()(convert)
schema_app.command(name="json-schema")(print_json_schema)
app.add_typer(schema_app, name="schema")
app.add_typer(program_app, name="program")
app.add_typer(models_app, name="models")
app.add_typer(keys_app, name="keys")
app.add_typer(cache_app, name="cache")
app.add_typer(config_app, name="config")
add_plugins(app)


def _print_version(asked: bool) -> None:
    if asked:
        from inlay import __version__

        print(f"inlay {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    It is 0, 1 for problems in checked files, 130 after an interrupt, and 2 for all other errors.
    """
    logging.basicConfig(level=logging.WARNING, format="inlay: %(message)s", stream=sys.stderr)
    if wrong := other_project():
        print(f"inlay: {wrong}", file=sys.stderr)
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    try:
        given = [_at_home(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
        _check_filled(given)
        status = typer.main.get_command(app).main(args=given, prog_name="inlay", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            return 0
        return _fail(_sentence(error))
    except InlayError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", status=130)
    except ModuleNotFoundError as error:  # a checkout was updated and not installed again, or a plugin's package
        if (error.name or "inlay").partition(".")[0] == "inlay":
            raise
        return _fail(f"no module named '{error.name}'; install inlay again (in a checkout: pip install .)")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:  # not about a file that the user named
            raise
        reason = (error.strerror or type(error).__name__).lower()
        return _fail(f"{os.fsdecode(error.filename)}: {reason}; check the path, and who may read and write there")


def _at_home(argument: str) -> str:
    """Expand ~ at the start of a path. Shells do not in quotation marks, nor behind --option=."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{option}{equals}{os.path.expanduser(value)}" if value.startswith("~") else argument


def _check_filled(arguments: Sequence[str]) -> None:
    """Raise ParameterError for an argument, or the value of an option, that is empty: often an unset variable."""
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if value.strip() or (option and not equals):
            continue
        before = arguments[number - 1] if number else ""
        name = option or (before if before.startswith("-") and "=" not in before else "")
        what = f"the value of {name}" if name else f"the argument behind '{before or 'inlay'}'"
        raise ParameterError(f"{what} is empty; give it a value, or leave it out")


def _sentence(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    command = f" (see '{context.command_path} --help')" if context is not None else ""
    return f"{getattr(error, 'format_message', error.__str__)().rstrip('.')}{command}"


def _fail(message: str, status: int = 2) -> int:
    sys.stdout.flush()
    print(f"inlay: {message}", file=sys.stderr)
    return status


def entry() -> None:
    """The console script, which has a process to itself."""
    # Threads that wait for work by spinning take the cores of those that have some, where there are more than cores:
    # beside another process, or the server's own. OpenMP reads this when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
