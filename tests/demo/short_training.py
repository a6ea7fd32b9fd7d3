"""A recipe of six small steps, with as much going on as in a long one."""

from __future__ import annotations

from functools import partial

import pytest
from transformers import PreTrainedTokenizerBase

from inlay.demo.questions import Form
from inlay.demo.recipe import Stage
from inlay.demo.train import examine

SHORT = (
    Stage("two", 2, (1, 2), 300, (0.01, 0.01), {"unstated": 1.0}, Form.PLAIN, questions=6),
    Stage("four", 4, (1, 2), 300, (0.01, 0.005), {"unstated": 1.0}, Form.PLAIN, questions=6),
)


def shorten(patch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have training take this tokenizer, no time to warm up, and note its progress every other step."""
    patch.setattr("inlay.demo.train.train_tokenizer", lambda: tokenizer)
    patch.setattr("inlay.demo.train._WARMUP", 1)
    patch.setattr("inlay.demo.train._LOOK", 2)
    patch.setattr("inlay.demo.train._EXAMINE", 3)
    patch.setattr("inlay.demo.train.examine", partial(examine, tokens=300))
