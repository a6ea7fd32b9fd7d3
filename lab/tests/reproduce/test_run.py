"""Runs: stored results are not measured again, and a failure becomes an entry and stops nothing else."""

from __future__ import annotations

import pytest

from inlay.errors import ModelError, ParameterError
from inlay_lab.reproduce.catalog import EXPERIMENTS
from inlay_lab.reproduce.experiment import NotHereError, Scale
from inlay_lab.reproduce.record import Record
from inlay_lab.reproduce.run import Plan, Status, run_experiments, summary
from inlay_lab.reproduce.worker import FailedError, in_own_process, in_this_process

from .samples import MACHINE, experiment, outcome

pytestmark = pytest.mark.long


def raising(error):
    def measure(_):
        raise error

    return measure


class Runs:
    """Runs plans in a folder and counts the measurements."""

    def __init__(self, folder) -> None:
        self.record = Record(folder / "results", Scale.QUICK, MACHINE)
        self.measured: list[str] = []
        self.news: list[tuple[int, int, str, str | None]] = []

    def __call__(self, experiments, **plan):
        entries: list = []

        def run(each, settings, limit_s):
            self.measured.append(each.name)
            return in_this_process(each, settings)

        def tell(news):
            status = None if news.entry is None else str(news.entry.status)
            self.news.append((news.number, news.total, news.experiment.name, status))

        run_experiments(Plan(scale=Scale.QUICK, **plan), self.record, tell, entries, experiments, run)
        return entries


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_kept_results_are_not_measured_again(runs):
    every = [experiment("one"), experiment("two")]
    assert [entry.status for entry in runs(every)] == [Status.MEASURED, Status.MEASURED]
    again = runs([*every, experiment("three")])
    assert [entry.status for entry in again] == [Status.KEPT, Status.KEPT, Status.MEASURED]
    assert runs.measured == ["one", "two", "three"]
    assert again[0].outcome == outcome()
    assert [entry.status for entry in runs(every, again=True)] == [Status.MEASURED, Status.MEASURED]


def test_failing_experiment_ends_no_other(runs, capsys):
    every = [
        experiment("broken", raising(ModelError("the model is not there"))),
        experiment("wrong", raising(ZeroDivisionError("by zero"))),
        experiment("elsewhere", raising(NotHereError("it needs a GPU"))),
        experiment("light", raising(ValueError("odd")), light=True),
        experiment("fine"),
    ]
    entries = runs(every)
    assert [(entry.status, entry.reason) for entry in entries] == [
        (Status.FAILED, "the model is not there"),
        (Status.FAILED, "ZeroDivisionError: by zero"),
        (Status.NOT_HERE, "it needs a GPU"),
        (Status.FAILED, "ValueError: odd"),
        (Status.MEASURED, ""),
    ]
    assert "ZeroDivisionError: by zero" in capsys.readouterr().err, "with where it happened"
    assert runs(every)[0].status == Status.FAILED, "a failure is tried again"


def test_only_selected_experiments_run(runs):
    every = [experiment("one"), experiment("two"), experiment("light", light=True)]
    plan = {"only": ["one"]}
    with pytest.raises(ParameterError, match="there is no experiment 'one'; use one of first-token, growth"):
        runs(every, **plan)
    name = next(iter(EXPERIMENTS))
    entries = runs([experiment(name), *every], only=[name])
    assert [entry.status for entry in entries] == [
        *(Status.MEASURED, Status.NOT_ASKED, Status.NOT_ASKED),
        Status.MEASURED,  # it costs nothing
    ]
    assert runs.news == [(1, 1, name, None), (1, 1, name, "measured")]
    assert entries[1].reason == "run it with --only one"
    runs(every)
    assert runs([experiment(name), *every], only=[name])[1].status == Status.KEPT


def test_given_values_are_part_of_the_settings(runs):
    seen = []
    taking = experiment("one", lambda settings: seen.append(settings) or outcome(), given=("model", "stored"))
    runs([taking], given={"model": "mine", "longbench": "else"})
    assert seen == [{"sizes": [1, 2], "model": "mine", "stored": None}]
    runs([taking], given={"model": "mine"})
    runs([taking], given={"model": "yours"})
    assert [each["model"] for each in seen] == ["mine", "yours"]


def test_interruption_keeps_measured_results(runs):
    every = [experiment("one"), experiment("two", raising(KeyboardInterrupt()))]
    with pytest.raises(KeyboardInterrupt):
        runs(every)
    assert runs([experiment("one")])[0].status == Status.KEPT


def test_summary_lists_agreement(runs):
    entries = runs([experiment("one"), experiment("two", raising(NotHereError("no")))])
    found = summary(entries, Scale.QUICK, MACHINE)
    one, two = found["experiments"]
    assert [row["agrees"] for row in one["rows"]] == [False, True, True, None]
    assert (two["status"], two["reason"], two["rows"]) == ("not runnable here", "no", [])


TINY = {"tokens": 64, "layers": 1, "runs": 1}


def test_experiment_runs_in_its_own_process():
    found = in_own_process(EXPERIMENTS["copies"], TINY, 300)
    one, every, nothing, _ = found.rows
    assert (one.published.value, one.unit) == (3.79, "ms")
    assert 0 < one.ours < every.ours
    assert (nothing.what, nothing.ours) == ("read in place: copied", 0)
    assert "64 tokens of Llama-2 7B's shape in bfloat16, 1 MiB a layer" in found.notes[0]


def test_process_reports_why_it_has_no_result():
    with pytest.raises(NotHereError, match="it needs LongBench's files"):
        in_own_process(EXPERIMENTS["quality"], {"longbench": None}, 300)
    with pytest.raises(FailedError, match="KeyError: 'tokens'"):
        in_own_process(EXPERIMENTS["copies"], {}, 300)


def test_a_process_ends_at_its_limit():
    with pytest.raises(FailedError, match=r"it took longer than 0\.001 minutes, the most at this scale"):
        in_own_process(EXPERIMENTS["copies"], TINY, 0.06)


def test_crashed_process_is_a_failure():
    with pytest.raises(FailedError, match="its process ended with status 1 and no result"):
        in_own_process(experiment("nobody knows this"), {}, 300)
