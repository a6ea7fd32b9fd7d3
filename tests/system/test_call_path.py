"""A call runs through few files, so that a reader can follow it. The lists are in docs/architecture.md."""

from __future__ import annotations

import pytest

from tests.call_path import chat, generate

#: The most files of each call. Lower them when files were merged; raise them only with a reason.
MOST_OF_GENERATE, MOST_OF_CHAT = 74, 99


@pytest.mark.long
def test_generate_with_recomputed_tokens_runs_through_few_files() -> None:
    files = generate()
    assert {"client/llm.py", "engine/core.py", "kv/index.py", "prompt/composed.py"} <= set(files)
    assert len(files) <= MOST_OF_GENERATE, files


@pytest.mark.long
def test_an_http_chat_runs_through_few_files() -> None:
    files = chat()
    assert {"server/completions.py", "api/openai/bodies.py", "engine/core.py", "kv/index.py"} <= set(files)
    assert len(files) <= MOST_OF_CHAT, files
