"""``inlay batch``: killed and resumed, interrupted, and one sentence for each error."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from inlay.models.load import MODEL_DIRECTORY
from inlay.models.location import public_name
from tests import commands
from tests.system.batch.helpers import line, read, texts, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    return commands.run(capsys, "batch", *arguments)


def test_model_name_equals_the_servers_and_retry_fixes_a_wrong_name(capsys):
    """Of a folder its last name; a name that is given later answers what failed without it."""
    folder = str(MODEL_DIRECTORY)
    rows = [line("a", prompt="The", model=public_name(folder)), line("b", prompt="The", model=folder)]
    write(Path("in"), [*rows, line("c", prompt="The", model="gpt-4o"), line("d", prompt="The")])
    options = ("in", "out", "--model", folder, "--kv-memory", "64MiB")
    assert run(capsys, *options)[0] == 1
    rows = {row["custom_id"]: row["response"] for row in read(Path("out"))}
    assert rows["d"]["body"]["model"] == public_name(folder)
    assert {name: row["status_code"] for name, row in rows.items()} == {"a": 200, "b": 200, "c": 404, "d": 200}
    named = (*options, "--served-model-name", "gpt-4o")
    status, _, err = run(capsys, *named)
    assert (status, "--retry-failed answers them again" in err) == (1, True)
    assert run(capsys, *named, "--retry-failed")[0] == 0
    assert len(texts(Path("out"))) == 4


def test_a_batch_of_the_bundled_model(capsys):
    write(Path("in"), [line("a", prompt="The ferry"), line("b", prompt="The ferry leaves", model="demo"), "nonsense"])
    status, out, err = run(capsys, "in", "out", "--kv-memory", "64MiB")
    assert (status, len(out.splitlines())) == (1, 1)
    report = json.loads(out)
    assert report["requests"] == 3
    assert (report["answered"], report["failed"], report["done_before"]) == (2, 1, 0)
    assert (report["model"], report["output"]) == ("demo", "out")
    assert report["prompt_tokens"] > report["cached_tokens"] > 0
    assert report["cached_share"] == round(report["cached_tokens"] / report["prompt_tokens"], 4)
    assert "Traceback" not in err
    assert run(capsys, "in", "out")[0] == 1  # nothing to do, and a line is still wrong
    rows = read(Path("out"))
    Path("out").write_text("".join(json.dumps(row) + "\n" for row in rows if row["custom_id"]))
    write(Path("in"), [line("c", prompt="The ferry")])
    status, out, _ = run(capsys, "in", "other", "--default-max-tokens", "3")
    assert (status, json.loads(out)["failed"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none", "out"], "none: no such file; check the path"),
        (["in", "in"], "in: is the input itself; give the output another name"),
        (["in", "out", "--model", "none/at/all"], "none/at/all"),
        (["in", "out", "--reuse", "some"], "--reuse some is not a reuse policy. Use one of"),
        (["in", "out", "--kv-memory", "much"], "--kv-memory is 'much'"),
        (
            ["in", "out", "--default-max-tokens", "0"],
            "--default-max-tokens is 0; it must be a whole number",
        ),
        (["in", "out", "--schema", "s.xml", "--schema", "s.xml"], "s.xml: its schema is named 's' as is that of s.xml"),
        (["in", "out", "--schema", "none.xml"], "none.xml"),
        (
            ["twice", "out"],
            "twice:2: the custom_id 'a' is that of line 1 as well; give every request its own custom_id",
        ),
        (["in"], "Missing argument 'OUTPUT'"),
    ],
)
def test_errors_are_one_sentence(capsys, arguments, sentence: str):
    write(Path("in"), [line("a", prompt="x")])
    write(Path("twice"), [line("a", prompt="x"), line("a", prompt="y")])
    Path("s.xml").write_text('<schema name="s">Text.</schema>')
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert not Path("out").exists()
    assert not Path("out.state").exists()


MODEL = ("--model", "random:tiny", "--dtype", "float32", "--kv-memory", "16MiB")


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """A batch in a process of its own, and a function that returns its terminal output after the end."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150", "TERM": "xterm"}
    command = [sys.executable, "-m", "inlay", "batch", *arguments, *MODEL]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown: list[bytes] = []
        reader = threading.Thread(target=_read_all, args=(ours, shown))
        reader.start()

        def ended() -> str:
            process.wait(timeout=60)
            reader.join()
            return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", b"".join(shown)).decode()

        try:
            yield process, ended
        finally:
            process.kill()
            ended()
            os.close(ours)


def _read_all(file: int, into: list[bytes]) -> None:
    with suppress(OSError):  # the other end is closed
        while part := os.read(file, 65536):
            into.append(part)


def wait_for_lines(process: subprocess.Popen[bytes], path: Path, number: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert process.poll() is None
        time.sleep(0.002)


@pytest.mark.long
def test_killed_and_interrupted_batch_is_resumed(folder: Path, capsys):
    out = folder / "out"
    write(folder / "in", [line(f"r{n}", prompt=f"Request {n % 7} of {n}: ", max_tokens=8) for n in range(960)])
    with started("in", "out", "--max-num-seqs", "2") as (process, ended):
        wait_for_lines(process, out, 12)
        process.kill()
        ended()
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # as a kill in the middle of a line leaves it
    killed = out.read_bytes().count(b"\n")
    with started("in", "out", "--max-num-seqs", "1") as (process, ended):
        wait_for_lines(process, out, killed + 12)
        process.send_signal(signal.SIGINT)
        shown = ended()
        assert process.returncode == 130
    assert shown.rstrip().endswith("inlay: interrupted; the same command goes on from here")
    assert "Traceback" not in shown
    assert re.search(r"answering .*/960 requests, [\d,]+ tokens/s, \d+% cached", shown), shown[-500:]
    done = len(texts(out))  # every line is whole
    assert killed + 12 <= done < 960

    status, printed, _ = run(capsys, "in", "out", *MODEL)
    report = json.loads(printed)
    assert (status, report["done_before"], report["answered"], report["failed"]) == (0, done, 960, 0)
    assert run(capsys, "in", "whole", *MODEL)[0] == 0
    taken_up, whole = texts(out), texts(folder / "whole")
    assert len(read(out)) == len(taken_up) == 960
    # only a near tie of two tokens can depend on the other requests
    assert sum(taken_up[name] != whole[name] for name in whole) <= 2
