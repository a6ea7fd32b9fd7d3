"""Train the bundled model: ``python -m inlay_lab.train.train --out DIRECTORY``.

All training data is generated from seeds. Progress goes to the terminal and to ``log.jsonl`` in the directory. A
checkpoint is written every few minutes, and the same command resumes from it. At the end ``model`` in the directory is
a Hugging Face checkpoint, which ``demo`` and other programs can load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from inlay.errors import ModelError
from inlay_lab.eval.conversations import draw_conversation
from inlay_lab.eval.words import Split
from inlay_lab.train.architecture import new_model
from inlay_lab.train.lessons import TASKS, Batch, Encoder, Exercise, Lesson, answering
from inlay_lab.train.recipe import FURTHER, RECIPE, Stage
from inlay_lab.train.tokenizer import train_tokenizer


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write configuration, bf16 weights, tokenizer and chat template into a directory; create it if needed."""
    config = model.config.to_dict()
    copy = LlamaForCausalLM(type(model.config).from_dict(config))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    copy.bfloat16().config.dtype = torch.bfloat16
    copy.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


WARMUP = 50
_CHECKPOINT_S = 240
LOOK = 50  # steps between two lines of progress
EXAMINE = 250  # steps between two evaluations on held-out questions
_ROUND = 64  # a step predicts a multiple of this many tokens: libraries cache code and memory for every size


class Training:
    """Model, optimizers and position in the recipe, saved and restored together.

    Every process has one, learns from its own conversations, and averages gradients with the others. On a few cores,
    processes of one thread each train on more tokens than one process of several threads.

    Args:
        model: The directory of an exported model to train further; None to start from new weights.
    """

    def __init__(
        self, out: Path, recipe: tuple[Stage, ...], seed: int, rank: int, processes: int, model: Path | None = None
    ) -> None:
        self.out, self.recipe, self.seed, self.rank, self.processes = out, recipe, seed, rank, processes
        self.tokenizer = kept_tokenizer(out, model)
        self.encoder = Encoder(self.tokenizer)
        self.model: LlamaForCausalLM = new_model(self.tokenizer, self._count_tokens(), seed)
        if model is not None:
            trained = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
            self.model.load_state_dict(trained.state_dict())
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.step = 0
        self.seconds = 0.0

    def run(self) -> None:
        """Train to the end of the recipe; log and save on the way."""
        begun, saved = time.monotonic() - self.seconds, time.monotonic()
        lately: list[tuple[float, float, int, float]] = []
        while (at := self._at(self.step)) is not None:
            stage, share = at
            before = time.monotonic()
            batch = self.batch(stage)
            loss, right = self.learn(batch, self._rate(stage, share))
            lately.append((loss, right, batch.ids.numel() * self.processes, time.monotonic() - before))
            self.step += 1
            self.seconds = time.monotonic() - begun
            if self.step % LOOK == 0:
                losses, rights, tokens, times = zip(*lately, strict=True)
                self._note(
                    stage=stage.name,
                    loss=round(sum(losses) / len(losses), 4),
                    right=round(sum(rights) / len(rights), 4),
                    tokens_per_s=round(sum(tokens) / sum(times)),
                )
                lately = []
            if self.step % EXAMINE == 0 and self.rank == 0:
                self._note(**examine(self.model, self.encoder, (2, 6), examined(self.recipe)))
            if time.monotonic() - saved > _CHECKPOINT_S:
                self.save()
                saved = time.monotonic()
        self.save()
        if self.rank == 0:
            export(self.model, self.tokenizer, self.out / "model")

    def _count_tokens(self) -> Tensor:
        rng = random.Random(self.seed)
        drawn = [draw_conversation(rng, Split.FIRST, documents=4, questions=8) for _ in range(60)]
        ids = [i for each in drawn for i in self.encoder.flat(each)]
        return torch.bincount(torch.tensor(ids), minlength=len(self.tokenizer)).float()

    def _at(self, step: int) -> tuple[Stage, float] | None:
        for stage in self.recipe:
            if step < stage.steps:
                return stage, step / stage.steps
            step -= stage.steps
        return None

    def _rate(self, stage: Stage, share: float) -> float:
        first, last = stage.rate
        return (first + (last - first) * share) * min(1.0, (self.step + 1) / WARMUP)

    def batch(self, stage: Stage) -> Batch:
        """The batch of the current step."""
        tokens = stage.tokens // self.processes
        # drawn from the step, so that a resumed run sees the same batches
        count = random.Random(f"{self.seed} {self.step}").randint(*stage.lesson.documents)
        rng = random.Random(f"{self.seed} {self.step} {self.rank}")
        lesson = replace(stage.lesson, documents=(count, count))
        if rng.random() < stage.drilled:
            lesson = rng.choice(stage.drills)
        batch, _ = answering(rng, self.encoder, stage.split, lesson, tokens=tokens)
        return batch

    def learn(self, batch: Batch, rate: float) -> tuple[float, float]:
        """Make one step at a learning rate; returns the loss, and the share of right answer tokens."""
        logits, targets, weights = predict(self.model, batch)
        losses = cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        answers = weights >= 1
        right = (logits.argmax(-1) == targets)[answers].float().mean()
        return float(loss.detach()), float(right)

    def _average_gradients(self) -> None:
        if self.processes > 1:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = (flat / self.processes).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _note(self, **values: Any) -> None:
        if self.rank != 0:
            return
        line = {"step": self.step, "minutes": round(self.seconds / 60, 1), **values}
        print(" ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write the checkpoint, replacing the last one atomically."""
        if self.rank != 0:
            return
        state = {
            "seed": self.seed,
            "recipe": [repr(stage) for stage in self.recipe],
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.out / "checkpoint.new")
        os.replace(self.out / "checkpoint.new", self.out / "checkpoint.pt")

    def resume(self) -> None:
        """Load the directory's checkpoint, if there is one. Raises ModelError if it is of another run."""
        state = read_checkpoint(self.out, self.recipe, self.seed)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]


