"""Everything that the README shows is run: its commands, its Python, its PML."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from inlay.cli.main import main

ROOT = Path(__file__).parents[2]


def blocks(language: str, file: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)


COMMANDS = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
BENCH = [command for command in COMMANDS if " bench " in command]
EVAL = [command for command in COMMANDS if " eval " in command]
SERVE = [command for command in COMMANDS if command.startswith("inlay serve")]
INLAY = [command for command in COMMANDS if command.startswith("inlay ") and command not in BENCH + EVAL + SERVE]


def run(command: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    if words[0] == "inlay":
        words[:1] = [sys.executable, "-m", "inlay"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=3600, env=environment)


def test_every_readme_command_is_known():
    assert {"make demo", "make test"} < set(COMMANDS)
    assert set(COMMANDS) - set(INLAY) - set(BENCH) - set(EVAL) - set(SERVE) == {"make demo", "make test"}
    assert len(SERVE) == 1
    assert len(EVAL) == 1
    assert len(INLAY) >= 4
    assert len(BENCH) == 2


@pytest.mark.parametrize("command", INLAY)
def test_commands(command, capsys, monkeypatch):
    """In this process, which has loaded the libraries; the server below starts as a process of its own."""
    monkeypatch.chdir(ROOT)
    status = main(shlex.split(command)[1:])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out
    if "--json" in command.split() and " run " in command:
        assert json.loads(out)["cached_tokens"] > 0


def output_of_the_client_example(base: str) -> list[str]:
    code = blocks("python")[0].replace("http://127.0.0.1:8000/v1", base)
    assert base in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", SERVE)
def test_serve_answers_and_stops(command):
    words = [sys.executable, "-m", "inlay", *shlex.split(command)[1:], "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as server:
        try:
            (base,) = re.findall(r"http://\S+", server.stdout.readline().decode())
            client = openai.OpenAI(base_url=base, api_key="none")
            prompt = {"schema": "docs", "imports": ["bravel"], "text": "Who is the mayor of Bravel?"}
            answer = client.chat.completions.create(
                model="demo", messages=[], extra_body={"prompt": prompt}, temperature=0
            )
            assert answer.choices[0].message.content
            assert answer.usage.prompt_tokens
            first, second = output_of_the_client_example(base)
            assert "of" in first.split()
            cached, of = second.split()[-3::2]
            assert int(of) // 2 < int(cached) < int(of), "the documents, in another order"
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0, server.stderr.read().decode()


@pytest.mark.long
@pytest.mark.parametrize("command", BENCH)
def test_bench_commands_on_a_small_model(command):
    """The same command on a model and sizes that take a second; test_long_commands runs it as it stands."""
    command = re.sub(r"random:\S+", "random:tiny", re.sub(r"--cached \d+", "--cached 128", command))
    result = run(command + " --runs 1 --json")
    assert result.returncode == 0, result.stderr
    assert '"speedup"' in result.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("command", EVAL)
def test_eval_commands_on_few_questions(command):
    """The same command with a question a task; test_long_commands runs it as it stands."""
    result = run(re.sub(r"--questions \d+", "--questions 5", command) + " --json")
    assert result.returncode == 0, result.stderr
    assert '"exact_match"' in result.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("command", BENCH + EVAL)
def test_long_commands(command):
    result = run(command)
    assert result.returncode == 0, result.stderr


def test_make_demo_is_the_first_command_of_the_readme():
    """`make demo` installs and runs the command."""
    plan = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--quiet" not in (ROOT / "Makefile").read_text(), "pip says what it does"
    assert "Answering a prompt" in plan
    demo = next(line for line in plan.splitlines() if "inlay run" in line)
    assert demo.replace(".venv/bin/", "").split()[:2] == ["inlay", "run"]
    assert any(command.split() == demo.replace(".venv/bin/", "").split() for command in INLAY)


def test_readme_python_runs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, code = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert "cached_tokens=" in capsys.readouterr().out


def test_the_schema_is_the_example():
    (schema,) = blocks("xml")
    assert schema == (ROOT / "examples/docs/docs.xml").read_text()


def test_the_architecture_names_every_package():
    """Each package of src/inlay, or one of its files, is linked in docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text()
    for package in (ROOT / "src/inlay").iterdir():
        if (package / "__init__.py").is_file():
            assert f"](../{package.relative_to(ROOT)}" in text, package


def test_cpu_package_index_precedes_the_first_installation():
    """Without it pip brings gigabytes of CUDA to machines that have no GPU."""
    for page in ("README.md", "docs/tutorial/first-schema.md", "docs/internals/kernel.md"):
        before, found, _ = (ROOT / page).read_text().partition("pip install .")
        assert found
        assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in before, page
