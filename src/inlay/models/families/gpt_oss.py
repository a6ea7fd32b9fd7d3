"""gpt-oss and others with attention sinks: a logit for each head that enters the softmax without a value."""

from __future__ import annotations

from inlay.models.standard import Standard


class GptOss(Standard):
    """gpt-oss and similar models. The stock layer passes its sinks to the interface."""

    model_types = ("gpt_oss", "granite_swa", "granitemoe_swa")
    sinks = True


FAMILY = GptOss()
