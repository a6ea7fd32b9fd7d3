"""Training: its output, and that an interruption changes nothing."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from inlay.errors import ModelError
from inlay_lab.eval.questions import Form
from inlay_lab.eval.words import Split
from inlay_lab.train.curve import draw, name_stages
from inlay_lab.train.lessons import Encoder, Exercise, Lesson, answering
from inlay_lab.train.recipe import FURTHER, RECIPE
from inlay_lab.train.train import Training, examined, main, predict
from lab.tests.train.short_training import SHORT, shorten

pytestmark = pytest.mark.long


class BrokenOffError(Exception):
    pass


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase) -> None:
    shorten(monkeypatch, tokenizer)


def weights(training: Training) -> dict[str, Tensor]:
    return training.model.state_dict()


def assert_same(one: object, other: object) -> None:
    """Assert bitwise equality of tensors in nested dictionaries and lists."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def break_after(monkeypatch: pytest.MonkeyPatch, training: Training, steps: int) -> None:
    """Train to a step, write a checkpoint, and stop."""
    learn = training.learn

    def learn_or_break(batch, rate):
        if training.step == steps:
            training.save()
            raise BrokenOffError
        return learn(batch, rate)

    monkeypatch.setattr(training, "learn", learn_or_break)
    with pytest.raises(BrokenOffError):
        training.run()


def test_the_log_is_one_json_object_a_line(trained: Training):
    lines = [json.loads(line) for line in (trained.out / "log.jsonl").read_text().splitlines()]
    looks = [line for line in lines if "loss" in line]
    examined = [line for line in lines if "loss" not in line]
    assert [(line["step"], line["stage"]) for line in looks] == [(2, "two"), (4, "four"), (6, "four")]
    assert all(math.isfinite(line["loss"]) and 0 <= line["right"] <= 1 for line in looks)
    assert looks[-1]["loss"] < looks[0]["loss"]
    assert all(line["tokens_per_s"] > 0 for line in looks)
    assert [line["step"] for line in examined] == [3, 6]
    for line in examined:
        scores = {name: score for name, score in line.items() if name not in ("step", "minutes")}
        assert {name.split()[0] for name in scores} == {"2", "6"}
        assert all(0 <= score <= 1 for score in scores.values())


def test_training_moves_every_weight(trained: Training, tmp_path: Path):
    start = weights(Training(tmp_path, SHORT, 1, 0, 1))
    for name, weight in weights(trained).items():
        assert weight.isfinite().all()
        assert not torch.equal(weight, start[name])


def test_interrupted_run_equals_an_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Training
):
    break_after(monkeypatch, Training(tmp_path, SHORT, 1, 0, 1), 3)
    resumed = Training(tmp_path, SHORT, 1, 0, 1)
    resumed.resume()
    assert resumed.step == 3
    resumed.run()
    assert resumed.step == trained.step == 6
    assert_same(weights(resumed), weights(trained))
    for mine, theirs in zip(resumed.optimizers, trained.optimizers, strict=True):
        assert_same(mine.state_dict()["state"], theirs.state_dict()["state"])


def test_a_finished_run_is_not_run_again(monkeypatch: pytest.MonkeyPatch, trained: Training):
    again = Training(trained.out, SHORT, 1, 0, 1)
    again.resume()
    monkeypatch.setattr(again, "learn", None)
    monkeypatch.setattr(again, "save", lambda: None)
    again.run()
    assert again.step == 6
    assert_same(weights(again), weights(trained))


def test_without_a_checkpoint_training_starts(tmp_path: Path):
    training = Training(tmp_path, SHORT, 1, 0, 1)
    training.resume()
    assert training.step == 0
    assert_same(weights(training), weights(Training(tmp_path, SHORT, 1, 0, 1)))


