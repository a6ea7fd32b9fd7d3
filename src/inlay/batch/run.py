"""Runs a batch from its input to its output."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from inlay.api.call import Call, system_fingerprint
from inlay.api.dialect import dialect_of
from inlay.api.failures import BodyError, Failure, failure_of, naming_text_model
from inlay.api.reasoning import check_parser, model_reasoning
from inlay.api.tools.formats import model_tools, named_format
from inlay.api.tools.offer import structure_failure
from inlay.batch.output import Output
from inlay.batch.requests import BatchCounts, BatchLine, Entry, Index, Progress, Stage, sort_key
from inlay.client.async_llm import AsyncLLM
from inlay.config import GENERATION_CONFIGS
from inlay.errors import InlayError, StructureError
from inlay.kv.identity import fingerprint_under
from inlay.pml import Prompt, Schema
from inlay.policy import ReusePolicy
from inlay.settings import check_choice
from inlay.types import RequestOutput
from inlay.wording import listed

T = TypeVar("T")

logger = logging.getLogger(__name__)

_AHEAD = 2  # requests under way for each that can run, so that one is ready whenever another ends


class BatchError(InlayError):
    """The model failed, so the batch ended early."""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """The settings of a batch.

    Args:
        input, output: files.
        retry_failed: True to answer failed requests of ``output`` again.
        names: the names of the model in requests, beside its adapters. Answers carry the first.
        schemas: the schemas that prompts may name.
        reuse: the policy of requests without one.
        seed: gives requests without a seed their own, together with their custom_id.
        default_max_tokens: see ``api.dialect.Dialect.translate``.
        tool_parser: see ``api.tools.formats.model_tools``.
        reasoning_parser: see ``api.reasoning.model_reasoning``.
        generation_config, chat_template, max_model_len: settings that ``load`` must apply to the model.
        loading: other options of ``load`` as JSON values. With equal ones, a finished batch needs no model to resume.
    """

    input: Path
    output: Path
    names: Sequence[str]
    retry_failed: bool = False
    schemas: Sequence[Schema] = ()
    reuse: str | None = None
    seed: int = 0
    default_max_tokens: int | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    generation_config: str = "auto"
    chat_template: str | None = None
    max_model_len: int | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        named_format(self.tool_parser)  # fail before a model is loaded
        check_parser(self.reasoning_parser)

    def settings(self) -> dict[str, Any]:
        """Return the settings that the answers depend on, beside input and model."""
        written = "".join(schema.to_json() for schema in sorted(self.schemas, key=lambda one: one.name))
        return {
            "set of schemas": hashlib.sha256(written.encode()).hexdigest(),
            "reuse policy": self.reuse,
            "seed": self.seed,
            "default max_tokens": self.default_max_tokens,
            "tool parser": self.tool_parser,
            "reasoning parser": self.reasoning_parser,
            "generation config": self.generation_config,
            "chat template": self.chat_template and hashlib.sha256(self.chat_template.encode()).hexdigest(),
            "max_model_len": self.max_model_len,
        }


def run_batch(job: BatchJob, load: Callable[[], AsyncLLM], progress: Progress, counts: BatchCounts) -> None:
    """Answer the requests that the output lacks. It can be killed at any moment and run again.

    Args:
        load: loads the model if needed.
        counts: kept up to date.

    Raises:
        InlayError: if the batch cannot run. A wrong request becomes a line of the output instead.
    """
    with (
        Index(job.input, progress) as index,
        Output(job.output, index, job.settings(), counts, retry_failed=job.retry_failed) as output,
    ):
        counts.requests = index.requests
        if counts.done == index.requests and output.asked_of(job.loading):
            return
        llm = load()  # also for a finished batch, to check that the model is the same
        try:
            output.begin(_made_by(llm), job.loading)
            if counts.done == index.requests:
                return
            asyncio.run(_Batch(job, llm, index, output, progress, counts).run())
        finally:
            llm.shutdown()


@dataclass
class _Batch:
    job: BatchJob
    llm: AsyncLLM
    index: Index
    output: Output
    progress: Progress
    counts: BatchCounts

    def __post_init__(self) -> None:
        self._ignored: set[str] = set()  # fields of requests that were told of
        self.tools = model_tools(self.llm.tokenizer, self.job.tool_parser)
        self.reasoning = model_reasoning(self.llm.tokenizer, self.job.reasoning_parser)

    async def run(self) -> None:
        for schema in self.job.schemas:
            await self.llm.add_schema(schema, encode=False)  # a module is encoded when a request needs it
        self._sort()
        await self._answer_all()

    def _sort(self) -> None:
        """Store the sort key of every request, and write errors for wrong lines."""
        before, missing = self.counts.done, self.counts.requests - self.counts.done
        for number, entry in enumerate(self.index.missing()):
            self.progress(Stage.SORTING, number, missing)
            if entry.problem is not None:
                message = f"line {entry.line}: {entry.problem}"
                self.output.refuse_line(entry, Failure(400, message, code="invalid_line"))
                continue
            line = self.index.read(entry)
            try:
                key = sort_key(self.llm, self._call(line))
            except InlayError as error:
                self._refuse(entry, error, line.endpoint)
            else:
                self.index.place(entry, key)
        assert self.counts.done - before + self.index.placed == missing, "every line is refused or placed"

    def _call(self, line: BatchLine) -> Call:
        """Translate a request for the model. Raises InlayError for a wrong request, or one that batches do not
        support.
        """
        dialect = dialect_of(line.endpoint)
        with naming_text_model(self.llm.client.model.text_model):
            body = dialect.read(line.body, line.endpoint)
        call = dialect.translate(
            body,
            default_max_tokens=self.job.default_max_tokens,
            tools=self.tools,
            reasoning=self.reasoning,
            defaults=self.llm.sampling_defaults,
        )
        self._check(call)
        for name in call.ignored:
            if name not in self._ignored:
                self._ignored.add(name)
                logger.warning("requests have the field %s, which means nothing here: it is ignored", name)
        return call

    def _check(self, call: Call) -> None:
        if call.stream:
            raise BodyError("stream is true; the answers of a batch come whole: leave it out", param="stream")
        if call.priority:
            message = f"priority is {call.priority}; a batch runs in the order of what prompts share: leave it out"
            raise BodyError(message, param="priority")
        name, names = call.model, self.job.names
        if name is not None and name not in names and name not in self.llm.adapters:
            remedy = f"write that, leave it out, or add --served-model-name {name}"
            if self.llm.adapters:
                remedy = f"write that, leave it out, or name an adapter: {listed(map(repr, self.llm.adapters))}"
            message = f"model is {name!r} and this batch runs {names[0]!r}; {remedy}"
            raise BodyError(message, param="model", code="model_not_found", status=404)
        known = [schema.name for schema in self.job.schemas]
        for prompt in call.prompts:
            if isinstance(prompt, Prompt) and prompt.schema not in known:
                message = f"the batch has no schema {prompt.schema!r}; give its file with --schema"
                raise BodyError(message, param="prompt", code="schema_not_found")

    async def _answer_all(self) -> None:
        under_way = _AHEAD * self.llm.config.max_num_seqs
        prompts = asyncio.Semaphore(under_way)  # a request can have several
        queue = enumerate(self.index.in_order())
        self.counts.started = time.perf_counter()
        workers = [asyncio.create_task(self._work(queue, prompts)) for _ in range(under_way)]
        try:
            await _together(workers)
        finally:
            self.llm.shutdown()  # while the event loop is still running

    async def _work(self, queue: Iterator[tuple[int, Entry]], prompts: asyncio.Semaphore) -> None:
        """Answer requests until the shared queue is empty."""
        for rank, entry in queue:
            await self._answer(rank, entry, prompts)
            self.progress(Stage.ANSWERING, self.counts.done, self.counts.requests)

    async def _answer(self, rank: int, entry: Entry, prompts: asyncio.Semaphore) -> None:
        line = self.index.read(entry)
        call, dialect = self._call(line), dialect_of(line.endpoint)
        runs = [self._run(rank, entry, call, number, prompts) for number in range(len(call.prompts))]
        try:
            outputs = await _together([asyncio.create_task(run) for run in runs])
        except BatchError:
            raise
        except InlayError as error:
            told = structure_failure(call, error) if isinstance(error, StructureError) else error
            self._refuse(entry, told, line.endpoint)
            return
        name, model = f"batch-{entry.line}", call.model or self.job.names[0]
        created = int(time.time())
        fingerprint = system_fingerprint(self.llm.client.model.fingerprint(_adapter(call, self.llm)))
        body = dialect.respond(call, outputs, name=name, created=created, model=model, fingerprint=fingerprint)
        self.output.answer(entry, body)
        self.counts.add(outputs)

    async def _run(self, rank: int, entry: Entry, call: Call, number: int, prompts: asyncio.Semaphore) -> RequestOutput:
        """Return the output of one of a request's prompts. ``rank`` is its place in the order and its priority."""
        prompt, params = call.prompts[number], call.params
        if params.seed is None:
            params = replace(params, seed=_seed(self.job.seed, entry.custom_id, number))
        async with prompts:
            try:
                return await _last(
                    self.llm.generate(
                        prompt,
                        params,
                        priority=rank,
                        reuse=None if call.reuse is None else ReusePolicy.parse(call.reuse),
                        positions=call.positions,
                        adapter=_adapter(call, self.llm),
                        keep_marked_alone=call.keep_marked_alone,
                        diagnostics=call.diagnostics,
                        stream_interval=None,
                    )
                )
            except InlayError:
                raise
            except Exception as error:  # the model's fault, so the request is not recorded as failed
                raise BatchError(
                    f"line {entry.line}: the model failed ({type(error).__name__}: {error}); the answers so far are in "
                    f"{self.job.output}: run the command again for the rest",
                    code="batch.model_failed",
                ) from error

    def _refuse(self, entry: Entry, error: InlayError, endpoint: str) -> None:
        failure = failure_of(error)
        said = replace(failure, message=f"line {entry.line}: {failure.message}")
        self.output.refuse(entry, said, dialect_of(endpoint))


def _adapter(call: Call, llm: AsyncLLM) -> str | None:
    """Return the adapter that a request names; None for the model alone."""
    return call.model if call.model in llm.adapters else None


def _made_by(llm: AsyncLLM) -> bytes:
    """Return a digest of a model, its adapters and their names."""
    made_by = llm.loaded.fingerprint
    for name, digest in sorted(llm.client.model.adapters.items()):
        made_by = fingerprint_under(made_by, digest + name.encode())
    return made_by


async def _last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        last = output
    return last


async def _together(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Return the tasks' results. If one fails, the others are cancelled."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _seed(seed: int, custom_id: str | None, number: int) -> int:
    """Return a request's own seed, independent of other requests."""
    digest = hashlib.sha256(json.dumps([seed, custom_id, number]).encode()).digest()
    return int.from_bytes(digest[:8], "big")
