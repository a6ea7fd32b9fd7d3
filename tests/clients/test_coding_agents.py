"""Claude Code and Codex as they are, in a session of two turns: a call of their shell, and the last word.

The answers of the model are written here. A grammar forces each, so the model still generates every token. The
programs come from npm: see ``make clients``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from inlay import AsyncLLM, SamplingParams
from inlay.types import RequestOutput
from tests.clients.site import PACKAGES, model_with_tools
from tests.server.conftest import Site, running

pytestmark = pytest.mark.slow

FOUND = PACKAGES / "agents" / "node_modules" / ".bin"
LAST_WORD = "The file is there now."
ASKED = "Write hello into made.txt."


def program(name: str) -> str:
    """The path of a program. Skips without it."""
    found = FOUND / name
    path = str(found) if found.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; run make clients")
    return path


class ScriptedLLM(AsyncLLM):
    """A model that calls a tool in its first answer, and says the last word once it has the result."""

    call = ""
    asked: list[Any]

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams | None = None, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        messages = prompt.get("messages") if isinstance(prompt, dict) else None
        if messages is not None and prompt.get("tools"):
            self.asked.append(prompt)
            answered = any(message["role"] == "tool" for message in messages)
            text = LAST_WORD if answered else self.call
            assert sampling_params is not None
            sampling_params = replace(sampling_params, structured_outputs={"choice": [text]})
        async for output in super().generate(prompt, sampling_params, **more):
            yield output


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, the bundled tokenizer, and a context for the prompts of these programs."""
    folder = model_with_tools(tmp_path_factory.mktemp("model"))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=65_536,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def scripted(directory: Path, call: str) -> Iterator[tuple[Site, ScriptedLLM]]:
    llm = ScriptedLLM(str(directory), kv_memory="256MiB", seed=0)
    llm.call, llm.asked = call, []
    with running(llm, served_names=("demo",), timeout_s=280.0) as site:
        yield site, llm
    llm.shutdown()


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a program in an empty home, and return its output."""
    home = folder / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_claude_code_calls_its_shell(directory: Path, tmp_path: Path) -> None:
    claude = program("claude")
    call = called("Bash", '{"command": "echo hello > made.txt", "description": "Write a file"}')
    with scripted(directory, call) as (site, llm):
        said = run(
            [claude, "-p", "--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", "Be brief.", "--", ASKED],
            tmp_path,
            ANTHROPIC_BASE_URL=site.base.removesuffix("/v1"),
            ANTHROPIC_API_KEY="any",
            ANTHROPIC_MODEL="demo",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert said.strip() == LAST_WORD
    assert (tmp_path / "made.txt").read_text() == "hello\n"
    first, second = llm.asked
    marked = [part for part in first["messages"][0]["content"] if "cache_control" in part]
    assert marked, "it marks its system prompt"
    assert [turn["role"] for turn in second["messages"]][-2:] == ["assistant", "tool"]


def test_codex_calls_its_shell(directory: Path, tmp_path: Path) -> None:
    codex = program("codex")
    home = tmp_path / "codex"
    home.mkdir()
    with scripted(directory, called("exec_command", '{"cmd": "echo hello > made.txt"}')) as (site, llm):
        (home / "config.toml").write_text(
            f'model = "demo"\nmodel_provider = "inlay"\n[model_providers.inlay]\nname = "inlay"\n'
            f'base_url = "{site.base}"\nwire_api = "responses"\nenv_key = "INLAY_API_KEY"\n'
        )
        command = [codex, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED]
        said = run(command, tmp_path, CODEX_HOME=str(home), INLAY_API_KEY="any")
    assert said.strip().endswith(LAST_WORD)
    assert (tmp_path / "made.txt").read_text() == "hello\n"
    assert len(llm.asked) == 2
