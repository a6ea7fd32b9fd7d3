"""``inlay serve``: serves a model behind OpenAI's API."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.loading import LoadingLines
from inlay.cli.options import (
    AcrossAdapters,
    Adapter,
    ChatTemplate,
    Compile,
    DefaultMaxTokens,
    Device,
    DType,
    Eviction,
    GenerationConfig,
    HostMemory,
    KVCacheDType,
    KVMemory,
    MaxModelLen,
    Promote,
    PromotionMemory,
    Quantization,
    ReasoningParser,
    Recompute,
    Reuse,
    ReuseTolerance,
    Shadow,
    ShadowThreshold,
    StateMemory,
    Store,
    StoreBytes,
    StoreCodec,
    StoreShared,
    Threads,
    ToolParser,
    Weights,
    adapters_of,
    announce_hub,
    policy_of,
    read_template,
    schema_file,
    store_of,
    told_device,
    told_store,
)
from inlay.config import DEFAULT_THRESHOLD
from inlay.errors import ParameterError
from inlay.kv.policies import DEFAULT_EVICTION
from inlay.tolerance import DEFAULT

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inlay.client.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_ADDRESS = ("127.0.0.1", 8000)
_NETWORK = "Listen elsewhere than on this machine although there are no keys: everybody there may use the model."


def serve(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A directory, a hub name, random:<shape>, or demo; or as --model."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same as MODEL; demo, if neither is given.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all of this machine.")] = _ADDRESS[0],
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for any that is free.")] = _ADDRESS[1],
    uds: Annotated[
        Path | None, typer.Option(help="Listen on this Unix domain socket, in place of host and port.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="What a proxy has in front of all paths, like /llm.")] = "",
    ssl_certfile: Annotated[Path | None, typer.Option(help="Speak TLS, with this chain of certificates (PEM).")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key, if that is in another file.")] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="Who may have signed the certificates of clients (PEM).")
    ] = None,
    ssl_cert_reqs: Annotated[int, typer.Option(help="Certificates of clients: 0 none, 1 optional, 2 required.")] = 0,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the model in place of MODEL, or its last name if it is a path. Several times."
        ),
    ] = None,
    reuse: Reuse = None,
    recompute: Recompute = None,
    promote: Promote = None,
    across_adapters: AcrossAdapters = None,
    tolerance: ReuseTolerance = str(DEFAULT),
    max_reuse: Annotated[
        str, typer.Option(help="The most that requests may ask for: off, exact, auto, modular.")
    ] = "modular",
    schema: Annotated[
        list[Path] | None, typer.Option(help="A schema (PML or JSON) for everybody. Several times for several.")
    ] = None,
    schema_ttl: Annotated[
        str | None,
        typer.Option(help="How long these stay encoded when no prompt reads them, like 1h; no bound, if not given."),
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="A file of 'inlay keys': nobody else is answered.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="INLAY_API_KEY",
            show_default=False,
            help="A key that may do all; others are refused. Several times. The environment is not seen by others, "
            "as command lines are.",
        ),
    ] = None,
    open_to_network: Annotated[bool, typer.Option("--open-to-network", help=_NETWORK)] = False,
    kv_memory: KVMemory = None,
    state_memory: StateMemory = None,
    host_memory: HostMemory = None,
    store: Store = None,
    store_bytes: StoreBytes = "16GiB",
    eviction: Eviction = DEFAULT_EVICTION,
    store_codec: StoreCodec = "none",
    store_shared: StoreShared = None,
    store_private: Annotated[
        bool | None,
        typer.Option(
            "--store-private/--no-store-private",
            show_default=False,
            help="Keep marked parts of messages and private schemas there too, or not. If not given, a server without "
            "keys keeps marked parts in the folder, and one with keys does not.",
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most answers that are written at the same time.")] = 64,
    max_waiting: Annotated[int, typer.Option(help="The most answers that wait to begin; more are refused.")] = 1024,
    max_pass: Annotated[
        float, typer.Option(help="Seconds that one pass of the model should take at most; 0 for any time.")
    ] = 0.25,
    max_model_len: MaxModelLen = None,
    chat_template: ChatTemplate = None,
    threads: Threads = None,
    dtype: DType = "auto",
    device: Device = "auto",
    compile: Compile = False,
    weights: Weights = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDType = "auto",
    adapter: Adapter = None,
    seed: Annotated[
        int | None, typer.Option(help="Of requests that bring none, and of random weights; drawn, if not given.")
    ] = None,
    default_max_tokens: DefaultMaxTokens = None,
    generation_config: GenerationConfig = "auto",
    profile: Annotated[
        str,
        typer.Option(help="auto: find out in idle time how much modules' tokens move, for recompute profiled; off."),
    ] = "auto",
    promotion_memory: PromotionMemory = 0.1,
    prefetch: Annotated[
        str,
        typer.Option(
            help="What is read from the store ahead of time: waiting, what requests in line will read; likely, also "
            "siblings in unions, and what followed the last time."
        ),
    ] = "waiting",
    pin_memory: Annotated[
        float, typer.Option(help="The share of the pool that what is pinned may take, of all tenants together.")
    ] = 0.25,
    shadow: Shadow = 0.0,
    shadow_threshold: ShadowThreshold = DEFAULT_THRESHOLD,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request ends; 0 for never.")] = 300.0,
    max_timeout: Annotated[
        float | None, typer.Option(help="The most seconds that a request may ask for; --timeout, if not given.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that requests may go on when the server is to stop.")] = 30.0,
    stream_interval: Annotated[
        int,
        typer.Option(help="New tokens that are worth an event of a stream; more are less work."),
    ] = 1,
    slow_client: Annotated[float, typer.Option(help="Seconds that a client may leave its answer unread.")] = 30.0,
    max_body: Annotated[int, typer.Option(help="Bytes of the largest body of a request.")] = 8 * 2**20,
    max_stored_responses: Annotated[
        int, typer.Option(help="Responses of one tenant that are stored for previous_response_id.")
    ] = 1_024,
    max_stored_bytes: Annotated[int, typer.Option(help="Bytes of one tenant's stored responses.")] = 32 * 2**20,
    max_stored_bytes_total: Annotated[int, typer.Option(help="The same of all tenants together.")] = 256 * 2**20,
    stored_response: Annotated[float, typer.Option(help="Seconds that a response is stored.")] = 24 * 3600.0,
    tool_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin whose scripts may ask; * for all. Several times.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="text, or json for one object a line.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> int:
    """Serve a model over HTTP, in the way of OpenAI's API.

    One line on stdout says where, as soon as the model answers; the log goes to stderr. Ctrl-C or SIGTERM lets requests
    under way end; a second one ends them.
    """
    if sys.stderr.isatty():
        print("inlay: loading the server", file=sys.stderr, flush=True)  # the log is not set up yet
    from inlay.server.run import listen, listen_unix, tls_context, url

    model = announce_hub(_one_model(name, model))
    # Check everything before the model, which may take minutes to load.
    policy = policy_of(reuse, recompute, promote, across_adapters, tolerance)
    tls = tls_context(ssl_certfile, ssl_keyfile, ssl_ca_certs, ssl_cert_reqs)
    template = read_template(chat_template)
    if uds is not None and (host, port) != _ADDRESS:
        raise ParameterError("--uds is in place of --host and --port; give one or the other")
    network = keys is not None or bool(api_key) or open_to_network
    with listen_unix(uds) if uds is not None else listen(host, port, network=network) as listener, _stopped_at_once():
        from inlay.models.location import served_names
        from inlay.server.settings import ServerSettings
        from inlay.server.tenants import Tenants

        settings = ServerSettings(
            host=host,
            port=port,
            served_names=served_names(model, served_model_name),
            reuse=policy,
            max_reuse=max_reuse,
            keys_file=keys,
            api_keys=tuple(api_key or []),
            uds=uds is not None,
            root_path=root_path,
            open_to_network=open_to_network,
            cors_origins=tuple(cors_origin or []),
            max_body_bytes=max_body,
            timeout_s=timeout or None,
            max_timeout_s=max_timeout,
            stream_interval=stream_interval,
            slow_client_s=slow_client,
            drain_s=drain,
            max_stored_responses=max_stored_responses,
            max_stored_bytes=max_stored_bytes,
            max_stored_bytes_total=max_stored_bytes_total,
            stored_response_s=stored_response,
            schema_ttl=schema_ttl,
            default_max_tokens=default_max_tokens,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            log_format=log_format,
            log_level=log_level,
        )
        adapters = adapters_of(adapter, settings.served_names)
        if keys is not None:
            Tenants.from_file(keys)
        first = [schema_file(file) for file in schema or []]
        from inlay.server.log_format import configure
        from inlay.server.run import Server
        from inlay.server.starting import Loading, StartingApp

        configure(format=log_format, level=log_level)
        lines = LoadingLines(logger.info, terminal=sys.stderr.isatty())
        running: list[AsyncLLM] = []
        folder = store_of(store, model)

        def load(loading: Loading) -> FastAPI:
            """On a thread, while probes are answered."""

            def report(what: str, done: int = 0, total: int = 0) -> None:
                loading.report(f"its {what}", done, total)
                lines.report(f"the {what}", done, total)

            from transformers.utils.logging import disable_progress_bar

            from inlay.client.async_llm import AsyncLLM
            from inlay.models.load import weights_progress
            from inlay.server.app import build_app

            disable_progress_bar()  # type: ignore[no-untyped-call]  # stderr is the log's
            report("model")
            with weights_progress(partial(report, "weights")):
                llm = AsyncLLM(
                    model,
                    reuse=policy,
                    tolerance=tolerance,
                    kv_memory=kv_memory,
                    state_memory=state_memory,
                    host_memory=host_memory,
                    max_num_seqs=max_num_seqs,
                    max_waiting=max_waiting,
                    max_pass_s=max_pass or None,
                    max_model_len=max_model_len,
                    chat_template=template,
                    seed=seed,
                    dtype=dtype,
                    device=device,
                    compile=compile,
                    weights=weights,
                    quantization=quantization,
                    kv_cache_dtype=kv_cache_dtype,
                    adapters=adapters,
                    generation_config=generation_config,
                    profile=profile,
                    promotion_memory=promotion_memory,
                    pin_memory=pin_memory,
                    prefetch=prefetch,
                    shadow=shadow,
                    shadow_threshold=shadow_threshold or None,
                    store=folder,
                    store_bytes=store_bytes,
                    eviction=eviction,
                    store_codec=store_codec,
                    store_shared=store_shared,
                    store_private=False if store_private is None and settings.has_keys else store_private,
                )
            running.append(llm)
            if llm.loaded.note:
                logger.info("%s", llm.loaded.note)
            for line in (told_device(str(llm.loaded.model.device)), told_store(llm.stats(), folder, llm.config.kept)):
                if line:
                    logger.info("%s", line)
            for one in llm.adapters.values():
                logger.info("%s", one)
            report("schemas")
            return build_app(llm, settings, first)

        where = f"inlay: serving {settings.served_names[0]} on {url(listener, tls=tls is not None)} (Ctrl-C ends)"

        def ready() -> None:
            lines.end()
            _ready(where)

        lines.report("the libraries")
        try:
            app = StartingApp(load, root_path, slow_client)
            Server(app, ready, tls).run([listener])
        finally:
            lines.end()
            gc.unfreeze()  # so that the end of the process finds what is to be taken apart
            for llm in running:
                llm.shutdown()
    return 0


def _one_model(name: str | None, option: str | None) -> str:
    """Return the model of MODEL or --model. Raises ParameterError if they differ."""
    if name is not None and option is not None and name != option:
        raise ParameterError(f"MODEL is {name} and --model is {option}; give one of them")
    given = option if name is None else name
    return "demo" if given is None else given


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """End the process at a signal with status 0, until the server handles signals.

    A model that is loading cannot be interrupted, and a regular exit would wait for its thread.
    """

    def end(number: int, _: object) -> None:
        print("inlay: stopped before it was ready", file=sys.stderr, flush=True)
        os._exit(0)

    if threading.current_thread() is not threading.main_thread():  # signals arrive only in the main thread
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _ready(where: str) -> None:
    gc.collect()
    gc.freeze()  # long-lived objects; a garbage collection over them would stop all threads, 0.2 s each time
    print(where, flush=True)
