"""Runs experiments one after the other. Stored results are used, and a failure does not stop the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from inlay.errors import ParameterError
from inlay_lab.bench.machine import describe_machine
from inlay_lab.reproduce.catalog import EXPERIMENTS
from inlay_lab.reproduce.experiment import Data, Experiment, NotHereError, Outcome, Scale, Settings
from inlay_lab.reproduce.record import Kept, Record
from inlay_lab.reproduce.worker import FailedError, in_own_process, in_this_process

#: Most seconds of one experiment.
LIMITS = {Scale.QUICK: 600.0, Scale.DEFAULT: 7200.0, Scale.FULL: 28800.0}


class Status(StrEnum):
    """The state of an experiment after a run."""

    MEASURED = "measured"
    KEPT = "kept"
    FAILED = "failed"
    NOT_HERE = "not runnable here"
    NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Entry:
    """An experiment and its state.

    Attributes:
        kept: Its result; None without one.
        reason: The reason for no result.
    """

    experiment: Experiment
    status: Status
    kept: Kept | None = None
    reason: str = ""

    @property
    def outcome(self) -> Outcome | None:
        """The figures of its result."""
        return None if self.kept is None else self.kept.outcome


@dataclass(frozen=True)
class News:
    """Progress: experiment ``number`` of ``total`` begins (entry is None) or has ended."""

    number: int
    total: int
    experiment: Experiment
    entry: Entry | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The experiments to run. Raises ParameterError.

    Attributes:
        only: Names of experiments; None for all.
        given: Settings from the user: ``longbench``, ``model``, ``stored``.
        again: Measure again even if a result is stored.
    """

    scale: Scale = Scale.DEFAULT
    only: Collection[str] | None = None
    given: Mapping[str, Any] | None = None
    again: bool = False

    def __post_init__(self) -> None:
        for name in self.only or ():
            if name not in EXPERIMENTS:
                raise ParameterError(f"there is no experiment '{name}'; use one of {', '.join(EXPERIMENTS)}")

    def settings(self, experiment: Experiment) -> Settings:
        """The settings of the scale, with those from the user."""
        given = {name: (self.given or {}).get(name) for name in experiment.given}
        return {**experiment.settings[self.scale], **given}

    def asks(self, experiment: Experiment) -> bool:
        """True if the experiment is one of those to run."""
        return self.only is None or experiment.name in self.only


#: Measures an experiment within a limit of seconds. Raises NotHereError and FailedError.
Runner = Callable[[Experiment, Settings, float], Outcome]


def run_experiments(
    plan: Plan,
    record: Record,
    tell: Callable[[News], None],
    entries: list[Entry],
    experiments: Iterable[Experiment] = tuple(EXPERIMENTS.values()),
    run: Runner = in_own_process,
) -> None:
    """Run the planned experiments without stored results, and add an entry for every experiment as it ends.

    Args:
        tell: Called before and after each planned experiment.
        entries: The list to extend, so that an interrupted run leaves some.
        run: Measures an experiment that is not light.
    """
    every = list(experiments)
    total, number = sum(plan.asks(each) for each in every), 0
    for each in every:
        settings = plan.settings(each)
        if not plan.asks(each):
            entries.append(_unasked(each, settings, record, run, LIMITS[plan.scale]))
            continue
        number += 1
        kept = None if plan.again or each.light else record.find(each, settings)
        if kept is not None:
            entry = Entry(each, Status.KEPT, kept)
        else:
            tell(News(number, total, each))
            entry = _measured(each, settings, record, run, LIMITS[plan.scale])
        entries.append(entry)
        tell(News(number, total, each, entry))


def _unasked(experiment: Experiment, settings: Settings, record: Record, run: Runner, limit_s: float) -> Entry:
    """The stored result of an experiment that is not planned. Light ones run in any case."""
    if experiment.light:
        return _measured(experiment, settings, record, run, limit_s)
    kept = record.find(experiment, settings)
    if kept is not None:
        return Entry(experiment, Status.KEPT, kept)
    return Entry(experiment, Status.NOT_ASKED, reason=f"run it with --only {experiment.name}")


def _measured(experiment: Experiment, settings: Settings, record: Record, run: Runner, limit_s: float) -> Entry:
    conditions, started = describe_machine(), time.monotonic()
    try:
        outcome = in_this_process(experiment, settings) if experiment.light else run(experiment, settings, limit_s)
    except NotHereError as error:
        return Entry(experiment, Status.NOT_HERE, reason=str(error))
    except FailedError as error:
        return Entry(experiment, Status.FAILED, reason=str(error))
    took_s = round(time.monotonic() - started, 2)
    kept = Kept(outcome, conditions, took_s, datetime.now(UTC).date().isoformat())
    if not experiment.light:
        record.keep(experiment, settings, kept)
    return Entry(experiment, Status.MEASURED, kept)


def summary(entries: Iterable[Entry], scale: Scale, machine: Data) -> Data:
    """All entries as one JSON object."""
    return {
        "scale": str(scale),
        "machine": machine,
        "experiments": [
            {
                "name": entry.experiment.name,
                "title": entry.experiment.title,
                "source": entry.experiment.source,
                "status": str(entry.status),
                "reason": entry.reason,
                **_result(entry.kept),
            }
            for entry in entries
        ],
    }


def _result(kept: Kept | None) -> Data:
    if kept is None:
        return {"took_s": None, "on": None, "rows": [], "tables": [], "notes": []}
    found = kept.outcome.report()
    rows = [{**row.report(), "agrees": None if _alone(row) else not row.differs} for row in kept.outcome.rows]
    return {"took_s": kept.took_s, "on": kept.on, "rows": rows, "tables": found["tables"], "notes": found["notes"]}


def _alone(row: Any) -> bool:
    return row.ours is None or row.published is None
