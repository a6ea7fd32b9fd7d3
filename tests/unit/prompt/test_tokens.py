"""Runs of text as token ids: nothing added, nothing stripped, and no text that turns into a special token."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inlay.errors import ContextError, ModelError
from inlay.models.shapes import bytes_tokenizer
from inlay.prompt.tokens import TextEncoder
from tests.generated import examples
from tests.raising import raises
from tests.tokenizers_for_tests import gpt2, llama2, llama3, metaspace, unigram

BUILD = {
    "gpt2": gpt2,
    "llama2": llama2,
    "llama3": llama3,
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-always": lambda: metaspace("always"),
    "unigram": unigram,
    "bytes": bytes_tokenizer,
}
LOSSLESS = [name for name in BUILD if name != "unigram"]
ENCODERS = {name: TextEncoder(build()) for name, build in BUILD.items()}


def composing() -> PreTrainedTokenizerFast:
    """Bytes after NFC, as of Qwen."""
    tokenizer = copy.deepcopy(gpt2())
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


BOUNDED = {**ENCODERS, "composing": TextEncoder(composing())}


def special_names(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """All added tokens that are not white space, the plain ones included."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]


NAMES = sorted({name for build in BUILD.values() for name in special_names(build())} | {"<0x0A>", "<unk>"})
# ▁ is how SentencePiece writes a space, so that it cannot come back
TEXTS = st.lists(st.sampled_from(NAMES) | st.text(alphabet="the ferry\n\t<|>/_日é😀", max_size=8), max_size=6).map(
    "".join
)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("text", ["The ferry", " The ferry", "  two", "end ", "\n\nlines\n", "日本 😀", " ", "\n"])
def test_encoded_text_decodes_to_itself(name: str, text: str) -> None:
    encoder, tokenizer = ENCODERS[name], BUILD[name]()
    before = encoder.text("day")  # the decoders of SentencePiece take a space off the front
    assert tokenizer.decode(before + encoder.text(text)) == "day" + text


@pytest.mark.parametrize(
    ("name", "space"),
    [("gpt2", "Ġ"), ("llama2", "▁"), ("metaspace-first", "▁"), ("metaspace-always", "▁"), ("unigram", "▁")],
)
def test_no_dummy_space(name: str, space: str) -> None:
    encoder, tokenizer = ENCODERS[name], BUILD[name]()
    assert tokenizer.tokenize("the") == [space + "the"]
    assert tokenizer.convert_ids_to_tokens(list(encoder.text(" the"))) == [space + "the"]
    for ids in (encoder.text("the"), encoder.template("the")):
        assert "".join(tokenizer.convert_ids_to_tokens(list(ids))) == "the"


def test_ends_of_a_text_are_not_stripped() -> None:
    tokenizer, encoder = unigram(), ENCODERS["unigram"]
    assert tokenizer.decode(encoder.text("a ") + encoder.text("the") + encoder.text(" ferry")) == "a the ferry"


@pytest.mark.parametrize("name", LOSSLESS)
@given(runs=st.lists(TEXTS, max_size=4))
@settings(max_examples=examples(60), deadline=None)
def test_runs_decode_to_their_text(name: str, runs: list[str]) -> None:
    encoder, tokenizer = ENCODERS[name], BUILD[name]()
    ids = [token for run in ["day", *runs] for token in encoder.text(run)]
    assert tokenizer.decode(ids) == "".join(["day", *runs])


@pytest.mark.parametrize("name", list(BUILD))
@given(text=TEXTS)
@settings(max_examples=examples(100), deadline=None)
def test_text_cannot_become_a_special_token(name: str, text: str) -> None:
    tokenizer = BUILD[name]()
    special = {tokenizer.convert_tokens_to_ids(token) for token in special_names(tokenizer)}
    ids = set(ENCODERS[name].text(text))
    assert not ids & (special - {tokenizer.unk_token_id})  # for 日 the unigram has nothing else


