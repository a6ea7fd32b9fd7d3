"""Errors as OpenAI sends them."""

from __future__ import annotations

import pytest
from openai.types.shared import ErrorObject

from inlay import errors
from inlay.openai import BodyError, Failure, failure_of

PLACE = errors.Place("prompt", 1, 2)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BodyError("wrong", param="n"), 400, "invalid_value"),
        (BodyError("wrong", code="model_not_found", status=404), 404, "model_not_found"),
        (errors.ContextError("wrong"), 400, "context_length_exceeded"),
        (errors.PMLError([errors.Problem(PLACE, "wrong"), errors.Problem(PLACE, "more")]), 400, "invalid_prompt"),
        (errors.ParameterError("wrong"), 400, "invalid_value"),
        (errors.ModelError("wrong"), 400, "invalid_prompt"),
        (errors.QueueFullError("wrong"), 429, "queue_full"),
        (errors.DeadlineError("wrong"), 504, "deadline_exceeded"),
        (errors.AbortedError("wrong"), 499, "aborted"),
        (errors.CapacityError("wrong"), 507, "kv_memory_exceeded"),
        (errors.InlayError("wrong"), 500, None),
    ],
)
def test_status_type_and_code(error, status, code):
    failure = failure_of(error)
    assert (failure.status, failure.code) == (status, code)
    assert "wrong" in failure.message
    assert "\n" not in failure.message
    assert failure.type == ("server_error" if status >= 499 else failure.type)
    found = ErrorObject.model_validate(failure.body()["error"], strict=True)
    assert (found.message, found.param, found.code) == (failure.message, failure.param, code)


def test_the_field_is_told():
    assert failure_of(BodyError("wrong", param="n")) == Failure(
        400, "wrong", "invalid_request_error", "n", "invalid_value"
    )
