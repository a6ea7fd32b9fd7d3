"""Counts calls, for tests that bound the work of a caller."""

from __future__ import annotations

from typing import Any

import pytest


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of each later call of a function, which still runs.

    Args:
        owner: the module, class or object that callers look the function up in.
    """
    calls: list[tuple[Any, ...]] = []
    real = getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return real(*given, **named)

    monkeypatch.setattr(owner, name, noted)
    return calls
