"""The options of a server, fixed at its start.

Command lines derive from this module, so it loads neither the HTTP server nor transformers before it checks values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from inlay.errors import ModelError, ParameterError
from inlay.policy import CEILINGS, PolicyFields, ReusePolicy, log_deprecated
from inlay.settings import BATCH, SERVE, check_choice, check_settings, parse_bytes, served, setting

LOG_FORMATS = ("text", "json")
EMBEDDING_POOLINGS = ("mean", "last", "cls")
LOG_LEVELS = ("debug", "info", "warning", "error")


def _endpoint(_: str, endpoint: str | None) -> None:
    from inlay.server.traces import check_endpoint

    check_endpoint(endpoint)


def _location(name: str, model: str) -> None:
    from inlay.models.location import check_location, model_name

    try:
        check_location(model_name(model))
    except ModelError as error:
        raise ModelError(f"{name}: {error}", code=error.code) from error


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Options of a server, checked on creation. Each field declares one; docs/reference/settings.md lists them.

    Raises:
        ParameterError: for a value that is not allowed, or options that exclude each other.
    """

    host: str = served("127.0.0.1", "The address to listen on; 0.0.0.0 for all of this machine.")
    port: int = served(8000, "The port to listen on; 0 takes a free one.")
    uds: Path | None = served(None, "Listen on this Unix domain socket instead of host and port.")
    root_path: str = served("", 'The path prefix at a proxy, like "/llm".')
    served_names: tuple[str, ...] = setting(
        ("demo",),
        "The model's names in requests; answers use the first one. Repeatable in commands. Default: MODEL, or its last "
        "name if it is a path.",
        commands=(SERVE, BATCH),
        option="served_model_name",
        defaults={SERVE: None, BATCH: None},
    )
    reuse: str | ReusePolicy | None = setting(None, "The reuse policy of requests without one, as of the engine.")
    recompute: str | None = setting(None, "As of the engine.")
    promote: bool | None = setting(None, "As of the engine.")
    across_adapters: bool | None = setting(None, "As of the engine.")
    find: str | None = setting(None, "As of the engine.")
    tolerance: float | str | None = setting(None, 'The tolerance of reuse "auto". None for the engine\'s.')
    max_reuse: str = served("modular", "The most reuse that a request may ask for.", choices=CEILINGS)
    keys_file: Path | None = served(
        None, "The file that ``inlay keys`` writes. Other callers are refused.", option="keys"
    )
    api_keys: tuple[str, ...] = served(
        (),
        "The operator's keys, beside the file. Without file and keys, every caller is answered. Repeatable in "
        "commands. Others can read command lines; use INLAY_API_KEY in the environment.",
        option="api_key",
        secret=True,
    )
    open_to_network: bool = served(
        False, "Allow a server without keys to listen beyond this machine. Everybody there may use the model."
    )
    cors_origins: tuple[str, ...] = served(
        (),
        'Origins of web pages whose scripts may call the server; "*" for all. Repeatable in commands.',
        option="cors_origin",
    )
    max_body_bytes: int | str = served(
        "8MiB", 'The largest body of a request, in bytes or like "8MiB".', option="max_body", checked=parse_bytes
    )
    max_nesting: int = served(64, "The most levels of lists and objects in a body.", least=1)
    timeout_s: float | None = served(
        300.0,
        "Seconds until a request is aborted, unless it asks for another time. None (0 for commands) for never.",
        zero_is_none=True,
    )
    max_timeout_s: float | None = served(None, "The most seconds that a request may ask for. Default: the timeout.")
    stream_interval: int = served(
        1, "New tokens per event of a stream, over all its choices. A larger value costs less.", least=1
    )
    keep_alive_s: float = served(10.0, "Seconds without an event until a stream sends its headers and a comment.")
    slow_client_s: float = served(30.0, "Seconds that a client may leave sent data unread.")
    drain_s: float = served(30.0, "Seconds that running requests may continue once the server stops.")
    default_max_tokens: int | None = setting(
        None,
        "The most tokens of answers to requests without a limit. Default: 16 for completions, and for chats none.",
        commands=(SERVE, BATCH),
        least=1,
    )
    tool_parser: str | None = setting(
        None,
        "The format of tool calls: hermes, llama3_json, mistral, … (docs/guides/tools.md). Default: detected from the "
        "chat template.",
        commands=(SERVE, BATCH),
    )
    reasoning_parser: str | None = setting(
        None,
        "The format of reasoning (docs/guides/tools.md), or off. Default: detected from the chat template.",
        commands=(SERVE, BATCH),
    )
    schema_ttl: str | None = served(
        None, 'The lifetime of the encoded states of the first schemas, like "1h". Default: no limit.'
    )
    log_format: str = served(
        "text", "The format of the log on stderr: text, or json for one object a line.", choices=LOG_FORMATS
    )
    log_level: str = served("info", "The lowest level of the log.", choices=LOG_LEVELS)
    max_stored_responses: int = served(
        1_024, "The most responses of one tenant that are stored for ``previous_response_id``.", least=1
    )
    max_stored_bytes: int = served(32 * 2**20, "The most bytes of one tenant's stored responses, as JSON.", least=1)
    max_stored_bytes_total: int = served(
        256 * 2**20, "The most bytes of all tenants' stored responses together.", least=1
    )
    stored_response_s: float = served(24 * 3600.0, "Seconds that a response is stored.")
    embedding_model: str | None = served(
        None,
        "A second model that answers /v1/embeddings and /v1/rerank: a folder or a hub name. Default: the served model "
        "answers them.",
        checked=_location,
        is_path=lambda text: text.startswith("."),
    )
    embedding_pooling: str | None = served(
        None,
        "The vector of the embedding model's last hidden states: their mean, the last token's, or the first one's "
        "(cls). Default: as the checkpoint declares, else last for decoders and mean for others.",
        choices=EMBEDDING_POOLINGS,
    )
    page: bool = served(True, 'Show the cache, requests and a playground at "/".')
    otlp_traces_endpoint: str | None = served(
        None,
        'Send a trace of every request to this OpenTelemetry collector, like "http://127.0.0.1:4318/v1/traces".',
        checked=_endpoint,
    )

    def __post_init__(self) -> None:
        from inlay.api.reasoning import check_parser
        from inlay.api.tools.formats import FORMATS
        from inlay.models.location import public_name
        from inlay.prompt.inputs import parse_ttl
        from inlay.server.tenants import check_api_key

        policy = self.policy
        check_settings(self)
        if self.tool_parser is not None:
            check_choice("tool_parser", self.tool_parser, tuple(row.name for row in FORMATS))
        check_parser(self.reasoning_parser)
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
        if self.embedding_pooling is not None and self.embedding_model is None:
            raise ParameterError("embedding_pooling needs an embedding model; give embedding_model, or leave it out")
        if self.embedding_model is not None and public_name(self.embedding_model) in self.served_names:
            raise ParameterError(
                f"embedding_model is called {public_name(self.embedding_model)!r:.80} as is the served model; give "
                "that one another name with served_model_name"
            )
        if not self.served_names or not all(self.served_names):
            raise ParameterError("served_names has no name, or an empty one; give the model one that clients can write")

    @property
    def body_bytes(self) -> int:
        """``max_body_bytes`` as a number."""
        return parse_bytes("max_body_bytes", self.max_body_bytes)

    @cached_property
    def policy(self) -> ReusePolicy | None:
        """The policy of requests without one. None for that of ``policy.default_policy``."""
        given = PolicyFields(self.reuse, self.recompute, self.promote, self.across_adapters, self.tolerance, self.find)
        return given.policy(deprecated=log_deprecated)

    @property
    def has_keys(self) -> bool:
        """True if callers without a key are refused."""
        return self.keys_file is not None or bool(self.api_keys)

    @property
    def longest_s(self) -> float | None:
        """The most seconds that a request may take; None for no limit."""
        return self.timeout_s if self.max_timeout_s is None else self.max_timeout_s
