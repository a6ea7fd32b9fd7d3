"""Coding agents as they are, in sessions of six turns or more: files written, read and edited, commands, a last word.

The answers of the model are written here. A grammar forces each, so the model still generates every token. The
programs come from npm and PyPI: see ``make clients``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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
from tests.server.clients.site import PACKAGES, model_with_tools
from tests.server.server.conftest import Site, running

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
    """A model that gives the answers of a script, one after the other.

    A conversation with tools gets the answer after its results. Without tools, each request gets the next answer.
    """

    script: list[str]
    with_tools = True
    asked: list[Any]
    answered: list[RequestOutput]

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams | None = None, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        messages = prompt.get("messages") if isinstance(prompt, dict) else prompt
        scripted = isinstance(messages, list | tuple) and (
            bool(isinstance(prompt, dict) and prompt.get("tools")) or not self.with_tools
        )
        if scripted:
            done = sum(message["role"] == "tool" for message in messages) if self.with_tools else len(self.asked)
            self.asked.append(prompt)
            text = self.script[min(done, len(self.script) - 1)]
            assert sampling_params is not None
            sampling_params = replace(sampling_params, structured_outputs={"choice": [text]})
        latest = None
        async for output in super().generate(prompt, sampling_params, **more):
            latest = output
            yield output
        if scripted and latest is not None:
            self.answered.append(latest)


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
def scripted(directory: Path, script: list[str], *, with_tools: bool = True) -> Iterator[tuple[Site, ScriptedLLM]]:
    llm = ScriptedLLM(str(directory), kv_memory="256MiB", seed=0)
    llm.script, llm.with_tools, llm.asked, llm.answered = script, with_tools, [], []
    with running(llm, served_names=("demo",), timeout_s=280.0) as site:
        yield site, llm
    llm.shutdown()


def run(command: list[str], folder: Path, *, typed: str | None = None, **environment: str) -> str:
    """Run a program in an empty home, and return its output. ``typed`` is its standard input."""
    home = folder / "home"
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "HOME": str(home), **environment},
        input=typed or "",
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def called(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def check_turns(llm: ScriptedLLM, turns: int) -> None:
    """Check that a session had this many turns, and that each later one found its history in the cache."""
    assert len(llm.answered) >= turns
    for number, prompt in enumerate(llm.asked[:turns]):
        assert sum(message["role"] == "tool" for message in prompt["messages"]) == number
    shares = [output.usage.cached_tokens / output.usage.prompt_tokens for output in llm.answered[1:turns]]
    assert min(shares) > 0.5, shares


def test_claude_code_writes_reads_and_edits_a_file(directory: Path, tmp_path: Path) -> None:
    claude, file = program("claude"), str(tmp_path / "made.txt")
    script = [
        called("Write", file_path=file, content="hello\n"),
        called("Read", file_path=file),
        called("Edit", file_path=file, old_string="hello", new_string="hello there"),
        called("Bash", command="cat made.txt", description="Show the file"),
        called("Bash", command="echo more >> made.txt", description="Add a line"),
        LAST_WORD,
    ]
    tools = "Bash,Read,Write,Edit"
    with scripted(directory, script) as (site, llm):
        said = run(
            [claude, "-p", "--tools", tools, "--allowedTools", tools, "--system-prompt", "Be brief.", "--", ASKED],
            tmp_path,
            ANTHROPIC_BASE_URL=site.base.removesuffix("/v1"),
            ANTHROPIC_API_KEY="any",
            ANTHROPIC_MODEL="demo",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    assert said.strip() == LAST_WORD
    assert (tmp_path / "made.txt").read_text() == "hello there\nmore\n"
    check_turns(llm, len(script))
    marked = [part for part in llm.asked[0]["messages"][0]["content"] if "cache_control" in part]
    assert marked, "it marks its system prompt"


def test_codex_works_in_its_shell(directory: Path, tmp_path: Path) -> None:
    codex = program("codex")
    home = tmp_path / "codex"
    home.mkdir()
    commands = ["echo hello > made.txt", "cat made.txt", "echo there >> made.txt", "wc -l made.txt", "ls"]
    script = [*(called("exec_command", cmd=command) for command in commands), LAST_WORD]
    with scripted(directory, script) as (site, llm):
        (home / "config.toml").write_text(
            f'model = "demo"\nmodel_provider = "inlay"\n[model_providers.inlay]\nname = "inlay"\n'
            f'base_url = "{site.base}"\nwire_api = "responses"\nenv_key = "INLAY_API_KEY"\n'
        )
        command = [codex, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", ASKED]
        said = run(command, tmp_path, CODEX_HOME=str(home), INLAY_API_KEY="any")
    assert said.strip().endswith(LAST_WORD)
    assert (tmp_path / "made.txt").read_text() == "hello\nthere\n"
    check_turns(llm, len(script))


def test_opencode_writes_reads_and_edits_a_file(directory: Path, tmp_path: Path) -> None:
    opencode, file = program("opencode"), str(tmp_path / "made.txt")
    script = [
        called("write", filePath=file, content="hello\n"),
        called("read", filePath=file),
        called("edit", filePath=file, oldString="hello", newString="hello there"),
        called("bash", command="cat made.txt", description="Show the file"),
        called("bash", command="echo more >> made.txt", description="Add a line"),
        LAST_WORD,
    ]
    with scripted(directory, script) as (site, llm):
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "inlay",
            "options": {"baseURL": site.base, "apiKey": "any"},
            "models": {"demo": {"name": "demo", "tool_call": True, "limit": {"context": 65_536, "output": 2_048}}},
        }
        settings = {"provider": {"inlay": provider}, "model": "inlay/demo", "permission": "allow", "autoupdate": False}
        (tmp_path / "opencode.json").write_text(json.dumps(settings))
        said = run([opencode, "run", "--model", "inlay/demo", ASKED], tmp_path, OPENCODE_DISABLE_LSP_DOWNLOAD="1")
    assert LAST_WORD in said
    assert (tmp_path / "made.txt").read_text() == "hello there\nmore\n"
    check_turns(llm, len(script))


def test_aider_edits_a_file_in_six_turns(directory: Path, tmp_path: Path) -> None:
    packages = PACKAGES / "aider"
    if not (packages / "aider").is_dir():
        pytest.skip("aider is not installed; run make clients")
    contents = ["hello\n" + "more\n" * number for number in range(6)]
    script = [f"I write it.\n\nmade.txt\n```\n{content}```\n" for content in contents]
    with scripted(directory, script, with_tools=False) as (site, llm):
        command = [sys.executable, "-m", "aider", "--model", "openai/demo", "--edit-format", "whole", "--no-git"]
        command += ["--yes-always", "--no-fancy-input", "--no-show-model-warnings", "--no-check-update", "--no-pretty"]
        command += ["--analytics-disable", "--map-tokens", "0", "--no-stream", "--no-show-release-notes", "made.txt"]
        run(
            command,
            tmp_path,
            typed=f"{ASKED}\n" + "Add a line to made.txt.\n" * 5,
            PYTHONPATH=str(packages),
            OPENAI_API_BASE=site.base,
            OPENAI_API_KEY="any",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
    assert (tmp_path / "made.txt").read_text() == contents[-1]
    assert len(llm.answered) >= 6
