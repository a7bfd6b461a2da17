"""Judge a split run by a whole one: at once where it is plain, otherwise with measured noise."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.checks.failures import Explainer, call_context, likely_mixups
from paritas.execution.evidence import Evidence, GivenLift, ItemEvidence
from paritas.execution.observation import Observation, RunOptions
from paritas.execution.program import Program, count_dtypes
from paritas.numerics import criterion
from paritas.numerics.bits import is_inexact
from paritas.numerics.checkers import NO_EVIDENCE
from paritas.numerics.gates import GROSS_SHAKES, gross_difference, near_in_float64
from paritas.numerics.judge import Checks, check_pair
from paritas.numerics.metrics import pair_metrics
from paritas.placement.placement import RankCut, bounds
from paritas.placement.recipes import name_of
from paritas.results.findings import Aspect, Finding, Status
from paritas.results.items import Item, gradient
from paritas.results.placements import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.numerics.automatic import JudgeEvidence
    from paritas.partition.runner import OperatorRun, Runner

# Of one way to split an operator; where it is wrong, its gradients are too.
MOST_EXPLAINED = 4


def run_items(seen: OperatorRun) -> dict[Item, Any]:
    """Everything that is compared of a run; a gradient that does not arrive is None."""
    items = dict(seen.results)
    for turn, gradients in enumerate(seen.gradients):
        for item, value in gradients.items():
            items[msgspec.structs.replace(item, draw=turn + 1)] = value
    return items


def shown_item(key: Item) -> Item:
    """The item that a person is told: the gradient, whichever cotangent was sent back."""
    return msgspec.structs.replace(key, draw=0)


# --- with measured noise --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class SideProgram(Program):
    """One side of a check: the operator whole, or where `split` says so, rank by rank."""

    sets_default = True
    notes_float64 = False

    runner: Runner
    split: bool

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """Those of its results and gradients."""
        return count_dtypes(native[0].outputs.values())

    def run(self, options: RunOptions) -> list[Observation]:
        """Run this side once more."""
        run = self.runner.split if self.split else self.runner.whole
        seen = run(wide=options.wide, around=options.around())
        return [
            Observation(
                outputs=run_items(seen), error=seen.error, gradient_error=seen.gradient_error
            )
        ]

    def baseline(self, evidence: Evidence[Any]) -> list[Observation] | None:
        """A rank's own narrowing is no noise of its own."""
        if not self.split or evidence.is_narrow:
            return None
        return evidence.run(RunOptions(wide=True, mode=evidence.lift_mode()))


