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
from typing import TYPE_CHECKING, Annotated

import typer

from inlay.cli.options import announce_hub, told_device, told_store
from inlay.cli.output import LoadingLines
from inlay.cli.settings import Options, with_settings
from inlay.errors import ParameterError
from inlay.settings import SERVE

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inlay.client.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


@with_settings(SERVE)
def serve(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A directory, a hub name, random:<shape>, or demo; or as --model."),
    ] = None,
    *,
    options: Options,
) -> int:
    """Serve a model over HTTP, with OpenAI's and Anthropic's APIs.

    When the model answers, one line on stdout has the address. The log goes to stderr. After Ctrl-C or SIGTERM, the
    server waits for running requests; a second signal ends them.
    """
    if sys.stderr.isatty():
        print("inlay: loading the server", file=sys.stderr, flush=True)  # the log is not set up yet
    from inlay.server.run import listen, listen_unix, tls_context, url

    model = announce_hub(_one_model(name, options))
    if options["embedding_model"] is not None:
        announce_hub(options["embedding_model"])
    # Check everything before the model, which may take minutes to load.
    options.check()
    tls = tls_context(*(options[f"ssl_{name}"] for name in ("certfile", "keyfile", "ca_certs", "cert_reqs")))
    uds = options["uds"]
    if uds is not None and any(options.flag(key) is not None for key in ("host", "port")):
        raise ParameterError("--uds is in place of --host and --port; give one or the other")
    network = bool(options["keys"] or options["api_key"] or options["open_to_network"])
    listening = listen_unix(uds) if uds is not None else listen(options["host"], options["port"], network=network)
    with listening as listener, _stopped_at_once():
        from inlay.models.location import served_names
        from inlay.server.settings import ServerSettings
        from inlay.server.tenants import Tenants

        names = served_names(model, options["served_model_name"])
        settings = ServerSettings(
            **options.fields_of(ServerSettings) | {"served_names": names, "reuse": options.policy}
        )
        engine = options.llm_settings(model, *names)
        if engine["store_private"] is None and settings.has_keys:
            engine["store_private"] = False
        if settings.keys_file is not None:
            Tenants.from_file(settings.keys_file)
        from inlay.cli.pml_files import schema_file

        first = [schema_file(file) for file in options["schema"] or []]
        from inlay.server.logs import configure
        from inlay.server.run import Loading, Server, StartingApp

        configure(format=settings.log_format, level=settings.log_level)
        lines = LoadingLines(logger.info, terminal=sys.stderr.isatty())
        running: list[AsyncLLM] = []

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
                llm = AsyncLLM(model, **engine)
            running.append(llm)
            if llm.loaded.note:
                logger.info("%s", llm.loaded.note)
            for line in (
                told_device(str(llm.loaded.model.device)),
                told_store(llm.stats(), engine["store"], llm.config.kept),
            ):
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
            app = StartingApp(load, settings.root_path, settings.slow_client_s, page=settings.page)
            Server(app, ready, tls).run([listener])
        finally:
            lines.end()
            gc.unfreeze()  # so that the end of the process finds what is to be taken apart
            for llm in running:
                llm.shutdown()
    return 0


def _one_model(name: str | None, options: Options) -> str:
    """Return the model of MODEL or --model. Raises ParameterError if they differ."""
    option = options.flag("model")
    if name is not None and option is not None and name != option:
        raise ParameterError(f"MODEL is {name} and --model is {option}; give one of them")
    return str(options["model"]) if name is None else name


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
