"""Every example runs as its README says, and reads most of its prompt from the cache."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inlay import Prompt
from inlay.cli.main import main
from tests.commands import run_file

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
SERVED = {"retrieval"}  # needs a server and FAISS; checked by tests/system/clients/test_retrieval.py
COMMANDS = [
    (folder.name, line)
    for folder in FOLDERS
    if folder.name not in SERVED and (folder / "README.md").is_file()
    for block in re.findall(r"^```sh\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a command in this process, from the project's folder, and returns what it prints."""
    monkeypatch.chdir(ROOT)

    def start(command: str) -> str:
        words = shlex.split(command)
        if words[0] == "inlay":
            assert main(words[1:]) == 0, capsys.readouterr().err
        else:
            run_file(*words[1:])
        return capsys.readouterr().out

    return start


def counts(output: str) -> list[tuple[int, int]]:
    """Tokens cached and computed, of every answer."""
    found = re.findall(r"([\d,]+) tokens cached, ([\d,]+) computed", output)
    return [(int(cached.replace(",", "")), int(computed.replace(",", ""))) for cached, computed in found]


def test_every_example_has_a_readme_with_commands():
    assert len(FOLDERS) >= 8
    deployed = {"cluster", "grafana"}  # checked by tests/unit/cluster/test_examples.py and by the dashboard's own test
    assert {name for name, _ in COMMANDS} == {folder.name for folder in FOLDERS} - deployed - SERVED


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(COMMANDS)])
def test_commands_of_each_readme_run(run, name: str, command: str):
    assert f"examples/{name}/" in command
    assert run(command).strip()


def test_python_and_pml_of_the_trip_example_are_equal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^```python\n(.*?)^```", (EXAMPLES / "trip/README.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    written = Prompt.from_file(EXAMPLES / "trip/prompt.xml")
    assert names["prompt"].to_pml() == written.to_pml()


def test_folder_example_answers_its_questions(run):
    output = run("python examples/folder/ask.py")
    for answer in ("Rolan Fader", "1412", "148 crowns", "Dora Kalis", "8081"):
        assert answer in output
    assert all(cached > computed for cached, computed in counts(output))


@pytest.mark.parametrize(("script", "answers"), [("personalization/persona.py", 2), ("tools/agent.py", 3)])
def test_most_of_every_prompt_is_cached(run, script: str, answers: int):
    found = counts(run(f"python examples/{script}"))
    assert len(found) == answers
    assert all(cached > 2 * computed for cached, computed in found)


def test_every_text_gets_a_label(run):
    lines = run('python examples/few_shot/classify.py "Hello?" "Thanks!"').splitlines()
    assert [line[11:] for line in lines] == ["Hello?", "Thanks!"]
    assert {line.split()[0] for line in lines} <= {"praise", "complaint", "question"}


def test_folder_without_documents_is_rejected(run, tmp_path: Path):
    with pytest.raises(SystemExit, match=r"holds no \.txt files"):
        run(f"python examples/folder/ask.py --folder {tmp_path}")
