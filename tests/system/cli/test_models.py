"""``inlay models``: the families that are served, one model, and why another is not."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from inlay.cli.main import main
from inlay.models.families import FAMILIES
from tests.model.families.configs import tiny_config


def test_all_families_as_json(capsys):
    assert main(["models", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = {row["family"]: row for row in printed["families"]}
    assert set(rows) == set(FAMILIES)
    assert rows["llama"] | {"joined": True, "shifts": "turned query", "reason": None} == rows["llama"]
    assert rows["mpt"]["shifts"] == "biased distance"
    assert rows["smollm3"]["shifts"] == "turned query, no positions"
    assert (rows["opt"]["shifts"], rows["opt"]["reason"]) == (
        None,
        "positions are learned, so a module is read only where it was encoded",
    )
    assert rows["gemma2"]["windows"] == [4096]
    assert rows["gpt_oss"]["sinks"]
    assert rows["deepseek_v3"]["latent"]
    assert "gemma3" in printed["by_their_text_models"]
    assert (rows["mamba"]["exact"], rows["mamba"]["modular"]) == (True, False)
    assert "recurrent layers that inlay cannot run itself" in printed["without_reuse"]["rwkv"]
    assert "encoders" in printed["refused"]["bert"]


def test_all_families_as_a_table(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "deepseek_v3" in printed
    assert "by their text models, without images and sound: gemma3, " in printed
    assert "they have recurrent layers that inlay cannot run itself" in printed


def test_one_model_from_its_configuration(capsys, tmp_path):
    AutoConfig.for_model("mistral", sliding_window=512, num_hidden_layers=2).save_pretrained(tmp_path)
    assert main(["models", "show", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["model"], printed["family"], printed["windows"]) == (str(tmp_path), "mistral", [512])
    assert printed["bytes_per_token"] == 2 * 2 * 8 * 128 * 2
    assert main(["models", "show", str(tmp_path)]) == 0
    assert "sliding windows: 512 positions; sinks: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("bert"), "models of type 'bert' are not supported: they are encoders"),
        (
            AutoConfig.for_model("t5"),
            "models of type 't5' are not supported: transformers has no causal language",
        ),
    ],
)
def test_unsupported_model_is_rejected_with_a_reason(capsys, tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    assert main(["models", "show", str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err


def test_model_without_reuse_is_described(capsys, tmp_path):
    AutoConfig.for_model("rwkv").save_pretrained(tmp_path)
    assert main(["models", "show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "reuse exact, and modules: no; they have recurrent layers that inlay cannot run itself" in printed
    assert main(["models", "show", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["family"], printed["exact"], printed["modular"]) == ("rwkv", False, False)


def test_model_with_exact_reuse_only_is_described(capsys, tmp_path):
    tiny_config("qwen3_5_text").save_pretrained(tmp_path)
    assert main(["models", "show", str(tmp_path)]) == 0
    assert "modules: no; their recurrent layers" in capsys.readouterr().out
    assert main(["models", "show", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["family"], printed["exact"], printed["modular"]) == ("qwen3_5_text", True, False)


def test_context_limited_by_rope_scaling_is_explained(capsys, tmp_path):
    tiny_config("phi3 longrope").save_pretrained(tmp_path)
    assert main(["models", "show", str(tmp_path)]) == 0
    assert "context: its context is 4,096 tokens here, not 8,192: for longer texts" in capsys.readouterr().out


def test_folder_rejected_by_load_is_rejected(capsys, tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    assert main(["models", "show", str(tmp_path)]) == 0
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    capsys.readouterr()
    assert main(["models", "show", str(tmp_path)]) == 2
    assert "is pickled, and pickles are not loaded" in capsys.readouterr().err
