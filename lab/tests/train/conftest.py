"""The bundled model's tokenizer, trained on less text, and a training run of six steps."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from inlay_lab.train.lessons import Encoder
from inlay_lab.train.train import Training
from lab.tests.train.short_training import SHORT, shorten
from tests.model.check.models import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return small_tokenizer()


@pytest.fixture(scope="session")
def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    return Encoder(tokenizer)


@pytest.fixture(scope="session")
def trained(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A finished run without interruption. Tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, tokenizer)
        training = Training(tmp_path_factory.mktemp("trained"), SHORT, 1, 0, 1)
        training.run()
    return training
