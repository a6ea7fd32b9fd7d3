"""``inlay check``: measures the divergence of each policy from full prefill on the model, and recommends a policy.

Full prefill answers every prompt greedily. Every policy is then forced to generate the same answer, and its
distributions are compared with those of full prefill, token by token. See docs/guides/check-prompts.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.check.prompts import KINDS, Batch, draw_batches, draw_prompts
from inlay.check.statistics import mean_bound, wilson_interval
from inlay.client.llm import LLM
from inlay.engine.background.divergence import divergences
from inlay.errors import InlayError, ModelError, ParameterError, PolicyError
from inlay.pml import Prompt, Schema
from inlay.policy import EXACT, ReusePolicy
from inlay.prompt.chat import ChatTemplate
from inlay.prompt.inputs import Conversation, has_modules
from inlay.sampling.params import SamplingParams
from inlay.tolerance import DEFAULT, Measured, Tolerance
from inlay.types import Scope


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence of a mode from full prefill over one answer.

    Attributes:
        kl: KL(full prefill ‖ mode) in nats, the mean over tokens.
        top1: Share of tokens with the same most probable token in both.
        same: The mode's greedy answer equals this one.
    """

    kl: float
    top1: float
    same: bool


def divergence(reference: Tensor, other: Tensor) -> float:
    """Return KL(reference ‖ other) in nats, the mean over tokens.

    Args:
        reference: Natural log-probabilities, [tokens, vocabulary].
        other: The same of the other distribution.
    """
    return float(divergences(reference, other).mean())


def compare(reference: Tensor, other: Tensor, said: Sequence[int]) -> Divergence:
    """Compare a mode with full prefill over the greedy answer of full prefill.

    The mode gives the same answer if its most probable token equals each token of the answer.

    Args:
        reference: Natural log-probabilities of full prefill, [tokens, vocabulary]. Each row follows the prompt and the
            earlier tokens of the answer.
        other: The same of the mode.
        said: Token ids of the answer.
    """
    assert len(reference) == len(other) == len(said), (len(reference), len(other), len(said))
    tops = other.argmax(dim=-1)
    agreed = (tops == reference.argmax(dim=-1)).double().mean()
    return Divergence(divergence(reference, other), float(agreed), bool((tops == torch.tensor(list(said))).all()))


#: The policies that are compared by default: no approximation, each form of modules, and selective recomputation.
AGAINST = (
    "exact",
    "isolated",
    "modular",
    "primed",
    "modular+linked:16",
    "modular+profiled:0.05",
    "modular+profiled:0.1",
    "primed+profiled:0.1",
    "modular+profiled:0.15",
    "primed+profiled:0.15",
    "modular+profiled*query:0.15",
    "modular+blend:0.15",
)
QUICK = ("exact", "modular", "modular+profiled:0.1")

_AT_ONCE = 8  # prompts with distributions in memory together
_DEMO_KINDS = ("facts", "counting")  # the bundled model was trained on these only

Row = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """A reuse policy with its positions."""

    reuse: str
    positions: str

    @property
    def policy(self) -> ReusePolicy:
        """The policy of its key."""
        return ReusePolicy.parse(self.reuse)


#: Full prefill of the whole prompt, without gaps: the reference for every mode.
REFERENCE = Mode("off", "packed")


