"""How many threads compute, and how they wait: both are settled before torch loads OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from inlay.cli.options import Threads
from tests.commands import run
from tests.pages import DOCS

EXAMPLE = (str(DOCS.parent / "examples/docs/docs.xml"), "--prompt", str(DOCS.parent / "examples/docs/prompt.xml"))


def settings_of_openmp(*options: str, **environment: str) -> dict[str, str]:
    """The settings that OpenMP prints when ``inlay run`` has loaded it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-m", "inlay", "run", *EXAMPLE, "--max-tokens", "1", "--json", *options]
    environment = {**inherited, "OMP_DISPLAY_ENV": "TRUE", **environment}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stderr
    pairs = (line.partition(" = ") for line in said.splitlines() if " = " in line)
    return {name.split()[-1]: value.strip("'") for name, _, value in pairs}


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other runtimes of OpenMP say this in other words")
@pytest.mark.parametrize(
    ("options", "environment", "policy", "threads"),
    [
        (("--threads", "3"), {}, "PASSIVE", "3"),
        (("--threads", "3"), {"OMP_NUM_THREADS": "2"}, "PASSIVE", "3"),
        ((), {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "2"}, "ACTIVE", "2"),
    ],
)
def test_openmp_gets_the_requested_threads_and_wait_policy(options, environment, policy, threads):
    """Threads that spin starve those that compute where there are more of them than cores. The user's word counts."""
    found = settings_of_openmp(*options, **environment)
    assert (found["OMP_WAIT_POLICY"], found["OMP_NUM_THREADS"]) == (policy, threads)


@pytest.mark.parametrize(
    "command",
    [
        ("serve",),
        ("run",),
        ("batch",),
        ("check",),
        ("reproduce",),
        ("simulate",),
        ("cache", "warm"),
        ("eval", "modular-qa"),
        ("eval", "longbench"),
        *(("bench", name) for name in ("ttft", "encode", "decode", "throughput", "attention")),
    ],
)
def test_every_computing_command_has_the_threads_option(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert "--threads" in run(capsys, *command, "--help")[1]


@pytest.mark.parametrize("number", ["0", "-1", "1025"])
def test_invalid_thread_number_is_rejected(capsys, number):
    said = run(capsys, "serve", "random:tiny", "--threads", number)
    assert said == (2, "", f"inlay: --threads is {number}; it must be a number from 1 to 1,024\n")


def test_threads_are_set_after_torch_was_loaded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    try:
        Threads.__metadata__[0].callback(before + 1)  # type: ignore[attr-defined]
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (before + 1, str(before + 1))
    finally:
        torch.set_num_threads(before)
