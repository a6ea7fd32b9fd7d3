"""Translates request bodies into calls, and outputs into response bodies, without HTTP.

``call`` and ``failures`` are independent of the API. ``values`` checks JSON values. ``tools`` and ``reasoning`` parse
the formats of models. ``dialect`` is the interface of an API, and ``openai`` is the one dialect.
"""
