import string
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inlay.output import TextStream
from inlay.sampling.params import SamplingParams
from tests.generated import examples

PLAIN = SamplingParams()
TEXT = "Hi, wörld — 你好😀!\n"
REPLACEMENT = "\ufffd"


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: every token is a string of bytes; two-byte merges cut across characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_char = {token: number for number, token in enumerate(alphabet)}
    pairs = [("Ġ", "w"), ("l", "d"), ("ð", "Ł"), ("½", "å"), ("s", "t"), ("ï", "¿")]
    vocab = to_char | {a + b: 256 + number for number, (a, b) in enumerate(pairs)}
    backend = Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def metaspace(*, strip: bool = True) -> PreTrainedTokenizerFast:
    """Llama 2's kind: words begin with ▁, unknown characters fall back to bytes, a text loses its first space."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁Hi", "▁w", "ö", "rld", "好", "ab", REPLACEMENT, *string.ascii_letters, *".,!—"]
    vocab = [(piece, -float(len(pieces) - number)) for number, piece in enumerate(pieces)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte_level": byte_level(),
    "metaspace": metaspace(),
    "metaspace_unstripped": metaspace(strip=False),
}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def bytes_of(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One token per byte."""
    if tokenizer is TOKENIZERS["byte_level"]:
        table = byte_table()
        return [tokenizer.convert_tokens_to_ids(table[byte]) for byte in data]
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]


def byte_table() -> dict[int, str]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def stream(tokenizer, ids: Sequence[int], params: SamplingParams = PLAIN, prompt: Sequence[int] = ()) -> TextStream:
    """The finished stream over all ids, checked on the way: nothing released is ever taken back."""
    running = TextStream(tokenizer, prompt, params)
    released = ""
    for token_id in ids:
        released += running.push(token_id)
        assert running.text == released
    released += running.finish()
    assert running.text == released
    return running


