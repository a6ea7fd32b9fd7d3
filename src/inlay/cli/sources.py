"""The values of a command's settings, in this order of precedence: flags, environment, file, defaults."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, ValidationError, create_model
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from inlay.cli.declared import known_settings
from inlay.errors import ParameterError
from inlay.settings import COMMANDS, Setting
from inlay.wording import clip, show

PREFIX = "INLAY_"
_MOST_BYTES = 1_000_000  # of a file
_KEY = re.compile(r"""\s*(["']?)([\w-]+)\1\s*=""")
_TABLE = re.compile(r"""\s*\[\s*(["']?)([\w-]+)\1\s*\]""")

_Lines: TypeAlias = dict[tuple[str | None, str], int]


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A value and its origin: "default", a flag, an environment variable, or a place like "inlay.toml:3"."""

    value: Any
    origin: str
    given: bool = True

    @property
    def from_flag(self) -> bool:
        return self.origin.startswith("--")


class _Layers(BaseSettings):
    """Flags over the environment, over defaults. The values of the file are the defaults.

    The names of fields are those of environment variables: no field may be called "schema".
    """

    model_config = SettingsConfigDict(env_ignore_empty=True, coerce_numbers_to_str=True, hide_input_in_errors=True)


def values_of(command: str, flags: Mapping[str, Any], file: Path | None) -> dict[str, SettingValue]:
    """Return the value of each setting of a command, by its key.

    Args:
        flags: the options that were given, by key. None stands for an option that was not given.
        file: a configuration file, or None.

    Raises:
        ParameterError: for a value that is not allowed, an unknown key, or an unreadable file.
    """
    known = known_settings(command)
    typed = {key: value for key, value in flags.items() if value is not None}
    read = {} if file is None else read_file(file, command)
    variables = {name.upper() for name, text in os.environ.items() if text}

    def origin_of(key: str) -> str:
        if key in typed:
            return known[key].flag
        variable = f"{PREFIX}{key}".upper()
        if variable in variables:
            return variable
        return read[key].origin if key in read else "default"

    fields: Any = {
        f"{PREFIX}{key}": (_type_of(one), read[key].value if key in read else None) for key, one in known.items()
    }
    try:
        layers = create_model("Layers", __base__=_Layers, **fields)(**{f"{PREFIX}{key}": typed[key] for key in typed})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]).removeprefix(PREFIX)
        reason = first["msg"].removeprefix("Value error, ")
        raise ParameterError(
            f"{_named(origin_of(key), key)}: {reason[0].lower()}{reason[1:]}", code="parameter.wrong_type"
        ) from None
    found = {}
    for key, one in known.items():
        value, origin = getattr(layers, f"{PREFIX}{key}"), origin_of(key)
        if origin == "default":
            found[key] = SettingValue(one.default_of(command), origin, given=False)
            continue
        if one.zero_is_none and value == 0:
            value = None
        one.check(value, _named(origin, key))
        found[key] = SettingValue(value, origin)
    return found


def unknown_variables() -> list[str]:
    """Return a warning for each environment variable that begins like a setting and names none."""
    known = {f"{PREFIX}{key}".upper() for key in known_settings()} | {f"{PREFIX}CONFIG", f"{PREFIX}CACHE_ROOT"}
    given = sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known)
    return [f"{name} is no setting{_nearest(name.upper(), known)}" for name in given]


def read_file(path: Path, command: str) -> dict[str, SettingValue]:
    """Return the values that a file sets for a command, by key.

    A key at the top applies to all commands that have it. A key in a table like ``[serve]`` applies to that command.

    Raises:
        ParameterError: for an unreadable file or an unknown key.
    """
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        where = f"{path}:{place[1]}:{place[2]}" if place else str(path)
        said = str(error).partition(" (at ")[0]
        raise ParameterError(f"{where}: this is not TOML: {said}; correct the line", code="config.not_toml") from None
    lines = _lines(text)
    tables = {name: value for name, value in data.items() if name in COMMANDS and isinstance(value, dict)}
    _check_keys(data.keys() - tables.keys(), None, path, lines)
    for table, keys in tables.items():
        _check_keys(keys, table, path, lines)
    found = {}
    parts: dict[str | None, Mapping[str, Any]] = {None: data, command: tables.get(command, {})}
    for part, given in parts.items():
        for key, value in given.items():
            if one := known_settings(command).get(key):
                found[key] = SettingValue(_beside(path.parent, value, one), _place(path, lines, part, key))
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ParameterError(
                f"{path}: it has more than {_MOST_BYTES:,} bytes; give a file of settings only",
                code="config.unreadable",
            )
        return data.decode()
    except OSError as error:
        raise ParameterError(
            f"{path}: it cannot be read ({error.strerror}); check the path of --config", code="config.unreadable"
        ) from None
    except UnicodeDecodeError:
        raise ParameterError(f"{path}: it is not UTF-8; save it as UTF-8", code="config.unreadable") from None


def _check_keys(keys: Iterable[str], table: str | None, path: Path, lines: _Lines) -> None:
    """Raise ParameterError for a key that no command has, or that the command of the table does not have."""
    known = known_settings(table)
    for key in keys:
        if key not in known:
            whose = "there is no setting" if table is None else f"inlay {table} has no setting"
            near = _nearest(key, (*known, *(COMMANDS if table is None else ())))
            raise ParameterError(
                f"{_place(path, lines, table, key)}: {whose} {show(key)}{near}", code="config.unknown_key"
            )


def _lines(text: str) -> _Lines:
    """Return the line of each key by its table, and of each table by (table, "")."""
    found: _Lines = {}
    table: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if begun := _TABLE.match(line):
            table = begun[2]
            found.setdefault((table, ""), number)
        elif key := _KEY.match(line):
            found.setdefault((table, key[2]), number)
    return found


def _place(path: Path, lines: _Lines, table: str | None, key: str) -> str:
    """Return the file and the line of a key, which may be a table."""
    line = lines.get((table, key)) or lines.get((key, ""))
    return str(path) if line is None else f"{path}:{line}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(clip(name).replace("-", "_"), list(known), 1)
    return f"; did you mean {near[0]}?" if near else "; see inlay config show"


def _beside(folder: Path, value: Any, one: Setting) -> Any:
    """Return the value with paths that are relative to the file's folder."""
    if isinstance(value, list):
        return [_beside(folder, each, one) for each in value]
    if one.is_path is None or not value or not isinstance(value, str) or not one.is_path(value):
        return [value] if _is_list(one) else value
    name, equals, path = value.partition("=") if one.metavar == "NAME=PATH" else ("", "", value)
    return f"{name}{equals}{folder / Path(path).expanduser()}"


def _is_list(one: Setting) -> bool:
    return one.option_type in (list[str], list[Path])


def _type_of(one: Setting) -> Any:
    kind = Annotated[one.option_type, NoDecode, BeforeValidator(_split)] if _is_list(one) else one.option_type
    return kind | None


def _split(value: Any) -> Any:
    """Return the texts of an environment variable: a JSON array, or words between spaces."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.startswith("[") else value.split()
    except ValueError:
        raise ValueError("write words with spaces between them, or a JSON array") from None


def _named(origin: str, key: str) -> str:
    """Return a setting as the user named it."""
    return origin if origin.startswith(("--", PREFIX)) else f"{origin}: {key}"
