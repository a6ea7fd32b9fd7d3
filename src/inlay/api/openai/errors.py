"""Failures as OpenAI writes errors."""

from __future__ import annotations

from typing import Any

from inlay.api.failures import Failure


def error_body(failure: Failure) -> dict[str, Any]:
    """The body of a response: ``{"error": {"message", "type", "param", "code"}}``."""
    kind = failure.kind.value
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}}
