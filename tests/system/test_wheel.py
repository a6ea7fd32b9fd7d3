"""A wheel, installed without extras where there is no compiler, and used from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXTRAS = (
    "matplotlib",
    "llguidance",
    "gguf",
    "llama_cpp",
    "nanobind",
    "scikit_build_core",
    "openai",
    "pytest",
    "hypothesis",
)
SCHEMA = '<schema name="mine"><user><module name="a">Lumen is a town. Its mayor is Ada Rosen. </module></user></schema>'
PROMPT = '<prompt schema="mine"><a/>Who is the mayor of Lumen?</prompt>'
PYTHON = """
from inlay import LLM, SamplingParams, Schema, __file__
llm = LLM("demo", kv_memory="64MiB")
llm.add_schema(Schema.from_file("mine.xml"))
prompt = Schema.from_file("mine.xml").prompt().use("a").text("Who is the mayor of Lumen?")
answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0]
assert answer.usage.cached_tokens > 8 and answer.outputs[0].text, answer
print(__file__)
"""


def run(*command: str | Path, cwd: Path = ROOT, status: int = 0, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PATH")}
    path = {"PATH": os.environ["PATH"]} if "PATH" not in environment else {}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**kept, **path, **environment}, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = f"build-dir={folder}/build"
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--wheel-dir", folder, "--config-settings", build, ROOT)  # fmt: skip
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_wheel_contents(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.startswith("inlay_llm-")
    assert any(name.startswith("inlay/_kernel.") for name in names)
    assert {"inlay/py.typed", "inlay/models/demo/model.safetensors", "inlay/models/demo/tokenizer.json"} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"inlay"}
    assert not any("csrc" in name for name in names)
    page = [one for one in zipfile.ZipFile(wheel).infolist() if one.filename.startswith("inlay/server/page/")]
    assert {"index.html", "app.mjs", "LICENSES.txt"} <= {one.filename.rpartition("/")[2] for one in page}
    assert sum(one.compress_size for one in page) < 60_000


@pytest.mark.slow
def test_a_wheel_is_used_from_another_folder(wheel: Path, tmp_path: Path):
    """Installed dependencies are visible there; extras and build tools are hidden."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    bin = tmp_path / "venv" / "bin"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    installed = ["--no-deps", "--no-index", "--quiet", wheel]
    run(sys.executable, "-m", "pip", "--python", bin / "python", "install", *installed)
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}))\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.xml").write_text(SCHEMA)
    (elsewhere / "ask.xml").write_text(PROMPT)

    def use(*command: str, status: int = 0) -> str:
        return run(bin / command[0], *command[1:], cwd=elsewhere, status=status, PATH=str(bin))

    assert use("inlay", "--version").startswith("inlay 0.")
    assert "mine.xml: ok" in use("inlay", "schema", "check", "mine.xml")
    said = use("inlay", "run", "mine.xml", "--prompt", "ask.xml", "--max-tokens", "8", "--json")
    row = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert (row["model"], row["cached_tokens"] > 8) == ("demo", True)
    assert use("python", "-c", PYTHON).strip().splitlines()[-1].startswith(str(site))
    assert "OpenAI" in use("inlay", "serve", "--help")
    drawing = use("inlay", "schema", "show", "mine.xml", "--plot", "mine.svg", status=2)
    assert "pip install 'inlay-llm[plots]'" in drawing
