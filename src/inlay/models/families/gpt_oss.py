"""gpt-oss and others with attention sinks: a logit for each head that takes part in the softmax, without a value."""

from __future__ import annotations

from inlay.models.standard import Standard


class GptOss(Standard):
    """The stock layer hands its sinks to the interface."""

    model_types = ("gpt_oss", "granite_swa", "granitemoe_swa")
    sinks = True


FAMILY = GptOss()
