"""ClusterLLM: an AsyncLLM without weights, in front of replicas."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedTokenizerBase

from inlay.client.async_llm import AsyncLLM
from inlay.client.base import Served
from inlay.client.engine import Engine
from inlay.cluster.wire import Description
from inlay.models.load import load_tokenizer
from inlay.prompt.inputs import check_template


class ClusterLLM(AsyncLLM):
    """The AsyncLLM of an ingress. It prepares prompts and schemas, and replicas compute.

    Args:
        client: The client of the replicas.
        said: The model description that the replicas published.
        tokenizer: The tokenizer of the model.
        settings: The EngineConfig fields that concern prompts.

    Raises:
        ParameterError: If a setting is invalid.
    """

    def __init__(
        self,
        client: Engine,
        said: Description,
        tokenizer: PreTrainedTokenizerBase,
        settings: dict[str, Any],
    ) -> None:
        super().__init__(Served(client, said.name, tokenizer, said.defaults, said.adapters), **settings)


def tokenizer_of(model: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, without its weights. Raises ModelError, ParameterError."""
    tokenizer = load_tokenizer(model)
    if chat_template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = check_template(chat_template)
    return tokenizer
