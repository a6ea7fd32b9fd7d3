"""The bundled model's tokenizer: byte-level BPE, trained on the generated text.

Before BPE, capitalised words are split into syllables; every other word stays whole. So a new name is a row of known
tokens, and writing it in capitals replaces token by token.
"""

from __future__ import annotations

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inlay_lab.eval.conversations import SYSTEM, draw_conversation
from inlay_lab.eval.words import Split

VOCABULARY = 3072
BOS, END, SYSTEM_TURN, USER_TURN, ASSISTANT_TURN = "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_VOWEL, _CONSONANT = "[aeiouAEIOU]", "[b-df-hj-np-tv-zB-DF-HJ-NP-TV-Z]"
_SYLLABLE = rf"{_CONSONANT}*{_VOWEL}+(?:{_CONSONANT}+(?![A-Za-z]))?"
_PIECES = "|".join(
    (
        rf"(?<=[A-Za-z]){_SYLLABLE}",  # further syllables of a capitalised word
        rf" ?(?=[A-Z]){_SYLLABLE}",  # its first syllable
        r" ?[A-Z]+",
        r" ?[a-z]+",
        r" ?\d",
        r"\n",
        r" ?[^\sA-Za-z\d]",
        r"\s",
        r".",
    )
)


def train_tokenizer(conversations: int = 4000, seed: int = 0) -> PreTrainedTokenizerBase:
    """A tokenizer trained on generated training text, an equal share of it in capitals."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, END, SYSTEM_TURN, USER_TURN, ASSISTANT_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(rng, conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM_TURN, USER_TURN, ASSISTANT_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _corpus(rng: random.Random, conversations: int) -> list[str]:
    texts = list(SYSTEM)
    for _ in range(conversations):
        drawn = draw_conversation(rng, Split.FIRST, documents=6, questions=8)
        plain = [drawn.system, *(document.text + "\n" for document in drawn.documents)]
        plain += [text for question in drawn.questions for text in (question.text, question.answer)]
        texts += plain
        texts += [answer.text.upper() for document in drawn.documents for answer in document.facts.values()] * 2
        texts += [document.name.upper() for document in drawn.documents] * 2
    return texts
