"""Options that several commands share, and parsers of option values."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.declared import check_threads, known_settings, use_threads
from inlay.cli.output import told_loading
from inlay.errors import ParameterError
from inlay.kv.choices import Kept
from inlay.policy import PolicyFields, ReusePolicy
from inlay.tolerance import DEFAULT, Tolerance
from inlay.wording import clip

if TYPE_CHECKING:
    from inlay.pml import Schema
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
    """Measure the deviation of each module of each schema behind other modules. "" stands for text outside modules."""
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
    """Return the line that names the store of encoded modules. None without a store.

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
