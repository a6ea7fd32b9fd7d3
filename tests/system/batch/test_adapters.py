"""Requests of a batch name adapters as those of a server do."""

from __future__ import annotations

import pytest

from inlay.errors import ParameterError
from tests.adapters import ALL, write_adapter
from tests.conftest import tiny
from tests.raising import raises
from tests.system.batch.helpers import bodies, line, read, run, texts, write


@pytest.fixture
def adapters(tmp_path):
    return {name: write_adapter(tmp_path / name, tiny("llama"), ALL, seed=seed) for seed, name in enumerate("ab")}


def test_each_request_uses_its_named_adapter(tmp_path, adapters):
    names = ["tiny", "a", "b", None, "a", "c"]
    rows = [
        line(str(number), prompt="The sea is", **({"model": name} if name else {})) for number, name in enumerate(names)
    ]
    source = write(tmp_path / "in", rows)
    counts = run(source, tmp_path / "out", llm={"adapters": adapters})
    assert counts.failed == 1
    failed = next(row for row in read(tmp_path / "out") if row["custom_id"] == "5")
    assert "model is 'c' and this batch runs 'tiny'; write that, leave it out, or name an adapter: 'a', 'b'" in str(
        failed
    )
    write(tmp_path / "out", [row for row in read(tmp_path / "out") if row["custom_id"] != "5"])
    said, told = texts(tmp_path / "out"), bodies(tmp_path / "out")
    assert said["0"] == said["3"]
    assert said["1"] == said["4"]
    assert len({str(said[number]) for number in "012"}) == 3
    assert [told[number]["model"] for number in "0123"] == ["tiny", "a", "b", "tiny"]
    assert len({told[number]["system_fingerprint"] for number in "01234"}) == 3


def test_batch_with_other_adapters_is_not_resumed(tmp_path, adapters):
    source = write(tmp_path / "in", [line("x", prompt="The sea is", model="a")])
    run(source, tmp_path / "out", llm={"adapters": adapters}, loading={"adapters": "ab"})
    with raises("batch.other_output", ParameterError, names="another model"):
        run(source, tmp_path / "out", llm={"adapters": {"a": adapters["b"]}}, loading={"adapters": "b"})
