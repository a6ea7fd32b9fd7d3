"""What is run, case by case, in the order of the tables: known before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from inlay.async_llm import AsyncLLM
from inlay.bench.throughput.modules import permuted_modules
from inlay.bench.throughput.setting import ThroughputSetting
from inlay.bench.throughput.users import user_workload
from inlay.bench.throughput.workload import Workload, shared_prefix


@dataclass(frozen=True)
class Case:
    """A workload for some columns. about: what its row says of it. sizes: what else it depends on."""

    about: dict[str, Any]
    sizes: dict[str, Any]
    columns: tuple[str, ...]
    make: Callable[[AsyncLLM], Coroutine[Any, Any, Workload]]


#: Cases that one small run of each column stands for; a cell of the first one may stand for all.
Group = tuple[Case, ...]


def groups(setting: ThroughputSetting, part: str) -> list[Group]:
    """The cases of a part; none for ``memory``, which asks nothing but what memory.py does."""
    if part == "prefix":
        return [_arrivals(setting, part, prefix) for prefix in setting.prefixes]
    if part == "modules":
        return [_arrivals(setting, part, None)]
    return [_hit_rates(setting, kind) for kind in setting.workloads] if part == "workloads" else []


def _arrivals(setting: ThroughputSetting, part: str, prefix: int | None) -> Group:
    """All requests at once, and at each rate."""
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
    return Case(about, sizes, _order(setting, ("inlay", "off", "stock", "transformers")), make)


def _hit_rates(setting: ThroughputSetting, kind: str) -> Group:
    """A sweep over hit rates. Who shares nothing takes equally long at all of them, and runs at the first one alone."""
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
