"""The bundled model's tokenizer: names in syllables, round trips of any text, and the chat template of lessons."""

from __future__ import annotations

import json
import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inlay.models.load import MODEL_DIRECTORY
from inlay_lab.eval.conversations import Conversation
from inlay_lab.eval.words import Split, Words
from inlay_lab.train.lessons import Encoder
from inlay_lab.train.tokenizer import VOCABULARY, train_tokenizer
from lab.tests.train.reading import conversations

pytestmark = pytest.mark.long

SPLITS = pytest.mark.parametrize("split", list(Split), ids=lambda split: split.value)


def test_the_recipe_makes_the_tokenizer_in_the_package():
    """Its corpus is generated. A change of the generator would make the tokenizer differ from the packaged one."""
    made, packaged = (
        json.loads(tokenizer.backend_tokenizer.to_str())
        for tokenizer in (train_tokenizer(), AutoTokenizer.from_pretrained(MODEL_DIRECTORY))
    )
    for part in ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens"):
        assert made[part] == packaged[part]


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


@SPLITS
@pytest.mark.parametrize("syllables", [2, 3])
def test_a_made_up_word_is_a_token_a_syllable(tokenizer: PreTrainedTokenizerBase, split: Split, syllables: int):
    words = Words(random.Random(1), split)
    for word in {words.word(syllables) for _ in range(500)}:
        for text in (word, " " + word):
            plain, capitals = pieces(tokenizer, text), pieces(tokenizer, text.upper())
            assert len(plain) == syllables
            assert capitals == [piece.upper() for piece in plain]


def test_a_person_is_four_tokens(tokenizer: PreTrainedTokenizerBase):
    words = Words(random.Random(2), Split.HELD_OUT)
    for _ in range(100):
        assert len(pieces(tokenizer, f" {words.name('person')}")) == 4


def test_word_has_the_same_tokens_anywhere(tokenizer: PreTrainedTokenizerBase):
    alone = pieces(tokenizer, " Bolukar")
    for before, after in (("The town", " is here."), ("in", "?"), ("of", ", or"), ("Star of", "\n")):
        assert pieces(tokenizer, f"{before} Bolukar{after}")[len(pieces(tokenizer, before)) :][: len(alone)] == alone


@given(text=st.text(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str):
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@SPLITS
def test_generated_text_round_trips(encoder: Encoder, split: Split):
    for drawn in conversations(split)[:30]:
        for document in drawn.documents:
            assert encoder.tokenizer.decode(encoder(document.text)) == document.text


def messages(drawn: Conversation) -> list[dict[str, str]]:
    """A conversation as chat messages; the documents precede the first question."""
    said = [{"role": "system", "content": drawn.system}]
    for index, question in enumerate(drawn.questions):
        before = "".join(document.text + "\n" for document in drawn.documents) if index == 0 else ""
        said += [
            {"role": "user", "content": before + question.text},
            {"role": "assistant", "content": question.answer},
        ]
    return said


@SPLITS
def test_lessons_equal_the_chat_template(encoder: Encoder, split: Split):
    for drawn in conversations(split)[:40]:
        runs, turns = encoder.conversation(drawn)
        ids = [*chain.from_iterable(runs), *chain.from_iterable(asked + answer for asked, answer in turns)]
        assert encoder.tokenizer.apply_chat_template(messages(drawn), return_dict=False) == ids
        assert len(runs) == 1 + len(drawn.documents)
        assert len(turns) == len(drawn.questions)
        first = [*chain.from_iterable(runs), *turns[0][0]]
        asked = encoder.tokenizer.apply_chat_template(
            messages(drawn)[:2], add_generation_prompt=True, return_dict=False
        )
        assert asked == first


def test_other_roles_are_refused(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(TemplateError, match="knows the roles system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "3"}])


def test_a_seed_names_its_vocabulary():
    first, again, other = (train_tokenizer(20, seed) for seed in (0, 0, 1))
    assert first.get_vocab() == again.get_vocab() != other.get_vocab()
    assert len(first) <= VOCABULARY
