"""The options of the throughput benchmark, and its cases. All are checked before any model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from inlay.client.async_llm import AsyncLLM
from inlay.config import KV_CACHE_DTYPES
from inlay.errors import ParameterError
from inlay.models.weights import WeightForm
from inlay.settings import check_choice
from inlay_lab.bench.throughput.workload import (
    CHOSEN,
    KINDS,
    MODULES,
    Sizes,
    Workload,
    permuted_modules,
    shared_prefix,
    user_workload,
)
from inlay_lab.options import check_least

PARTS = ("prefix", "modules", "workloads", "memory")
COLUMNS = ("inlay", "off", "stock", "transformers", "llama.cpp")
ARRIVALS = ("batch", "poisson")
CHUNK = 64
_REQUESTS, _USERS = 16, 20  # 95 % of 20 is a whole number
_OVERTIME = 2  # budgets after which a run ends without a result


@dataclass(frozen=True, kw_only=True)
class ThroughputSetting:
    """Options of the throughput benchmark. Raises ParameterError.

    Attributes:
        parts: From ``PARTS``.
        columns: Columns to run; ``inlay`` always runs. ``workloads`` has only ``inlay`` and ``off``, ``memory`` only
            ``inlay``, and ``llama.cpp`` runs only ``prefix``.
        requests: In a run; None for 16, or 20 in ``workloads``.
        batch: Most requests that run at once.
        arrivals: Of the parts prefix and modules: all at once ("batch") or at random times ("poisson").
        rates: Requests a second for "poisson".
        prefixes: Lengths of the shared prefix, in tokens.
        question: Tokens of each request's own text.
        completion, module_completion: Tokens of an answer.
        module_tokens: Of each of 12 modules; a prompt has 6 of them.
        workloads: From ``KINDS``.
        hit_rates: Target hit rates, 0 to 1.
        clients: Clients of the workloads, each with one request at a time.
        users: Sizes of these workloads, and of the documents of ``memory``.
        documents: Numbers of resident documents in ``memory``.
        budget_s: Seconds of a run without its preparation. If a small run predicts more, the column gets fewer
            requests.
            A run ends without a result after twice the budget. Documents of ``memory`` that take longer to compute are
            left out.
        dtype, weights, quantization: Of our model, as in ``load_model``. Other columns have stock weights in its dtype.
        kv_cache_dtype: Of our engine; see EngineConfig.
        out: A file of JSON lines. Cells in it are not measured again; new cells are added to it.
    """

    models: tuple[str, ...]
    parts: tuple[str, ...] = ("prefix", "modules")
    columns: tuple[str, ...] = COLUMNS
    arrivals: tuple[str, ...] = ("batch",)
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    requests: int | None = None
    batch: int = 16
    prefixes: tuple[int, ...] = (0, 512, 1024, 2048)
    question: int = 32
    completion: int = 64
    module_tokens: int = 256
    module_completion: int = 16
    workloads: tuple[str, ...] = KINDS
    hit_rates: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
    clients: int = 4
    users: Sizes = field(default_factory=Sizes)
    documents: tuple[int, ...] = (0, 10, 50, 100)
    dtype: str = "auto"
    weights: str = "packed"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    runs: int = 1
    budget_s: float = 120.0
    out: Path | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        words = {"parts": PARTS, "columns": COLUMNS, "arrivals": ARRIVALS, "workloads": KINDS}
        for name, allowed in words.items():
            for word in getattr(self, name):
                check_choice(name if name == "arrivals" else name.removesuffix("s"), word, allowed)
        check_least(1, requests=self.requests, batch=self.batch, question=self.question, completion=self.completion)
        check_least(1, module_tokens=self.module_tokens, clients=self.clients, runs=self.runs)
        check_least(0, prefixes=self.prefixes, documents=self.documents)
        for rate in self.rates:
            if not (rate > 0 and math.isfinite(rate)):
                raise ParameterError(f"rate is {rate}; it must be a number of requests a second above 0")
        for rate in self.hit_rates:
            if not 0 <= rate <= 1:
                raise ParameterError(f"hit rate is {rate * 100:g} %; it must be from 0 to 100")
        WeightForm(self.weights, self.quantization)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not 0 < self.budget_s < math.inf:
            raise ParameterError(f"budget_s is {self.budget_s:g}; it must be a number of seconds above 0")

    def small(self) -> ThroughputSetting:
        """The same parts at sizes that take seconds. Such figures say little."""
        return replace(
            self,
            requests=4,
            batch=2,
            prefixes=(0, 64),
            question=8,
            completion=4,
            module_tokens=16,
            module_completion=4,
            hit_rates=(0.0, 0.5),
            clients=2,
            users=Sizes(64, 48, 16, 16, 3, 8, 4, 4),
            documents=(0, 2),
            rates=(50.0,),
            runs=1,
            quick=True,
        )

    @property
    def limit_s(self) -> float:
        """Seconds after which a run ends without a result."""
        return _OVERTIME * self.budget_s

    def requests_of(self, part: str) -> int:
        """Number of requests in a run of a part."""
        return self.requests or (_USERS if part == "workloads" else _REQUESTS)

    def longest(self, part: str) -> int:
        """Tokens of a part's longest request with its answer, plus a few, since texts are cut inexactly."""
        return {
            "prefix": max(self.prefixes) + self.question + self.completion,
            "modules": CHOSEN * self.module_tokens + self.question + self.module_completion + 16,
            "workloads": self.users.longest,
            "memory": self.users.document + self.users.question + 1,
        }[part]

    def chunks(self, part: str) -> int:
        """Chunks of KV for a full unshared batch of a part and for its resident text."""
        running = {"workloads": min(self.clients, self.batch), "memory": 1}.get(part, self.batch)
        document = -(-self.users.document // CHUNK) + 1
        passages = self.requests_of(part) * self.users.passages
        resident = {
            "prefix": 0,
            "modules": MODULES * (-(-self.module_tokens // CHUNK) + 1),
            "workloads": max(document, passages * (-(-self.users.passage // CHUNK) + 1)),
            "memory": (max(self.documents) + 1) * document,
        }[part]
        return running * (-(-self.longest(part) // CHUNK) + CHOSEN + 2) + resident


@dataclass(frozen=True)
class Case:
    """A workload for some columns.

    Attributes:
        about: Fields that identify its row.
        sizes: Further settings that its cells depend on.
        columns: Columns to run.
        make: Makes the workload.
    """

    about: dict[str, Any]
    sizes: dict[str, Any]
    columns: tuple[str, ...]
    make: Callable[[AsyncLLM], Coroutine[Any, Any, Workload]]


#: Cases that share one small run of each column. A cell of the first case may stand for all.
Group = tuple[Case, ...]


def groups(setting: ThroughputSetting, part: str) -> list[Group]:
    """The cases of a part. ``memory`` has none; memory.py measures it."""
    if part == "prefix":
        return [_arrivals(setting, part, prefix) for prefix in setting.prefixes]
    if part == "modules":
        return [_arrivals(setting, part, None)]
    return [_hit_rates(setting, kind) for kind in setting.workloads] if part == "workloads" else []


def _arrivals(setting: ThroughputSetting, part: str, prefix: int | None) -> Group:
    """A case with all requests at once, and one for each rate."""
    return tuple(_arriving(setting, part, prefix, rate) for rate in _rates(setting))


def _rates(setting: ThroughputSetting) -> Iterator[float | None]:
    if "batch" in setting.arrivals:
        yield None
    if "poisson" in setting.arrivals:
        yield from setting.rates


def _arriving(setting: ThroughputSetting, part: str, prefix: int | None, rate: float | None) -> Case:
    requests, question = setting.requests_of(part), setting.question
    completion = setting.completion if part == "prefix" else setting.module_completion

    async def make(llm: AsyncLLM) -> Workload:
        sizes = {"requests": requests, "question": question, "completion": completion}
        if prefix is None:
            workload = await permuted_modules(llm, tokens=setting.module_tokens, **sizes)
        else:
            workload = shared_prefix(llm.vocab_size, prefix=prefix, **sizes)
        return workload if rate is None else workload.arriving(rate, 0)

    about = {"part": part, "prefix": prefix, "rate": rate, "arrivals": "batch" if rate is None else "poisson"}
    about |= {"requests": requests, "completion": completion}
    sizes = {"question": question, "module_tokens": None if prefix is not None else setting.module_tokens}
    able = COLUMNS if prefix is not None else COLUMNS[:-1]  # llama.cpp reuses prefixes only
    return Case(about, sizes, _order(setting, able), make)


def _hit_rates(setting: ThroughputSetting, kind: str) -> Group:
    """A sweep over hit rates. A column that shares nothing takes equally long at all of them, so it runs at the
    first only.
    """
    return tuple(
        _hitting(setting, kind, rate, ("inlay",) if number else ("inlay", "off"))
        for number, rate in enumerate(setting.hit_rates)
    )


def _hitting(setting: ThroughputSetting, kind: str, hit_rate: float, columns: tuple[str, ...]) -> Case:
    requests, clients = setting.requests_of("workloads"), setting.clients
    completion = setting.users.summary if kind == "summaries" else setting.users.answer

    async def make(llm: AsyncLLM) -> Workload:
        return await user_workload(kind, llm, setting.users, requests=requests, hit_rate=hit_rate, clients=clients)

    about = {"part": "workloads", "workload": kind, "aimed_hit_rate": hit_rate, "rate": None}
    about |= {"clients": clients, "requests": requests, "completion": completion}
    return Case(about, {"users": asdict(setting.users)}, _order(setting, columns), make)


def _order(setting: ThroughputSetting, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in columns if name == "inlay" or name in setting.columns)
