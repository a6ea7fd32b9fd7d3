"""Translates a request's effort of reasoning into variables of the chat template."""

from __future__ import annotations

from typing import Any

from inlay.api.failures import BodyError
from inlay.api.reasoning.formats import SWITCHES, ModelReasoning

USUAL = "medium"
"""Asks for the model's normal behavior."""


def effort_variables(effort: str | None, model: ModelReasoning | None) -> dict[str, Any] | None:
    """Return the template variables for an effort; None if the template does not support it.

    Args:
        effort: "none" for no reasoning, or a level such as "high". None for the template's own default.
        model: the model's reasoning.
    """
    known = frozenset[str]() if model is None else model.variables
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if effort == "none" and (found := _switches(model)):
        return {found[0]: False}
    if effort == USUAL or (effort == "none" and not reasons(model)):
        return {}
    return None


def switch_on(model: ModelReasoning | None) -> dict[str, Any]:
    """Return the template variables that ask for reasoning; empty for a template without a switch."""
    return dict.fromkeys(_switches(model)[:1], True)


def variables_for(effort: str | None, model: ModelReasoning | None, field: str) -> dict[str, Any]:
    """Return the template variables for an effort. Raises BodyError if the template does not support it.

    Args:
        effort: see ``effort_variables``, as for ``model``.
        field: the body's field that has the effort.
    """
    found = effort_variables(effort, model)
    if found is not None:
        return found
    allowed = f'"{USUAL}"' if reasons(model) and not _switches(model) else f'"none" or "{USUAL}"'
    message = f"{field} is {effort!r}, but this model's chat template does not support it; write {allowed}"
    raise BodyError(f"{message}, or leave it out", param=field)


def reasons(model: ModelReasoning | None) -> bool:
    """True if the model reasons before its answers."""
    return model is not None and model.format is not None


def _switches(model: ModelReasoning | None) -> list[str]:
    return [] if model is None else [name for name in SWITCHES if name in model.variables]
