"""transformers' own continuous batching as a column: a paged cache with prefix sharing; requests join at any step."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from inlay.bench.throughput.record import Answer, Limit, Run
from inlay.bench.throughput.workload import Workload
from inlay.errors import DeadlineError, ModelError
from inlay.models.interface import attention_implementation

_PAGE = 64  # tokens of a page, as in our pool; its default is 256, which shares less
_STEP_TOKENS = 1024  # in a forward pass; its masks are this by all slots of the cache


class Continuous:
    """Runs workloads through ``ContinuousBatchingManager``; a new one for every run, so that nothing is stored."""

    def __init__(self, model: PreTrainedModel, most: int) -> None:
        self._model = model
        self._most = most

    def prompt_tokens(self, workload: Workload) -> int:
        """How many tokens of prompts this computes: it finds beginnings, and no modules behind other text."""
        return workload.prompt_tokens(sharing=workload.schema is None)

    def run(self, workload: Workload, limit_s: float = math.inf) -> Run:
        """Answer all requests. Raises ModelError with its own reason where it cannot, DeadlineError behind a limit."""
        pages = self._most * (-(-workload.longest // _PAGE) + 1)
        # eos -1: no token ends an answer; sdpa is what it takes on a CPU, where flash kernels are not there.
        make: Any = GenerationConfig
        generation = make(max_new_tokens=workload.completion, do_sample=False, eos_token_id=-1)
        settings = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages,
            max_batch_tokens=_STEP_TOKENS,
            max_requests_per_batch=self._most,
            auto_switch_to_flash=False,
        )
        factory: Any = self._model
        try:
            with (
                attention_implementation(self._model, "sdpa"),
                factory.continuous_batching_context_manager(generation, continuous_batching_config=settings) as manager,
            ):
                return _ask(manager, workload, Limit(limit_s))
        except (ModelError, DeadlineError):
            raise
        except Exception as error:  # whatever its reason is, it is told
            raise ModelError(f"transformers' continuous batching: {_reason(error)}") from error


def _ask(manager: Any, workload: Workload, limit: Limit) -> Run:
    run = Run(time.perf_counter(), [])
    for number, ask in enumerate(workload.asks):
        time.sleep(max(0.0, run.started + ask.at - time.perf_counter()))
        manager.add_request(list(ask.ids), request_id=str(number), record_timestamps=True)
    made: dict[str, Any] = {}
    while len(made) < len(workload.asks):
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise ModelError(f"transformers' continuous batching: {result.error}")
        if result is not None and result.is_finished():
            made[result.request_id] = result
        elif result is None and not manager.is_running():
            raise ModelError("transformers' continuous batching: its thread has ended without a word")
        limit.check()
    for number, ask in enumerate(workload.asks):
        result = made[str(number)]
        answer = Answer(run.started + ask.at, list(result.timestamps), tuple(result.generated_tokens), ask.ids)
        run.answers.append(answer)
    return run


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
