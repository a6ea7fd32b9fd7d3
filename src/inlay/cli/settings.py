"""Gives commands the options of their settings, and loads models by them.

``inlay config`` shows the settings of a command, with the origin of each.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from inlay.cli.declared import group_of, known_settings, use_threads
from inlay.cli.options import AsJson, adapters_of, policy_of, read_template, store_of, told_device, told_store
from inlay.cli.output import told_loading
from inlay.config import EngineConfig, ModelSettings
from inlay.errors import ModelError, ParameterError
from inlay.models.location import check_place
from inlay.policy import ReusePolicy
from inlay.settings import COMMANDS, SERVE, Setting, check_choice, settings_of
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.cli.sources import SettingValue
    from inlay.client.async_llm import AsyncLLM
    from inlay.client.llm import LLM
    from inlay.sampling.params import SamplingParams


_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="INLAY_CONFIG",
        show_envvar=False,
        metavar="FILE",
        help="A TOML file of settings. Options win over the environment (INLAY_KV_MEMORY for --kv-memory), and the "
        "environment over the file (docs/guides/configuration.md).",
    ),
]


class Options:
    """The values of a command's settings.

    Args:
        values: by key, from all sources.
    """

    def __init__(self, values: Mapping[str, SettingValue]) -> None:
        self.values = values

    def __getitem__(self, key: str) -> Any:
        """Return the value of a setting. ``key`` is the option with underscores."""
        return self.values[key].value

    def flag(self, key: str) -> Any:
        """Return the value of an option that was given on the command line, else None."""
        return self.values[key].value if self.values[key].from_flag else None

    @cached_property
    def policy(self) -> ReusePolicy | None:
        """The reuse policy, or None for the engine's default. Raises PolicyError."""
        return policy_of(
            *(self[name] for name in ("reuse", "recompute", "promote", "across_adapters", "tolerance", "find"))
        )

    @cached_property
    def template(self) -> str | None:
        """The chat template that replaces the model's own. Raises ParameterError."""
        return read_template(self["chat_template"])

    def adapters(self, *taken: str) -> dict[str, str]:
        """Return adapter folders by name. ``taken`` are the names of the model. Raises ParameterError."""
        return adapters_of(self["adapter"], taken)

    def check(self) -> None:
        """Raise ParameterError for a policy, a template or an adapter that is wrong for every model."""
        _ = self.policy, self.template
        self.adapters()

    def fields_of(self, settings: type[Any]) -> dict[str, Any]:
        """Return the fields of a dataclass of settings that this command has, for its constructor."""
        found = {}
        for name, one in settings_of(settings).items():
            if one.key in self.values and one.commands:
                value = self[one.key]
                found[name] = tuple(value) if isinstance(value, list) else value
        return found

    def llm_settings(self, model: str, *names: str) -> dict[str, Any]:
        """Return the arguments of LLM and AsyncLLM. Raises ParameterError.

        Args:
            names: further names of the model, which no adapter may have.
        """
        given = self.fields_of(ModelSettings) | self.fields_of(EngineConfig)
        if "reuse" in given:
            given = {name: value for name, value in given.items() if name not in ("recompute", "promote", "find")}
            given |= {"reuse": self.policy, "across_adapters": None}
        if "chat_template" in given:
            given["chat_template"] = self.template
        if "adapters" in given:
            given["adapters"] = self.adapters(model, *names)
        if "store" in given:
            given["store"] = store_of(given["store"], model)
        return given

    def load_llm(self, model: str) -> LLM:
        """Load a model for calls that step the engine themselves. Raises InlayError."""
        _check_place(model)
        with told_loading("the libraries"):
            from inlay.client.llm import LLM
        settings = self._checked(model)
        with told_loading(f"the model {clip(model)}"):
            llm = LLM(model, **settings)
        _report(llm, settings["store"])
        return llm

    def load_async(self, model: str) -> AsyncLLM:
        """Load a model whose engine has a thread of its own. Raises InlayError."""
        _check_place(model)
        with told_loading("the libraries"):
            from inlay.client.async_llm import AsyncLLM
        settings = self._checked(model)
        with told_loading(f"the model {clip(model)}"):
            llm = AsyncLLM(model, **settings)
        _report(llm, settings["store"])
        return llm

    def sampling(self, llm: LLM | AsyncLLM) -> SamplingParams:
        """Return the sampling parameters: the options, then the model's defaults, then greedy."""
        from inlay.sampling.params import SamplingParams

        return SamplingParams(**{"temperature": 0.0, **llm.sampling_defaults, **self._sampling()})

    def _sampling(self) -> dict[str, Any]:
        given = {name: self[name] for name in ("max_tokens", "seed", "temperature")}
        return {name: value for name, value in given.items() if value is not None}

    def _checked(self, model: str) -> dict[str, Any]:
        """Return ``llm_settings``, after a check of the sampling parameters that needs no model."""
        from inlay.sampling.params import SamplingParams

        SamplingParams(**self._sampling())
        return self.llm_settings(model)