def test_truncated_checkpoint_is_an_error(tmp_path: Path, trained: Training):
    whole = (trained.out / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(whole[: len(whole) // 2])
    training = Training(tmp_path, SHORT, 1, 0, 1)
    with pytest.raises(ModelError, match=r"checkpoint\.pt is damaged; delete it to begin anew"):
        training.resume()
    assert training.step == 0


@pytest.mark.parametrize(("recipe", "seed"), [(SHORT, 2), (SHORT[:1], 1)])
def test_a_checkpoint_of_another_run_is_an_error(tmp_path: Path, trained: Training, recipe, seed: int):
    (tmp_path / "checkpoint.pt").write_bytes((trained.out / "checkpoint.pt").read_bytes())
    with pytest.raises(ModelError, match="made with another seed or recipe"):
        Training(tmp_path, recipe, seed, 0, 1).resume()


def test_the_model_is_written_at_the_end(trained: Training):
    written = AutoModelForCausalLM.from_pretrained(trained.out / "model")
    for name, weight in weights(trained).items():
        assert torch.equal(written.state_dict()[name], weight.to(torch.bfloat16))


def test_failed_save_keeps_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Training):
    (tmp_path / "checkpoint.pt").write_bytes((trained.out / "checkpoint.pt").read_bytes())

    def half_a_save(state, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    training = Training(tmp_path, SHORT, 1, 0, 1)
    monkeypatch.setattr(torch, "save", half_a_save)
    with pytest.raises(OSError, match="no space"):
        training.save()
    training.resume()
    assert training.step == 6


def test_only_the_first_process_writes(tmp_path: Path):
    Training(tmp_path, SHORT, 1, 1, 2).save()
    assert not (tmp_path / "checkpoint.pt").exists()


def test_rounded_predictions_contain_all_weighted_ones(encoder: Encoder, trained: Training):
    for seed in range(4):
        lesson = Lesson((1, 3), 3 + seed)
        batch, _ = answering(random.Random(seed), encoder, Split.TRAIN, lesson, tokens=600)
        logits, targets, weights = predict(trained.model, batch)
        assert len(logits) == len(targets) == len(weights)
        assert len(weights) % 64 == 0
        assert (weights == 0).sum() < 64
        counted = batch.weights[:, 1:] > 0
        assert torch.equal(targets[weights > 0], batch.ids[:, 1:][counted])
        assert torch.equal(weights[weights > 0], batch.weights[:, 1:][counted])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected = trained.model(input_ids=batch.ids, position_ids=batch.positions).logits[:, :-1][counted]
        assert (logits[weights > 0] - expected).abs().max() < 0.05


def test_processes_share_a_batch_and_average(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    one_step = (replace(SHORT[0], steps=1),)
    half = (replace(one_step[0], tokens=150),)
    alone, shared = Training(tmp_path, half, 1, 0, 1), Training(tmp_path, one_step, 1, 0, 2)
    clipped = []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda all_of, _: clipped.append([p.grad for p in all_of]))
    monkeypatch.setattr(
        "inlay_lab.train.train.dist.all_reduce", lambda flat: flat.mul_(2)
    )  # another one with the same gradients
    alone.run()
    shared.run()
    assert len(clipped) == 2
    assert_same(*clipped)
    assert_same(weights(shared), weights(alone))


@pytest.mark.parametrize("drilled", [0.0, 0.5, 1.0])
def test_drills_take_their_share_of_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drilled: float):
    drills = (
        Lesson((0, 0), 3, exercise=Exercise.COMPARISONS),
        Lesson((2, 2), 3, {"count": 1.0}, Form.PLAIN, facts=(1,)),
    )
    stage = replace(SHORT[0], drills=drills, drilled=drilled)
    training = Training(tmp_path, (stage,), 1, 0, 1)
    asked: list[str] = []

    def watched(*arguments, **settings):
        batch, drawn = answering(*arguments, **settings)
        asked.append("/".join(sorted({question.task for each in drawn for question in each.questions})))
        return batch, drawn

    monkeypatch.setattr("inlay_lab.train.train.answering", watched)
    for training.step in range(40):
        training.batch(stage)
    shares = {task: asked.count(task) / 40 for task in ("unstated", "comparing", "count")}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["unstated"] == pytest.approx(1 - drilled, abs=0.2)
    assert shares["comparing"] == pytest.approx(shares["count"], abs=0.3)


def test_further_wordings_start_in_a_later_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    splits = [stage.split for stage in RECIPE]
    assert splits == sorted(splits, key=[Split.FIRST, Split.TRAIN].index)
    drawn = []

    def watched(rng, encoder, split, lesson, **settings):
        drawn.append(split)
        return answering(rng, encoder, split, lesson, **settings)

    monkeypatch.setattr("inlay_lab.train.train.answering", watched)
    Training(tmp_path, (replace(SHORT[0], split=Split.FIRST), SHORT[1]), 1, 0, 1).run()
    assert [split for split in drawn if split is not Split.HELD_OUT] == [Split.FIRST] * 2 + [Split.TRAIN] * 4


def test_the_recipe_ends_with_most_documents_and_least_rate():
    lessons = [stage.lesson for stage in RECIPE]
    assert all(stage.steps > 0 for stage in RECIPE)
    assert all(1 <= lesson.documents[0] <= lesson.documents[1] for lesson in lessons)
    assert lessons[-1].documents[1] == max(lesson.documents[1] for lesson in lessons)
    assert RECIPE[-1].rate[1] == min(rate for stage in RECIPE for rate in stage.rate)
    assert lessons[-1].mix is lessons[-1].form is None
    assert all((stage.drilled > 0) == bool(stage.drills) for stage in RECIPE)


def test_a_run_can_be_drawn(tmp_path: Path, trained: Training):
    log = (trained.out / "log.jsonl").read_text().splitlines()
    draw([*log, *log], tmp_path / "curve.svg")  # a resumed run repeats steps
    drawn = (tmp_path / "curve.svg").read_text()
    assert drawn.count("<!--  two -->") == drawn.count("<!--  four -->") == 1
    assert "<!-- exact match, 6 documents -->" in drawn


def test_names_of_short_stages_do_not_overlap():
    axes = Figure().subplots()
    steps = {"one": 1, "two": 5, "three": 6, "four": 500, "end": 1000}
    name_stages(axes, [{"step": step, "stage": name} for name, step in steps.items()])
    assert [line.get_xdata()[0] for line in axes.lines] == list(steps.values())
    assert [text.get_text().strip() for text in axes.texts] == list(steps)
    first, second, third, *others = [text.get_position()[0] for text in axes.texts]
    assert (first, others) == (1, [500, 1000])
    assert third - second == pytest.approx(second - first)
    assert second - first >= 20


def test_training_continues_from_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Training):
    start = Training(tmp_path, SHORT, 1, 0, 1, trained.out / "model")
    for name, weight in weights(trained).items():
        assert torch.equal(weights(start)[name], weight.to(torch.bfloat16).float())
    assert start.tokenizer.get_vocab() == trained.tokenizer.get_vocab()
    first = weights(trained)["model.norm.weight"].clone()
    start.run()
    assert not torch.equal(weights(start)["model.norm.weight"], first)
    assert (tmp_path / "model" / "config.json").is_file()


def test_training_continues_with_the_further_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: Training
):
    started: list[tuple] = []
    monkeypatch.setattr("inlay_lab.train.train.spawn", lambda work, settings, nprocs: started.append(settings))
    model = trained.out / "model"
    command = ["--out", str(tmp_path / "run"), "--model", str(model)]
    main(command)
    assert started[0][-1] == model
    assert (tmp_path / "run" / "tokenizer").is_dir()
    Training(tmp_path / "run", FURTHER, 1, 0, 1).save()
    main(command)  # resumes
    with pytest.raises(SystemExit, match="2"):
        main(command[:2])
    assert "made with another seed or recipe" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*command[:3], str(tmp_path)])
    assert f"--model is {tmp_path}; there is no config.json in it" in capsys.readouterr().err