def read_checkpoint(out: Path, recipe: tuple[Stage, ...], seed: int) -> dict[str, Any] | None:
    """The checkpoint in a directory, or None without one. Raises ModelError if it is of another run."""
    path = out / "checkpoint.pt"
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        of = (state["seed"], state["recipe"])
    except Exception as error:  # torch raises different errors for damaged bytes
        raise ModelError(f"{path} is damaged; delete it to begin anew") from error
    if of != (seed, [repr(stage) for stage in recipe]):
        raise ModelError(f"{path} was made with another seed or recipe; use another directory, or delete it")
    return state


def kept_tokenizer(out: Path, model: Path | None = None) -> PreTrainedTokenizerBase:
    """The run's tokenizer, trained or taken from a model once, then stored: the checkpoint depends on its token ids."""
    directory = out / "tokenizer"
    if not directory.is_dir():
        made = train_tokenizer() if model is None else AutoTokenizer.from_pretrained(model)
        made.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def predict(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (n, vocabulary), targets (n) and weights (n) of the tokens that count, and a few more for a round n."""
    targets, weights = batch.ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
    count = -(-int(weights.count_nonzero()) // _ROUND) * _ROUND
    kept = weights.argsort(descending=True, stable=True)[:count].sort().values
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1].flatten(0, 1)[kept])
    return logits, targets[kept], weights[kept]


def examined(recipe: tuple[Stage, ...]) -> tuple[Exercise | None, ...]:
    """The exercises for ``examine`` after a recipe: the five tasks (None), and the drilled ones across documents."""
    drilled = {drill.exercise for stage in recipe for drill in stage.drills}
    return (None, *(exercise for exercise in TASKS if exercise in drilled))


@torch.no_grad()
def examine(
    model: LlamaForCausalLM,
    encoder: Encoder,
    counts: tuple[int, ...],
    exercises: tuple[Exercise | None, ...] = (None,),
    tokens: int = 12_000,
) -> dict[str, float]:
    """The share of held-out answers with every token predicted as most probable, by documents and task.

    Args:
        counts: Numbers of documents.
        exercises: Exercises to ask; None stands for the five tasks.
        tokens: Of each, roughly.
    """
    scores: dict[str, list[bool]] = {}
    for count, exercise in product(counts, exercises):
        lesson = Lesson((count, count), 8, exercise=exercise)
        batch, drawn = answering(random.Random(0), encoder, Split.HELD_OUT, lesson, tokens=tokens, gapped=0.0)
        answers = Batch(batch.ids, batch.positions, batch.weights * (batch.weights >= 1))
        logits, targets, weights = predict(model, answers)
        hits = (logits.argmax(-1) == targets)[weights > 0].tolist()
        at = 0
        for conversation in drawn:
            for question, (_, answer) in zip(
                conversation.questions, encoder.conversation(conversation)[1], strict=True
            ):
                scores.setdefault(f"{count} {question.task}", []).append(all(hits[at : at + len(answer)]))
                at += len(answer)
        assert at == len(hits)
    return {name: round(sum(hits) / len(hits), 3) for name, hits in sorted(scores.items())}


def main(words: Sequence[str] | None = None) -> None:
    """The command line. ``words`` are its arguments in place of those of the process."""
    parser = argparse.ArgumentParser(description="Train the bundled model; the same command resumes.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint, the log and the model")
    parser.add_argument("--model", type=Path, help="directory of an exported model: train it on, by the further recipe")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="of one thread each")
    arguments = parser.parse_args(words)
    if arguments.processes < 1:
        parser.error(f"--processes is {arguments.processes}; at least one is needed")
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(f"--model is {arguments.model}; there is no config.json in it: give the directory of a model")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        read_checkpoint(arguments.out, _recipe(arguments.model), arguments.seed)
    except ModelError as error:
        parser.error(str(error))
    kept_tokenizer(arguments.out, arguments.model)  # before the processes, which share it
    with tempfile.TemporaryDirectory() as meeting:
        settings = (arguments.out, arguments.seed, arguments.processes, f"file://{meeting}/meeting", arguments.model)
        try:
            spawn(_work, settings, nprocs=arguments.processes)
        except KeyboardInterrupt:
            parser.exit(130, f"\nstopped; the same command goes on from the last checkpoint in {arguments.out}\n")


def _recipe(model: Path | None) -> tuple[Stage, ...]:
    return RECIPE if model is None else FURTHER


def _work(rank: int, out: Path, seed: int, processes: int, meeting: str, model: Path | None) -> None:
    # all get SIGINT when the command ends; background processes of a script would ignore it by default
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # processes wait for each other, so each gets its own core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    training = Training(out, _recipe(model), seed, rank, processes, model)
    training.resume()
    training.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