@pytest.mark.parametrize("name", list(BUILD))
def test_templates_do_produce_special_tokens(name: str) -> None:
    tokenizer, encoder = BUILD[name](), ENCODERS[name]
    for token in special_names(tokenizer):
        assert encoder.template(token) == (tokenizer.convert_tokens_to_ids(token),)
        assert len(encoder.text(token)) > 1


def test_the_unigram_would_match_its_special_pieces() -> None:
    """The reason for the guard: without it, the pieces of the vocabulary win."""
    pieces = unigram().backend_tokenizer.model.tokenize("<s>a</s>")
    assert [piece.value for piece in pieces] == ["<s>", "a", "</s>"]
    ids = ENCODERS["unigram"].text("<s>a</s>")
    assert "".join(unigram().convert_ids_to_tokens(list(ids))) == "<s>a</s>"
    wide = ENCODERS["unigram"].text("＜s＞")  # NFKC makes <s> of it
    assert unigram().convert_ids_to_tokens(list(wide)) == ["<", "s", ">"]


def test_names_of_bytes_and_of_unk_are_text() -> None:
    tokenizer, encoder = unigram(), ENCODERS["unigram"]
    for text in ("<0x0A>", "<unk>", "<unk><unk>"):
        assert "".join(tokenizer.convert_ids_to_tokens(list(encoder.text(text)))) == text
    assert encoder.text("日") == (tokenizer.unk_token_id,)
    assert encoder.text("日<unk>")[:1] == (tokenizer.unk_token_id,)
    assert "".join(tokenizer.convert_ids_to_tokens(list(encoder.text("日<unk>")))) == "<unk><unk>"


