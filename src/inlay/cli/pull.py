"""``inlay pull``: downloads a model from the hub."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    model: Annotated[str, typer.Argument(help="A name on the hub, such as Qwen/Qwen2.5-0.5B-Instruct.")],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit; main, if not given.")] = None,
) -> None:
    """Download a model, or what is missing of it, and print its folder. Every command takes its name from then on."""
    from inlay.models.pull import pull as download

    print(download(model, revision))
