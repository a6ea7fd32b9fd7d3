"""Settings that are declared once, in the fields of dataclasses, and checked by their declarations.

``EngineConfig``, ``ModelSettings``, ``ServerSettings`` and the commands' own settings are such dataclasses. The options
of commands, the keys of configuration files, environment variables and docs/reference/settings.md derive from them. A
new option is one field::

    max_waiting: int | None = setting(None, "The most queued requests.", commands=(SERVE,), least=1)
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeGuard

from inlay.errors import ParameterError
from inlay.wording import show

SERVE, RUN, CHAT, BATCH, CHECK, WARM = "serve", "run", "chat", "batch", "check", "warm"
#: The commands that have settings. ``warm`` is ``inlay cache warm``.
COMMANDS = (SERVE, RUN, CHAT, BATCH, CHECK, WARM)
#: The commands that answer prompts in this process.
ANSWERING = (SERVE, RUN, CHAT)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: The type of an option by the type of its field. The first type that the field allows is taken, so a size is a text.
_TYPES: dict[str, Any] = {
    "tuple[str, ...]": list[str],
    "tuple[Path, ...]": list[Path],
    "Path": Path,
    "bool": bool,
    "str": str,
    "float": float,
    "int": int,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The declaration of a setting.

    Args:
        help: its meaning, for command lines and the reference.
        commands: the commands that have it as an option.
        option: its name on command lines, in files and in the environment. None for the name of the field.
        option_type: the type of the option. None for the one that the field's type implies.
        metavar: the name of the value in the help of commands.
        choices: the allowed values. Empty for all.
        least: the smallest whole number. None for other values.
        checked: raises ParameterError for a wrong value. It gets the setting's name and the value.
        defaults: command → its own default.
        secret: if True, the value is not shown.
        zero_is_none: if True, 0 stands for None where None cannot be written.
        is_path: tells if a text is a path. In a file, it is relative to the file's folder.
        field, default, optional: the field's name and default, and True if it may be None. ``settings_of`` fills
            them in.
    """

    help: str
    commands: tuple[str, ...] = ()
    option: str | None = None
    option_type: Any = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    checked: Callable[[str, Any], object] | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    secret: bool = False
    zero_is_none: bool = False
    is_path: Callable[[str], bool] | None = None
    field: str = ""
    default: Any = None
    optional: bool = False

    @property
    def key(self) -> str:
        """The name of the option with underscores: the key in files."""
        return self.option or self.field

    @property
    def flag(self) -> str:
        """The option on command lines, like "--kv-memory"."""
        return f"--{self.key.replace('_', '-')}"

    def default_of(self, command: str) -> Any:
        """Return the default of a command."""
        return self.defaults.get(command, self.default)

    def check(self, value: Any, name: str | None = None) -> None:
        """Raise ParameterError for a value that is not allowed.

        Args:
            name: the setting as the user named it. None for the field's name.
        """
        name = name or self.field
        if value is None and self.optional:
            return
        if self.choices:
            check_choice(name, value, self.choices)
        if self.option_type is bool and not isinstance(value, bool):
            raise ParameterError(f"{name} is {value!r}; it must be True or False", code="parameter.wrong_type")
        if self.least is not None and not (is_whole(value) and value >= self.least):
            raise ParameterError(
                f"{name} is {value!r}; it must be a whole number of at least {self.least}",
                code="parameter.out_of_range",
            )
        if self.checked is not None:
            self.checked(name, value)


def always_path(text: str) -> bool:
    """Return True: every text of this setting is a path."""
    return True


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Return a dataclass field that declares a setting. For arguments see Setting."""
    one = Setting(help=help, default=default, **declared)
    return dataclasses.field(default=default, repr=not one.secret, metadata={"setting": one})


def served(default: Any, help: str, **declared: Any) -> Any:
    """Return the field of a setting that only ``serve`` has."""
    return setting(default, help, commands=(SERVE,), **declared)


def settings_of(settings: type[Any]) -> dict[str, Setting]:
    """Return the declarations of a dataclass by field.

    A field such as ``drain_s`` is a number of seconds, and its option has no suffix: ``--drain``.
    """
    found = {}
    for field in dataclasses.fields(settings):
        parts = [part.strip() for part in str(field.type).split("|")]
        kinds = [kind for name, kind in _TYPES.items() if name in parts]
        one: Setting = field.metadata["setting"]
        kind = one.option_type or (kinds[0] if kinds else None)
        seconds = field.name.endswith("_s")
        found[field.name] = dataclasses.replace(
            one,
            field=field.name,
            option=one.option or (field.name.removesuffix("_s") if seconds else None),
            checked=one.checked or (check_seconds if seconds else None),
            optional="None" in parts,
            option_type=kind,
            is_path=one.is_path or (always_path if kind in (Path, list[Path]) else None),
        )
    return found


def check_settings(settings: Any) -> None:
    """Check each field of a dataclass of settings. Raises ParameterError."""
    for name, one in settings_of(type(settings)).items():
        one.check(getattr(settings, name))


def parse_bytes(name: str, value: object) -> int:
    """Parse a size in bytes, a number or like '4GiB'. Raises ParameterError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value))
    size = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
    if not 1 <= size < math.inf:
        raise ParameterError(
            f"{name} is {show(value)}; write a number of bytes, or for example '4GiB'", code="parameter.invalid_size"
        )
    return int(size)


def check_seconds(name: str, value: object) -> float:
    """Return a duration in seconds. Raises ParameterError."""
    if _is_positive(value):
        return float(value)  # type: ignore[arg-type]
    raise ParameterError(f"{name} is {value!r}; it must be a number of seconds above 0", code="parameter.out_of_range")


def check_date(name: str, value: object) -> None:
    """Raise ParameterError unless the value is a date as YYYY-MM-DD."""
    try:
        if date.fromisoformat(value).isoformat() != value:  # type: ignore[arg-type]
            raise ValueError("another form, like 20260131 or 2026-W05-6")
    except (TypeError, ValueError):
        raise ParameterError(
            f"{name} is {show(value)}; write a date as text, like '2026-01-31'", code="parameter.invalid_date"
        ) from None


def check_nats(name: str, value: object) -> None:
    """Raise ParameterError unless the value is a divergence in nats per token."""
    if not _is_positive(value):
        raise ParameterError(
            f"{name} is {value!r}; it must be a number of nats above 0, like 0.1", code="parameter.out_of_range"
        )


def check_device(name: str, value: object) -> None:
    """Raise ParameterError unless the value is the name of a device, which need not exist."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise ParameterError(
            f"{name} is {show(value)}; use auto, cpu, cuda, or cuda:1 for the second GPU",
            code="parameter.unknown_choice",
        )


def check_share(name: str, value: object) -> None:
    """Raise ParameterError unless the value is a share from 0 to 1."""
    if not (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1):
        raise ParameterError(
            f"{name} is {value!r}; it must be a share between 0 and 1, like 0.1", code="parameter.out_of_range"
        )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed words. Raises ParameterError."""
    if value not in allowed:
        raise ParameterError(
            f"{name} is {show(value)}; use one of {', '.join(allowed)}", code="parameter.unknown_choice"
        )
    return str(value)


def is_whole(value: object) -> TypeGuard[int]:
    """True for a whole number. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
