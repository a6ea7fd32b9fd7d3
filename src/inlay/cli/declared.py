"""The settings of commands: those of the model, the engine and the server, and those that only commands have."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from inlay.config import EngineConfig, ModelSettings
from inlay.errors import ParameterError
from inlay.server.settings import ServerSettings
from inlay.settings import ANSWERING, BATCH, CHAT, CHECK, RUN, SERVE, WARM, Setting, served, setting, settings_of

_MOST_THREADS = 1024
_MODEL = "A directory, a GGUF file, a hub name, random:<shape>, or demo."


def check_threads(name: str, threads: int) -> None:
    """Raise ParameterError for a number of threads that no machine has."""
    if not 1 <= threads <= _MOST_THREADS:
        raise ParameterError(f"{name} is {threads}; it must be a number from 1 to {_MOST_THREADS:,}")


@dataclass(frozen=True, kw_only=True)
class CommandSettings:
    """The settings that only commands have."""

    model: str = setting(
        "demo",
        f"The model. {_MODEL} For inlay run, the model of a schema.",
        commands=(SERVE, RUN, BATCH, WARM),
        is_path=lambda text: text.startswith("."),
    )
    threads: int | None = setting(
        None,
        "Cores that compute, as OMP_NUM_THREADS. Default: all of the machine. Several processes on one machine should "
        "share its cores.",
        commands=(*ANSWERING, BATCH, CHECK, WARM),
        checked=check_threads,
    )
    schema: tuple[Path, ...] = setting(
        (),
        "A schema (PML or JSON) that requests may name. Repeatable.",
        commands=(SERVE, BATCH),
    )
    max_tokens: int = setting(128, "The most tokens to generate.", commands=(RUN, CHAT), least=1, defaults={CHAT: 512})
    temperature: float | None = setting(
        None, "0 takes the most probable token. Default: the model's own, or 0.", commands=(RUN, CHAT)
    )
    ssl_certfile: Path | None = served(None, "Speak TLS, with this chain of certificates (PEM).")
    ssl_keyfile: Path | None = served(None, "The private key, if it is in another file.")
    ssl_ca_certs: Path | None = served(None, "The authorities that sign the certificates of clients (PEM).")
    ssl_cert_reqs: int = served(0, "Certificates of clients: 0 none, 1 optional, 2 required.")


#: The classes that declare settings, by the title of their group in help and reference.
GROUPS: dict[str, type[Any]] = {
    "Model": ModelSettings,
    "Engine": EngineConfig,
    "Server": ServerSettings,
    "Command": CommandSettings,
}


@cache
def known_settings(command: str | None = None) -> dict[str, Setting]:
    """Return the settings of a command by key. None for those of all commands."""
    found = {}
    for group in reversed(GROUPS.values()):
        for one in settings_of(group).values():
            if one.commands if command is None else command in one.commands:
                found[one.key] = one
    return found


def group_of(one: Setting) -> str:
    """Return the title of a setting's group."""
    return next(title for title, group in GROUPS.items() if one in settings_of(group).values())


def use_threads(threads: int | None) -> None:
    """Set the number of threads for models. Call it before torch loads, because OpenMP reads the variable then."""
    if threads is None:
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:  # in a process that runs several commands
        sys.modules["torch"].set_num_threads(threads)
