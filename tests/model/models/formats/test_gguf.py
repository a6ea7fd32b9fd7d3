"""Models in GGUF files, beside the stock models they were made of and transformers' own reader."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from inlay import LLM, ModelError, SamplingParams
from inlay.cli.main import main
from inlay.models.compiled_weight import can_compile
from inlay.models.formats.gguf_file import stored_blocks
from inlay.models.interface import attention_implementation
from inlay.models.load import LoadedModel, load_model, load_tokenizer
from inlay.models.quantize import FusedLayers, Int4Linear, Int8Linear

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

from tests.model.models.formats.gguf_files import CHAT, MODELS, blocks_near, random_model, write_gguf  # noqa: E402
from tests.raising import raises  # noqa: E402

IDS = torch.tensor([[3, 77, 200, 41, 41, 9, 130, 18, 250, 6, 33, 90]])


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS).logits[0]


def read_by_transformers(path: Path, loaded: LoadedModel):
    """The stock model of the same configuration, with the tensors as transformers' own reader reads them."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    lacking = model.load_state_dict(tensors, strict=False).missing_keys
    assert lacking == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    return model


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture_equals_the_written_model(tmp_path, architecture):
    model = random_model(architecture)
    path = write_gguf(tmp_path / "model.gguf", model, architecture)
    stock = load_model(path, weights="stock")
    torch.testing.assert_close(logits(stock.model), logits(model), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(load_model(path).model), logits(model), atol=1e-4, rtol=0)
    assert stock.spec.family == model.config.model_type
    assert stock.model.config.eos_token_id == 258


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_every_type_equals_transformers_reading(tmp_path, architecture, kind):
    path = write_gguf(tmp_path / "model.gguf", random_model(architecture), architecture, kind)
    loaded = load_model(path, weights="stock", dtype="float32")
    torch.testing.assert_close(logits(loaded.model), logits(read_by_transformers(path, loaded)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_weights_are_not_rounded_twice(tmp_path, kind):
    """Packed, a layer has the file's numbers, scales and zeros: nothing is rounded twice."""
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", kind)
    kept = load_model(path, dtype="float32")
    attention = kept.model.model.layers[0].self_attn
    assert isinstance(attention.qkv, Int4Linear)
    assert isinstance(attention.out, Int4Linear)
    stock = load_model(path, dtype="float32", weights="stock")
    head = kept.model.lm_head
    kept.model.lm_head = stock.model.lm_head  # 264 outputs are no whole blocks
    torch.testing.assert_close(logits(kept.model), logits(stock.model), atol=1e-3, rtol=0)  # inputs in 16 bits
    assert isinstance(head, Int8Linear)
    asked = load_model(path, dtype="float32", quantization="int4")
    asked.model.lm_head = stock.model.lm_head
    torch.testing.assert_close(logits(asked.model), logits(stock.model), atol=1e-3, rtol=0)


@pytest.mark.skipif(not can_compile(torch.bfloat16), reason="needs the compiled kernel's layers")
def test_eight_bit_weights_are_not_rounded_twice():
    weight = np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = stored_blocks(torch.from_numpy(gguf.quantize(weight, kind)), kind)
    layer = Int8Linear(stored, dtype=torch.bfloat16)
    torch.testing.assert_close(layer(torch.eye(96)).t(), stored.dense(0, 48), atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(not can_compile(torch.bfloat16), reason="needs the compiled kernel's layers")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_tied_head_has_the_bits_of_its_file(tmp_path, kind):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama", tie_word_embeddings=True), "llama", kind)
    model = load_model(path, dtype="bfloat16").model
    stock = load_model(path, dtype="bfloat16", weights="stock").model
    assert isinstance(model.lm_head, Int8Linear) == (kind != "F16")  # 264 outputs are no whole blocks of 4 bits
    assert stock.lm_head.weight is stock.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, stock.get_input_embeddings().weight)
    x = torch.randn(3, stock.config.hidden_size, dtype=torch.bfloat16)
    exact = x.double() @ stock.lm_head.weight.double().T
    torch.testing.assert_close(model.lm_head(x).double(), exact, atol=0.02, rtol=0.01)
    assert not isinstance(load_model(path, dtype="float32").model.lm_head, Int8Linear)  # too few bits for its logits


def test_k_quants_keep_each_layer_in_its_bits(tmp_path):
    """Q4_K_M gives some layers, and values apart from queries and keys, 6 bits."""
    model = random_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    mixed = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}
    path = write_gguf(tmp_path / "model.gguf", model, "llama", mixed)
    stock = load_model(path, dtype="float32", weights="stock")
    torch.testing.assert_close(logits(stock.model), logits(read_by_transformers(path, stock)), atol=1e-4, rtol=0)
    kept = load_model(path, dtype="float32")
    layer = kept.model.model.layers[0]
    assert isinstance(layer.self_attn.qkv, FusedLayers)
    assert [type(part) for part in layer.self_attn.qkv.layers] == [Int4Linear, Int8Linear]
    assert isinstance(layer.mlp.gate_up, Int4Linear)
    assert isinstance(layer.mlp.down, Int8Linear)
    error = (logits(kept.model) - logits(stock.model)).norm() / logits(stock.model).norm()
    assert error < 0.05


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_grids_equal_gguf_dequantization(kind):
    which = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    _, size = gguf.GGML_QUANT_SIZES[which]
    blocks = rng.integers(0, 256, (6, 3 * size), dtype=np.uint8)
    halves = rng.uniform(-0.1, 0.1, (6, 3, 2)).astype(np.float16)
    blocks.reshape(6, 3, size)[:, :, : 2 if kind == "Q4_0" else 4] = halves.view(np.uint8)[
        ..., : 2 if kind == "Q4_0" else 4
    ]
    stored = stored_blocks(torch.from_numpy(blocks), which)
    expected = torch.from_numpy(gguf.dequantize(blocks, which))
    assert stored.on_grid
    assert stored.shape == expected.shape
    torch.testing.assert_close(stored.dense(1, 5), expected[1:5], atol=1e-4, rtol=1e-5)


def test_quantizer_is_accurate():
    weight = np.random.default_rng(0).normal(size=(4, 512)).astype(np.float32)
    for kind, most in (("Q4_K", 0.3), ("Q6_K", 0.08)):
        back = gguf.dequantize(blocks_near(weight, kind), gguf.GGMLQuantizationType[kind])
        assert np.abs(back - weight).max() < most


def test_tokenizer_chat_template_and_answers_come_from_the_file(tmp_path, capsys):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q8_0")
    tokenizer = load_tokenizer(path)
    assert tokenizer.is_fast
    assert tokenizer.chat_template == CHAT
    assert tokenizer.decode(tokenizer.encode("Hi there", add_special_tokens=False)) == "Hi there"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")
    llm = LLM(path, kv_memory="4MiB")
    (output,) = llm.generate("Hi there", SamplingParams(temperature=0, max_tokens=4))
    (reply,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=4))
    llm.shutdown()
    assert len(output.outputs[0].token_ids) <= 4
    assert reply.prompt_token_ids
    assert main(["models", "show", str(path)]) == 0
    assert "is of the family llama" in capsys.readouterr().out
    assert main(["memory", "--model", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_fingerprint_depends_on_the_file_and_the_weight_form(tmp_path):
    model = random_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model, "llama", "Q4_0")
    kept, again = load_model(path), load_model(path)
    assert kept.fingerprint == again.fingerprint
    other = {load_model(path, weights="stock").fingerprint, load_model(path, quantization="int8").fingerprint}
    assert len(other | {kept.fingerprint}) == 3
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1
    changed = write_gguf(tmp_path / "changed.gguf", model, "llama", "Q4_0")
    assert load_model(changed).fingerprint != kept.fingerprint


def test_known_fingerprint_is_not_recomputed(tmp_path, monkeypatch):
    import inlay.models.fingerprint as cache

    monkeypatch.setattr(cache, "SETTLED_S", -1.0)
    monkeypatch.setenv("INLAY_CACHE_ROOT", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q4_0")
    first = load_model(path)
    assert len(list((tmp_path / "cache" / "fingerprints").iterdir())) == 1
    monkeypatch.setattr("inlay.models.fingerprint.blocks_of", lambda weight: pytest.fail("hashed again"))
    assert load_model(path).fingerprint == first.fingerprint
    assert load_model(path, weights="stock").fingerprint != first.fingerprint


def test_llama3_scaling_is_detected_from_its_factors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("llama", rope_parameters=scaling, max_position_embeddings=16384)
    inverse = model.model.rotary_emb.inv_freq
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = plain / inverse
    path = write_gguf(tmp_path / "model.gguf", model, "llama", extra={"rope_freqs.weight": factors})
    loaded = load_model(path, weights="stock")
    torch.testing.assert_close(loaded.model.model.rotary_emb.inv_freq, inverse)
    odd = write_gguf(tmp_path / "odd.gguf", model, "llama", extra={"rope_freqs.weight": torch.full_like(factors, 3.0)})
    with raises("model.unsupported_setting", ModelError, names="odd.gguf"):
        load_model(odd)
    extra, more = {"rope_freqs.weight": factors}, {"llama.rope.scaling.factor": 2.0}
    twice = write_gguf(tmp_path / "twice.gguf", model, "llama", extra=extra, more=more)
    with raises("model.unsupported_setting", ModelError, names="twice.gguf"):
        load_model(twice)


def test_phi3s_scaling_is_read_with_both_its_factors(tmp_path):
    wide = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    short, long = (torch.linspace(1, end, 8) for end in (1.5, 4.0))
    scaling = wide | {"short_factor": short.tolist(), "long_factor": long.tolist()}
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    model = random_model("phi3", rope_parameters=scaling, **sizes)
    extra = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    attention = math.sqrt(1 + math.log(256 / 64) / math.log(64))
    more = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": attention}
    loaded = load_model(write_gguf(tmp_path / "model.gguf", model, "phi3", extra=extra, more=more), weights="stock")
    assert loaded.spec.max_positions == 64
    assert "its context is 64 tokens here, not 256" in (loaded.note or "")
    for length in (48, 200):  # the second of the long factors, which only stock code is asked for
        ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode(), attention_implementation(loaded.model, "sdpa"):
            torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
    alone = write_gguf(tmp_path / "alone.gguf", model, "phi3", extra=extra)
    with raises("model.unsupported_setting", ModelError, names="alone.gguf"):
        load_model(alone)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"scaling.type": "none"}, {"rope_type": "default"}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0, "scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scale_linear": 4.0, "scaling.type": "none"}, {"rope_type": "default"}),
        ({"scale_linear": 4.0, "scaling.type": "yarn"}, {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_other_scalings_are_read_from_the_file(tmp_path, more, expected):
    metadata = {f"llama.rope.{key}": value for key, value in more.items()}
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", more=metadata)
    parameters = load_model(path, weights="stock").model.config.rope_parameters
    assert {key: parameters[key] for key in expected} == expected


def test_invalid_files_are_rejected_with_a_remedy(tmp_path):
    model = random_model("llama")
    whole = write_gguf(tmp_path / "whole.gguf", model, "llama").read_bytes()
    cut, damaged = tmp_path / "cut.gguf", tmp_path / "damaged.gguf"
    cut.write_bytes(whole[:-4096])
    damaged.write_bytes(whole[:40] + b"\xff" * 80 + whole[120:])
    bare = write_gguf(tmp_path / "bare.gguf", model, "llama", tokens=False)
    odd = write_gguf(tmp_path / "odd.gguf", model, "llama", "MXFP4")
    strange = write_gguf(tmp_path / "strange.gguf", model, "llama", named="rwkv7")
    long = write_gguf(
        tmp_path / "long.gguf",
        model,
        "llama",
        more={"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0},
    )
    cases = {
        cut: r"cut\.gguf: is damaged, cut short or no GGUF: .*; download it again$",
        damaged: r"damaged\.gguf: is damaged, cut short or no GGUF: .*; download it again$",
        bare: r"bare\.gguf: the file holds no tokenizer; give one that does",
        odd: r"odd\.gguf: .* is of the type MXFP4, which inlay does not read; give a file in Q4_K_M, Q8_0 or F16",
        strange: r"strange\.gguf: holds a model of the architecture 'rwkv7', which inlay does not read from GGUF \(it",
        long: r"long\.gguf: rotary scaling 'dynamic' is not supported; use one of linear, yarn, llama3",
        tmp_path
        / "none.gguf": r"none\.gguf: no such file; give the folder of a Hugging Face checkpoint, or a GGUF file",
    }
    for path, sentence in cases.items():
        with pytest.raises(ModelError, match=sentence) as told:
            load_model(path)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("named", "more", "sentence"),
    [
        (
            "llama",
            {"general.type": "adapter"},
            r"\(general\.type 'adapter', general\.architecture 'llama'\); give the GGUF file of the model itself, .* "
            "and the adapter with --adapter as PEFT saves it$",
        ),
        (
            "clip",
            {"general.type": "mmproj"},
            r"\(general\.type 'mmproj', general\.architecture 'clip'\); give the GGUF file of the model itself, or the "
            "folder of its Hugging Face checkpoint$",
        ),
        ("llama", {}, r"\(general\.architecture 'llama'\); give the GGUF file of the model itself, or the folder"),
    ],
)
def test_file_without_a_model_names_its_contents(tmp_path, named, more, sentence):
    path = tmp_path / "other.gguf"
    model = random_model("llama")
    write_gguf(path, model, "llama", named=named, more=more, part=lambda name: "attn_q" in name, tokens=False)
    with pytest.raises(ModelError, match=r"other\.gguf: holds no embeddings of tokens .*" + sentence):
        load_model(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": False},
        {"split": "tomorrow-bpe"},
        {"kind": "MXFP4"},
        {"part": lambda name: "ffn_up" not in name},
        {"extra": {"blk.0.odd.weight": torch.zeros(4, 4)}},
        {"more": {"llama.feed_forward_length": 96}},
        {"named": "rwkv7"},
    ],
)
def test_models_show_and_load_reject_the_same_files(tmp_path, capsys, change):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", **change)
    with pytest.raises(ModelError) as told:
        load_model(path)
    assert main(["models", "show", str(path)]) == 2
    assert str(told.value) in " ".join(capsys.readouterr().err.split())


def test_unexpected_tensor_is_rejected(tmp_path):
    experts = {"blk.0.ffn_gate_exps.weight": torch.zeros(2, 64, 64)}
    mixture = write_gguf(tmp_path / "mixture.gguf", random_model("llama"), "llama", extra=experts)
    with raises("model.unexpected_weights", ModelError, names="mixture.gguf"):
        load_model(mixture)


def test_gguf_file_in_a_folder_is_found(tmp_path):
    model = random_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    (tmp_path / "config.json").write_text("{}")  # as in many repositories of GGUF files
    assert load_model(tmp_path).fingerprint == load_model(path).fingerprint
    write_gguf(tmp_path / "other.gguf", model, "llama", "Q8_0")
    with raises("model.ambiguous_file", ModelError, names="model.gguf"):
        load_model(tmp_path)


def test_split_gguf_model_is_loaded(tmp_path):
    model = random_model("llama")
    whole = load_model(write_gguf(tmp_path / "whole.gguf", model, "llama", "Q4_0"))
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = [folder / f"model-{i:05}-of-00002.gguf" for i in (1, 2)]
    write_gguf(parts[0], model, "llama", "Q4_0", part=lambda name: name.startswith("blk.0") or "embd" in name)
    write_gguf(parts[1], model, "llama", "Q4_0", part=lambda name: not (name.startswith("blk.0") or "embd" in name))
    for given in (*parts, folder):
        loaded = load_model(given)
        assert loaded.fingerprint == whole.fingerprint
        assert torch.equal(logits(loaded.model), logits(whole.model))
    parts[1].unlink()
    with raises("model.missing_weights", ModelError, names="model-00002-of-00002.gguf"):
        load_model(parts[0])


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with raises("model.missing_package", ModelError):
        load_model(path)


_BY_LLAMA = """
import ctypes, json, sys
import llama_cpp as cpp
import numpy as np
silent = cpp.llama_log_callback(lambda level, text, data: None)
cpp.llama_log_set(silent, ctypes.c_void_p(0))
cpp.llama_backend_init()
ids = json.loads(sys.argv[2])
model = cpp.llama_model_load_from_file(sys.argv[1].encode(), cpp.llama_model_default_params())
params = cpp.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 64, 1, 1
state = cpp.llama_init_from_model(model, params)
batch = cpp.llama_batch_init(len(ids), 0, 1)
batch.n_tokens = len(ids)
for i, token in enumerate(ids):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
assert cpp.llama_decode(state, batch) == 0
words = (cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model)),)
rows = [cpp.llama_get_logits_ith(state, i) for i in range(len(ids))]
print(json.dumps([np.ctypeslib.as_array(row, words).tolist() for row in rows]))
"""


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp is not installed")
@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("gemma3", {}),
        ("llama", {"scale_linear": 4.0}),
        ("llama", {"scaling.factor": 4.0}),
    ],
)
def test_llama_cpp_computes_the_same_model(tmp_path, architecture, more):
    """In a process of its own, because two OpenMP runtimes in one would fight for the cores."""
    model = random_model(architecture)
    rope = {f"{architecture}.rope.{key}": value for key, value in more.items()}
    path = write_gguf(tmp_path / "model.gguf", model, architecture, "F16", more=rope)
    ids = json.dumps(IDS[0].tolist())
    said = subprocess.run([sys.executable, "-c", _BY_LLAMA, path, ids], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    theirs = torch.tensor(json.loads(said.stdout.splitlines()[-1]))
    ours = logits(load_model(path, dtype="float32").model)
    assert (ours - theirs).norm() / theirs.norm() < 0.01
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("llama-bpe", ["It", "'S", "Ġ", "123", "4"]),
        ("gpt-2", ["It", "'", "S", "Ġ1234"]),
        ("smollm", ["It", "'", "S", "Ġ", "1", "2", "3", "4"]),
        ("stablelm2", ["It", "'S", "Ġ", "1", "2", "3", "4"]),
        ("bloom", ["It'S", "Ġ1234"]),
        ("viking", ["It'S", "Ġ", "1", "2", "3", "4"]),
        ("default", ["It", "'", "S", "Ġ", "123", "4"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, split, pieces):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", split=split)
    before_merging = load_tokenizer(path).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in before_merging.pre_tokenize_str("It'S 1234")] == pieces


#: Splits differ in contractions, digits, marks of many scripts, and white space.
PARTS = (
    *("It's", "I'LL", " we've", " 1234567", "3.14", "  ", "\n\n", "\t", " foo", " bar(x)", " =>", " $5", "a+b", " `q`"),
    *(
        "|x|",
        "~y^2",
        " ñandú",
        "…",
        "。",
        "，",
        "、",
        " नमस्ते।",
        "۔عربي،",
        "\u00a0x",
        " ½²",
        "e\u0301",
        "!?",
        ".",
        "日本語",
    ),
)
_IDS_BY_LLAMA = """
import ctypes, json, sys
import llama_cpp as cpp
silent = cpp.llama_log_callback(lambda level, text, data: None)
cpp.llama_log_set(silent, ctypes.c_void_p(0))
cpp.llama_backend_init()
params = cpp.llama_model_default_params()
params.vocab_only = True
texts, ids = json.loads(sys.argv[1]), []
for path in sys.argv[2:]:
    vocab = cpp.llama_model_get_vocab(cpp.llama_model_load_from_file(path.encode(), params))
    room = (cpp.llama_token * 1000)()
    ids.append([])
    for text in texts:
        count = cpp.llama_tokenize(vocab, text.encode(), len(text.encode()), room, 1000, False, False)
        ids[-1].append(list(room[:count]))
print(json.dumps(ids))
"""


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp is not installed")
def test_llama_cpp_splits_text_in_the_same_way(tmp_path):
    """With merges that were learned across all borders, so that another split gives other ids."""
    rng = random.Random(0)
    texts = ["".join(rng.choice(PARTS) for _ in range(12)) for _ in range(60)]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learned.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=800, initial_alphabet=letters, max_token_length=8, show_progress=False)
    )
    pairs = (" ".join(merge) for merge in json.loads(learned.to_str())["model"]["merges"])
    merges = [pair for pair in pairs if pair != "Ġ t"]
    model = random_model("llama", vocab_size=260 + len(merges), num_hidden_layers=1)
    names = ("gpt-2", "llama-bpe", "qwen2", "smollm", "stablelm2", "bloom", "poro-chat", "viking", "default")
    paths = [write_gguf(tmp_path / f"{name}.gguf", model, "llama", split=name, merges=merges) for name in names]
    command = [sys.executable, "-c", _IDS_BY_LLAMA, json.dumps(texts), *map(str, paths)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    theirs = json.loads(said.stdout.splitlines()[-1])
    for name, path, expected in zip(names, paths, theirs, strict=True):
        tokenizer = load_tokenizer(path)
        assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == expected, name
    assert (
        len({json.dumps(ids) for ids in theirs}) == len(names) - 2
    )  # Poro's split is BLOOM's, and StableLM 2's is Qwen2's


def test_unknown_text_split_is_rejected(tmp_path):
    """transformers reads it with GPT-2's, whose ids are others, and says nothing."""
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", split="tomorrow-bpe")
    with raises("model.unsupported_tokenizer", ModelError, names="tomorrow-bpe"):
        load_model(path)


def test_missing_text_split_is_read_with_a_warning(tmp_path, caplog):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", split=None)
    assert load_tokenizer(path).decode(load_tokenizer(path).encode("It's 1234")) == "It's 1234"
    assert [record.message for record in caplog.records if "tokenizer.ggml.pre" in record.message]
