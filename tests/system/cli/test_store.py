"""``--store``: by default, commands keep encoded modules in the user's cache directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.cli.options import store_of
from tests.commands import run
from tests.pages import DOCS

SCHEMA, PROMPT = (str(DOCS.parent / "examples" / "records" / name) for name in ("records.xml", "prompt.xml"))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache directory, without any settings of the user."""
    monkeypatch.delenv("INLAY_STORE")
    monkeypatch.delenv("INLAY_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inlay" / "store"


def ask(capsys, *options: str) -> tuple[dict, str]:
    arguments = ("run", SCHEMA, "--prompt", PROMPT, "--max-tokens", "4", "--json", *options)
    status, out, err = run(capsys, *arguments)
    assert status == 0, err
    return json.loads(out), err


def lines_of(err: str) -> list[str]:
    """The lines about the store."""
    return [line for line in err.splitlines() if "kept" in line or "store" in line]


def test_second_run_encodes_nothing(capsys, cache):
    first, said = ask(capsys)
    assert lines_of(said) == [f"inlay: encoded modules are kept in {cache} (0.0 of 16.0 GiB; --store off keeps none)"]
    second, _ = ask(capsys)
    assert second["text"] == first["text"]
    assert (first["encoded_tokens"] > 0, first["tiers"]["disk"]) == (True, 0)
    assert (second["encoded_tokens"], second["tiers"]) == (0, {"device": 0, "disk": second["cached_tokens"]})
    status, out, _ = run(capsys, "run", SCHEMA, "--prompt", PROMPT, "--max-tokens", "4")
    assert (status, "its modules were read from the store, before the request, in" in out) == (0, True)


@pytest.mark.long
def test_new_process_encodes_nothing(cache):
    command = [sys.executable, "-m", "inlay", "run", SCHEMA, "--prompt", PROMPT, "--max-tokens", "4", "--json"]
    said = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (json.loads(process.stdout) for process in said)
    assert first["encoded_tokens"] >= first["cached_tokens"] > 100  # with the primer
    assert first["tiers"] == {"device": first["cached_tokens"], "disk": 0}
    assert (second["encoded_tokens"], second["text"]) == (0, first["text"])
    assert second["tiers"] == {"device": 0, "disk": first["cached_tokens"]}


def test_store_off_keeps_nothing(capsys, cache):
    for _ in range(2):
        row, said = ask(capsys, "--store", "off")
        assert row["encoded_tokens"] > 0
        assert lines_of(said) == []
    assert not cache.exists()


def test_option_precedes_environment_and_default_store(cache, tmp_path, monkeypatch):
    assert store_of(None, "demo") == str(cache)
    assert store_of(None, "random:tiny") == "off"
    assert store_of("here", "random:tiny") == "here"
    monkeypatch.setenv("INLAY_STORE", "there")
    assert store_of(None, "demo") == store_of(None, "random:tiny") == "there"
    assert store_of("off", "demo") == "off"


def test_unwritable_home_is_not_an_error(cache, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    assert store_of(None, "demo") == "off"
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "cache")


def test_unusable_folder_is_one_sentence(capsys, tmp_path):
    (tmp_path / "file").write_text("no folder")
    arguments = ("run", SCHEMA, "--prompt", PROMPT, "--store", str(tmp_path / "file"))
    status, _, err = run(capsys, *arguments)
    assert status == 2
    sentence = f"the store {tmp_path / 'file'} cannot be used (Not a directory); give another folder, or 'off' for none"
    assert err.splitlines()[-1] == f"inlay: {sentence}"
