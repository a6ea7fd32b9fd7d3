"""The exported model is an ordinary, small checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from inlay import LLM, SamplingParams
from inlay_lab.train.architecture import CONTEXT, new_model
from inlay_lab.train.train import export

CHAT = [{"role": "system", "content": "Answer from the documents.\n"}, {"role": "user", "content": "Who is Bolu?"}]


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    return new_model(tokenizer, seed=7)


@pytest.fixture(scope="module")
def folder(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    into = tmp_path_factory.mktemp("exported") / "made" / "model"
    export(model, tokenizer, into)
    return into


def test_exported_weights_equal_the_model_in_bf16(model: LlamaForCausalLM, folder: Path):
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.dtype == torch.bfloat16
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert dict(read.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, weight in read.named_parameters():
        assert torch.equal(weight, model.get_parameter(name).to(torch.bfloat16))


def test_export_leaves_the_model_unchanged(model: LlamaForCausalLM, folder: Path):
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "causal"


def test_exported_configuration_has_no_training_settings(folder: Path):
    for file in ("config.json", "generation_config.json"):
        assert "causal" not in {str(value) for value in json.loads((folder / file).read_text()).values()}
    assert AutoModelForCausalLM.from_pretrained(folder).config._attn_implementation != "causal"


def test_files_are_small(folder: Path):
    assert (folder / "model.safetensors").stat().st_size < 25_000_000
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_tokenizer_is_exported(tokenizer: PreTrainedTokenizerBase, folder: Path):
    read = AutoTokenizer.from_pretrained(folder)
    assert read.get_vocab() == tokenizer.get_vocab()
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<|begin|>", "<|end|>", "<|end|>")
    assert read.model_max_length == CONTEXT
    text = "The town Bolukar was founded in 1,204.\n  ÉÀ 漢"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.decode(read(text)["input_ids"]) == text
    for opened in (False, True):
        assert read.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=opened) == (
            "<|begin|><|system|>Answer from the documents.\n<|end|><|user|>Who is Bolu?<|end|>"
            + ("<|assistant|>" if opened else "")
        )


def test_generation_ends_with_the_turn(tokenizer: PreTrainedTokenizerBase, folder: Path):
    generation = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert generation.eos_token_id == tokenizer.eos_token_id
    assert generation.do_sample is False


def test_exported_model_chats_with_inlay(tokenizer: PreTrainedTokenizerBase, folder: Path):
    llm = LLM(str(folder), dtype="float32", kv_memory="64MiB")
    (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=5))
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(output.prompt_token_ids) == ids
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = stock.generate(torch.tensor([ids]), max_new_tokens=5)[0, len(ids) :].tolist()
    assert list(output.outputs[0].token_ids) == said
