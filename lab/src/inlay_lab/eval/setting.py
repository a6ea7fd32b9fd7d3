"""The options of ``modular-qa``, and the modes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.client.llm import LLM
from inlay.errors import ParameterError
from inlay.kv.choices import ROUNDED
from inlay.models.spec import dtype_name
from inlay.policy import POSITIONS, ReusePolicy
from inlay.settings import check_choice
from inlay_lab.eval.across import ALL_TASKS
from inlay_lab.eval.modular_cases import Round, draw_rounds
from inlay_lab.eval.oracle import served
from inlay_lab.eval.questions import TASKS

ORDERS = ("schema", "permuted")
_MOST_DOCUMENTS = 1000  # in a schema; made-up names run out somewhere beyond


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of ``modular-qa``. Raises ParameterError.

    Attributes:
        reuse: The policies, in the order of the rows. Write ``oracle`` for ``profiled`` to select tokens as in
            oracle.py.
        positions: The position policies of each; None for the engine's default.
        documents: Number of documents in a prompt; several numbers are measured one after another.
        questions: Over all tasks, for each number of documents. Rounded up to equal numbers for each task.
        spare: Further documents in the schema; None for as many as in a prompt.
        scaffold: Also run each modular policy with the documents of every prompt in a scaffold.
        repeat: Repetitions of each prompt under ``modular`` for the promotion curve; 0 for no curve.
        seed: Of documents and questions.
        tasks: From ALL_TASKS.
        order: Of documents in a prompt, from ORDERS: the schema's, or random.
    """

    reuse: Sequence[str] = ("off", "isolated", "anchored", "modular")
    positions: Sequence[str] | None = None
    documents: int | Sequence[int] = 6
    questions: int = 200
    spare: int | None = None
    scaffold: bool = False
    repeat: int = 0
    seed: int = 0
    tasks: Sequence[str] = TASKS
    order: str = "schema"

    def __post_init__(self) -> None:
        for name in self.reuse:
            ReusePolicy.parse(served(name))
        for name in self.positions or ():
            check_choice("positions", name, POSITIONS)
        for task in self.tasks:
            check_choice("tasks", task, ALL_TASKS)
        check_choice("order", self.order, ORDERS)
        for documents in self.counts:
            self._check_documents(documents)
        _require("questions", self.questions, 1, "or there is nothing to measure")
        _require("repeat", self.repeat, 0, "it counts how often each prompt is asked again")
        _require("seed", self.seed, 0, "it numbers what is drawn")
        if self.scaffold and not any(ReusePolicy.parse(served(name)).modular for name in self.reuse):
            told = f"scaffold changes nothing under {', '.join(self.reuse)}"
            raise ParameterError(
                f"{told}: only modules are encoded without each other; add isolated or anchored to reuse"
            )

        if self.scaffold and self.permuted:
            raise ParameterError("scaffold names documents in the schema's order; use order 'schema' with it")

    def _check_documents(self, documents: int) -> None:
        spare = self.spare_of(documents)
        _require("documents", documents, 2, "one of the tasks compares two of them")
        _require("spare", spare, 0, "it counts the documents that no prompt of a schema need import")
        if documents + spare > _MOST_DOCUMENTS:
            together = f"{documents + spare:,}"
            raise ParameterError(f"documents and spare are {together} together; use at most {_MOST_DOCUMENTS:,}")

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of documents, each once."""
        return (self.documents,) if isinstance(self.documents, int) else tuple(dict.fromkeys(self.documents))

    @property
    def permuted(self) -> bool:
        """True if a prompt's documents stand in random order."""
        return self.order == "permuted"

    def spare_of(self, documents: int) -> int:
        """The number of documents in a schema beyond those of a prompt."""
        return documents if self.spare is None else self.spare

    def rounds(self, documents: int) -> list[Round]:
        """The schemas and cases for prompts of ``documents`` documents."""
        return draw_rounds(
            documents=documents,
            spare=self.spare_of(documents),
            questions=self.questions,
            seed=self.seed,
            tasks=self.tasks,
            permuted=self.permuted,
        )


@dataclass(frozen=True)
class Mode:
    """A reuse policy with its positions.

    Attributes:
        scaffold: The documents of a prompt are encoded together.
    """

    reuse: str
    positions: str
    scaffold: bool = False


#: Full prefill of the whole prompt, without gaps: the reference for every mode.
REFERENCE = Mode("off", "packed")


def modes_of(llm: LLM, setting: Setting) -> list[Mode]:
    """The requested modes, each once. Raises ParameterError if the model refuses one."""
    asked = [
        REFERENCE if reuse == REFERENCE.reuse else Mode(reuse, llm.positions_for(served(reuse), positions), scaffold)
        for reuse in taken_of(llm, setting.reuse).values()
        for positions in setting.positions or (None,)
        for scaffold in ((False, True) if setting.scaffold and ReusePolicy.parse(served(reuse)).modular else (False,))
    ]
    if setting.permuted and any(mode.positions == "schema" for mode in asked):
        raise ParameterError(
            "order 'permuted' needs packed positions: with positions 'schema' the order is the schema's"
        )
    return list(dict.fromkeys(asked))


def taken_of(llm: LLM, reuse: Sequence[str]) -> dict[str, str]:
    """The requested policies, each with its policy on this model. Only ``auto`` changes."""
    return {name: str(llm.policy(name)) if ReusePolicy.parse(served(name)).auto else name for name in reuse}


def autos(llm: LLM, reuse: Sequence[str]) -> dict[str, Any]:
    """The policy of ``auto`` on this model, under the key "auto", if these policies include it."""
    taken = {name: policy for name, policy in taken_of(llm, reuse).items() if name != policy}
    return {"auto": taken} if taken else {}


def describe_model(llm: LLM) -> dict[str, Any]:
    """The model of a result."""
    kept = llm.client.model.keys.kv_dtype
    return {
        "model": llm.model_name,
        "dtype": dtype_name(llm.loaded.model.dtype),
        "quantization": llm.loaded.form.quantization,
    } | ({"kv_cache_dtype": kept} if kept in ROUNDED else {})


def model_words(result: Mapping[str, Any]) -> str:
    """The model of a result as text, from ``describe_model``."""
    words = [result["model"], result["dtype"], result["quantization"]]
    kept = result.get("kv_cache_dtype")
    return ", ".join([*filter(None, words), *([f"{kept} KV"] if kept else [])])


def _require(name: str, value: int, least: int, reason: str) -> None:
    if value < least:
        raise ParameterError(f"{name} is {value}; it must be at least {least}: {reason}")