def test_further_recipe_includes_earlier_exercises():
    drills = {drill.exercise for stage in FURTHER for drill in stage.drills}
    across = {Exercise.SUPERLATIVES, Exercise.SORTS, Exercise.CONFLICTS, Exercise.SHARED}
    assert drills >= {*across, Exercise.COMPARISONS, Exercise.KIND_COUNTS, Exercise.REPETITIONS}
    assert {*examined(FURTHER)} == {None, *across}
    assert examined(RECIPE) == (None,)
    assert all(0 < stage.drilled < 1 for stage in FURTHER)
    assert all(stage.lesson == RECIPE[-1].lesson for stage in FURTHER)
    assert FURTHER[-1].rate[1] == RECIPE[-1].rate[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--processes", "0"], "--processes is 0; at least one is needed"), ([], "checkpoint.pt is damaged; delete it")],
)
def test_invalid_command_is_rejected_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments, sentence: str
):
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    monkeypatch.setattr("inlay_lab.train.train.spawn", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), *arguments])
    assert sentence in capsys.readouterr().err


def test_interrupted_command_names_the_next_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("inlay_lab.train.train.spawn", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(["--out", str(tmp_path)])
    assert f"the same command goes on from the last checkpoint in {tmp_path}\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what processes there are")
def test_a_killed_command_leaves_no_process(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    """Otherwise they would train on and overwrite the output of the next run."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "inlay_lab.train.train", "--out", str(tmp_path), "--processes", "2"]
    with subprocess.Popen(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]) as training:
        processes = wait_for(lambda: [pid for pid in children(training.pid) if handles_interrupts(pid)], 2)
        training.kill()
    try:
        wait_for(lambda: [pid for pid in processes if trains(pid)], 0)
    finally:
        for pid in filter(trains, processes):
            os.kill(pid, signal.SIGKILL)


def wait_for(found: Callable[[], list[int]], count: int) -> list[int]:
    end = time.monotonic() + 120
    while len(pids := found()) != count:
        assert time.monotonic() < end, f"{len(pids)} processes, not {count}"
        time.sleep(0.1)
    return pids


def children(pid: int) -> list[int]:
    """The training processes of the command with this process id."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed if trains(int(child))]


def trains(pid: int) -> bool:
    try:  # the command line of a zombie process is empty
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def handles_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return not int(ignored, 16) >> (signal.SIGINT - 1) & 1
