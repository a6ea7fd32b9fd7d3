"""The life of a server process: open the socket, serve with Uvicorn, drain at a signal, and exit.

The socket is opened before the model is loaded, so that errors in its options are reported at once.

Requests are answered while the model loads: the process is alive, the page shows progress, and all else must wait. This
module imports nothing slow, so it answers before torch is imported.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from inlay.errors import ParameterError
from inlay.server.page_files import name_of, page_response
from inlay.server.threads import set_up_process

if TYPE_CHECKING:
    from inlay.server.service import Service


_RETRY_S = 1
_MESSAGES = "/v1/messages"  # whose clients expect Anthropic's form of errors


@dataclass
class Loading:
    """The progress of loading a model. One thread writes it, others read it.

    Args:
        what: the current step, as in "the server loads …".
        done: finished units of the step.
        total: all units of the step; 0 if they are not counted.
        began: the start, in monotonic seconds.
    """

    what: str = "its libraries"
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.monotonic)

    def report(self, what: str, done: int = 0, total: int = 0) -> None:
        self.what, self.done, self.total = what, done, total

    def __str__(self) -> str:
        counted = f", {self.done:,} of {self.total:,}" if self.total else ""
        seconds = time.monotonic() - self.began
        return f"the server loads {self.what}{counted} ({seconds:.0f} s so far); try again in a moment"


class StartingApp:
    """An ASGI application that is replaced by another one once that is loaded.

    Args:
        load: creates the application on its own thread, and reports its progress.
        root_path: see ServerSettings.
        slow_client_s: see ServerSettings.
        page: see ServerSettings.
    """

    def __init__(
        self,
        load: Callable[[Loading], FastAPI],
        root_path: str = "",
        slow_client_s: float = 30.0,
        *,
        page: bool = False,
    ) -> None:
        self.loading = Loading()
        self.slow_client_s = slow_client_s
        self._load = load
        self._root = root_path
        self._page = page
        self._app: ASGIApp | None = None

    async def loaded(self) -> FastAPI:
        """Load the application and return it. Raises the exception that loading raised.

        The end of the process does not wait for the thread, because a load cannot be interrupted.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[FastAPI] = loop.create_future()

        def run() -> None:
            try:
                app = self._load(self.loading)
            except BaseException as error:
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, app)

        threading.Thread(target=run, name="loader", daemon=True).start()
        return await future

    def become(self, app: ASGIApp) -> None:
        """Let another application answer from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # the loaded application is opened by the server
            await _lifespan(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        path = scope["path"].removeprefix(self._root)
        if self._page and scope["method"] in ("GET", "HEAD") and (name := name_of(path)) is not None:
            page = page_response(name, Headers(scope=scope).get("if-none-match"))
            if page is not None:
                return page
        if path == "/health":
            return Response(b'{"status":"alive"}', media_type="application/json")
        message = str(self.loading)
        body: dict[str, Any] = {
            "error": {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
        }
        if path.removeprefix(self._root).startswith(_MESSAGES):
            error = {"type": "overloaded_error", "message": message, "code": "not_ready", "param": None}
            body = {"type": "error", "error": {**error, "details": {"error_code": "not_ready"}}, "request_id": None}
        return Response(json.dumps(body), 503, {"Retry-After": str(_RETRY_S)}, media_type="application/json")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


_LAST_PORT = 65535
_LONGEST_MS = 2**31 - 1
_BACKLOG = 2048  # connections that the system queues while the model loads or the event loop is busy


def listen(host: str, port: int, *, network: bool) -> socket.socket:
    """Listen on a host and a port.

    Args:
        host: a name or an address of this machine.
        port: 0 for any free port.
        network: allow an address that other machines can reach.

    Raises:
        ParameterError: an unknown host, a port in use, or a reachable address without ``network``.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ParameterError(f"--port is {port}; it must be a number from 1 to {_LAST_PORT}, or 0 for any that is free")
    family, address = _address(host, port)
    if not network and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise ParameterError(
            f"--host {host} can be reached from other machines, and without keys everybody there may use the model; "
            "give --keys (see 'inlay keys add --help'), or --open-to-network if that is meant"
        )
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except PermissionError:
        raise ParameterError(f"--port {port} is not allowed for this user; take one from 1024 on") from None
    except OSError as error:
        raise ParameterError(_why_not(host, port, error)) from None


@contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix domain socket. Its file is removed at the end of the block.

    The modes of the file and its folder, and the umask, decide which users may connect. A socket file that a killed
    server left behind is replaced. Raises ParameterError.
    """
    where = f"--uds {path}"
    listener = socket.socket(socket.AF_UNIX)
    with closing(listener):
        try:
            if path.is_socket() and not _answers(path):
                path.unlink()
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what = "a server listens there already" if path.is_socket() else "there is a file of that name"
                raise ParameterError(f"{where}: {what}; give another path") from None
            reason = error.strerror or error
            raise ParameterError(f"{where} cannot be listened on: {reason}; check the path") from None
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with closing(socket.socket(socket.AF_UNIX)) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def tls_context(
    certfile: Path | None, keyfile: Path | None, ca_certs: Path | None = None, cert_reqs: int = 0
) -> ssl.SSLContext | None:
    """Return the TLS context of the server; None without a certificate.

    Args:
        certfile: the certificate chain, in PEM.
        keyfile: its private key; None if it is in the same file.
        ca_certs: the authorities that may have signed client certificates.
        cert_reqs: 0 asks clients for no certificate, 1 checks one if it is given, 2 requires one.

    Raises:
        ParameterError: a file is missing or cannot be used.
    """
    if certfile is None:
        if keyfile is not None or ca_certs is not None or cert_reqs:
            raise ParameterError("TLS needs a certificate; give --ssl-certfile")
        return None
    if cert_reqs not in (0, 1, 2):
        raise ParameterError(f"--ssl-cert-reqs is {cert_reqs}; use 0 (none), 1 (optional) or 2 (required)")
    if cert_reqs and ca_certs is None:
        raise ParameterError(
            f"--ssl-cert-reqs is {cert_reqs}, which needs certificate authorities; give --ssl-ca-certs"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _said_of("--ssl-certfile and --ssl-keyfile", certfile, keyfile):
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    if ca_certs is not None:
        with _said_of("--ssl-ca-certs", ca_certs):
            context.load_verify_locations(ca_certs)
    context.verify_mode = ssl.VerifyMode(cert_reqs)
    return context


def _no_password() -> str:
    """Refuse an encrypted key, because OpenSSL would ask for its password on a terminal."""
    raise ParameterError("--ssl-keyfile: the key is encrypted; give one without a password, that only you may read")


@contextmanager
def _said_of(options: str, *files: Path | None) -> Iterator[None]:
    """Turn errors of files into one sentence."""
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        missing = [str(file) for file in files if file is not None and not file.is_file()]
        reason = f"no such file: {missing[0]}" if missing else getattr(error, "reason", None) or error.strerror
        raise ParameterError(f"{options}: cannot be used ({reason}); check the files, which are PEM") from None


def url(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the base URL for clients. For a Unix domain socket, return its path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{shown}]:{port}/v1" if ":" in shown else f"{scheme}://{shown}:{port}/v1"


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the address of a host. It prefers IPv4, because most programs try that first."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ParameterError(f"--host {host!r} is not known here; give an address or a name of this machine") from None
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use, perhaps by another server; give another --port, or 0 for any"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; give one that is, or 0.0.0.0 for all of them"
    return f"--host {host} --port {port} cannot be listened on: {error.strerror or error}"


def drop_sleepers(listener: socket.socket, seconds: float) -> None:
    """Let the system close connections of clients that read nothing for this many seconds, if it can.

    A server cannot take back data that it has handed to the system, and its connection waits until that data is read.
    Linux also counts the time in which the client's window is closed (RFC 5482).
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, option, min(int(seconds * 1000), _LONGEST_MS))


