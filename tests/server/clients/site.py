"""The bundled model with a chat template that shows tools, and the directories of the clients' packages.

Clients require conflicting versions of the same packages, so each has its own directory, made by ``make clients``.
Each program runs by itself with that directory first on its path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inlay.models.load import MODEL_DIRECTORY

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
RECORDED = HERE / "recorded"
PACKAGES = Path(os.environ.get("INLAY_CLIENTS", HERE.parents[1] / "build" / "clients"))
_LINE = r"inlay: serving .+ on (https?://127\.0\.0\.1:\d+/v1) \(Ctrl-C ends\)\n"


@dataclass(frozen=True)
class Client:
    """One client: the name of its program and of its directory, and the packages that Python imports from it."""

    name: str
    module: str

    @property
    def path(self) -> Path | None:
        """The directory of its packages; None where they are with Python's own, or nowhere."""
        directory = PACKAGES / self.name
        return directory if (directory / self.module).is_dir() else None

    @property
    def installed(self) -> bool:
        return self.path is not None or importlib.util.find_spec(self.module) is not None


CLIENTS = (
    Client("openai", "openai"),
    Client("litellm", "litellm"),
    Client("langchain-openai", "langchain_openai"),
    Client("langchain-anthropic", "langchain_anthropic"),
    Client("instructor", "instructor"),
    Client("pydantic-ai", "pydantic_ai"),
    Client("openai-agents", "agents"),
)


def model_with_tools(directory: Path) -> Path:
    """The bundled model in a directory, with another chat template."""
    shutil.copytree(MODEL_DIRECTORY, directory, dirs_exist_ok=True)
    shutil.copyfile(HERE / "tools.jinja", directory / "chat_template.jinja")
    return directory


def self_signed(folder: Path, name: str = "server", *options: str) -> Path:
    """A certificate for this machine that signs itself, in PEM; its key is beside it. Skips where no openssl is."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", *(options or ("-nodes",))]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / f"{name}.pem"


@contextmanager
def served(directory: Path, name: str = "demo", *options: str) -> Iterator[str]:
    """``inlay serve`` of a model, under a name, in a process of its own; its base URL. options: more of the command."""
    command = [sys.executable, "-m", "inlay", "serve", str(directory), "--served-model-name", name, "--port", "0"]
    command += options
    with (directory / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(_LINE, said)
            assert found, said + (directory / "serve.log").read_text()
            yield found[1]
        finally:
            process.kill()
            process.communicate()


def run(client: Client, base: str, trusted: Path | None = None) -> dict[str, str | None]:
    """Run a client's program. Returns the result of each scenario by name: the end of a traceback, or None.

    trusted: the certificate of the server's signer, in PEM, if the connections use TLS.
    """
    environment = dict(os.environ)
    if trusted is not None:
        environment["SSL_CERT_FILE"] = str(trusted)
    if client.path is not None:
        environment["PYTHONPATH"] = str(client.path)
    program = PROGRAMS / f"{client.module}_client.py"
    done = subprocess.run(
        [sys.executable, str(program), base], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["scenario"]: line["error"] for line in lines}
