"""``inlay serve`` with a store: the use of a marked document after a restart, and the server's report of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

DOCUMENT = "Bravel is a town. It was founded in 1687. The mayor of Bravel is Rosa Tilen. Bravel is known for its salt."


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[OpenAI, Path]]:
    """A client of a server in a process of its own, and the file of its log. The server ends in order."""
    log = folder / "log.txt"
    arguments = ["serve", "demo", "--port", "0", "--kv-memory", "64MiB", "--store", str(folder / "store"), *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "inlay", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            said = process.stdout.readline()
            assert "/v1" in said, log.read_text()
            url = said.split(" on ")[1].split(" ")[0]
            yield OpenAI(base_url=url, api_key="operator", max_retries=0), log
        finally:
            process.terminate()
            process.wait(30)


def cached(client: OpenAI) -> int:
    """Ask about the marked document, and return how many tokens of the prompt came from the cache."""
    part = {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}}
    content = [part, {"type": "text", "text": "Who is the mayor of Bravel?"}]
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=4
    )
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), True),
        (("--no-store-private",), False),
        (("--api-key", "operator"), False),
        (("--api-key", "operator", "--store-private"), True),
    ],
)
def test_marked_document_is_reused_after_a_restart(tmp_path: Path, options: tuple[str, ...], kept: bool):
    with server(tmp_path, *options) as (client, _):
        assert cached(client) == 0
    with server(tmp_path, *options) as (client, log):
        assert (cached(client) > 0) is kept
        (line,) = [line for line in log.read_text().splitlines() if "encoded modules are kept" in line]
        assert ("marked parts of messages are not kept" in line) is not kept
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files) is kept
    folders = {path.parent for path in files}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (*files, *folders))
