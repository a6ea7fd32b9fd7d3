"""Options that several commands share, parsers of option values, and the options that settings give to commands.

``inlay config`` shows the settings of a command, with the origin of each.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from inlay.cli.output import told_loading
from inlay.cli.sources import check_threads, group_of, known_settings, use_threads
from inlay.config import EngineConfig, ModelSettings
from inlay.errors import ModelError, ParameterError
from inlay.kv.choices import Kept
from inlay.models.location import check_place
from inlay.policy import PolicyFields, ReusePolicy
from inlay.settings import COMMANDS, SERVE, Setting, check_choice, settings_of
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.cli.sources import SettingValue
    from inlay.client.async_llm import AsyncLLM
    from inlay.client.llm import LLM
    from inlay.pml import Schema
    from inlay.sampling.params import SamplingParams
    from inlay.types import EngineStats


def announce_hub(model: str) -> str:
    """Return a model's name, after a line on stderr if it is looked up on the hub."""
    here = model == "demo" or model.startswith("random:") or os.path.exists(model)
    path = model.startswith((".", "/")) or model.endswith((".gguf", "/")) or model.count("/") > 1
    if model and not here and not path and not _offline():
        print(f"inlay: {clip(model)} is no folder here; it is looked up on the Hugging Face hub", file=sys.stderr)
    return model


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _announce_hubs(models: list[str]) -> list[str]:
    return [announce_hub(model) for model in models]


def help_of(key: str) -> str:
    """Return the help of a setting, for commands that have it as an option of their own."""
    return known_settings()[key].help.replace("``", "")


Model = Annotated[
    str, typer.Option(help="A directory, a GGUF file, a hub name, random:<shape>, or demo.", callback=announce_hub)
]
Models = Annotated[
    list[str],
    typer.Option(
        "--model", help="A directory, a hub name, random:<shape>, or demo; repeatable.", callback=_announce_hubs
    ),
]
Tokenizer = Annotated[
    str, typer.Option(help="Whose tokenizer counts: a directory, a hub name, or demo.", callback=announce_hub)
]
DType = Annotated[str, typer.Option(help=help_of("dtype"))]
Quantization = Annotated[str | None, typer.Option(help=help_of("quantization"))]
Weights = Annotated[str | None, typer.Option(help=help_of("weights"))]
Recompute = Annotated[str | None, typer.Option(help=help_of("recompute"))]
Promote = Annotated[bool | None, typer.Option("--promote/--no-promote", help=help_of("promote"))]
AcrossAdapters = Annotated[
    bool | None, typer.Option("--across-adapters/--no-across-adapters", help=help_of("across_adapters"))
]
Adapter = Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help=help_of("adapter"))]
Profile = Annotated[
    bool, typer.Option("--profile", help="Encode it as well, and say how much each module depends on the others.")
]
StoreBytes = Annotated[str, typer.Option(help=help_of("store_bytes"))]
KVCacheDType = Annotated[str, typer.Option(help=help_of("kv_cache_dtype"))]
KVMemory = Annotated[str | None, typer.Option(help=help_of("kv_memory"))]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON in place of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw it into this .png, .svg or .pdf file.")]


def _use_threads(threads: int | None) -> int | None:
    if threads is not None:
        check_threads("--threads", threads)
        use_threads(threads)
    return threads


Threads = Annotated[int | None, typer.Option(callback=_use_threads, expose_value=False, help=help_of("threads"))]
Quick = Annotated[bool, typer.Option("--quick", help="Sizes that take seconds: for trying it out, not for figures.")]
Runs = Annotated[int, typer.Option(help="Runs of each, more where they are short; medians are reported.")]


def deviations_of(schemas: Sequence[Schema], model: str) -> list[dict[str, float]]:
    """The deviation of each module of each schema behind other modules; "" for text outside modules."""
    with told_loading("the libraries"):
        from inlay.client.llm import LLM
    with told_loading(f"the model {clip(model)}"):
        llm = LLM(model, seed=0)
    found = []
    for schema in schemas:
        llm.add_schema(schema)
        found.append(llm.deviations(schema.name))
    return found


