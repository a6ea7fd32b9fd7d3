"""docs/guides/memory.md and schema-advice.md: commands run and print the shown output, and tables are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from inlay.authoring.memory import CODECS
from inlay.cli.main import main
from tests.unit.authoring.lint.test_rules import BROKEN

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / "docs/guides" / name).read_text() for name in ("memory.md", "schema-advice.md")}
_COMMAND = re.compile(r"^```sh\n(.*)\n```$(?:\n\n^```text\n((?s:.*?))^```$)?", re.MULTILINE)
COMMANDS = [(page, match[1], match[2]) for page, text in PAGES.items() for match in _COMMAND.finditer(text)]


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the table with this header, row by row."""
    rows = PAGES[page].split(f"\n{header}\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_all_commands_were_found():
    assert len(COMMANDS) == sum(text.count("```sh") for text in PAGES.values()) == 6


@pytest.mark.parametrize(("page", "command", "shown"), COMMANDS, ids=[command for _, command, _ in COMMANDS])
def test_commands(page, command, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "118")
    words = shlex.split(command)
    plots = [word for word in words if word.startswith("docs/images/")]
    assert words[0] == "inlay"
    assert main([str(tmp_path / Path(word).name) if word in plots else word for word in words[1:]]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [Path(plot).name for plot in plots]
    assert all((ROOT / plot).is_file() for plot in plots)
    if shown is not None:
        assert comparable(capsys.readouterr().out, page) == comparable(shown, page)


def comparable(output: str, page: str) -> list[str]:
    """Lines without white space at their ends; on the page about schemas without counts, which the tokenizer gives."""
    counts = r": .*" if page == "schema-advice.md" else "(?!)"
    return [re.sub(counts, lambda rest: re.sub(r"\d+", "#", rest[0]), line.rstrip()) for line in output.splitlines()]


def test_every_codec_has_a_row():
    rows = table("memory.md", "| `--codec` | bits an element | scales add | the engine runs it |")
    written = {row[0].split("`")[1]: (row[1], row[2], row[3]) for row in rows}
    assert written == {
        codec.name: (str(codec.bits), codec.adds, "yes" if codec.runs else "no") for codec in CODECS.values()
    }


def test_every_rule_has_a_row():
    rows = table("schema-advice.md", "| rule | what it finds | because |")
    tested = {name.replace(",", " ").split()[0] for name in BROKEN}
    assert [row[0].strip("`") for row in rows] == list(dict.fromkeys(row[0].strip("`") for row in rows))
    assert {row[0].strip("`") for row in rows} == tested | {"beyond-context", "long-argument", "wide-parameter"}
