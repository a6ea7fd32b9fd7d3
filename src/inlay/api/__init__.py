"""Translates request bodies into calls, and outputs into response bodies, without HTTP.

``dialect`` is the interface of an API. ``openai``, ``responses``, ``anthropic`` and ``embeddings`` implement it.
``forms`` and ``reading`` check bodies for all dialects. ``call`` and ``failures`` are the results, independent of the
dialect. ``tools`` and ``reasoning`` parse the formats of models.
"""
