"""Train the bundled model: ``python -m inlay.demo.train --out DIRECTORY``.

Everything that training sees is generated, from seeds. Progress goes to the terminal and to ``log.jsonl`` in the
directory; a checkpoint is written every few minutes, and the same command goes on from it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from inlay.demo.architecture import new_model
from inlay.demo.lessons import Batch, Encoder, answering
from inlay.demo.questions import Form
from inlay.demo.tokenizer import train_tokenizer
from inlay.demo.words import Split


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    documents: the least and most that a conversation has. mix: the weight of each task, or None for the usual one.
    tokens: of a batch, over all processes. rate: the learning rate at its start and end.
    """

    name: str
    steps: int
    documents: tuple[int, int]
    tokens: int
    rate: tuple[float, float]
    mix: dict[str, float] | None = None
    form: Form | None = None
    questions: int = 8


RECIPE = (
    Stage("facts", 350, (1, 2), 4096, (0.01, 0.01), {"single": 1.0}, Form.PLAIN),
    Stage("facts of three", 650, (1, 3), 4096, (0.006, 0.006), {"single": 1.0}, Form.PLAIN),
    Stage("one to four", 1000, (1, 4), 6144, (0.006, 0.006)),
    Stage("two to eight", 2000, (2, 8), 8192, (0.006, 0.006)),
    Stage("two to twelve", 1200, (2, 12), 8192, (0.006, 0.0003)),
)
_WARMUP = 50
_CHECKPOINT_S = 240
_LOOK = 50  # steps between two lines of progress
_EXAMINE = 250  # steps between two looks at held-out questions


class Training:
    """Model, optimizers and place in the recipe; saved and restored as one.

    Every process holds one, learns from its own conversations, and averages gradients with the others: on a few cores,
    processes of one thread each get through twice as many tokens as one process of several threads.
    """

    def __init__(self, out: Path, recipe: tuple[Stage, ...], seed: int, rank: int, processes: int) -> None:
        self.out, self.recipe, self.seed, self.rank, self.processes = out, recipe, seed, rank, processes
        self.tokenizer: PreTrainedTokenizerBase = train_tokenizer()
        self.encoder = Encoder(self.tokenizer)
        self.model: LlamaForCausalLM = new_model(self.tokenizer, seed)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.step = 0
        self.seconds = 0.0

    def run(self) -> None:
        begun, saved, lately = time.monotonic() - self.seconds, time.monotonic(), []
        tokens = 0
        while (at := self._at(self.step)) is not None:
            stage, share = at
            batch = self._batch(stage)
            loss, right = self._learn(batch, self._rate(stage, share))
            lately.append((loss, right))
            tokens += batch.ids.numel() * self.processes
            self.step += 1
            self.seconds = time.monotonic() - begun
            if self.step % _LOOK == 0 and self.rank == 0:
                losses, rights = zip(*lately, strict=True)
                self._note(
                    stage=stage.name,
                    loss=round(sum(losses) / len(losses), 4),
                    right=round(sum(rights) / len(rights), 4),
                    tokens_per_s=round(tokens / self.seconds),
                )
                lately = []
            if self.step % _EXAMINE == 0 and self.rank == 0:
                self._note(**examine(self.model, self.encoder, (2, 6)))
            if time.monotonic() - saved > _CHECKPOINT_S:
                self.save()
                saved = time.monotonic()
        self.save()

    def _at(self, step: int) -> tuple[Stage, float] | None:
        for stage in self.recipe:
            if step < stage.steps:
                return stage, step / stage.steps
            step -= stage.steps
        return None

    def _rate(self, stage: Stage, share: float) -> float:
        first, last = stage.rate
        return (first + (last - first) * share) * min(1.0, (self.step + 1) / _WARMUP)

    def _batch(self, stage: Stage) -> Batch:
        # drawn from the step, so that a resumed run sees what an unbroken one does
        count = random.Random(f"{self.seed} {self.step}").randint(*stage.documents)
        batch, _ = answering(
            random.Random(f"{self.seed} {self.step} {self.rank}"),
            self.encoder,
            Split.TRAIN,
            tokens=stage.tokens // self.processes,
            documents=count,
            questions=stage.questions,
            form=stage.form,
            mix=stage.mix,
        )
        return batch

    def _learn(self, batch: Batch, rate: float) -> tuple[float, float]:
        logits, targets, weights = predict(self.model, batch)
        losses = cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, factor in zip(self.optimizers, (1.0, 0.3), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        answers = weights == 1
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
        line = {"step": self.step, "minutes": round(self.seconds / 60, 1), **values}
        print(" ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """Write the checkpoint beside the last one, then take its place."""
        if self.rank != 0:
            return
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.out / "checkpoint.new")
        os.replace(self.out / "checkpoint.new", self.out / "checkpoint.pt")

    def resume(self) -> None:
        path = self.out / "checkpoint.pt"
        if path.is_file():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]


def predict(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (n, vocabulary), targets (n) and weights (n) of the n tokens that count."""
    counted = batch.weights[:, 1:] > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][counted])
    return logits, batch.ids[:, 1:][counted], batch.weights[:, 1:][counted]


@torch.no_grad()
def examine(
    model: LlamaForCausalLM, encoder: Encoder, counts: tuple[int, ...], tokens: int = 12_000
) -> dict[str, float]:
    """The share of held-out answers whose every token is the most probable one, by documents and task."""
    scores: dict[str, list[bool]] = {}
    for count in counts:
        batch, drawn = answering(
            random.Random(0), encoder, Split.HELD_OUT, tokens=tokens, documents=count, questions=8, gapped=0.0
        )
        answers = Batch(batch.ids, batch.positions, batch.weights * (batch.weights == 1))
        logits, targets, _ = predict(model, answers)
        hits = (logits.argmax(-1) == targets).tolist()
        at = 0
        for conversation in drawn:
            for question, (_, answer) in zip(
                conversation.questions, encoder.conversation(conversation)[1], strict=True
            ):
                scores.setdefault(f"{count} {question.task}", []).append(all(hits[at : at + len(answer)]))
                at += len(answer)
        assert at == len(hits)
    return {name: round(sum(hits) / len(hits), 3) for name, hits in sorted(scores.items())}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the bundled model; the same command resumes.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint, the log and the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="of one thread each")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as meeting:
        settings = (arguments.out, arguments.seed, arguments.processes, f"file://{meeting}/meeting")
        spawn(_work, settings, nprocs=arguments.processes)


def _work(rank: int, out: Path, seed: int, processes: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    training = Training(out, RECIPE, seed, rank, processes)
    training.resume()
    training.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