class Careful:
    """Judges the items that are not plain at once; runs are made when first needed."""

    def __init__(self, runner: Runner, lifted: tuple[OperatorRun, OperatorRun]) -> None:
        """`lifted` are the plain float64 runs of both sides."""
        self.runner = runner
        self.lifted = tuple(run_items(seen) for seen in lifted)
        self._shaken: dict[Item, Any] | None = None
        self._explainer = Explainer(left=MOST_EXPLAINED)

    @functools.cached_property
    def runs(self) -> tuple[Evidence[SideProgram], Evidence[SideProgram]]:
        """Both sides' runs."""
        return self._evidence(split=False), self._evidence(split=True)

    def _evidence(self, *, split: bool) -> Evidence[SideProgram]:
        program = SideProgram(self.runner, split=split)
        native = self.runner.split(wide=False) if split else self.runner.whole(wide=False)
        return Evidence(program, [Observation(outputs=run_items(native))], self.runner.seed)

    def _item(self, key: Item, *, in_float64: bool = False) -> ItemEvidence:
        """What may be asked about one item; the ranks' own roundings are noise as well.

        A sum over ranks rounds every term. Where terms are larger than their sum, so is this
        noise, and it belongs to the split as such.
        """
        whole, ranks = self.runs
        lifted = GivenLift(ranks.arbiter)
        return ItemEvidence(whole, key, lifted=lifted, also=(ranks,), in_float64=in_float64)

    @property
    def notes(self) -> list[str]:
        """What is worth a note about the runs."""
        notes = list(self._explainer.notes)
        if "runs" in vars(self):
            notes += [*self.runs[0].notes, *self.runs[1].notes]
        return notes

    def judge(self, key: Item) -> list[Finding]:
        """The findings about one item: of the lifted runs, or if these pass, of the native ones."""
        whole, split, reason = _fill_missing_gradient(*(items.get(key) for items in self.lifted))
        if not near_in_float64(whole, split):
            findings = self._lifted(key, whole, split)
            if not self.runner.narrow or not all(f.status.passes() for f in findings):
                findings = self._explained(findings, whole, split)
                return [_with_rank_of_worst(finding, reason, self.runner) for finding in findings]
        natives = (side.native[0].outputs.get(key) for side in self.runs)
        first, second, _ = _fill_missing_gradient(*natives)
        evidence = self._item(key)
        findings, _ = check_pair(shown_item(key), first, second, Checks(), evidence)
        findings = self._explained(findings, first, second, evidence)
        return [_with_rank_of_worst(finding, reason, self.runner) for finding in findings]

    def _explained(
        self, findings: list[Finding], whole: Any, split: Any, evidence: JudgeEvidence = NO_EVIDENCE
    ) -> list[Finding]:
        """With what kind of wrong they are: a sum never taken, a part in another's place ..."""
        if all(finding.status.passes() for finding in findings):
            return findings
        call = self.runner.call
        known = call_context(call.name, call.args, call.kwargs)
        names = {name_of(place): value for place, value in enumerate(call.args)}
        names |= {name_of(place): value for place, value in call.kwargs.items()}
        is_result = not findings[0].item.kind.is_gradient
        context = dataclasses.replace(
            known if is_result else type(known)(),
            world={f"axis {axis}": ranks for axis, (_, ranks) in enumerate(self.runner.levels)},
            named=likely_mixups(names, whole),
        )
        return self._explainer.explain(findings, whole, split, evidence, context)

    def _lifted(self, key: Item, whole: Any, split: Any) -> list[Finding]:
        """The findings about one item of the lifted runs."""
        gross = self._gross(key, whole, split)
        if gross is not None:
            return [gross]
        left, right = self.runs
        # Once more in a lifted run that widens what the operator narrows inside, too.
        first = (left.arbiter() or left.native)[0].outputs.get(key)
        second = (right.arbiter() or right.native)[0].outputs.get(key)
        first, second, _ = _fill_missing_gradient(first, second)
        evidence = self._item(key, in_float64=True)
        findings, _ = check_pair(shown_item(key), first, second, Checks(), evidence)
        return [_in_float64(finding) for finding in findings]

    def _gross(self, key: Item, whole: Any, split: Any) -> Finding | None:
        """A difference so large that no rounding makes it; None where that is not plain."""
        if not is_inexact(whole) or not is_inexact(split) or whole.shape != split.shape:
            return None
        moved = self._shaken_item(key, whole)
        if moved is None or not bool(torch.isfinite(moved).all() & torch.isfinite(whole).all()):
            return None
        lost = int((~torch.isfinite(split)).sum())
        limit = GROSS_SHAKES * criterion.rms_difference(moved, whole)
        reason = gross_difference(whole, split, lambda: limit)
        if lost:
            reason = f"{lost} of {whole.numel()} values are not finite, also in float64"
        if reason is None:
            return None
        return Finding(
            item=shown_item(key),
            aspect=Aspect.VALUE,
            status=Status.DIFFERENT,
            reason=reason,
            dtype=str(whole.dtype).removeprefix("torch."),
            shape=tuple(whole.shape),
            metrics=pair_metrics(whole, split),
        )

    def _shaken_item(self, key: Item, like: Tensor) -> Tensor | None:
        if self._shaken is None:
            self._shaken = run_items(self.runner.whole(wide=True, shake=True))
        moved: Any = self._shaken.get(key)
        return moved if is_inexact(moved) and moved.shape == like.shape else None


def _fill_missing_gradient(whole: Any, split: Any) -> tuple[Any, Any, str]:
    """A gradient that does not arrive is zero; where the other side has one, that is told."""
    if split is None and isinstance(whole, torch.Tensor):
        return whole, torch.zeros_like(whole), "no gradient arrives: "
    if whole is None and isinstance(split, torch.Tensor):
        return torch.zeros_like(split), split, "the whole has no gradient: "
    return whole, split, ""


def _in_float64(finding: Finding) -> Finding:
    if finding.native is None:
        return finding
    reason = f"in float64, {finding.reason}" if finding.reason else ""
    return msgspec.structs.replace(finding, reason=reason, lifted=finding.native, native=None)


def _with_rank_of_worst(finding: Finding, reason: str, runner: Runner) -> Finding:
    """With the rank whose part the worst element is in."""
    if finding.status.passes(strict=True):
        return finding
    words = f"{reason}{finding.reason}"
    worst = finding.metrics.max_abs_index if finding.metrics else None
    if worst and finding.aspect is Aspect.VALUE:
        cut = _cut_of(finding.item, runner)
        where = cut.words(worst) if cut and cut.dim < len(worst) else ""
        words = f"{words}; worst {where}" if where else words
    return msgspec.structs.replace(finding, reason=words)


def _cut_of(item: Item, runner: Runner) -> RankCut | None:
    if item in runner.cuts:
        return runner.cuts[item]
    recipe, ranks = runner.levels[0]
    values: dict[Any, Any] = {**dict(enumerate(runner.call.args)), **runner.call.kwargs}
    for place, placement in recipe.inputs:
        value = values[place]
        if item != gradient(name_of(place)) or not isinstance(placement, Shard):
            continue
        dim = placement.dim % value.dim()
        cuts = bounds(value.shape[dim], placement.unit, ranks, item.text)
        return RankCut(dim, tuple(cuts))
    return None
