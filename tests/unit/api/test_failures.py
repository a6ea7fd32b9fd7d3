"""Errors as OpenAI sends them."""

from __future__ import annotations

import pytest
from openai.types.shared import ErrorObject

from inlay import errors
from inlay.api.failures import BodyError, Failure, failure_of
from inlay.api.openai import error_body

PLACE = errors.Place("prompt", 1, 2)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BodyError("wrong", param="n"), 400, "invalid_value"),
        (BodyError("wrong", code="model_not_found", status=404), 404, "model_not_found"),
        (BodyError("wrong", code="rate_limit_exceeded", status=429), 429, "rate_limit_exceeded"),
        (BodyError("wrong\nfield", code="stopping", status=503), 503, "stopping"),
        (errors.ContextError("wrong"), 400, "context_length_exceeded"),
        (errors.PMLError([errors.Problem(PLACE, "wrong"), errors.Problem(PLACE, "more")]), 400, "invalid_prompt"),
        (errors.ParameterError("wrong"), 400, "invalid_value"),
        (errors.ModelError("wrong"), 400, "invalid_prompt"),
        (errors.QueueFullError("wrong"), 429, "queue_full"),
        (errors.DeadlineError("wrong"), 504, "deadline_exceeded"),
        (errors.AbortedError("wrong"), 499, "aborted"),
        (errors.EngineDeadError("wrong"), 503, "engine_dead"),
        (errors.CapacityError("wrong"), 400, "kv_memory_exceeded"),
        (errors.DeviceMemoryError("wrong"), 507, "device_memory_exceeded"),
        (errors.InlayError("wrong"), 500, None),
    ],
)
def test_status_type_and_code(error, status, code):
    failure = failure_of(error)
    assert (failure.status, failure.code) == (status, code)
    assert "wrong" in failure.message
    assert "\n" not in failure.message
    kinds = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}
    assert failure.kind == kinds.get(status, "server_error")
    found = ErrorObject.model_validate(error_body(failure)["error"], strict=True)
    assert (found.message, found.param, found.code) == (failure.message, failure.param, code)


def test_field_of_an_error_is_reported():
    assert failure_of(BodyError("wrong", param="n")) == Failure(400, "wrong", "n", "invalid_value")


def test_client_text_in_an_error_has_no_control_codes():
    failure = failure_of(BodyError("messages.\x1b[2J\nis \u202ewrong", param="messages.\x1b[2J"))
    assert (failure.message, failure.param) == ("messages.\\x1b[2J; is \\u202ewrong", "messages.\\x1b[2J")


def test_retry_time_is_reported():
    assert failure_of(errors.QueueFullError("full")).retry_after_s == 1.0
    assert failure_of(BodyError("slower", status=429, retry_after_s=2.5)).retry_after_s == 2.5
    assert failure_of(errors.CapacityError("never fits")).retry_after_s is None
    assert "retry_after_s" not in error_body(failure_of(errors.QueueFullError("full")))["error"]
