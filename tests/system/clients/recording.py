"""``python -m tests.system.clients.recording``: writes down what clients send, so that it can be sent without them.

A proxy stands between each client and a server. Of bodies that are alike but for their texts, one is kept.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.server.clients.site import CLIENTS, RECORDED, Client, model_with_tools, run, served
from tests.system.clients.lmcache_bench import LMCACHE, WORKLOADS, bench
from tests.system.clients.vocabulary import many_words


def kind(value: Any) -> Any:
    """The shape of a value: without its texts and numbers, and without repetitions in lists."""
    if isinstance(value, dict):
        return {key: one if key in ("role", "type") else kind(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(kind(one)) for one in value})
    return type(value).__name__


@contextmanager
def recording(base: str, bodies: list[dict[str, Any]]) -> Iterator[str]:
    """A proxy in front of a server; its base URL. bodies: gets each path and body that comes."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append({"path": self.path, "body": json.loads(data)})
            there = HTTPConnection(urlsplit(base).netloc, timeout=60)
            there.request("POST", self.path, data, {"Content-Type": "application/json"})
            answer = there.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.read())
            there.close()

        def log_message(self, *_: Any) -> None:
            """Log nothing: the requests are in the file."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}/v1"
        proxy.shutdown()


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, served(model_with_tools(Path(directory))) as base:
        for client in CLIENTS:
            if not client.installed:
                print(f"{client.name}: is not installed; run make clients")
                continue
            bodies: list[dict[str, Any]] = []
            with recording(base, bodies) as proxy:
                failed = {name for name, error in run(client, proxy).items() if error}
            keep(client, bodies)
            print(f"{client.name}: failed: {sorted(failed)}")
    if LMCACHE.installed:
        with tempfile.TemporaryDirectory() as directory:
            record_lmcache(Path(directory))


def record_lmcache(directory: Path) -> None:
    """Record the requests of its benchmarks, to a model with a large enough vocabulary."""
    model, bodies = many_words(directory / "model"), list[dict[str, Any]]()
    with served(model, name=str(model)) as base, recording(base, bodies) as proxy:
        for workload in WORKLOADS:
            done = bench(workload, proxy, str(model), directory)
            print(f"{workload}: {'failed' if done.returncode else 'ended'}")
    for one in bodies:
        one["body"]["model"] = "words"
    keep(LMCACHE, bodies)


def keep(client: Client, bodies: Sequence[dict[str, Any]]) -> None:
    """Write down bodies that came, one of each kind."""
    kept = {json.dumps(kind(one)): one for one in bodies}
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in kept.values())
    (RECORDED / f"{client.name}.json").write_text(f"[\n{lines}\n]\n")
    print(f"{client.name}: {len(kept)} of {len(bodies)} bodies")


if __name__ == "__main__":
    main()
