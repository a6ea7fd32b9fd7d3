"""The options of a server, fixed at its start."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from inlay.api.reasoning.formats import check_parser
from inlay.api.tools.formats import FORMATS
from inlay.config import check_choice
from inlay.errors import ParameterError
from inlay.policy import PolicyFields, ReusePolicy, log_deprecated
from inlay.prompt.inputs import parse_ttl
from inlay.server.limits import CEILINGS
from inlay.server.tenants import check_api_key

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_COUNTS = (
    "max_body_bytes",
    "max_nesting",
    "stream_interval",
    "max_stored_responses",
    "max_stored_bytes",
    "max_stored_bytes_total",
)
_SECONDS = ("timeout_s", "max_timeout_s", "keep_alive_s", "slow_client_s", "drain_s", "stored_response_s")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of a server, checked on creation. Raises ParameterError.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        served_names: the model's names in requests. Answers use the first one.
        reuse, recompute, promote, across_adapters, tolerance: the policy of requests without one, see PolicyFields.
            None for that of ``policy.default_policy``.
        max_reuse: the most reuse that a request may ask for.
        keys_file: the file that ``inlay keys`` writes.
        api_keys: the operator's keys, beside the file. Without file and keys, every caller is answered.
        open_to_network: allow a server without keys to listen beyond this machine.
        uds: the server listens on a Unix domain socket instead of host and port.
        root_path: the path prefix at a proxy, like "/llm"; "" for none.
        cors_origins: origins of web pages whose scripts may call the server; "*" for all.
        max_body_bytes: the largest body.
        max_nesting: the most levels of lists and objects in a body.
        timeout_s: seconds until a request is aborted, unless it asks for another time; None for never.
        max_timeout_s: the most seconds that a request may ask for; None for ``timeout_s``.
        stream_interval: new tokens per event of a stream, over all its choices. A larger value costs less.
        keep_alive_s: seconds without an event until a stream sends its headers and a comment.
        slow_client_s: seconds that a client may leave sent data unread.
        drain_s: seconds that running requests may continue once the server stops.
        default_max_tokens: see ``api.dialect.Dialect.translate``.
        tool_parser: the format of tool calls, a name of ``api.tools.formats``; None to detect it from the template.
        reasoning_parser: the format of reasoning, a name of ``api.reasoning.formats``; None to detect it.
        max_stored_responses: the most responses of one tenant that are stored for ``previous_response_id``.
        max_stored_bytes: the most bytes of one tenant's stored responses, as JSON.
        max_stored_bytes_total: the same of all tenants together.
        stored_response_s: seconds that a response is stored.
        schema_ttl: the lifetime of the encoded states of the first schemas, like "1h"; None for no limit.
        log_format: the format of the log on stderr.
        log_level: the lowest level of the log.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ("demo",)
    reuse: str | ReusePolicy | None = None
    recompute: str | None = None
    promote: bool | None = None
    across_adapters: bool | None = None
    tolerance: float | str | None = None
    max_reuse: str = "modular"
    keys_file: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    open_to_network: bool = False
    uds: bool = False
    root_path: str = ""
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_nesting: int = 64
    timeout_s: float | None = 300.0
    max_timeout_s: float | None = None
    stream_interval: int = 1
    keep_alive_s: float = 10.0
    slow_client_s: float = 30.0
    drain_s: float = 30.0
    default_max_tokens: int | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    max_stored_responses: int = 1_024
    max_stored_bytes: int = 32 * 2**20
    max_stored_bytes_total: int = 256 * 2**20
    stored_response_s: float = 24 * 3600.0
    schema_ttl: str | None = None
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        policy = self.policy
        check_choice("max_reuse", self.max_reuse, CEILINGS)
        if self.tool_parser is not None:
            check_choice("tool_parser", self.tool_parser, tuple(row.name for row in FORMATS))
        check_parser(self.reasoning_parser)
        check_choice("log_format", self.log_format, LOG_FORMATS)
        check_choice("log_level", self.log_level, LOG_LEVELS)
        if policy is not None and not policy.within(ReusePolicy.parse(self.max_reuse)):
            raise ParameterError(
                f"reuse is '{policy}' and max_reuse is {self.max_reuse!r}, which allows less; lower reuse or raise "
                "max_reuse"
            )
        if self.schema_ttl is not None:
            parse_ttl(self.schema_ttl, "schema_ttl")
        for key in self.api_keys:
            check_api_key(key)
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ParameterError(
                f"root_path is {self.root_path!r:.80}; write it like '/llm', without a slash at the end"
            )
        if not self.served_names or not all(self.served_names):
            raise ParameterError("served_names has no name, or an empty one; give the model one that clients can write")
        for name in (*_COUNTS, "default_max_tokens"):
            value = getattr(self, name)
            if not (value is None and name == "default_max_tokens") and value < 1:
                raise ParameterError(f"{name} is {value}; it must be at least 1")
        for name in _SECONDS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ParameterError(f"{name} is {value:g}; it must be a finite number of seconds above 0")

    @cached_property
    def policy(self) -> ReusePolicy | None:
        """The policy of requests without one. None for that of ``policy.default_policy``."""
        given = PolicyFields(self.reuse, self.recompute, self.promote, self.across_adapters, self.tolerance)
        return given.policy(deprecated=log_deprecated)

    @property
    def has_keys(self) -> bool:
        """True if callers without a key are refused."""
        return self.keys_file is not None or bool(self.api_keys)

    @property
    def longest_s(self) -> float | None:
        """The most seconds that a request may take; None for no limit."""
        return self.timeout_s if self.max_timeout_s is None else self.max_timeout_s
