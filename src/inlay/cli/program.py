"""``inlay program``: shows the schema of a Python function."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from inlay.errors import InlayError, ParameterError
from inlay.pml.program import Program
from inlay.wording import listed

app = typer.Typer(help="Show prompt programs: Python functions that are schemas.", no_args_is_help=True)

_MODULE = "__inlay_program__"  # not __main__, so that a script's guarded code does not run


@app.callback()
def _options() -> None: ...


@app.command()
def show(
    program: Annotated[str, typer.Argument(metavar="FILE:NAME", help="A Python file and a program in it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the schema as one JSON object.")] = False,
) -> None:
    """Print the schema of a program, as PML."""
    schema = find_program(program).schema
    print((schema.to_json() if as_json else schema.to_pml()).rstrip("\n"))


def find_program(reference: str) -> Program[Any]:
    """Load the program ``FILE:NAME`` by running the file, with its folder on the path as for a script.

    Raises ParameterError for a missing or failing program, and PMLError for one that cannot be translated.
    """
    file, _, name = reference.rpartition(":")
    if not file:
        usage = "write FILE:NAME, a Python file and the name of a program in it"
        if not Path(name).is_file():
            raise ParameterError(f"{reference!r} names no program; {usage}")
        raise ParameterError(f"{reference!r} names no program; {usage}: {_known(_run(Path(name)))}")
    module = _run(Path(file))
    if not hasattr(module, name):
        raise ParameterError(f"{file} has no {name!r}; {_known(module)}")
    found = getattr(module, name)
    if not isinstance(found, Program):
        raise ParameterError(f"{reference} is of type {type(found).__name__}, not a program; {_known(module)}")
    return found


def _known(module: ModuleType) -> str:
    programs = listed(name for name, value in vars(module).items() if isinstance(value, Program))
    return f"its programs are {programs}" if programs else "it has no program: write @inlay.program over a function"


def _run(file: Path) -> ModuleType:
    if not file.is_file():
        what = "is a folder; name a file in it" if file.is_dir() else "no such file; check the path"
        raise ParameterError(f"{file}: {what}")
    loader = SourceFileLoader(_MODULE, str(file))
    spec = spec_from_loader(_MODULE, loader)
    assert spec is not None  # there is a loader
    module = module_from_spec(spec)
    source = _source(file)
    with _running(module, file.parent):
        try:
            # The loader's own way would write a compiled file beside this one.
            exec(loader.source_to_code(source, str(file)), module.__dict__)
        except InlayError:
            raise
        except (Exception, SystemExit) as error:  # a program can fail in any way
            raise ParameterError(_failure(file, error)) from None
    return module


def _source(file: Path) -> str:
    try:
        return decode_source(file.read_bytes())
    except (UnicodeDecodeError, SyntaxError):  # a SyntaxError about its encoding declaration
        raise ParameterError(f"{file}: is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise ParameterError(f"{file}: cannot be read ({error.strerror}); make the file readable") from None


@contextmanager
def _running(module: ModuleType, folder: Path) -> Iterator[None]:
    """Register the module under its name, and make its siblings importable."""
    path, sys.path = sys.path, [str(folder.resolve()), *sys.path]
    sys.modules[module.__name__] = module  # dataclasses look there
    try:
        yield
    finally:
        sys.path = path
        del sys.modules[module.__name__]


def _failure(file: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines = [error.lineno]
    place = f"{file}:{lines[-1]}" if lines else str(file)
    if isinstance(error, SystemExit):
        return f"{place}: the file exits while it is loaded; put that under if __name__ == '__main__':"
    reason = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    return f"{place}: {type(error).__name__}{': ' * bool(reason)}{reason}, while the file is loaded; correct it"