def adapters_of(given: Sequence[str] | None, taken: Sequence[str] = ()) -> dict[str, str]:
    """Parse adapter folders by name. ``taken`` are the model's names. Raises ParameterError."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, folder = one.partition("=")
        if not (name and equals and folder):
            raise ParameterError(f"--adapter is {clip(one)!r}; write NAME=PATH, as in --adapter sql=adapters/sql")
        if name in found or name in taken:
            what = "two adapters are" if name in found else "an adapter and its model are"
            raise ParameterError(f"--adapter {clip(one)}: {what} called {clip(name)!r}; give each a name of its own")
        found[name] = folder
    return found


def policy_of(
    reuse: str | None,
    recompute: str | None,
    promote: bool | None,
    across_adapters: bool | None,
    tolerance: str = str(DEFAULT),
    find: str | None = None,
) -> ReusePolicy | None:
    """Return the policy of a command's options, or None. A deprecated one is named on stderr. Raises PolicyError.

    ``tolerance`` is the default of every ``auto`` of the engine. It is not part of the policy.
    """
    Tolerance.parse(tolerance, f"--tolerance {clip(tolerance)}")
    policy = PolicyFields(reuse, recompute, promote, across_adapters, find=find).policy(options=True, deprecated=_warn)
    if policy is not None and policy.auto and tolerance != str(DEFAULT):
        PolicyFields(reuse, tolerance=tolerance).policy(options=True, deprecated=_warn)  # refuses a second tolerance
    return policy


def _warn(message: str) -> None:
    print(f"inlay: {message}", file=sys.stderr)


def words(text: str) -> tuple[str, ...]:
    """Split words at commas, without repetitions."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def counts(option: str, text: str) -> tuple[int, ...]:
    """Split whole numbers at commas. Raises ParameterError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"{option} is '{text}'; write a number, or several with commas: 1024,2048") from None


def read_template(path: Path | None) -> str | None:
    """Read a chat template; None for the model's own. Raises ParameterError for an invalid one."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ParameterError(f"--chat-template {path} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise ParameterError(
            f"--chat-template {path} cannot be read ({error.strerror}); give a file that you may read"
        ) from None
    from inlay.prompt.inputs import check_template

    return check_template(text, str(path))


def check_plot(path: Path | None) -> None:
    """Raise ParameterError if a plot could not be saved, before minutes of work."""
    from inlay.authoring.plot import check_plot_file

    if path is not None:
        check_plot_file(path)


def store_of(given: str | None, model: str) -> str:
    """Return the store of a command that has one by default: a folder, or "off"."""
    said = given if given is not None else os.environ.get("INLAY_STORE")
    if said or model.startswith("random:"):
        return said or "off"
    from inlay.models.fingerprint import cache_root

    root = cache_root()
    if root is None:
        return "off"
    try:  # the default store fails silently, because the user did not ask for it
        (root / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return "off"
    return str(root / "store")


def told_device(device: str) -> str | None:
    """Return the line that names the GPU; None for the CPU."""
    if device == "cpu":
        return None
    import torch

    return f"computing on {device}, {torch.cuda.get_device_name(device)}"


_TOLD_KEPT = {
    Kept.SCHEMAS: "; marked parts of messages are not kept (--store-private keeps them)",
    Kept.UNSALTED: "; marked parts of messages are kept too (--no-store-private keeps none)",
    Kept.ALL: "; marked parts of messages and private schemas are kept too",
}


def told_store(stats: EngineStats, store: str, kept: Kept | None = None) -> str | None:
    """Return the line that says where encoded modules are kept, or None where there is no store.

    Args:
        kept: which segments the store holds. None for a command that reads no messages.
    """
    messages = "" if kept is None else _TOLD_KEPT[kept]
    shared = None
    if stats.shared is not None:
        shared = "on the shared store" if stats.shared.up else "on the shared store once that is reached"
    if stats.disk is None:
        return None if shared is None else f"encoded modules are kept {shared}{messages}"
    size, quota = (f"{amount / 2**30:.1f}" for amount in (stats.disk.bytes, stats.disk.quota))
    beside = "" if shared is None else f", and {shared}"
    return f"encoded modules are kept in {store} ({size} of {quota} GiB; --store off keeps none){beside}{messages}"


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
    """Print what holds for a command, and the origin of each value: a flag, the environment, a file, or the default.

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