def continuation(tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool = True) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def first_completed(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The text cut at the stop string that ends first, the longest of these: one character after the other."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@every_tokenizer
@pytest.mark.parametrize("text", [TEXT, " leading", "  ", "a", "👩‍👩‍👧 é", "日本語のテキスト", "\n\n", ""])
def test_streamed_text_equals_decode(tokenizer, text):
    for ids in (ids_of(tokenizer, text), bytes_of(tokenizer, text.encode())):
        assert stream(tokenizer, ids).text == tokenizer.decode(ids)
        prompt = ids_of(tokenizer, " Hi")
        assert stream(tokenizer, ids, prompt=prompt).text == text


@every_tokenizer
def test_a_space_that_opens_the_answer_is_kept_after_a_prompt(tokenizer):
    ids = ids_of(tokenizer, " world")
    special = tokenizer.bos_token_id
    for prompt in ("Hi", "Hi there, this is a long prompt", "Hi\n"):
        assert stream(tokenizer, ids, prompt=ids_of(tokenizer, prompt)).text == " world"
        assert stream(tokenizer, ids, prompt=[*ids_of(tokenizer, prompt), *[special] * 40]).text == " world"
    for prompt in ([], [special]):
        assert stream(tokenizer, ids, prompt=prompt).text == tokenizer.decode(ids)


def test_text_is_released_as_soon_as_it_is_certain():
    tokenizer = TOKENIZERS["byte_level"]
    running = TextStream(tokenizer, [], PLAIN)
    assert [running.push(token) for token in bytes_of(tokenizer, "aé😀b".encode())] == [
        *("a", "", "é", "", "", "", "😀", "b")
    ]


def test_byte_fallback_waits_for_the_end_of_a_run_of_bytes():
    """With one bad byte, all bytes of the run become U+FFFD, those of complete characters too."""
    tokenizer = TOKENIZERS["metaspace"]
    good = bytes_of(tokenizer, "é😀".encode())
    after = ids_of(tokenizer, "ab")
    running = TextStream(tokenizer, [], PLAIN)
    assert [running.push(token) for token in good + after] == ["", "", "", "", "", "", "é😀ab"]
    bad = [*good, good[0], *after]
    assert stream(tokenizer, bad).text == tokenizer.decode(bad) == REPLACEMENT * 7 + "ab"


@every_tokenizer
@pytest.mark.parametrize(
    "data", [b"a\xc3", b"\xf0\x9f\x98", b"\xff\xfe", b"\xc3\xa9\xf0\x9f", b"\x80" * 50, b"\xc3" * 50]
)
def test_an_incomplete_end_becomes_replacement_characters(tokenizer, data):
    ids = bytes_of(tokenizer, data)
    prompt = ids_of(tokenizer, " Hi")
    text = stream(tokenizer, ids, prompt=prompt).text
    assert text == continuation(tokenizer, prompt, ids)
    assert text.endswith(REPLACEMENT)


@every_tokenizer
def test_a_character_that_the_prompt_begins_belongs_to_the_answer(tokenizer):
    data = bytes_of(tokenizer, "好".encode())
    prompt = ids_of(tokenizer, "Hi") + data[:2]
    assert stream(tokenizer, data[2:] + ids_of(tokenizer, "ab"), prompt=prompt).text == "好ab"
    assert stream(tokenizer, ids_of(tokenizer, "ab"), prompt=prompt).text == "ab"


@every_tokenizer
def test_a_replacement_character_of_the_prompt_is_not_repeated(tokenizer):
    prompt = ids_of(tokenizer, f"Hi{REPLACEMENT}")
    for text in ("ab", "é好", REPLACEMENT, f"{REPLACEMENT}a"):
        ids = bytes_of(tokenizer, text.encode())
        assert stream(tokenizer, ids, prompt=prompt).text == text


def test_special_tokens_are_kept_or_dropped():
    tokenizer = TOKENIZERS["byte_level"]
    tool = tokenizer.convert_tokens_to_ids("<tool>")
    letters = ids_of(tokenizer, "ab")
    ids = [letters[0], tokenizer.eos_token_id, tool, letters[1], tokenizer.bos_token_id]
    assert stream(tokenizer, ids).text == "a<tool>b"
    assert stream(tokenizer, ids, SamplingParams(skip_special_tokens=False)).text == "a</s><tool>b<s>"


@every_tokenizer
def test_special_and_unknown_tokens_do_not_cut_a_character(tokenizer):
    data = bytes_of(tokenizer, "😀".encode())
    ids = [data[0], tokenizer.eos_token_id, data[1], 10**6, *data[2:], *ids_of(tokenizer, "a")]
    assert stream(tokenizer, ids).text == "😀a"


@every_tokenizer
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_token_borders_ends_the_text(tokenizer, include):
    params = SamplingParams(stop=["STOP", "never"], include_stop_str_in_output=include)
    running = TextStream(tokenizer, ids_of(tokenizer, "Hi"), params)
    pieces = [running.push(token) for token in bytes_of(tokenizer, b"a STSTOP")]
    assert running.stopped == "STOP"
    assert running.text == "".join(pieces) == ("a STSTOP" if include else "a ST")
    assert running.push(ids_of(tokenizer, "b")[0]) == ""
    assert running.finish() == ""
    assert running.text == "".join(pieces)


def test_possible_prefix_of_a_stop_string_is_held_back():
    tokenizer = TOKENIZERS["byte_level"]
    running = TextStream(tokenizer, [], SamplingParams(stop=["abc", "bd"]))
    assert [running.push(token) for token in bytes_of(tokenizer, b"xabab")] == ["x", "", "", "ab", ""]
    assert running.text == "xab"
    assert running.finish() == "ab"
    assert (running.text, running.stopped) == ("xabab", None)


def test_a_stop_string_of_byte_tokens_stops_at_once():
    """It does not take one more token to see that a line break of a byte-fallback tokenizer is there."""
    tokenizer = TOKENIZERS["metaspace"]
    prompt = ids_of(tokenizer, "Hi\n")
    for text, stop, before in (("ab\n", "b\n", "a"), ("\n", "\n", ""), ("aé😀", "😀", "aé")):
        running = TextStream(tokenizer, prompt, SamplingParams(stop=stop))
        for token in ids_of(tokenizer, text):
            running.push(token)
        assert (running.text, running.stopped) == (before, stop)


@every_tokenizer
def test_a_stop_string_may_be_a_replacement_character(tokenizer):
    params = SamplingParams(stop=REPLACEMENT)
    assert stream(tokenizer, bytes_of(tokenizer, "aéb".encode()), params).stopped is None
    cut = stream(tokenizer, ids_of(tokenizer, "a") + bytes_of(tokenizer, b"\xc3"), params)
    assert (cut.text, cut.stopped) == ("a", REPLACEMENT)


@every_tokenizer
@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["abcd", "bc"], "a", "bc"),
        (["bc", "abc"], "", "abc"),
        (["d", "b"], "a", "b"),
        (["abcde"], "abcd", None),
        (["cd"], "ab", "cd"),
    ],
)
def test_the_stop_string_completed_first_wins(tokenizer, stops, text, stop):
    for order in (stops, stops[::-1]):
        for ids in (ids_of(tokenizer, "abcd"), bytes_of(tokenizer, b"abcd")):
            found = stream(tokenizer, ids, SamplingParams(stop=order), prompt=ids_of(tokenizer, "Hi"))
            assert (found.text, found.stopped) == (text, stop)


