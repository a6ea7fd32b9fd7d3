"""Building without a working compiler, and the contents of wheels and source distributions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "src")
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
ASK = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
sys.meta_path[:] = [finder for finder in sys.meta_path if "skbc" not in type(finder).__module__]  # an editable install
sys.path.insert(0, sys.argv[1])
import inlay
from inlay.attention.registry import get_backend
print(inlay.__file__.startswith(sys.argv[1]), get_backend("auto").name, get_backend("auto").name)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("scikit_build_core") is None, reason="needs the tools of the build"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy without build folders, so that nothing built before is found."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, copy)
    return copy


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *(str(part) for part in command)],
        cwd=cwd, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(checkout: Path, what: str, **environment: str) -> tuple[Path, str]:
    """The file that a build hook (PEP 517) makes, and its output."""
    code = f"from scikit_build_core.build import {what}; print({what}('dist'))"
    said = run("-c", code, cwd=checkout, **environment)
    return checkout / "dist" / said.splitlines()[-1], said


def test_wheel_without_a_compiler_works_without_the_kernel(checkout, tmp_path):
    wheel, said = build(checkout, "build_wheel", **NO_COMPILER)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "is not able to compile a simple test program" in said  # pip shows it with -v
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "_kernel" in name or "csrc" in name]
        archive.extractall(tmp_path / "installed")
    answer = run("-c", ASK, tmp_path / "installed", cwd=tmp_path)
    assert answer.splitlines() == [
        "inlay was installed without its compiled kernel: attention runs in PyTorch, right but slower; "
        "reinstall where a C++17 compiler is found",
        "True torch torch",
    ]


def test_editable_install_works_without_a_compiler(checkout):
    wheel, _ = build(checkout, "build_editable", **NO_COMPILER)
    assert wheel.name.endswith("-py3-none-any.whl")


def test_a_source_distribution_holds_the_kernel_and_builds(checkout, tmp_path):
    source, _ = build(checkout, "build_sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / source.name.removesuffix(".tar.gz")
    in_checkout = {path.name for path in (checkout / "src/inlay/csrc").iterdir()}
    assert {path.name for path in (unpacked / "src/inlay/csrc").iterdir()} == in_checkout
    wheel, _ = build(unpacked, "build_wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [name for name in names if name.startswith("inlay/_kernel")]
    assert not [name for name in names if "csrc" in name]
