"""A recipe of six small steps that uses all parts of a long one."""

from __future__ import annotations

from functools import partial

import pytest
from transformers import PreTrainedTokenizerBase

from inlay_lab.eval.questions import Form
from inlay_lab.train.lessons import Lesson
from inlay_lab.train.recipe import Stage
from inlay_lab.train.train import examine

_LESSON = Lesson((1, 2), 6, {"unstated": 1.0}, Form.PLAIN)
SHORT = (
    Stage("two", 2, 300, (0.01, 0.01), _LESSON),
    Stage("four", 4, 300, (0.01, 0.005), _LESSON),
)


def shorten(patch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make training use this tokenizer, skip the warm-up, and log every other step."""
    patch.setattr("inlay_lab.train.train.train_tokenizer", lambda: tokenizer)
    patch.setattr("inlay_lab.train.train.WARMUP", 1)
    patch.setattr("inlay_lab.train.train.LOOK", 2)
    patch.setattr("inlay_lab.train.train.EXAMINE", 3)
    patch.setattr("inlay_lab.train.train.examine", partial(examine, tokens=300))