class _CheckedHeads(h11.Connection):
    """h11's connection that refuses a request with two lengths of its body (RFC 9112, 6.1), or with a long head.

    A proxy that believes the other length could take the bytes after the body for a part of it, or the reverse. The
    text of one client would then become a request of another.

    Args:
        most: the bytes of a head. h11 itself counts only those of a head that is not complete yet.
    """

    #: The error of the last request; None if h11 refused it.
    refusal: str | None = None

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, most)
        self._most = most

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if isinstance(event, h11.Request):
            if {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
                self._refuse("The request has both Content-Length and Transfer-Encoding; send one of them.")
            if before - len(self.trailing_data[0]) > self._most:
                self._refuse(f"The request line and headers have more than {self._most:,} bytes; send fewer.")
        return event

    def _refuse(self, why: str) -> NoReturn:
        self.refusal = why
        raise h11.RemoteProtocolError(why)


_LONGEST_HEAD = 16 << 10  # bytes


class PromptHeads(H11Protocol):
    """Uvicorn's HTTP protocol with a time limit for the head of a request.

    The head must arrive within ``head_s`` seconds and give one body length. The time runs from the connection, and
    later from the first byte of a head. Between two requests, a connection may be idle for Uvicorn's
    ``timeout_keep_alive``. BodyMiddleware limits the body.
    """

    head_s = 20.0

    def __init__(self, config: uvicorn.Config, *args: Any, **others: Any) -> None:
        super().__init__(config, *args, **others)
        self.conn = _CheckedHeads(config.h11_max_incomplete_event_size or _LONGEST_HEAD)

    def send_400_response(self, msg: str) -> None:
        assert isinstance(self.conn, _CheckedHeads), "it was made above"
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its body is malformed, so the application is to send nothing more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refusal or msg)
        else:  # the response began before the whole body came
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_s, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if not waiting:
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(self.head_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)


_UVICORN = logging.getLogger("uvicorn.error")
_KEEP_ALIVE_S = 75  # longer than proxies keep idle connections, so that the proxies close them
_LAST_S = 3.0  # after a second signal: time to deliver errors to clients
_CLOSING_S = 2  # for connections to close after the last request


class Server(uvicorn.Server):
    """A Uvicorn server that drains requests at the first signal and aborts them at the second.

    Args:
        app: the application, or one that is still loading.
        ready: called once the model answers.
        tls: see ``tls_context``; None for plain connections.
    """

    def __init__(
        self, app: FastAPI | StartingApp, ready: Callable[[], None] = lambda: None, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=PromptHeads,
                ssl_context_factory=None if tls is None else lambda *_: tls,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                proxy_headers=False,  # nothing depends on the address of a client, so a header about it is not trusted
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self.fault: Exception | None = None
        self._starting = app if isinstance(app, StartingApp) else None
        self._service: Service | None = None
        if isinstance(app, StartingApp):
            self._slow_client_s = app.slow_client_s
        else:
            self._service = app.state.service
            self._slow_client_s = app.state.service.settings.slow_client_s
        self._ready = ready
        self._tasks: list[asyncio.Task[None]] = []
        self._signals = 0

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on open sockets until a signal. Raises the error that prevents the start."""
        set_up_process()
        for listener in sockets or ():
            drop_sleepers(listener, self._slow_client_s)
        super().run(sockets)
        if self.fault is not None:
            raise self.fault

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        if self._service is None:
            _UVICORN.setLevel(logging.WARNING)  # the log must not say that the server has started
        else:
            await self._service.open()  # before the lifespan, which could not report an error as one sentence
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tasks.append(asyncio.create_task(self._start()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Only a call to the event loop is safe here.

        While the model loads, there is nothing to drain and the load cannot be interrupted, so the process exits. At
        the second signal the process exits after a moment. It does not wait for the event loop or the engine, because
        code outside the interpreter cannot be interrupted.
        """
        self._signals += 1
        if self._service is None:
            print("inlay: stopped before it was ready", file=sys.stderr, flush=True)
            _leave()
        if self._signals == 2:
            end = threading.Timer(_LAST_S, _leave)
            end.daemon = True
            end.start()
        self.loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Start to stop. A second call stops at once. Call it on the event loop."""
        self._tasks.append(asyncio.create_task(self._stop()))

    async def _start(self) -> None:
        try:
            if self._service is None:
                self._service = await self._loaded()
            await self._service.warm_up()
        except Exception as error:  # a server that never becomes ready is useless
            self.fault = error
            self.should_exit = True
        else:
            self._ready()

    async def _loaded(self) -> Service:
        """Wait for the application to load, and let it answer requests from then on."""
        assert self._starting is not None, "where there is no service, one is being loaded"
        app = await self._starting.loaded()
        service: Service = app.state.service
        await service.open()
        _UVICORN.setLevel(logging.NOTSET)
        self._starting.become(app)
        return service

    async def _stop(self) -> None:
        if self._service is None:
            self.should_exit = True
            return
        first = not self._service.in_flight.stopping
        await self._service.stop()
        if first:
            self.should_exit = True


def _leave() -> None:
    """End the process like the end of its main thread, but without waiting for other threads."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
