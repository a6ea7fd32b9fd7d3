"""The distribution is inlay-llm: it is installed and named in messages so, and distinguished from another's inlay."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from inlay import LLM, __version__
from inlay.cli import main as command_line
from inlay.distribution import NAME, other_project
from tests.conftest import tiny

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OTHER = r"another project named inlay \(0\.3\.3\) is installed, .* run pip uninstall --yes inlay inlay-llm, then pip "


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, the first that Python looks into."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def installed(site: Path, name: str, version: str, entry_point: str = "") -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_point and f"[console_scripts]\ninlay = {entry_point}\n")


def test_other_distribution_named_inlay_is_reported(site, capsys, caplog):
    assert other_project() is None
    installed(site, "inlay", "0.3.3")
    assert re.match(OTHER, other_project() or "")
    assert command_line.main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert out == f"inlay {__version__}\n"
    assert re.match(f"inlay: {OTHER}", err)
    LLM(tiny("llama"), kv_memory="4MiB").shutdown()
    assert [re.match(OTHER, record.getMessage()) is not None for record in caplog.records] == [True]


def test_this_project_is_not_reported(site):
    installed(site, "inlay-llm", "9.0", "inlay.cli.main:entry")
    installed(site, "inlay", "0.1.0", "inlay.cli.main:entry")
    assert other_project() is None


def test_the_name_of_the_distribution_is_the_same_everywhere():
    project = PROJECT["project"]
    assert (project["name"], project["version"], list(project["scripts"])) == (NAME, __version__, ["inlay"])
    files = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "lab").rglob("*.py"),
    ]
    texts = {path: path.read_text() for path in files if path.suffix in (".md", ".py")}
    wrong = [
        path.name for path, text in texts.items() if re.search(r"\binlay\[|pip install inlay(?!-llm|-lab)\b", text)
    ]
    assert wrong == []
    named = {extra for text in texts.values() for extra in re.findall(r"inlay-llm\[(\w+)\]", text)}
    assert named <= set(project["optional-dependencies"])
    assert {"plots", "shared"} <= named


def test_wheels_are_built_for_every_classified_python():
    named = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["project"]["classifiers"]))
    built = [f"3.{number}" for number in re.findall(r"cp3(\d+)-", str(PROJECT["tool"]["cibuildwheel"]["build"]))]
    assert named == built


def test_wheels_are_built_for_every_system_in_the_readme():
    """With the kernel, which a failed build leaves out without a word: the test of each wheel imports it."""
    wheels = PROJECT["tool"]["cibuildwheel"]
    systems = (ROOT / "README.md").read_text().split("inlay runs on ")[1].split("computes on")[0]
    assert all(name in systems for name in ("Linux (x86-64, arm64)", "macOS (Apple silicon)"))
    assert (wheels["linux"]["archs"], wheels["macos"]["archs"]) == (["x86_64", "aarch64"], ["arm64"])
    assert {wheels["linux"][f"manylinux-{arch}-image"] for arch in wheels["linux"]["archs"]} == {"manylinux_2_28"}
    assert "test-skip" not in wheels
    assert 'python -c "import inlay._kernel"' in wheels["test-command"]
    files = re.findall(r"\{project\}/(\S+)", wheels["test-command"])
    assert files
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.skipif(find_spec("cibuildwheel") is None, reason="cibuildwheel is not installed")
@pytest.mark.parametrize(
    ("platform", "ending"),
    [("linux", "manylinux_x86_64"), ("linux", "manylinux_aarch64"), ("macos", "macosx_arm64")],
)
def test_cibuildwheel_takes_its_configuration(platform, ending):
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.split() if line.endswith(ending)] == [
        f"cp3{minor}-{ending}" for minor in (11, 12, 13)
    ]