@dataclass(frozen=True, kw_only=True)
class CheckSetting:
    """The settings of a check. Raises ParameterError for settings that do not fit together.

    Attributes:
        against: Policies to compare. None for QUICK or AGAINST.
        schema: The user's schema. None for generated ones.
        prompts: Prompts of the user's schema, or messages with marked parts without a schema. None to draw them.
        quick: Use fewer and shorter prompts, and fewer policies unless ``against`` names them.
        seconds: Time limit. The batch of at most 8 prompts that runs at the limit is finished, and at least one policy
            is compared on one prompt.
        tolerance: The tolerance of the recommendation.
        seed: The seed of generated prompts.
        passes: The most passes over all kinds of generated prompts, or the most batches of a user's schema.
        tokens: The most tokens of an answer.
    """

    against: Sequence[str] | None = None
    schema: Schema | None = None
    prompts: Sequence[Prompt | Conversation] | None = None
    quick: bool = False
    seconds: float = 300.0
    tolerance: Tolerance = DEFAULT
    seed: int = 0
    passes: int = 18
    tokens: int = 24

    def __post_init__(self) -> None:
        for name in self.policies:
            if ReusePolicy.parse(name).auto:
                raise ParameterError(
                    "against names 'auto', which is what comes of this check; name other policies",
                    code="parameter.conflict",
                )
        if self.schema is None and any(isinstance(prompt, Prompt) for prompt in self.prompts or ()):
            raise ParameterError(
                "there are prompts and no schema; give the schema that they name as well", code="parameter.conflict"
            )
        if self.prompts is not None and not self.prompts:
            raise ParameterError(
                "there are no prompts; give at least one, or none for generated ones", code="prompt.empty"
            )
        for prompt in self.prompts or ():
            if not isinstance(prompt, Prompt):
                if self.schema is not None:
                    message = "there are messages and a schema; leave the schema out, or give its prompts"
                    raise ParameterError(message, code="parameter.conflict")
                if not has_modules(prompt):
                    raise ParameterError(
                        "messages have no marked part, so nothing is reused between them but prefixes; mark documents "
                        "with cache_control",
                        code="prompt.not_marked",
                    )
            elif self.schema is not None and prompt.schema != self.schema.name:
                raise ParameterError(
                    f"{prompt.source}: the prompt is of schema '{prompt.schema}', and the schema that is checked is "
                    f"'{self.schema.name}'; give prompts of that one",
                    code="schema.other_schema",
                )

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies to compare, without duplicates."""
        given = self.against if self.against is not None else QUICK if self.quick else AGAINST
        return tuple(dict.fromkeys(str(ReusePolicy.parse(name)) for name in given))


@dataclass(frozen=True)
class Refused:
    """A policy that a model does not allow, with the reason."""

    policy: str
    positions: str
    reason: str


@dataclass
class _Measurement:
    """The measurement of one policy on one prompt. ``unit`` is the number of the prompt's schema."""

    kind: str
    unit: int
    divergence: Divergence
    computed: int
    modules: int
    ttft_s: float


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        rows: Measurements, in the order of the policies.
        refused: Policies that the model does not allow.
        recommended: The recommended policy.
        reason: The reason of the recommendation.
        kinds: For each kind of prompts, the number of prompts and of schemas.
        meaningless: The reason why answers were not compared, or None if they were.
        missing: Policies that no prompt was compared for, because the time was over or the check was interrupted.
        complete: Every policy was compared on the same prompts, of every kind.
        interrupted: The check ended by a signal.
    """

    rows: tuple[Measured, ...]
    refused: tuple[Refused, ...]
    recommended: str
    reason: str
    kinds: dict[str, tuple[int, int]]
    meaningless: str | None
    missing: tuple[str, ...] = ()
    complete: bool = True
    interrupted: bool = False

    def as_json(self) -> Row:
        """Return the object of the last line of ``inlay check --json``."""
        rows = [
            {
                "policy": row.policy,
                "prompts": row.prompts,
                "kl": float(f"{row.kl:.4g}"),
                "top1": round(row.top1, 4),
                "same_answers": None if row.same is None else round(row.same, 4),
                "recomputed": round(row.recomputed, 4),
                "ttft_ms": None if row.ttft_ms is None else float(f"{row.ttft_ms:.4g}"),
            }
            for row in self.rows
        ]
        return {"rows": rows, "recommended": self.recommended, "reason": self.reason}


def check_model(llm: LLM, setting: CheckSetting, progress: Callable[[int, int], None] | None = None) -> Check:
    """Compare policies with full prefill on a model. The cheapest policies are compared first.

    ``CheckSetting.seconds`` limits the wall time. The result then holds the measurements made so far. The same
    holds after a KeyboardInterrupt, unless it comes before the first measurement.

    Args:
        llm: The model, with ``promotion_memory=0`` and without a store that outlives it.
        setting: The settings.
        progress: Called with the number of compared answers and the total.

    Raises:
        InlayError: A schema or prompt does not fit. Raised before any prompt runs.
    """
    modes, refused = _modes(llm, setting.policies)
    run = _CheckRun(llm, modes, setting.tokens, setting.seconds)
    total, interrupted = 0, False
    try:
        for batches, passes in _batches(llm, setting):
            total = total or passes * sum(len(batch.prompts) for batch in batches) * (len(modes) + 1)
            for done in run.ask(batches):
                if progress is not None:
                    progress(min(done, total), total)
            if run.late:
                break
    except KeyboardInterrupt:
        if not run.measured:
            raise
        interrupted = True
    if not total:
        longest = llm.client.model.max_positions
        raise ParameterError(
            f"no generated prompt fits into the model's {longest:,} positions; give a schema with shorter modules",
            code="schema.too_long",
        )
    if progress is not None and not interrupted:
        progress(total, total)
    run.level()
    kinds = run.kinds()
    given = setting.schema is not None or setting.prompts is not None
    everything = given or set(kinds_of(llm)) == set(kinds)
    meaningless = "the weights are random, so that answers mean nothing" if _is_random(llm) else None
    rows = tuple(run.row(mode, answers=meaningless is None) for mode in modes if mode in run.measured)
    missing = tuple(mode.reuse for mode in modes if mode not in run.measured)
    recommended, reason = _recommended(llm, rows, setting.tolerance, meaningless)
    complete = everything and not missing
    return Check(rows, refused, recommended, reason, kinds, meaningless, missing, complete, interrupted)


def kinds_of(llm: LLM) -> tuple[str, ...]:
    """Return the kinds of generated prompts for a model: all kinds, but only documents for the bundled model."""
    return _DEMO_KINDS if llm.model_name == "demo" else KINDS


def _is_random(llm: LLM) -> bool:
    return llm.model_name.startswith("random:")


def _modes(llm: LLM, policies: Sequence[str]) -> tuple[list[Mode], tuple[Refused, ...]]:
    """Return the policies with their positions, and those that the model refuses. Raises PolicyError if it has none."""
    modes: list[Mode] = []
    refused: list[Refused] = []
    why = llm.client.model.why_not_shift
    for name in policies:
        if why is not None and ReusePolicy.parse(name).modular:
            refused.append(Refused(name, "packed", why))
        try:
            modes.append(REFERENCE if name == REFERENCE.reuse else Mode(name, llm.positions_for(name)))
        except PolicyError as error:
            if len(policies) == 1:
                raise
            refused.append(Refused(name, "packed", str(error)))
    return modes, tuple(refused)


def _batches(llm: LLM, setting: CheckSetting) -> Iterator[tuple[list[Batch], int]]:
    """Yield the batches of each pass with the largest number of passes. Raises InlayError."""
    passes = 2 if setting.quick else setting.passes
    if setting.schema is None and setting.prompts is not None:
        for prompt in setting.prompts:
            llm.lay_out(prompt)  # reports a wrong prompt before any prompt runs
        yield from _portions("messages", None, setting.prompts)
        return
    if setting.schema is None:
        try:
            ChatTemplate(llm.tokenizer).pieces(("system", "user"), generation=True)
            turns = True
        except ModelError:
            turns = False
        kinds = kinds_of(llm)
        for number in range(passes):
            drawn = draw_batches(number, setting.seed, turns=turns, small=setting.quick)
            yield [batch for batch in drawn if batch.kind in kinds and _fits(llm, batch, setting.tokens)], passes
        return
    schema = setting.schema
    drawn_prompts = setting.prompts
    if drawn_prompts is None:
        drawn_prompts = draw_prompts(schema, _AT_ONCE * passes, setting.seed)
    llm.add_schema(schema, encode=False, replace=True)
    if setting.prompts is None:
        whole = Batch(schema.name, schema, tuple(drawn_prompts))
        drawn_prompts = [prompt for prompt in whole.prompts if _fits(llm, Batch("", schema, (prompt,)), setting.tokens)]
        if not drawn_prompts:
            raise ParameterError(
                f"no prompt of schema '{schema.name}' could be drawn that the model has room for; give some in a file "
                "with --prompts",
                code="schema.too_long",
            )
    else:
        for prompt in drawn_prompts:
            llm.lay_out(prompt)  # reports a wrong prompt before any prompt runs
    yield from _portions(schema.name, schema, drawn_prompts)


def _portions(
    kind: str, schema: Schema | None, prompts: Sequence[Prompt | Conversation]
) -> Iterator[tuple[list[Batch], int]]:
    """Yield prompts in batches of _AT_ONCE, with the number of batches."""
    portions = [prompts[at : at + _AT_ONCE] for at in range(0, len(prompts), _AT_ONCE)]
    for portion in portions:
        yield [Batch(kind, schema, tuple(portion))], len(portions)


def _fits(llm: LLM, batch: Batch, answer: int) -> bool:
    """Return True if every prompt and its answer fit into the model's positions."""
    assert batch.schema is not None, "it was drawn from a schema"
    try:
        llm.add_schema(batch.schema, encode=False, replace=True)
        longest = max(llm.lay_out(prompt).end for prompt in batch.prompts)
    except InlayError:
        return False
    return longest + answer < llm.client.model.max_positions


