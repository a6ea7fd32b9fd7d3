"""A collector of traces that counts what arrives and keeps nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_REQUEST_SPAN = b"llm_request"  # see inlay.server.traces


@dataclass
class Collector:
    """What a collector received.

    Attributes:
        endpoint: Its address, for ``--otlp-traces-endpoint``.
        requests: Spans of whole requests.
        size: Bytes of all spans.
    """

    endpoint: str
    requests: int = 0
    size: int = 0


@contextmanager
def collecting() -> Iterator[Collector]:
    """Receive traces by OTLP over HTTP, on a free port, within a block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.requests += body.count(_REQUEST_SPAN)
            collector.size += len(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