@pytest.mark.parametrize("role", ["eos_token", "additional_special_tokens"])
def test_shared_unk_token_is_dropped(role: str) -> None:
    backend = Tokenizer(models.Unigram([("</s>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=0))
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    names = {"unk_token": "</s>", "eos_token": "</s>"} if role == "eos_token" else {"unk_token": "</s>"}
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, **names))
    expected = (1, 2) if role == "eos_token" else (1, 0, 2)
    assert encoder.text("a日本b") == expected
    assert encoder.unk_id == 0
    assert len(encoder.text("日" * 20_000)) in (0, 1)


def test_one_character_special_token_is_dropped() -> None:
    backend = Tokenizer(models.WordLevel({"☃": 0, "a": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken("☃", special=True, normalized=False)])
    encoder = TextEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="☃", unk_token="?"))
    assert encoder.text("a☃a?b") == (1, 1, 2, 2)
    assert encoder.template("☃") == (0,)


def test_added_tokens_of_white_space_stay() -> None:
    """Models use them to indent code, and no template starts a role with them."""
    tokenizer, encoder = gpt2(), ENCODERS["gpt2"]
    assert tokenizer.convert_ids_to_tokens(list(encoder.text("    if"))) == ["    ", "if"]
    assert tokenizer.convert_ids_to_tokens(list(encoder.text("<think>"))) == ["<", "th", "in", "k", ">"]


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.rounds, self.characters = inner, 0, 0

    def encode_batch(self, texts: list[str], **settings: bool):
        self.rounds += 1
        self.characters += sum(map(len, texts))
        return self.inner.encode_batch(texts, **settings)


@pytest.mark.parametrize(
    "text", ["<s>" * 20_000, "<unk>" * 20_000, "<<s></s>" * 10_000, "<0x0A>" * 10_000, "<" * 50_000]
)
@pytest.mark.parametrize("name", ["unigram", "llama2", "gpt2"])
def test_adversarial_text_takes_a_few_passes(name: str, text: str) -> None:
    encoder = TextEncoder(BUILD[name]())
    counting = Counting(encoder.plain_tokenizer)
    encoder.plain_tokenizer = counting  # type: ignore[assignment]
    ids = encoder.text(text)
    assert counting.rounds <= 4
    assert counting.characters <= 4 * len(text)
    assert BUILD[name]().decode(ids) == text


@pytest.mark.parametrize(
    ("name", "bos"),
    [
        ("gpt2", None),
        ("bytes", None),
        ("llama2", "<s>"),
        ("metaspace-first", "<s>"),
        ("unigram", "<s>"),
        ("llama3", "<|begin_of_text|>"),
    ],
)
def test_bos(name: str, bos: str | None) -> None:
    """A bos_token counts only if the stock tokenizer puts it in front."""
    assert ENCODERS[name].bos == (() if bos is None else (BUILD[name]().convert_tokens_to_ids(bos),))


@pytest.mark.parametrize("name", list(BUILD))
def test_tokenizer_is_unchanged(name: str) -> None:
    tokenizer = BUILD[name]()
    tokenizer.backend_tokenizer.enable_truncation(5)
    try:
        before = tokenizer.backend_tokenizer.to_str()
        encoder = TextEncoder(tokenizer)
        assert len(encoder.text("one two three four five six seven")) > 5
        assert len(encoder.template("one two three four five six seven")) > 5
        assert tokenizer.backend_tokenizer.to_str() == before
        assert not tokenizer.backend_tokenizer.encode_special_tokens
    finally:
        tokenizer.backend_tokenizer.no_truncation()


@pytest.mark.parametrize("name", list(BUILD))
def test_empty_text(name: str) -> None:
    assert ENCODERS[name].text("") == ()
    assert ENCODERS[name].template("") == ()


def test_a_slow_tokenizer_is_refused() -> None:
    with raises("model.no_fast_tokenizer", ModelError):
        TextEncoder(object())  # type: ignore[arg-type]


@given(TEXTS | st.text(max_size=60) | st.text(alphabet="e\u0301\u0323\u212a\u1100\u1161\u11a8", max_size=60))
def test_token_count_is_at_least_the_lower_bound(text: str) -> None:
    for name in ("gpt2", "llama2", "llama3", "bytes", "composing"):
        encoder = BOUNDED[name]
        assert encoder.bound.least_tokens(text) <= len(encoder.text(text))
        assert encoder.bound.least_tokens(text) <= len(encoder.template(text))


def test_tokenizers_that_drop_text_have_no_lower_bound() -> None:
    assert ENCODERS["unigram"].bound.least_tokens("word " * 1000) == 0
    splitting = Tokenizer(models.BPE({chr(33 + n): n for n in range(90)}, []))
    splitting.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TextEncoder(PreTrainedTokenizerFast(tokenizer_object=splitting), 10).bound.least_tokens(" " * 1000) == 0


def test_overlong_text_is_rejected_before_tokenization() -> None:
    encoder = TextEncoder(bytes_tokenizer(), 100)
    longest = max(map(len, special_names(bytes_tokenizer())))  # all others are single bytes
    fits = "x" * (99 * longest)
    encoder.bound.check([fits])
    with pytest.raises(ContextError) as caught:
        encoder.bound.check([fits, "y"])
    assert str(caught.value) == (
        f"the text has {99 * longest + 1:,} bytes, which are 100 tokens at least, and the model's context is 100 "
        "tokens long, answer included; shorten the text"
    )


@pytest.mark.parametrize("read", ["text", "template"])
def test_tokenizing_lets_other_threads_run(read: str) -> None:
    """A long text is tokenized without the interpreter's lock, by every method."""
    encoder = ENCODERS["gpt2"]
    used = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plain_tokenizer", "template_tokenizer"):
            real = getattr(encoder, name)
            patch.setattr(
                encoder,
                name,
                SimpleNamespace(encode_batch=lambda *a, real=real, **k: used.append(1) or real.encode_batch(*a, **k)),
            )
        assert getattr(encoder, read)("some words")
    assert used, "only encode_batch gives the lock away"
