"""The ``inlay`` command. Each subcommand has its own file and imports no other's. Errors are one sentence."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from inlay.distribution import other_project
from inlay.errors import InlayError, ParameterError
from inlay.wording import printable

GROUP = "inlay.commands"
#: The commands of inlay-lab, with their help.
LAB = {
    "bench": "Measure speed and memory (inlay-lab).",
    "eval": "Measure answers with reuse against answers without (inlay-lab).",
    "reproduce": "Run the experiments of both papers (inlay-lab).",
    "simulate": "Simulate the routing of a cluster (inlay-lab).",
}
#: The commands of this package: where each is defined, and its help.
COMMANDS = {
    "run": (
        "inlay.cli.run:run",
        "Answer a prompt of a schema, or a question about text files, and show cached tokens and times.",
    ),
    "chat": (
        "inlay.cli.chat:chat",
        "Talk to a model about text files. Each file is computed once and then read from the cache.",
    ),
    "serve": ("inlay.cli.serve:serve", "Serve a model over HTTP, with OpenAI's and Anthropic's APIs."),
    "deploy": (
        "inlay.cli.deploy:deploy",
        "Run replicas of a model behind one address. Requests go to the replica that has most of their text in its "
        "cache.",
    ),
    "batch": (
        "inlay.cli.batch:batch",
        "Answer a file of requests. Requests that share text run together, so every text is computed once.",
    ),
    "check": (
        "inlay.cli.check:check",
        "Compare reuse policies with full prefill on a model itself, and recommend one.",
    ),
    "explain": (
        "inlay.cli.explain:explain",
        "Explain why prompt tokens are computed: inlay explain --url URL REQUEST.json, or inlay explain MODEL "
        "LOG.jsonl.",
    ),
    "lint": (
        "inlay.cli.lint_log:lint_log",
        "Find the fields of logged requests that break the cache: inlay lint --log requests.jsonl --model MODEL.",
    ),
    "top": (
        "inlay.cli.top:top",
        "Watch a server: requests, tokens per second, the cache by tier, hits, and misses by reason.",
    ),
    "memory": (
        "inlay.cli.memory:memory",
        "Print the megabytes (MiB, 2^20 bytes) of keys and values for each cached token, and of the model's weights.",
    ),
    "pull": (
        "inlay.cli.models:pull",
        "Download a model, or its missing files, and print the folder.",
    ),
    "convert": (
        "inlay.cli.schema:convert",
        "Write a schema or a prompt in the other form: PML as JSON, JSON as PML. The text of src files is included.",
    ),
    "schema": ("inlay.cli.schema:app", "Check and show schemas."),
    "program": ("inlay.cli.program:app", "Show prompt programs: Python functions that are schemas."),
    "models": (
        "inlay.cli.models:app",
        "List the families of models that are served, and what may be asked of each.",
    ),
    "keys": ("inlay.cli.keys:app", "Make, list and revoke the API keys of a server."),
    "cache": (
        "inlay.cli.cache:app",
        "Show and change what the store on disk holds, or the cache of a server that runs.",
    ),
    "config": ("inlay.cli.settings:app", "Show settings and where they come from."),
}
_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

# Typer has its own copy of click and exports only this one of its errors. Its base class is found from it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _LazyGroup(typer.core.TyperGroup):
    """A group that imports a command when it runs or is completed. A list of commands needs only their help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import a command and return it as an object of click.

    Args:
        name: One of ``COMMANDS`` or of the group ``inlay.commands``, or a command of inlay-lab.
    """
    if name in COMMANDS:
        module, _, attribute = COMMANDS[name][0].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        found = next((entry.load() for entry in entry_points(group=GROUP) if entry.name == name), None)
    alone = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    elif found is not None:
        alone.command(name=name)(found)
    else:
        alone.command(name=name, context_settings=_ANY_ARGUMENTS)(_missing(name))
    return typer.main.get_group(alone).commands[name]


def list_commands() -> dict[str, str]:
    """Return the help of every command by name. Commands of unknown packages are loaded for it."""
    found = {name: text for name, (_, text) in COMMANDS.items()} | LAB
    for entry in entry_points(group=GROUP):
        if entry.name not in found:
            found[entry.name] = (load_command(entry.name).help or "").partition("\n\n")[0]
    return found


def _missing(name: str) -> Callable[[], None]:
    def command() -> None:
        raise InlayError(
            f"'inlay {name}' is a command of inlay-lab, which is not installed; "
            "run pip install inlay-lab (in a checkout: pip install ./lab)",
            code="parameter.missing_package",
        )

    return command


def _print_version(asked: bool) -> None:
    if asked:
        from inlay import __version__

        print(f"inlay {__version__}")
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


def command_line() -> typer.Typer:
    """Return the command line with every command of ``list_commands``."""
    app = typer.Typer(
        name="inlay",
        cls=_LazyGroup,
        help="Serve language models and compute the attention states of every piece of text once.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, text in list_commands().items():
        app.command(name=name, help=text)(_options)
    return app


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
        status = typer.main.get_command(command_line()).main(args=given, prog_name="inlay", standalone_mode=False)
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
    print(f"inlay: {printable(message)}", file=sys.stderr)
    return status


def entry() -> None:
    """The console script, which has a process to itself."""
    # Threads that wait for work by spinning take the cores of those that have some, where there are more than cores:
    # beside another process, or the server's own. OpenMP reads this when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
