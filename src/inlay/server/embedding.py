"""Answers requests for embeddings with the embedding model, beside the engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from inlay.api.call import Call
from inlay.errors import ContextError, ParameterError
from inlay.models.embedding import EmbeddingModel, EmbeddingPooling
from inlay.prompt.inputs import check_ids
from inlay.server.metrics import Update
from inlay.types import CompletionOutput, RequestMetrics, RequestOutput, Usage
from inlay.workpool import WorkPool

#: The most tokens of one pass, padding included. A longer text has a pass of its own.
BATCH_TOKENS = 4_096


class EmbeddingService:
    """An embedding model with its thread. Tenants take turns after each pass.

    Args:
        model: the embedding model.
        prompts: the pool that tokenizes texts.
        most_waiting: the most queued passes of one tenant; None for no limit.
    """

    def __init__(self, model: EmbeddingModel, prompts: WorkPool, most_waiting: int | None) -> None:
        self.model = model
        self._prompts = prompts
        self._passes = WorkPool("computing embeddings", threads=1, most_waiting=most_waiting)

    def close(self) -> None:
        """Refuse further passes."""
        self._passes.close()

    async def answer(
        self, call: Call, names: Sequence[str], *, owner: str | None, arrival: float, timeout_s: float | None
    ) -> AsyncGenerator[Sequence[Update], None]:
        """Yield the finished outputs of a call's prompts, pass by pass.

        Args:
            call: a call for embeddings.
            names: the request id of each prompt.
            owner: the tenant's salt.
            arrival: when the request arrived, on the clock of ``time.perf_counter``.
            timeout_s: seconds after the arrival until the request fails; None for no deadline.

        Raises:
            ContextError: a text is too long.
            ParameterError: a prompt has no tokens, or unknown ids.
            DeadlineError: the deadline has passed.
            QueueFullError: the tenant has too many queued passes.
        """
        deadline = None if timeout_s is None else arrival + timeout_s
        pooling: EmbeddingPooling = call.repeated["pooling"] or self.model.pooling
        most = call.params.truncate_prompt_tokens
        rows = await self._prompts.run(self._rows, call.prompts, most, owner=owner, deadline=deadline)
        for batch in batches([len(row) for row in rows]):
            ids = [rows[number] for number in batch]
            began, vectors = await self._passes.run(self._embed, ids, pooling, owner=owner, deadline=deadline)
            ended = time.perf_counter()
            times = RequestMetrics(
                queue_s=began - arrival, compute_s=ended - began, ttft_s=ended - arrival, total_s=ended - arrival
            )
            yield [
                (number, _output(names[number], call.prompts[number], rows[number], vector, times))
                for number, vector in zip(batch, vectors, strict=True)
            ]

    def _rows(self, prompts: Sequence[Any], most: int | None) -> list[list[int]]:
        """Return the checked token ids of prompts."""
        model, rows = self.model, []
        for prompt in prompts:
            if isinstance(prompt, str):
                row = model.tokenize(prompt, most)
            else:
                row = check_ids(prompt, model.vocab_size, what="input")[-most if most else 0 :]
            if len(row) > model.max_tokens:
                raise ContextError(
                    f"a text has {len(row):,} tokens, and the embedding model {model.name} reads "
                    f"{model.max_tokens:,}; shorten it, or give truncate_prompt_tokens",
                    code="request.too_long",
                )
            if not row:
                raise ParameterError("a text is empty; give at least one token", code="prompt.empty")
            rows.append(row)
        return rows

    def _embed(self, rows: list[list[int]], pooling: EmbeddingPooling) -> tuple[float, list[tuple[float, ...]]]:
        """Return the start of a pass, and the vector of each text."""
        began = time.perf_counter()
        return began, [tuple(vector) for vector in self.model.vectors(rows, pooling).tolist()]


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of texts that share a pass, the shortest texts first.

    Args:
        lengths: the tokens of each text.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[number] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _output(name: str, prompt: Any, ids: list[int], vector: tuple[float, ...], times: RequestMetrics) -> RequestOutput:
    """Return the output of an embedded text. Nothing is read from a cache."""
    return RequestOutput(
        request_id=name,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=tuple(ids),
        prompt_positions=tuple(range(len(ids))),
        outputs=[CompletionOutput(index=0, text="", token_ids=(), finish_reason="length")],
        finished=True,
        usage=Usage(
            prompt_tokens=len(ids),
            cached_tokens=0,
            computed_tokens=len(ids),
            exact_tokens=0,
            module_tokens=0,
            shifted_tokens=0,
        ),
        metrics=times,
        embedding=vector,
    )
