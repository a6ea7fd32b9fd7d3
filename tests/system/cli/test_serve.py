"""``inlay serve``: the process prints its address, answers, and stops on a signal; one sentence for each error."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from inlay.cli import main as command_line
from tests.server.server.conftest import UnixConnection

MODEL = ("random:tiny", "--dtype", "float32", "--kv-memory", "16MiB", "--port", "0")
LINE = r"inlay: serving (\S+) on http://127\.0\.0\.1:(\d+)/v1 \(Ctrl-C ends\)\n"


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A server takes the log of its process over; these tests start some in this one."""
    names = (None, "inlay", "uvicorn", "uvicorn.access", "uvicorn.error", "asyncio")
    named = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, logger.handlers[:], logger.disabled) for logger in named]
    yield
    for logger, level, handlers, disabled in before:
        logger.setLevel(level)
        logger.handlers, logger.disabled = handlers, disabled


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A server in a process of its own, its name of the model, and its port; killed at the end if it still runs."""
    command = [sys.executable, "-m", "inlay", "serve", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            said = process.stdout.readline()
            found = re.fullmatch(LINE, said)
            assert found, said + process.stderr.read()
            yield process, found[1], int(found[2])
        finally:
            process.kill()


def client(port: int) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)


def test_server_answers_and_stops_on_a_signal(tmp_path: Path):
    schema = tmp_path / "trip.xml"
    schema.write_text('<schema name="trip">Plan. <module name="miami">Miami.</module></schema>')
    options = ("--served-model-name", "mine", "--schema", str(schema), "--log-format", "json", "--drain", "20")
    with started(*MODEL, *options) as (process, name, port):
        assert name == "mine"
        one = client(port)
        prompt = {"schema": "trip", "content": [{"import": "miami"}, "?"]}
        said = one.chat.completions.create(model="mine", messages=[], extra_body={"prompt": prompt}, max_tokens=3)
        assert said.choices[0].finish_reason in ("stop", "length")
        long = {"prompt": "x", "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        slow = one.completions.create(model="mine", stream=True, **long)
        next(slow)
        process.send_signal(signal.SIGTERM)
        *_, last = slow
        assert last.choices[0].finish_reason == "length", "what is under way may end"
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
    lines = [json.loads(line) for line in err.splitlines()]
    assert any("random weights" in line["message"] for line in lines)
    assert {"/v1/chat/completions", "/v1/completions"} <= {line.get("path") for line in lines}
    assert "Traceback" not in err


@pytest.mark.long
def test_second_signal_ends_the_server_at_once():
    with started(*MODEL) as (process, _, port):
        endless = {"prompt": "x", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
        stream = client(port).completions.create(model="random:tiny", stream=True, **endless)
        next(stream)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="the server is stopping"):
            list(stream)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0
        assert time.monotonic() - began < 25, "what is under way may end within 30 seconds, if nobody insists"
        assert "Traceback" not in err


def over_socket(path: Path, method: str, at: str, body: object = None, *, key: str = "two") -> tuple[int, Any]:
    """The status and the value of an answer."""
    with closing(UnixConnection(path)) as connection:
        heads = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request(method, at, None if body is None else json.dumps(body), heads)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.long
def test_options_of_other_servers_are_accepted(tmp_path: Path):
    """Keys of the environment and of the command, a chat template, a length, a seed, a root path, a socket's file."""
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    path = tmp_path / "inlay.sock"
    options = ["--uds", str(path), "--api-key", "one", "--api-key", "two", "--root-path", "/llm", "--seed", "3"]
    options += ["--max-model-len", "64", "--chat-template", str(tmp_path / "chat.jinja")]
    command = [sys.executable, "-m", "inlay", "serve", *MODEL[:-2], *options]
    with subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout.readline() == f"inlay: serving random:tiny on unix:{path} (Ctrl-C ends)\n"
            assert over_socket(path, "GET", "/llm/v1/models", key="three")[0] == 401
            (model,) = over_socket(path, "GET", "/llm/v1/models")[1]["data"]
            assert (model["id"], model["max_model_len"]) == ("random:tiny", 64)
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            tokens = over_socket(path, "POST", "/tokenize", chat)[1]["tokens"]
            assert over_socket(path, "POST", "/detokenize", {"tokens": tokens})[1]["prompt"] == "<Hi>"
            run.send_signal(signal.SIGTERM)
            assert run.wait(20) == 0
        finally:
            run.kill()
    assert not path.exists()


LOADING = """
import sys, time
import inlay.client.base
from inlay.cli.main import main

def load(*_):
    print("loading", flush=True)
    time.sleep(60)

inlay.client.base.as_loaded = load
sys.exit(main(["serve", "random:tiny", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signal_during_loading_ends_the_server_at_once(number):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOADING], **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "inlay: stopped before it was ready\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "TAKEN"], "port TAKEN of 127.0.0.1 is in use, perhaps by another server; give another --port"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid' is not known here"),
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 can be reached from other machines, and without keys",
        ),
        (["--port", "70000"], "--port is 70000; it must be a number from 1 to 65535"),
        (["--reuse", "some"], "--reuse some is not a reuse policy. Use one of"),
        (["--reuse", "exact", "--max-reuse", "off"], "reuse is 'exact' and max_reuse is 'off'"),
        (["--slow-client", "nan"], "--slow-client is nan; it must be a number of seconds above 0"),
        (["--timeout", "-1"], "--timeout is -1.0; it must be"),
        (["--stream-interval", "0"], "--stream-interval is 0; it must be a whole number of at least 1"),
        (["--log-format", "xml"], "--log-format is 'xml'; use one of text, json"),
        (["--keys", "none.json"], "none.json"),
        (["--schema", "none.xml"], "none.xml"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-pass", "-1"], "--max-pass is -1.0; it must be a number of seconds above 0"),
        (["--tool-parser", "none"], "tool_parser is 'none'; use one of hermes"),
        (["--kv-memory", "much"], "--kv-memory is 'much'"),
        (["--api-key", ""], "the value of --api-key is empty; give it a value, or leave it out"),
        (["--api-key", "a b"], "an API key is empty, or has a space"),
        (["--kv-memory", "999TiB"], "kv_memory is '999TiB', and this machine has"),
        (["--store="], "the value of --store is empty"),
        (["--schema", " "], "the value of --schema is empty"),
        ([""], "the argument behind '0' is empty"),
        (["--chat-template", "none.jinja"], "--chat-template none.jinja cannot be read (No such file or directory)"),
        (["--max-model-len", "9999999"], "max_model_len is 9999999, and the model has"),
        (["--root-path", "llm/"], "root_path is 'llm/'; write it like '/llm'"),
        (["--uds", "inlay.sock"], "--uds is in place of --host and --port; give one or the other"),
        (["--ssl-keyfile", "key.pem"], "TLS needs a certificate; give --ssl-certfile"),
        (["--ssl-certfile", "none.pem"], "--ssl-certfile and --ssl-keyfile: cannot be used (no such file: none.pem)"),
    ],
)
def test_errors_are_one_sentence(capsys, tmp_path: Path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [port if argument == "TAKEN" else argument for argument in arguments]
        rest = [] if "--port" in given else ["--port", "0"]
        status = command_line.main(["serve", "random:tiny", "--kv-memory", "16MiB", *rest, *given])
        sentence = sentence.replace("TAKEN", port)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_missing_model_is_rejected(capsys):
    assert command_line.main(["serve", "none/at/all", "--port", "0"]) == 2
    assert "none/at/all" in capsys.readouterr().err
