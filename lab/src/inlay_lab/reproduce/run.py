"""Runs experiments one after the other: what is kept is taken, what fails is noted, and the next one follows."""

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
from inlay_lab.reproduce.experiment import Data, Experiment, NotBuiltError, NotHereError, Outcome, Scale, Settings
from inlay_lab.reproduce.record import Kept, Record
from inlay_lab.reproduce.worker import FailedError, in_own_process, in_this_process

#: Seconds that one experiment may take.
LIMITS = {Scale.QUICK: 600.0, Scale.DEFAULT: 7200.0, Scale.FULL: 28800.0}


class Status(StrEnum):
    """What became of an experiment."""

    MEASURED = "measured"
    KEPT = "kept"
    FAILED = "failed"
    NOT_HERE = "not runnable here"
    NOT_BUILT = "not built"
    NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Entry:
    """An experiment and what became of it. kept: its result; None where there is none, for ``reason``."""

    experiment: Experiment
    status: Status
    kept: Kept | None = None
    reason: str = ""

    @property
    def outcome(self) -> Outcome | None:
        """Its result's figures."""
        return None if self.kept is None else self.kept.outcome


@dataclass(frozen=True)
class News:
    """An experiment begins (entry is None) or has ended; which of how many it is."""

    number: int
    total: int
    experiment: Experiment
    entry: Entry | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to run. Raises ParameterError.

    only: names of experiments; None for all. given: what users add to settings: ``longbench``, ``model``, ``stored``.
    again: whether what is kept is measured anew.
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
        """Those of the scale, with what was given."""
        given = {name: (self.given or {}).get(name) for name in experiment.given}
        return {**experiment.settings[self.scale], **given}

    def asks(self, experiment: Experiment) -> bool:
        """Whether it is one of those to run."""
        return self.only is None or experiment.name in self.only


#: Measures one. Raises NotHereError and FailedError.
Runner = Callable[[Experiment, Settings, float], Outcome]


def run_experiments(
    plan: Plan,
    record: Record,
    tell: Callable[[News], None],
    entries: list[Entry],
    experiments: Iterable[Experiment] = tuple(EXPERIMENTS.values()),
    run: Runner = in_own_process,
) -> None:
    """Run what is asked for and not kept, and add an entry for every experiment, as each of them ends.

    tell: called before and after each that is asked for. entries: is added to, so that who is interrupted has some.
    run: measures an experiment that is not light.
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
    """What is kept of it; what costs nothing is there in any case."""
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
    except NotBuiltError as error:
        return Entry(experiment, Status.NOT_BUILT, reason=str(error))
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
    """All of it as one JSON object."""
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
