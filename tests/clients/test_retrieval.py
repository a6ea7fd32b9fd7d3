"""The components for LangChain, LlamaIndex and Haystack, in pipelines of these libraries, against a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.clients.site import PACKAGES, PROGRAMS, model_with_tools, served

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
