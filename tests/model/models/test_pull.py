"""``inlay pull`` against a hub that answers from a folder, or not at all."""

from __future__ import annotations

import copy
import logging
import shutil
import threading
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig

from inlay import ModelError
from inlay.cli.main import main
from inlay.models import load as loading
from inlay.models import pull as module
from inlay.models.load import read_config
from inlay.models.pull import pull
from tests.conftest import tiny
from tests.raising import raises


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder of a repository; requested files are copied into ``cache``, as the hub's client does."""
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    repository.mkdir()
    AutoConfig.for_model("llama").save_pretrained(repository)
    for name in ("model-00001-of-00001.safetensors", "tokenizer.json", "pytorch_model.bin", "model.onnx"):
        (repository / name).write_text(name)

    def one(name, file, revision=None):
        cache.mkdir(exist_ok=True)
        return shutil.copy(repository / file, cache / file)

    def many(name, revision=None, allow_patterns=(), ignore_patterns=()):
        for path in repository.iterdir():
            if any(fnmatch(path.name, each) for each in allow_patterns):
                one(name, path.name)
        return str(cache)

    monkeypatch.setattr(module, "hf_hub_download", one)
    monkeypatch.setattr(module, "snapshot_download", many)
    return repository


def test_pull_loads_needed_files_and_no_pickles(hub, capsys):
    assert main(["pull", "owner/name"]) == 0
    folder = hub.parent / "cache"
    assert capsys.readouterr().out == f"{folder}\n"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model-00001-of-00001.safetensors",
        "tokenizer.json",
    }


def test_pickled_weights_are_rejected(hub):
    (hub / "model-00001-of-00001.safetensors").unlink()
    with raises("model.pickled_weights", ModelError, names="owner/name"):
        pull("owner/name")


def test_nothing_is_downloaded_of_an_unsupported_model(hub):
    AutoConfig.for_model("bert").save_pretrained(hub)
    with raises("model.unknown_architecture", ModelError, names="bert"):
        pull("owner/name")
    assert [path.name for path in (hub.parent / "cache").iterdir()] == ["config.json"]


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError("gated", response=RESPONSE), "asks for its terms to be accepted on its page first"),
        (RepositoryNotFoundError("none", response=RESPONSE), "is not on the hub, or is private; write OWNER/NAME"),
        (LocalEntryNotFoundError("no connection"), "is not on this machine and the hub cannot be reached; run `inlay"),
        (OSError("disk full\nmore"), "could not be downloaded: disk full; what is here already is kept, so try again"),
    ],
)
def test_hub_error_is_one_sentence(monkeypatch, error, reason):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(module, "hf_hub_download", fail)
    with raises("model.not_pulled", ModelError, names=f"owner/name {reason}"):
        pull("owner/name")


def test_offline_pull_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with raises("model.not_pulled", ModelError, names="cannot be reached"):
        pull("owner/no-such-name")


def test_invalid_name_is_rejected():
    with raises("model.not_pulled", ModelError, names="OWNER/NAME"):
        pull("a//b c")


class Told(logging.Handler):
    """A log handler that records messages and sets an event."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.heard.set()


def test_slow_hub_is_reported_while_waiting(monkeypatch):
    told = Told()

    def silent(*_: Any, **__: Any) -> None:
        assert told.heard.wait(30), "nothing is said while it waits"
        raise LocalEntryNotFoundError("no answer")

    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(AutoConfig, "from_pretrained", silent)
    monkeypatch.setattr(module, "hf_hub_download", silent)
    module.logger.addHandler(told)
    try:
        for ask, code in ((pull, "model.not_pulled"), (read_config, "model.not_found")):
            told.heard.clear()
            with raises(code, ModelError, names="cannot be reached"):
                ask("owner/name")
    finally:
        module.logger.removeHandler(told)
    assert told.said[0].startswith("still waiting for the Hugging Face hub to answer for owner/name (0 s so far); with")


def test_nothing_is_logged_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module.threading, "Thread", None)
    with module.waiting(str(tmp_path)):
        pass


def test_gguf_file_is_pulled_by_its_name(hub, capsys):
    for part in (1, 2):
        (hub / f"model-Q4_0-{part:05}-of-00002.gguf").write_text("GGUF")
    assert main(["pull", "owner/name/model-Q4_0-00002-of-00002.gguf"]) == 0
    cache = hub.parent / "cache"
    assert capsys.readouterr().out == f"{cache / 'model-Q4_0-00001-of-00002.gguf'}\n"
    assert {path.name for path in cache.iterdir()} == {f"model-Q4_0-{part:05}-of-00002.gguf" for part in (1, 2)}


def test_repository_of_gguf_files_needs_a_file_name(monkeypatch):
    def lacking(*_: Any, **__: Any):
        raise EntryNotFoundError("404")

    monkeypatch.setattr(module, "hf_hub_download", lacking)
    with pytest.raises(
        ModelError, match=r"owner/name has no such file; give the name of a repository .*OWNER/NAME/FILE\.gguf"
    ):
        pull("owner/name")


def test_loading_a_name_pulls_it_first(hub, monkeypatch, tmp_path):
    """So run, serve and chat reject what pull rejects, and resume interrupted downloads."""
    folder = tmp_path / "whole"
    copy.deepcopy(tiny("llama").model).save_pretrained(folder)
    tiny("llama").tokenizer.save_pretrained(folder)
    asked: list[str] = []

    def pulled(name: str):
        asked.append(name)
        return folder

    monkeypatch.setattr(loading, "pull", pulled)
    monkeypatch.setattr(loading, "whole_config", lambda name: AutoConfig.from_pretrained(folder))
    loaded = loading.load_model("owner/name")
    assert (asked, loaded.name) == (["owner/name"], "owner/name")
    assert loaded.fingerprint == loading.load_model(folder).fingerprint


def test_pickles_in_a_folder_are_refused(tmp_path):
    copy.deepcopy(tiny("llama").model).save_pretrained(tmp_path)
    tiny("llama").tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with raises("model.pickled_weights", ModelError, names="pytorch_model.bin"):
        loading.load_model(tmp_path)