def _check_place(model: str) -> None:
    """Raise ModelError if there are no files of a model, before torch is loaded. A document is no model."""
    try:
        check_place(model)
    except ModelError as error:
        if error.code != "model.not_a_folder":
            raise
        raise ModelError(
            f"{clip(model)} is a file, and no model; write the model first, and the file as --document {clip(model)}",
            code=error.code,
        ) from error


def _report(llm: LLM | AsyncLLM, store: str) -> None:
    """Print notes about a loaded model on stderr."""
    notes = (llm.loaded.note, told_device(str(llm.loaded.model.device)), told_store(llm.stats(), store))
    for line in (*notes, *map(str, llm.adapters.values())):
        if line:
            print(f"inlay: {line}", file=sys.stderr)


def with_settings(command: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function the options of a command's settings. It gets their values as the argument ``options``.

    Args:
        command: a name of ``inlay.settings.COMMANDS``. None for the settings of all commands; then the function gets
            the given flags by key as ``flags``, and the file as ``config``.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(function, include_extras=True)
        own = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for each in inspect.signature(function).parameters.values()
            if each.name not in ("options", "flags", "config")
        ]
        known = known_settings(command)

        def called(**given: Any) -> Any:
            flags = {key: value for key in known if (value := given.pop(key)) not in (None, [])}
            config = given.pop("config")
            if command is None:
                return function(**given, flags=flags, config=config)
            from inlay.cli.sources import values_of

            options = Options(values_of(command, flags, config))
            use_threads(options["threads"])
            return function(**given, options=options)

        taken = [*own, *_parameters(command, known)]
        called.__name__, called.__doc__ = function.__name__, function.__doc__
        called.__annotations__ = {each.name: each.annotation for each in taken}
        called.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        return called

    return decorate


def _parameters(command: str | None, known: Mapping[str, Setting]) -> Iterator[inspect.Parameter]:
    """Yield ``--config`` and the parameter of each setting. None stands for an option that is not given."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("config", keyword, default=None, annotation=_CONFIG)
    for key, one in known.items():
        option = typer.Option(
            f"{one.flag}/--no-{one.flag[2:]}" if one.option_type is bool else one.flag,
            help=_help(one, one.default if command is None else one.default_of(command)),
            show_default=False,
            metavar=one.metavar or ("|".join(one.choices) or None),
            autocompletion=_completion(one.choices) if one.choices else None,
            rich_help_panel=f"{group_of(one)} options",
        )
        yield inspect.Parameter(key, keyword, default=None, annotation=Annotated[one.option_type | None, option])


def _completion(choices: tuple[str, ...]) -> Callable[[], list[str]]:
    return lambda: list(choices)


def _help(one: Setting, default: Any) -> str:
    """Return the help of a setting without marks of code, and with its default."""
    shown = "" if default in (None, "", (), False) else f" Default: {default}."
    return one.help.replace("``", "") + shown


app = typer.Typer(help="Show settings and where they come from.", no_args_is_help=True)


@app.callback()
def _config() -> None:
    """Show settings and where they come from."""


@app.command()
@with_settings(None)
def show(
    command: Annotated[
        str,
        typer.Argument(
            metavar="[COMMAND]",
            help=f"The command whose settings are shown: {', '.join(COMMANDS)}. warm is inlay cache warm.",
            autocompletion=lambda: list(COMMANDS),
        ),
    ] = SERVE,
    given: Annotated[bool, typer.Option("--given", help="Leave out settings at their default.")] = False,
    as_json: AsJson = False,
    *,
    flags: Mapping[str, Any],
    config: Path | None,
) -> None:
    """Print the settings of a command, each with its value and origin: a flag, the environment, a file, or the default.

    It reads the same options, environment and --config as the command. Secrets are hidden.
    """
    from inlay.cli.sources import unknown_variables, values_of

    known = known_settings(check_choice("COMMAND", command, COMMANDS))
    for key in flags:
        if key not in known:
            flag = known_settings()[key].flag
            raise ParameterError(f"inlay {command} has no option {flag}; leave it out", code="config.unknown_key")
    values = values_of(command, flags, config)
    rows = {key: _row(known[key], one) for key, one in values.items() if one.given or not given}
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
    else:
        width = max(map(len, rows), default=0)
        for key, row in rows.items():
            text = "not set" if row["value"] is None else json.dumps(row["value"], ensure_ascii=False)
            print(f"{key:{width}} = {text}  ({row['origin']})")
    for line in unknown_variables():
        print(f"inlay: {line}", file=sys.stderr)


def _row(one: Setting, found: SettingValue) -> dict[str, Any]:
    value = found.value
    if isinstance(value, list | tuple):
        value = [str(each) for each in value] or None
    if one.secret and value is not None:
        value = "(hidden)"
    return {"value": str(value) if isinstance(value, Path) else value, "origin": found.origin}
