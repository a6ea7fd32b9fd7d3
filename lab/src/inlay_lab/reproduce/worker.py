"""One experiment in a separate process, so that its memory is its own and a crash ends only it.

``python -m inlay_lab.reproduce.worker NAME RESULT`` reads settings as JSON from its input and writes the outcome to a
file.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from inlay.errors import InlayError
from inlay.whole_file import replace_file
from inlay_lab.reproduce.experiment import Experiment, NotHereError, Outcome, Settings

_CLASSES: dict[str, type[Exception]] = {"not here": NotHereError}


class FailedError(Exception):
    """An experiment failed; the message has the reason."""


def in_this_process(experiment: Experiment, settings: Settings) -> Outcome:
    """Run an experiment. Raises NotHereError, or FailedError for any other failure."""
    try:
        return experiment.measure(settings)
    except NotHereError:
        raise
    except InlayError as error:
        raise FailedError(str(error)) from error
    except Exception as error:
        traceback.print_exc()
        raise FailedError(f"{type(error).__name__}: {error}") from error


def in_own_process(experiment: Experiment, settings: Settings, limit_s: float) -> Outcome:
    """As ``in_this_process``, in a separate process that is killed after ``limit_s`` seconds."""
    with tempfile.TemporaryDirectory(prefix="inlay-reproduce-") as folder:
        path = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "inlay_lab.reproduce.worker", experiment.name, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            try:
                process.communicate(json.dumps(dict(settings)), timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise FailedError(f"it took longer than {limit_s / 60:g} minutes, the most at this scale") from None
            finally:
                process.kill()
        if not path.exists():
            raise FailedError(_ending(process.returncode))
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "outcome" in said:
        return Outcome.read(said["outcome"])
    raise _CLASSES.get(said["what"], FailedError)(said["reason"])


def _ending(status: int) -> str:
    if status == -9:
        return "its process was killed, as the system does where memory runs out; close other programs, or use --quick"
    return f"its process ended with {'signal' if status < 0 else 'status'} {abs(status)} and no result"


def main(name: str, path: str) -> None:
    """Run one experiment of the catalog and write its outcome."""
    from inlay_lab.reproduce.catalog import EXPERIMENTS

    settings = json.load(sys.stdin)
    try:
        said: dict[str, Any] = {"outcome": in_this_process(EXPERIMENTS[name], settings).report()}
    except NotHereError as error:
        said = {"what": "not here", "reason": str(error)}
    except FailedError as error:
        said = {"what": "failed", "reason": str(error)}
    replace_file(Path(path), json.dumps(said).encode(), durable=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="inlay: %(message)s", stream=sys.stderr)
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # the result is written; do not wait for threads of engines and libraries
