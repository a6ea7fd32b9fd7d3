"""Faults, damage and delays in the passes of a model, through PyTorch's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from inlay.models.load import LoadedModel


@contextmanager
def each_pass(
    loaded: LoadedModel,
    *,
    before: Callable[[int], object] | None = None,
    after: Callable[[Tensor], Tensor | None] | None = None,
) -> Iterator[None]:
    """Call functions around every pass of a model, until the end of the block.

    Args:
        before: gets the number of tokens. It may raise, or wait.
        after: gets the logits, (rows with logits, vocabulary). It may return others in their place.
    """

    def begins(_: nn.Module, __: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        assert before is not None
        before(inputs["input_ids"].shape[1])

    def ends(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        assert after is not None
        changed = after(output.logits[0])
        if changed is not None:
            output.logits = changed[None]

    with ExitStack() as hooks:
        if before is not None:
            hooks.callback(loaded.model.register_forward_pre_hook(begins, with_kwargs=True).remove)
        if after is not None:
            hooks.callback(loaded.model.register_forward_hook(ends).remove)
        yield


def failing(loaded: LoadedModel, error: BaseException) -> Any:
    """Let every pass of a model raise, until the end of the block."""

    def fail(_: int) -> None:
        raise error

    return each_pass(loaded, before=fail)
