"""The components for LangChain, LlamaIndex and Haystack, and the example with FAISS, against a server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from inlay.retrieval import chunks
from tests.server.clients.site import PACKAGES, PROGRAMS, model_with_tools, served

pytestmark = pytest.mark.slow

LIBRARIES = {"langchain": "langchain_core", "llama_index": "llama_index", "haystack": "haystack"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model_with_tools(tmp_path_factory.mktemp("model"))) as url:
        yield url


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_component_prefers_stored_documents_within_epsilon(base: str, library: str) -> None:
    folder = PACKAGES / "retrieval"
    if not (folder / LIBRARIES[library]).is_dir():
        pytest.skip(f"{library} is not installed; run make clients")
    environment = dict(os.environ) | {"PYTHONPATH": str(folder)}
    program = [sys.executable, str(PROGRAMS / f"retrieval_{library}.py"), base]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


EXAMPLE = Path(__file__).parents[3] / "examples" / "retrieval"


def ask(base: str, *arguments: str) -> str:
    """Run the example with the vector store. Returns its output."""
    folder = PACKAGES / "faiss"
    if not (folder / "faiss").is_dir():
        pytest.skip("faiss-cpu is not installed; run make clients")
    environment = dict(os.environ) | {"PYTHONPATH": str(folder)}
    program = [sys.executable, str(EXAMPLE / "ask.py"), "--url", base, *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def computed(output: str) -> list[int]:
    """The computed prompt tokens of each answer."""
    return [int(count) for count in re.findall(r"tokens cached, (\d+) computed", output)]


def test_the_commands_of_the_examples_readme(base: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    first, second = (
        ask(base, "--index", str(tmp_path), *shlex.split(line.removeprefix("python examples/retrieval/ask.py")))
        for line in block.splitlines()
    )
    assert re.match(r"(\d+) chunks, \1 embedded, 0 removed\n", first)
    assert "Rosa Tilen" in first
    assert re.match(r"\d+ chunks, 0 embedded, 0 removed\n", second)
    assert "Rolan Fader" in second


def test_an_edit_embeds_and_computes_changed_chunks_only(base: str, tmp_path: Path) -> None:
    evict = urllib.request.Request(f"{base}/cache/segments", method="DELETE")  # of earlier tests
    urllib.request.urlopen(evict, timeout=60).close()
    folder, index = tmp_path / "documents", tmp_path / "index"
    shutil.copytree(EXAMPLE / "documents", folder)
    options = ("--folder", str(folder), "--index", str(index), "--most", "9")  # all chunks are in each prompt
    before = ask(base, *options, "Who sells the chair?", "Who sells the lamp?")
    whole, again = computed(before)
    assert again < whole / 3  # no chunk is computed again
    text = (folder / "ships.txt").read_text()
    (folder / "ships.txt").write_text(text.replace("Tomas Garin", "Lena Moravi"))
    after = ask(base, *options, "Who sells the gate?", "Who sells the ship?")
    assert re.match(r"\d+ chunks, 1 embedded, 1 removed\n", after)
    edited, own = computed(after)
    longest = max(map(len, chunks(text, least=130, most=400)))  # characters, so more than its tokens
    assert own < edited < own + longest
    assert edited < whole / 2
