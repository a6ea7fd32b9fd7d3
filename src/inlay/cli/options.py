"""Options that several commands have, with one name and one help text each; and values that hold several."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.errors import ParameterError

if TYPE_CHECKING:
    from inlay.types import EngineStats

Model = Annotated[str, typer.Option(help="A directory, a hub name, random:<shape>, or demo.")]
Tokenizer = Annotated[str, typer.Option(help="Whose tokenizer counts: a directory, a hub name, or demo.")]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Quantization = Annotated[
    str | None, typer.Option(help="int8 or int4: keep the weights in so many bits; as they are, if not given.")
]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="A file with a chat template (Jinja), in place of the model's own.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of a prompt and its answer; what the model has positions for, if not given.")
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Where encoded modules of public schemas outlive the process: a folder, or off. If not given, INLAY_STORE "
        "or the user's cache directory, and off for random: models."
    ),
]
StoreBytes = Annotated[str, typer.Option(help="The most that folder may hold; the least recently used goes first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw it into this .png, .svg or .pdf file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Sizes that take seconds: for trying it out, not for figures.")]
Runs = Annotated[int, typer.Option(help="Runs of each, more where they are short; medians are reported.")]


def words(text: str) -> tuple[str, ...]:
    """Words with commas between them; one that is given twice counts once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises ParameterError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"{option} is '{text}'; write a number, or several with commas: 1024,2048") from None


def store_of(given: str | None, model: str) -> str:
    """The ``store`` of a command that keeps one unless it is told otherwise: a folder, or "off"."""
    said = given if given is not None else os.environ.get("INLAY_STORE")
    if said or model.startswith("random:"):
        return said or "off"
    from inlay.models.fingerprint_cache import cache_root

    root = cache_root()
    if root is None:
        return "off"
    try:  # nobody asked for it, so that nobody is told what is wrong with it but by the line that says where it is
        (root / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return "off"
    return str(root / "store")


def told_store(stats: EngineStats, store: str) -> str | None:
    """The line that says where encoded modules are kept; None for nowhere."""
    if stats.disk is None:
        return None
    size, quota = (f"{amount / 2**30:.1f}" for amount in (stats.disk.bytes, stats.disk.quota))
    return f"encoded modules are kept in {store} ({size} of {quota} GiB; --store off keeps none)"


def read_template(path: Path | None) -> str | None:
    """The text of a chat template; None for the model's own. Raises ParameterError where it is none."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ParameterError(f"--chat-template {path} cannot be read ({reason}); check the path") from None
    from inlay.prompt.inputs import check_template

    return check_template(text, str(path))


def check_plot(path: Path | None) -> None:
    """Raise ParameterError now, not behind minutes of work, where the drawing could not be saved."""
    from inlay.advice.plot.figure import check_plot_file

    if path is not None:
        check_plot_file(path)
