"""docs/internals/adding-a-family.md: its families answer as the stock models, and its tests exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from inlay import LLM, ParameterError
from inlay.models.families import FAMILIES, register
from inlay.models.family import Family
from inlay.models.shapes import bytes_tokenizer
from tests.conftest import CONFIGS
from tests.pages import DOCS, blocks, rows
from tests.raising import raises

PAGE = DOCS / "internals/adding-a-family.md"
FILES = [block for block in blocks(PAGE) if block.note == "wren.py"]


class WrenConfig(LlamaConfig):
    model_type = "wren"


class WrenForCausalLM(LlamaForCausalLM):
    config_class = WrenConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, path/to/wren, of a family that transformers knows and inlay does not."""
    AutoConfig.register("wren", WrenConfig, exist_ok=True)
    AutoModelForCausalLM.register(WrenConfig, WrenForCausalLM, exist_ok=True)
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    model = WrenForCausalLM(WrenConfig(**CONFIGS["llama"][1]))
    model.save_pretrained(folder / "path/to/wren")
    bytes_tokenizer().save_pretrained(folder / "path/to/wren")
    return folder


@pytest.fixture(params=FILES, ids=str)
def wren(request: pytest.FixtureRequest) -> Iterator[Family]:
    """The family that a file of the page makes, served for as long as a test runs."""
    names: dict[str, tuple[Family]] = {}
    exec(compile(request.param.text, str(request.param), "exec", dont_inherit=True), names)
    (family,) = names["SERVED"]
    register(family)
    yield family
    del FAMILIES["wren"]


def test_unknown_family_is_served_without_reuse(folder: Path) -> None:
    llm = LLM(str(folder / "path/to/wren"))
    assert "models of type 'wren' are served without reuse: inlay has not verified" in (llm.loaded.note or "")
    with raises("policy.unsupported", ParameterError, names="wren"):
        llm.generate(["Once"], reuse="exact")


@pytest.mark.usefixtures("wren")
def test_added_family_equals_the_stock_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (code,) = [block for block in blocks(PAGE) if block.language == "python" and not block.note]
    (shown,) = [block for block in blocks(PAGE) if block.language == "text"]
    exec(compile(code.text, str(code), "exec", dont_inherit=True), {})
    assert capsys.readouterr().out == shown.text


def test_every_step_of_a_family_has_a_row() -> None:
    steps = [name.strip("`") for name, _ in rows(PAGE, "step", "what a family defines there")]
    public = [name for name, value in vars(Family).items() if callable(value) and not name.startswith("_")]
    assert steps == public


@pytest.mark.long
def test_its_command_finds_the_tests() -> None:
    (command,) = [shlex.split(block.text) for block in blocks(PAGE) if block.language == "sh"]
    assert command[:3] == ["python", "-m", "pytest"]
    run = [sys.executable, *command[1:], "--collect-only", "-q"]
    done = subprocess.run(run, cwd=DOCS.parent, capture_output=True, text=True, check=True)
    for file in ("models/test_fused.py", "equivalence/test_exact.py", "engine/test_sharing.py"):
        assert f"tests/model/{file}" in done.stdout


def test_linked_files_exist() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert linked
    assert [name for name in linked if not (PAGE.parent / name).exists()] == []