@every_tokenizer
def test_stop_strings_do_not_count_within_the_first_min_tokens(tokenizer):
    ids = bytes_of(tokenizer, b"xaxabx")
    outcomes = [
        (found.text, found.stopped)
        for count in range(7)
        for found in [stream(tokenizer, ids, SamplingParams(stop=["x", "ab"], min_tokens=count))]
    ]
    assert outcomes == [
        ("", "x"),
        ("xa", "x"),
        ("xa", "x"),
        ("xax", "ab"),
        ("xax", "ab"),
        ("xaxab", "x"),
        ("xaxabx", None),
    ]


class Counting:
    """A tokenizer that notes the most tokens that it decoded at once."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.longest = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, ids: list[int], **how: Any) -> str:
        self.longest = max(self.longest, len(ids))
        return self.inner.decode(ids, **how)


def test_a_long_answer_is_decoded_in_pieces():
    """The work per token does not grow with the answer."""
    tokenizer = TOKENIZERS["byte_level"]
    counting = Counting(tokenizer.backend_tokenizer)
    running = TextStream(SimpleNamespace(backend_tokenizer=counting), [], PLAIN)
    for token in bytes_of(tokenizer, ("é好😀a" * 100).encode() + b"\x80" * 500):
        running.push(token)
    assert running.text + running.finish() == "é好😀a" * 100 + REPLACEMENT * 500
    assert 0 < counting.longest < 40


def test_long_byte_runs_are_not_decoded_repeatedly():
    """Nothing of a run is settled before it ends, and scripts that a vocabulary lacks are one run."""
    tokenizer = TOKENIZERS["metaspace"]
    counting = Counting(tokenizer.backend_tokenizer)
    text = "አማርኛ" * 40
    params = SamplingParams(stop=text[-9:] + "ሀ")
    running = TextStream(SimpleNamespace(backend_tokenizer=counting), bytes_of(tokenizer, b"Hi"), params)
    for token in bytes_of(tokenizer, (text + "ሀ" + text).encode()):
        running.push(token)
    assert (running.text, running.stopped) == (text[:-9], params.stop)
    assert counting.longest < 20


def test_white_space_is_not_cleaned_up():
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(tokenizer, ids_of(tokenizer, "a , b .  do n't")).text == "a , b .  do n't"


ALPHABET = "ab \né好😀" + REPLACEMENT
texts = st.text(alphabet=ALPHABET, max_size=24)
stop_strings = st.lists(st.text(alphabet="ab \né😀", min_size=1, max_size=4), max_size=3)


@st.composite
def split(draw: st.DrawFn, text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The text as tokens, some characters as whole tokens where there are any, others byte by byte."""
    ids: list[int] = []
    while text:
        length = draw(st.integers(1, len(text)))
        part, text = text[:length], text[length:]
        ids += ids_of(tokenizer, part) if draw(st.booleans()) else bytes_of(tokenizer, part.encode())
    return ids


@every_tokenizer
@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_streaming_equals_decoding_all_and_cutting(tokenizer, data):
    text, prompt = data.draw(texts), data.draw(texts.map("a".__add__))
    stops = data.draw(stop_strings)
    include = data.draw(st.booleans())
    ids = data.draw(split(text, tokenizer))
    found = stream(
        tokenizer,
        ids,
        SamplingParams(stop=stops, include_stop_str_in_output=include),
        prompt=data.draw(split(prompt, tokenizer)),
    )
    assert (found.text, found.stopped) == first_completed(text, stops, include)


@every_tokenizer
@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_text_of_decode(tokenizer, data):
    """Random bytes, mostly no valid UTF-8, special tokens and rows beyond the vocabulary."""
    lead = bytes_of(tokenizer, b"\xc3\xa9\xf0\x9f\x98\x80\x80\xff a")
    token_ids = st.sampled_from(lead) | st.integers(0, len(tokenizer) + 3)
    ids = data.draw(st.lists(token_ids, max_size=60))
    prompt = ids_of(tokenizer, "Hi ab")
    skip = data.draw(st.booleans())
    found = stream(tokenizer, ids, replace(PLAIN, skip_special_tokens=skip), prompt=prompt)
    assert found.text == continuation(tokenizer, prompt, ids, skip)
