"""deploy/: what can be checked of images and services without running them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from inlay.cli.declared import known_settings
from inlay.cli.sources import values_of
from inlay.settings import SERVE, parse_bytes

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HADOLINT = Path(sys.executable).with_name("hadolint")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, continued lines joined."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    first = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    return found[first:]


def variables(stage: list[tuple[str, str]]) -> dict[str, str]:
    return dict(pair.split("=", 1) for word, rest in stage if word == "ENV" for pair in shlex.split(rest))


def test_every_copied_file_exists_and_is_in_the_context():
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    sources = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    own = [source for source in sources if not source.startswith(("--from", "/"))]
    assert own
    for source in own:
        assert (ROOT / source).exists(), source
        assert source.removeprefix("./") in kept, f"{source} is not in the context"


def test_build_context_has_every_package_file():
    """Files that pyproject.toml names, and the folder of CMakeLists.txt."""
    copied = " ".join(rest for word, rest in instructions() if word == "COPY")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (project["readme"], *project["license-files"], "CMakeLists.txt", "pyproject.toml", "src"):
        assert re.search(rf"(^|\s|/){re.escape(name)}(\s|$)", copied), name


def test_image_installs_existing_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert len(installed) == 2
    assert "https://download.pytorch.org/whl/cpu" in installed[0], "the default build of torch brings CUDA"
    (named,) = re.findall(r'"\.\[([\w,]+)\]"', installed[1])
    assert set(named.split(",")) <= extras.keys()
    assert all("--constraint constraints.txt" in command for command in installed)


def test_the_image_runs_without_root_and_compiler():
    stage = last_stage()
    words = [word for word, _ in stage]
    (user,) = (rest for word, rest in stage if word == "USER")
    assert user.isdigit(), "Kubernetes checks numbers alone"
    assert int(user) > 0
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert not any("apt-get" in rest for _, rest in stage)
    assert all(":" in rest for word, rest in instructions() if word == "FROM"), "a base image has no tag"


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is not installed")
def test_hadolint_accepts_the_dockerfiles():
    files = [DEPLOY / "Dockerfile", ROOT / "examples/cluster/Dockerfile"]
    checked = subprocess.run([HADOLINT, "--no-color", *files], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_variables_of_the_image_are_settings():
    known = {f"INLAY_{key}".upper() for key in known_settings(SERVE)} | {"INLAY_CACHE_ROOT"}
    found = {name for name in variables(last_stage()) if name.startswith("INLAY_")}
    assert found
    assert found <= known


@contextmanager
def answering(status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health_check_queries_readiness(status, healthy):
    (check,) = (rest for word, rest in last_stage() if word == "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    with answering(status) as port:
        environment = {**os.environ, "INLAY_PORT": str(port)}
        run = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, check=False)
    assert (run.returncode == 0) is healthy


def test_the_compose_file_fits_the_image_and_the_settings():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["inlay"]
    context = DEPLOY / service["build"]["context"]
    assert (context / service["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    volume, path = service["volumes"][0].split(":")
    assert volume in compose["volumes"]
    assert path == variables(last_stage())["INLAY_CACHE_ROOT"]
    own, there, mode = service["volumes"][1].split(":")
    assert (DEPLOY / own).is_file()
    assert (there, mode) == (service["command"][2], "ro")
    drain = values_of(SERVE, {}, DEPLOY / "inlay.toml")["drain"].value
    assert int(service["stop_grace_period"].removesuffix("s")) > drain


def test_settings_file_is_valid_for_a_server():
    found = values_of(SERVE, {}, DEPLOY / "inlay.toml")
    assert sum(one.origin.startswith(str(DEPLOY)) for one in found.values()) == 7


def unit() -> dict[str, str]:
    lines = (DEPLOY / "inlay.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_unit_gives_requests_time_to_finish():
    drain = values_of(SERVE, {}, DEPLOY / "inlay.toml")["drain"].value
    assert int(unit()["TimeoutStopSec"]) > drain
    assert unit()["ExecStart"].endswith("inlay serve --config /etc/inlay/inlay.toml")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    file = tmp_path / "inlay.service"
    text = (DEPLOY / "inlay.service").read_text()
    file.write_text(text.replace("/opt/inlay/bin/inlay", sys.executable).replace("=inlay\n", "=root\n"))
    checked = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert [line for line in checked.stderr.splitlines() if "inlay.service" in line] == []
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(DEPLOY / "inlay.service")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0, "its exposure is above 2.0"


def test_proxies_have_the_limits_of_the_server():
    found = values_of(SERVE, {}, DEPLOY / "inlay.toml")
    nginx, caddy = ((DEPLOY / name).read_text() for name in ("nginx.conf", "Caddyfile"))
    (megabytes,) = re.findall(r"client_max_body_size (\d+)m;", nginx)
    (mebibytes,) = re.findall(r"max_size (\d+)MiB", caddy)
    assert int(megabytes) * 2**20 == int(mebibytes) * 2**20 == parse_bytes("max_body", found["max_body"].value)
    (read,) = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    (head,) = re.findall(r"response_header_timeout (\d+)s", caddy)
    assert min(int(read), int(head)) > found["timeout"].value
    assert "proxy_buffering off;" in nginx


def test_dockerignore_excludes_no_needed_file():
    patterns = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:2] == "**"]
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    needed = [path for path in files if path.suffix != ".so" and path.parent.name != "__pycache__"]
    assert needed
    assert not [path for path in needed if any(fnmatch(f"/{path}", f"*/{pattern[3:]}") for pattern in patterns)]
