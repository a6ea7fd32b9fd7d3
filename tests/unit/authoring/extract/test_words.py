"""Text is cut into words without loss, and in the same way wherever it stands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.authoring.extract.runs import Vocabulary, carried_by_xml, split_words


@settings(deadline=None)
@given(st.text())
def test_splitting_preserves_the_text(text):
    assert "".join(split_words(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, big world.", ["Hello", ",", " big", " world", "."]),
        ("  two\n\n\tthree", [" ", " two", "\n\n", "\t", "three"]),
        ("camelCase HTTPServer2", ["camel", "Case", " HTTPS", "erver", "2"]),
        ("Größe naïve Ärger", ["Größe", " naïve", " Ärger"]),
        ("привет мир", ["привет", " мир"]),
        ("天气很好。", ["天", "气", "很", "好", "。"]),
        ("สวัสดี", ["ส", "ว", "ั", "ส", "ด", "ี"]),
        ("a\r\nb", ["a", "\r", "\n", "b"]),
        ("-----==", ["-----=="]),
        ("🙂🙂", ["🙂", "🙂"]),
        ("", []),
    ],
)
def test_words(text, words):
    assert split_words(text) == words


@settings(deadline=None)
@given(st.text(alphabet="aB1 \n_-é天.", max_size=12), st.text(alphabet="aB1 \n_-é天.", max_size=12))
def test_text_is_split_the_same_way_after_any_text(before, after):
    # from the second border on inside the common part, all borders are the same
    common = "one Two three 45, six天seven"
    expected = split_words(common)
    words = split_words(before + common + after)
    assert any(words[start : start + len(expected) - 3] == expected[2:-1] for start in range(len(words)))


def test_long_text_without_spaces_is_split_by_content():
    blob = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk" * 40
    assert split_words("data:" + blob)[-400:] == split_words("x;base64," + blob)[-400:]
    assert max(map(len, split_words(blob))) < 20


def test_equal_numbers_are_equal_words():
    vocabulary = Vocabulary()
    assert vocabulary.encode("a b a b").tolist() == [0, 1, 2, 1]
    assert vocabulary.encode(" b c").tolist() == [1, 3]
    assert list(vocabulary) == ["a", " b", " a", " c"]


@pytest.mark.parametrize(("text", "carried"), [("a\t\r\n�😀", True), ("\0", False), ("\x0c", False), ("\uffff", False)])
def test_characters_without_xml_form_are_detected(text, carried):
    assert carried_by_xml(text) is carried
