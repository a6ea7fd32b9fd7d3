"""Keyword arguments that several calls of LLM and AsyncLLM share. ``generate`` documents them."""

from __future__ import annotations

from typing import TypedDict

from inlay.policy import ReusePolicy


class PolicyOptions(TypedDict, total=False):
    """The reuse policy of a request (docs/reference/policies.md). None and a missing name stand for the default."""

    reuse: str | ReusePolicy | None
    recompute: str | None
    promote: bool | None
    across_adapters: bool | None
    tolerance: float | str | None
    find: str | None


class RequestOptions(PolicyOptions, total=False):
    """The options of a request that LLM and AsyncLLM have in common, beside its adapter."""

    positions: str | None
    order: str | None
    cache_salt: str | None
    diagnostics: bool


class StreamOptions(RequestOptions, total=False):
    """The options of ``AsyncLLM.generate``."""

    adapter: str | None
    request_id: str | None
    priority: int
    timeout_s: float | None
    arrival: float | None
    stream_interval: int | None
    tenant: str
    weight: float
    keep_marked_alone: bool


class OwnerOptions(TypedDict, total=False):
    """The owner of cached text. See ``Scope``."""

    cache_salt: str | None
    adapter: str | None
    tenant: str
    weight: float


class SchemaOptions(TypedDict, total=False):
    """The policy and the owner of encoded modules, for calls about a schema or a prompt's modules.

    Attributes:
        reuse, positions: the policy that the modules are encoded for. None for the engine's defaults.
        cache_salt: the salt of the requests that read them. None for all requests.
        adapter: the adapter that they are encoded for. None for the model alone.
    """

    reuse: str | ReusePolicy | None
    positions: str | None
    cache_salt: str | None
    adapter: str | None