def _cost(mode: Mode) -> tuple[int, float]:
    """Return a key that sorts modes by the tokens that they compute."""
    policy = mode.policy
    if not policy.modular:
        return 2, 0.0
    if policy.recompute is None:
        return 0, 0.0
    return 1, 0.0 if policy.recompute.kind == "linked" else policy.recompute.amount


class _CheckRun:
    """The measurements of every mode so far, within a time limit in seconds."""

    def __init__(self, llm: LLM, modes: Sequence[Mode], tokens: int, seconds: float) -> None:
        self._llm, self._modes, self._tokens = llm, sorted(modes, key=_cost), tokens
        self._end = time.perf_counter() + seconds
        self._seen: dict[Mode, list[_Measurement]] = {mode: [] for mode in modes}
        self._encoded: set[bytes] = set()
        self._schema: Schema | None = None
        self._unit = -1
        self._done = 0
        self._at_once = 1  # doubles, so that every mode has a first measurement early

    @property
    def measured(self) -> list[Mode]:
        """The modes that have measurements."""
        return [mode for mode, seen in self._seen.items() if seen]

    @property
    def late(self) -> bool:
        """True if the time is over and at least one mode has a measurement."""
        return bool(self.measured) and time.perf_counter() > self._end

    def ask(self, batches: Sequence[Batch]) -> Iterator[int]:
        """Run batches in every mode until the time is over. Yields the number of answers so far, over all batches."""
        for batch in batches:
            rest = list(batch.prompts)
            while rest and not self.late:
                portion, rest = rest[: self._at_once], rest[self._at_once :]
                self._at_once = min(2 * self._at_once, _AT_ONCE)
                yield from self._ask(batch, portion)

    def _ask(self, batch: Batch, prompts: list[Prompt | Conversation]) -> Iterator[int]:
        """Run prompts of one batch, full prefill first."""
        llm = self._llm
        if batch.schema is None:
            self._unit = 0
        elif batch.schema is not self._schema:
            llm.reset_prefix_cache()
            self._schema, self._unit = batch.schema, self._unit + 1
            self._encoded.clear()
            llm.add_schema(batch.schema, encode=False, replace=True)
        params = SamplingParams(temperature=0, max_tokens=self._tokens)
        outputs = llm.generate(prompts, params, reuse=REFERENCE.reuse, positions=REFERENCE.positions)
        said = [output.outputs[0].token_ids for output in outputs]
        expected = llm.distributions(prompts, said, reuse=REFERENCE.reuse, positions=REFERENCE.positions)
        self._done += len(prompts)
        yield self._done
        whole = llm.policy("modular")
        modules = [sum(len(spec.ids) for spec in llm.processor.segments_of(prompt, whole)) for prompt in prompts]
        for mode in self._modes:
            # A separate salt, so that a mode reuses only modules and nothing else of other modes.
            asked: dict[str, Any] = {
                "reuse": mode.policy,
                "positions": mode.positions,
                "cache_salt": f"check {mode.reuse}",
            }
            # One by one, because the time to the first token must be that of a single request.
            first = SamplingParams(temperature=0, max_tokens=1)
            usages = []
            for prompt in prompts:
                if self.late:
                    return
                self._encode(prompt, mode, asked)
                usages.append(llm.generate([prompt], first, **asked)[0])
                self._done += 1
                yield self._done
            found = expected if mode == REFERENCE else llm.distributions(prompts, said, **asked)
            for number, output in enumerate(usages):
                usage, ttft_s = output.usage, output.metrics.ttft_s
                assert ttft_s is not None, "it has answered"
                own = usage.prompt_tokens - modules[number]
                computed = max(0, usage.computed_tokens + usage.selecting_tokens - own)
                divergence = compare(expected[number], found[number], said[number])
                self._seen[mode].append(
                    _Measurement(batch.kind, self._unit, divergence, computed, modules[number], ttft_s)
                )

    def _encode(self, prompt: Prompt | Conversation, mode: Mode, asked: Mapping[str, Any]) -> None:
        """Encode the modules of a prompt that no mode has read yet, with their deviation profiles."""
        policy = self._llm.policy(mode.policy, mode.positions)
        if not policy.modular:
            return
        segments = self._llm.processor.segments_of(prompt, policy, Scope(str(asked["cache_salt"])))
        keys = {spec.key for spec in segments}
        if keys - self._encoded:
            self._llm.warm(prompt, **asked)
            self._encoded |= keys

    def level(self) -> None:
        """Drop measurements of prompts that not every mode has, if every mode has some."""
        shortest = min(map(len, self._seen.values()))
        if shortest:
            for seen in self._seen.values():
                del seen[shortest:]

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Return the number of prompts of each kind, and the number of their schemas."""
        seen = max(self._seen.values(), key=len)
        kinds = dict.fromkeys(one.kind for one in seen)
        return {
            kind: (sum(one.kind == kind for one in seen), len({one.unit for one in seen if one.kind == kind}))
            for kind in kinds
        }

    def row(self, mode: Mode, *, answers: bool) -> Measured:
        """Return the figures of a mode. ``answers``: answers are meaningful."""
        seen = self._seen[mode]
        groups: dict[str, list[_Measurement]] = {}
        for one in seen:
            groups.setdefault(one.kind, []).append(one)
        bounds = [mean_bound(_grouped(of_kind)) for of_kind in groups.values()]
        lows = [wilson_interval(sum(one.divergence.same for one in of), len(of))[0] for of in groups.values()]
        modules = sum(one.modules for one in seen)
        return Measured(
            policy=mode.reuse,
            positions=mode.positions,
            prompts=len(seen),
            kl=statistics.fmean(one.divergence.kl for one in seen),
            kl_high=max(bounds),
            top1=statistics.fmean(one.divergence.top1 for one in seen),
            same=statistics.fmean(one.divergence.same for one in seen) if answers else None,
            same_low=min(lows) if answers else None,
            recomputed=sum(one.computed for one in seen) / modules if modules else 0.0,
            ttft_ms=1000 * statistics.median(one.ttft_s for one in seen),
        )


def _grouped(seen: Sequence[_Measurement]) -> list[list[float]]:
    """Return divergences grouped by schema. A user's schema is one group, because the bound concerns only this
    schema.
    """
    units: dict[int, list[float]] = {}
    for one in seen:
        units.setdefault(one.unit if one.kind in KINDS else 0, []).append(one.divergence.kl)
    return list(units.values())


def _recommended(llm: LLM, rows: Sequence[Measured], tolerance: Tolerance, meaningless: str | None) -> tuple[str, str]:
    """Return the policy that ``auto`` chooses, and the reason.

    Args:
        rows: The measured policies.
        tolerance: The tolerance of ``auto``.
        meaningless: The reason why answers were not compared, or None if they were.
    """
    why_not_shift = llm.client.model.why_not_shift
    auto = ReusePolicy.parse(f"auto:{tolerance}", llm.config.positions)
    taken = auto.resolved(rows, why_not_shift)
    row = taken.settled(why_not_shift).row(rows)
    only = "" if meaningless is None else f"; {meaningless}, and only distributions were compared"
    others = [each for each in rows if ReusePolicy.parse(each.policy).modular]
    if not taken.modular or row is None:
        if not others:
            return str(EXACT), f"no policy that reads modules was compared{only}"
        nearest = min(others, key=lambda each: each.kl_high)
        return str(EXACT), (
            f"no policy that computes less is surely within {tolerance.in_words}: the nearest, {nearest.policy}, is "
            f"{nearest.kl:.2g} nats from full prefill in the mean, and up to {nearest.kl_high:.2g} where it is "
            f"farthest{only}"
        )
    exact = next((each for each in rows if each.policy == str(EXACT)), None)
    faster = ""
    if exact is not None and exact.ttft_ms is not None and row.ttft_ms is not None:
        faster = f", with the first token after {row.ttft_ms / exact.ttft_ms:.2f} of exact's time"
    return str(taken), (
        f"it computes least ({row.recomputed:.0%} of the modules' tokens{faster}) of those that are surely within "
        f"{tolerance.in_words}: {row.kl:.2g} nats from full prefill in the mean, and at most {row.kl_high:.2g} (95%) "
        f"where it is farthest{only}"
    )
