"""A test cluster on its own Ray Serve, started by ``inlay deploy``, and access to its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil
import yaml

import inlay

_START_S = 120.0
_STOP_S = 60.0
JSON = {"Content-Type": "application/json"}


@dataclass
class Deployed:
    """A running cluster.

    Attributes:
        port: Of the HTTP proxy.
        process: Of ``inlay deploy``.
    """

    port: int
    process: subprocess.Popen[str]

    def call(self, method: str, path: str, body: Any = None, timeout: float = 30) -> tuple[int, Any]:
        """Send a request; returns the status, and the JSON value or else the text of the answer."""
        data = None if body is None else json.dumps(body).encode()
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as connection:
            connection.request(method, path, data, JSON)
            response = connection.getresponse()
            text = response.read().decode()
            kind = response.getheader("content-type", "")
            return response.status, json.loads(text) if "json" in kind else text

    def ask(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.call("POST", "/v1/completions", body)

    def stream(self, prompt: Any, **fields: Any) -> Iterator[str]:
        """Yield the data of each event."""
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "stream": True, **fields}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body).encode(), JSON)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    def metric(self, name: str) -> float:
        _, text = self.call("GET", "/metrics")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)

    def processes(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas. ``deployment`` is "engine" or "ingress"."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if f"ServeReplica:inlay:{deployment}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wait(self, what: Callable[[], bool], timeout: float = 60) -> None:
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            with suppress(OSError, HTTPException, ValueError):
                if what():
                    return
            time.sleep(0.1)
        raise AssertionError(f"it has not come within {timeout:g} s")

    def ready(self) -> bool:
        return self.call("GET", "/ready")[0] == 200


@contextmanager
def deployed(folder: Path, program: Sequence[str] = ("-m", "inlay"), **settings: Any) -> Iterator[Deployed]:
    """Run a cluster of the demo model within a block.

    Args:
        program: Arguments of Python that run the command ``inlay``.
        settings: Entries of the cluster's configuration file.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    said = {
        "model": "demo",
        "engine": {"kv_memory": "32MiB", "max_num_seqs": 16, "store": "off", "seed": 0},
        "replicas": {"count": 2, "cpus": 0.3, "drain_s": 5.0},
        "ingress": {"cpus": 0.2, "drain_s": 5.0},
        "schemas": {"folder": str(folder / "schemas")},
        "http": {"port": port},
        **settings,
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(said))
    # Ray's processes must find the modules that this process finds.
    paths = [str(Path(inlay.__file__).parent.parent), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, *program, "deploy", str(path)]
    log = (folder / "log.txt").open("w")
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env) as process:
        children: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "inlay: serving demo" in line, (folder / "log.txt").read_text()[-4000:]
            cluster = Deployed(port, process)
            cluster.wait(cluster.ready, _START_S)
            yield cluster
        finally:
            with suppress(psutil.Error):
                children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            for child in psutil.wait_procs(children, 5)[1]:
                with suppress(psutil.Error):
                    child.kill()
