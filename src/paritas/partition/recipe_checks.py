"""Is this way of splitting an operator right? Forward, backward, and what the operator writes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed

from paritas.checks.failures import FailedSplit, remember_failed
from paritas.errors import UsageError, first_line, in_one_line
from paritas.execution.observation import AFTER
from paritas.numerics import criterion
from paritas.numerics.gates import near_in_float64, near_natively
from paritas.parallel.rank_pool import LostRankError
from paritas.partition.ranks.remote_runs import RemoteRunner
from paritas.partition.runner import OUTPUT, Draws, Runner, Streams
from paritas.partition.split_evidence import Careful, path_of, run_items
from paritas.placement.recipes import (
    Group,
    RankError,
    Recipe,
    argument_words,
    device_of,
    name_of,
)
from paritas.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.results.placements import Replicate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.partition.annotation import Annotation
    from paritas.partition.ranks.remote_runs import Team
    from paritas.partition.runner import OperatorRun
    from paritas.placement.recipes import OperatorCall
    from paritas.results.graph_reports import Confirm


# --- What is kept of a split that is wrong, so that its verdict can be shrunk ---------------------

_WRONG = frozenset({Status.DIFFERENT, Status.DEGRADED})


def failed_split(
    verdict: Verdict,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int,
    annotation: Annotation | None = None,
) -> tuple[FailedSplit, ...]:
    """What to remember of a split; nothing unless it is wrong for certain.

    Args:
        verdict: of this split alone.
        annotation: that the recipe was made from: on other shapes it makes another.
    """
    wrong = _wrong(verdict)
    if not wrong:
        return ()
    single = recipe[0] if isinstance(recipe, tuple) and len(recipe) == 1 else recipe
    count = ranks[0] if isinstance(ranks, tuple) and len(ranks) == 1 else ranks
    return (
        FailedSplit(
            call=call,
            recipe=single,
            annotation=None if annotation is None else annotation.text,
            ranks=count,
            seed=seed,
            status=max((one.status for one in wrong), key=lambda status: status.gravity),
            kinds=kinds_of(verdict),
        ),
    )


def kinds_of(verdict: Verdict) -> frozenset[tuple[Aspect, str]]:
    """In what a split is wrong: the same on other shapes is the same fault."""
    return frozenset((one.aspect, _role(one.path)) for one in _wrong(verdict))


def _wrong(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.failures if finding.status in _WRONG]


def _role(path: str) -> str:
    if "gradient of " in path:
        return "gradient"
    return "argument" if path.endswith(AFTER) else "result"


# --- The check ------------------------------------------------------------------------------------


def check_recipe(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
) -> Verdict:
    """Compare an operator with itself split over ranks, all in this process.

    Results are compared element by element, gradients of every floating argument under two random
    cotangents, and the arguments that the operator wrote to. First in float64, where rounding
    excuses nothing; then, under the first cotangent, in the dtype of the call, by its error to
    the float64 run.

    Args:
        call: the operator and its arguments, which are left as they are.
        recipe: how it is split; several, one for each axis of a mesh of ranks.
        ranks: how many ranks; one number for each axis.
        seed: of the cotangents and of what is drawn for partial arguments.
        strict: whether an unstable item fails.

    Raises:
        UsageError: the recipe names an argument that the call has not, or the ranks make no sense.
    """
    verdict = examine_recipe(call, recipe, ranks, seed=seed, strict=strict).verdict
    remember_failed(verdict, failed_split(verdict, call, recipe, ranks, seed=seed))
    return verdict


def examine_recipe(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
    wholes: Wholes | None = None,
) -> ExaminedRecipe:
    """Do what `check_recipe` does, and keep what was compared.

    Args:
        wholes: of the same call and seed: what is not split is run once for all its recipes.

    Raises:
        UsageError: the recipe names an argument that the call has not, or the ranks make no sense.
    """
    levels = mesh_levels(call, recipe, ranks)
    shared = wholes if wholes is not None else Wholes()
    state = Streams.of(call)
    try:
        with _team_for(levels) as team:
            runner = shared.runner_for(call, levels, seed, team)
            check = RecipeCheck(runner, strict=strict, wholes=shared)
            verdict = check.verdict()
            if check.native is not None and check.native[1] is None and runner.lost is None:
                # It ended in float64; what the ranks give natively is worth telling all the same.
                split = runner.split(wide=False, cotangents=0)
                check.native = check.native[0], split
    finally:
        state.restore()
    return ExaminedRecipe(verdict, check.native, check.lifted)


def _team_for(
    levels: tuple[tuple[Recipe, int], ...],
) -> contextlib.AbstractContextManager[Team | None]:
    """Ranks that can talk to each other, if a recipe has them do so; otherwise a loop will do."""
    if not any(recipe.exchanges for recipe, _ in levels):
        return contextlib.nullcontext()
    from paritas.partition.ranks.threads import ThreadTeam

    return ThreadTeam(levels[0][1])


class Wholes:
    """The runs of a call that is not split: they do not depend on the recipe."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.native: OperatorRun | None = None
        self.lifted: OperatorRun | None = None
        self.notes: list[str] = []

    def runner_for(
        self,
        call: OperatorCall,
        levels: tuple[tuple[Recipe, int], ...],
        seed: int,
        team: Team | None = None,
    ) -> Runner:
        """A runner for a recipe, which knows what the first run has shown.

        Args:
            team: who runs the parts; without one they are run one after the other.

        Raises:
            UsageError: this is another call, or another seed.
        """
        if team is None:
            runner = Runner(call, levels, seed)
        else:
            runner = RemoteRunner(call, levels, seed, team)
        if self.runner is None or self.native is None:
            self.runner = runner
            return runner
        if self.runner.call is not call or self.runner.seed != seed:
            raise UsageError("runs of another call, or of another seed, cannot be taken over")
        runner.take_over(self.runner)
        return runner


@dataclasses.dataclass(frozen=True)
class ExaminedRecipe:
    """A verdict, and the runs behind it.

    Attributes:
        native: the operator whole and split, in the dtype of the call; None if it did not run.
        lifted: the same in float64, where both were run.
    """

    verdict: Verdict
    native: tuple[OperatorRun, OperatorRun | None] | None = None
    lifted: tuple[OperatorRun, OperatorRun] | None = None


def mesh_levels(
    call: OperatorCall, recipe: Recipe | tuple[Recipe, ...], ranks: int | tuple[int, ...]
) -> tuple[tuple[Recipe, int], ...]:
    """A recipe and a number of ranks for each axis of the mesh.

    Raises:
        UsageError: they do not fit one another, or the call.
    """
    recipes = (recipe,) if isinstance(recipe, Recipe) else tuple(recipe)
    counts = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if len(recipes) != len(counts) or not recipes:
        message = f"{len(recipes)} recipes and {len(counts)} numbers of ranks"
        raise UsageError(f"{message}; give one number of ranks for each recipe")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"the number of ranks is {count!r}; give 1 or more")
    if len(recipes) > 1 and any(one.exchanges for one in recipes):
        raise UsageError(
            "ranks that exchange something are checked along one axis of a mesh; give this recipe "
            "alone"
        )
    known = {*range(len(call.args)), *call.kwargs}
    for one in recipes:
        # A group is given to the ranks whether the call has such an argument or not.
        groups = {p for p, rule in one.numbers if isinstance(rule, Group) and isinstance(p, str)}
        named = [place for place, _ in (*one.inputs, *one.numbers) if place not in groups]
        for place in named:
            if place not in known:
                have = ", ".join(map(name_of, [*range(len(call.args)), *call.kwargs])) or "none"
                message = f"the recipe names {name_of(place)}; the call has {have}"
                raise UsageError(f"{message}; name one of these")
    return tuple(zip(recipes, counts, strict=True))


def drifting(verdict: Verdict, call: OperatorCall, recipe: Recipe) -> tuple[str, ...]:
    """Of a split that is right, the arguments that each rank has its own of after the call.

    These are what the rule leaves to the ranks, as far as it is not what the whole writes.
    """
    if not verdict.passed:
        return ()
    compared = {finding.path for finding in verdict.findings}
    return tuple(
        argument_words(call, place)
        for place, placement in recipe.inputs
        if placement == Replicate(own=True) and f"{name_of(place)}{AFTER}" not in compared
    )


class RecipeCheck:
    """One check from its first run to its verdict."""

    def __init__(self, runner: Runner, *, strict: bool, wholes: Wholes | None = None) -> None:
        self.runner = runner
        self.strict = strict
        self.wholes = Wholes() if wholes is None else wholes
        self.notes: list[str] = []
        self.skipped: list[str] = []
        self.native: tuple[OperatorRun, OperatorRun | None] | None = None
        self.lifted: tuple[OperatorRun, OperatorRun] | None = None

    def verdict(self) -> Verdict:
        """Run what is needed for one."""
        try:
            verdict = self._verdict()
        except LostRankError as error:
            self.runner.lost = error
        if self.runner.lost is not None:  # somebody may have caught it on the way
            return self._lost(self.runner.lost)
        return verdict

    def _verdict(self) -> Verdict:
        whole = self._first_run()
        if whole.error is not None:
            return self._failed(whole.error, whole=True)
        self.native = whole, None
        if not whole.results:
            reason = "the operator gives nothing and writes to nothing: nothing to compare"
            return self._ended(Status.UNVERIFIED, Aspect.HARNESS, reason)
        narrow = self.runner.narrow
        lifted_whole = self._lifted_run(whole)
        lifted_split = self.runner.split(wide=True)
        if lifted_split.error is not None:
            return self._failed(lifted_split.error)
        self.lifted = lifted_whole, lifted_split
        early = self._structure(lifted_whole, lifted_split)
        if early is not None:
            return early
        native_split = self.runner.split(wide=False, cotangents=1) if narrow else lifted_split
        if native_split.error is not None:
            return self._failed(native_split.error)
        self.native = whole, native_split
        return self._compare((whole, native_split), (lifted_whole, lifted_split))

    def _lifted_run(self, native: OperatorRun) -> OperatorRun:
        """In float64; a second time with what it narrows inside widened too, if it must be."""
        runner = self.runner
        if self.wholes.lifted is None:
            self.wholes.lifted = runner.whole(wide=True) if runner.narrow else native
            if self.wholes.lifted.error is not None:  # it mixes the two
                runner.lifting = True
                self.wholes.lifted = runner.whole(wide=True)
            if self.wholes.runner is not None:
                self.wholes.runner.lifting = runner.lifting
        return self.wholes.lifted

    def _first_run(self) -> OperatorRun:
        """Natively; a second time with its draws kept, if it draws."""
        if self.wholes.native is None:
            self.wholes.native = self._native_run()
            self.wholes.notes = list(self.notes)
        self.notes = list(self.wholes.notes)
        return self.wholes.native

    def _native_run(self) -> OperatorRun:
        runner = self.runner
        narrow = runner.narrow
        before = Streams.of(runner.call)
        whole = runner.whole(wide=False, cotangents=1 if narrow else 2)
        if whole.error is None and before.moved_by(runner.call):
            runner.draws = Draws()
            self.notes.append("it draws random numbers: each rank is given its part of the whole's")
            whole = runner.whole(wide=False, cotangents=1 if narrow else 2)
        return whole

    # --- how it ends -----------------------------------------------------------------------------

    def _structure(self, whole: OperatorRun, split: OperatorRun) -> Verdict | None:
        """The end, where the results do not correspond and gradients would not either."""
        if whole.error is not None:
            reason = f"the operator cannot be run in float64: {in_one_line(whole.error)}"
            return self._ended(Status.UNVERIFIED, Aspect.HARNESS, reason)
        findings: list[Finding] = []
        for path, value in whole.results.items():
            other = split.results.get(path)
            if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            if value.shape != other.shape:
                reason = f"shape {list(other.shape)} instead of {list(value.shape)}"
                findings.append(_finding(path, Status.DIFFERENT, reason, Aspect.SHAPE, value))
        if whole.results.keys() != split.results.keys():
            counts = f"{len(split.results)} results instead of {len(whole.results)}"
            findings.append(_finding(OUTPUT, Status.DIFFERENT, counts, Aspect.STRUCTURE))
        if not findings:
            return None
        skipped = ("values and gradients: the results are not of the same shapes",)
        coverage = Coverage(compared=len(whole.results), skipped=skipped)
        return Verdict(
            findings=tuple(findings),
            coverage=coverage,
            notes=tuple(self.notes),
            strict=self.strict,
        )

    def _failed(self, error: Exception, *, whole: bool = False) -> Verdict:
        """The end, where a forward pass raised."""
        text = first_line(error, 1000)
        if isinstance(error, RankError):
            return self._ended(Status.DIFFERENT, Aspect.EXCEPTION, text)
        if isinstance(error, UsageError):
            return self._ended(Status.UNVERIFIED, Aspect.HARNESS, text)
        words = in_one_line(error)
        if whole:
            reason = f"the operator itself fails: {words}"
            return self._ended(Status.UNVERIFIED, Aspect.EXCEPTION, reason)
        return self._ended(Status.UNVERIFIED, Aspect.HARNESS, f"the split run failed: {words}")

    def _lost(self, error: Exception) -> Verdict:
        """The end, where a rank is gone."""
        finding = Finding(
            path="ranks",
            aspect=Aspect.HARNESS,
            status=Status.UNVERIFIED,
            reason=str(error),
            advice="check it in one process, where what it raises is seen",
        )
        return Verdict(findings=(finding,), coverage=Coverage(), strict=self.strict)

    def _ended(self, status: Status, aspect: Aspect, reason: str) -> Verdict:
        compared = int(status is Status.DIFFERENT)
        return Verdict(
            findings=(_finding(OUTPUT, status, reason, aspect),),
            coverage=Coverage(compared=compared, skipped=tuple(self.skipped)),
            notes=tuple(self.notes),
            strict=self.strict,
        )

    # --- values ----------------------------------------------------------------------------------

    def _compare(
        self, native: tuple[OperatorRun, OperatorRun], lifted: tuple[OperatorRun, OperatorRun]
    ) -> Verdict:
        findings = self._gradient_errors(native, lifted)
        wholes, splits = (run_items(seen) for seen in lifted)
        references, candidates = (run_items(seen) for seen in native)
        settled: dict[str, Status] = {}
        unsettled: list[str] = []
        for key, value in wholes.items():
            if key not in splits:
                continue
            other = splits[key]
            if value is None and other is None:
                if key not in lifted[0].results:
                    self.skipped.append(f"{path_of(key)}: nothing depends on it")
                continue
            if key in self.runner.own and not near_in_float64(value, other):
                self._note_own(key, value)
                continue
            status = self._settled(value, other, key, references, candidates)
            if status is None:
                unsettled.append(key)
            else:
                settled[key] = status
        judged: dict[str, list[Finding]] = {}
        if unsettled:
            judge = Careful(self.runner, lifted)
            judged = {key: judge.judge(key) for key in unsettled}
            self.notes += judge.notes
        for key, status in settled.items():
            judged[key] = [_finding(path_of(key), status, "", Aspect.VALUE, wholes[key])]
        findings += _rolled_up({key: judged[key] for key in wholes if key in judged})
        return Verdict(
            findings=tuple(findings),
            coverage=Coverage(compared=len(judged), skipped=tuple(dict.fromkeys(self.skipped))),
            notes=tuple(dict.fromkeys(self.notes)),
            strict=self.strict,
        )

    def _note_own(self, path: str, whole: Any) -> None:
        """Say of what the rule leaves to each rank how far it is from the whole's."""
        own = self.runner.own[path]
        name, parts = argument_words(self.runner.call, own.place), own.parts
        typical = criterion.rms(whole)
        apart = max(criterion.rms_difference(part, whole) for part in parts)
        share = f"{apart / typical:.2g} times the typical value" if typical else f"{apart:.3g}"
        self.skipped.append(f"{path}: each rank's own, as the rule says")
        self.notes.append(
            f"{name} drifts: after the call each of {len(parts)} ranks has its own, off by up to "
            f"{share}; the rule claims the outputs and the gradients, and not this"
        )

    def _settled(
        self,
        whole: Any,
        split: Any,
        key: str,
        references: dict[str, Any],
        candidates: dict[str, Any],
    ) -> Status | None:
        """How an item ends if no noise has to be measured for that."""
        if not isinstance(whole, torch.Tensor):
            same = type(whole) is type(split) and whole == split
            return Status.IDENTICAL if same else None
        if not near_in_float64(whole, split):
            return None
        if key not in references or key not in candidates:  # of a cotangent not sent natively
            return Status.IDENTICAL if torch.equal(whole, split) else Status.EQUIVALENT
        reference, candidate = references[key], candidates[key]
        if reference is whole and candidate is split:  # a float64 operator: settled above
            return Status.IDENTICAL if torch.equal(whole, split) else Status.EQUIVALENT
        return near_natively(reference, candidate, whole)

    def _gradient_errors(
        self, native: tuple[OperatorRun, OperatorRun], lifted: tuple[OperatorRun, OperatorRun]
    ) -> list[Finding]:
        for whole, split in (lifted, native):
            if whole.gradient_error is not None:
                words = in_one_line(whole.gradient_error)
                if "derivative for" in words and "is not implemented" in words:
                    self.skipped.append("gradients: torch has no derivative of this operator")
                    return []
                reason = f"the operator's own backward pass fails: {words}"
                return [_finding("gradients", Status.UNVERIFIED, reason, Aspect.EXCEPTION)]
            if split.gradient_error is not None:
                reason = (
                    f"the backward pass of the ranks raised {in_one_line(split.gradient_error)}"
                )
                return [_finding("gradients", Status.DIFFERENT, reason, Aspect.EXCEPTION)]
            if bool(whole.gradients) != bool(split.gradients):
                side = "whole" if whole.gradients else "split"
                reason = f"only the {side} operator can be differentiated"
                return [_finding("gradients", Status.DIFFERENT, reason, Aspect.REQUIRES_GRAD)]
        return []


def _rolled_up(judged: dict[str, list[Finding]]) -> list[Finding]:
    """One finding for each path, the gravest of its cotangents; all that fail of one."""
    gravest: dict[str, list[Finding]] = {}
    for key, findings in judged.items():
        path = path_of(key)
        known = gravest.get(path)
        if known is None or _gravity(findings) > _gravity(known):
            gravest[path] = findings
    return [finding for findings in gravest.values() for finding in findings]


def _gravity(findings: list[Finding]) -> int:
    return max(finding.status.gravity for finding in findings)


def _finding(path: str, status: Status, reason: str, aspect: Aspect, value: Any = None) -> Finding:
    shaped = isinstance(value, torch.Tensor)
    return Finding(
        path=path,
        aspect=aspect,
        status=status,
        reason=reason,
        dtype=str(value.dtype).removeprefix("torch.") if shaped else None,
        shape=tuple(value.shape) if shaped else None,
    )


# --- The check of a recipe in this process, and on real ranks where that is asked for -------------


def check_confirm(confirm: Confirm | None, device: torch.device, ranks: int) -> None:
    """Refuse a confirmation that there can be none of here, before the work.

    Args:
        device: on which the operator is checked.
        ranks: how many there are at most.

    Raises:
        UsageError: there are no such ranks; the message says what is missing.
    """
    if confirm is None or confirm == "gloo":
        return
    if confirm != "nccl":
        raise UsageError(f"confirm={confirm!r}: give 'gloo', 'nccl', or nothing")
    if device.type != "cuda":
        raise UsageError(
            f"NCCL sends from GPU to GPU, and the device is {str(device)!r}: give --device cuda "
            "(device='cuda'), or confirm with gloo"
        )
    if not distributed.is_nccl_available():
        raise UsageError("this torch is built without NCCL: confirm with gloo")
    have = torch.cuda.device_count()
    if have < ranks:
        raise UsageError(
            f"NCCL needs a GPU for each of {ranks} ranks, and {have} can be seen: confirm with "
            "gloo, whose ranks share GPUs, or check fewer ranks"
        )


def check_confirmed(
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...] = 2,
    *,
    seed: int = 0,
    strict: bool = False,
    confirm: Confirm | None = None,
) -> Verdict:
    """Check a recipe; with `confirm`, a second time on ranks that are processes of their own.

    Raises:
        UsageError: the recipe makes no sense, or there are no such ranks.
    """
    verdict = check_recipe(call, recipe, ranks, seed=seed, strict=strict)
    if confirm is None:
        return verdict
    real = confirmation(confirm, call, recipe, ranks, seed=seed, strict=strict)
    return Verdict.merge([verdict, real])


def confirmation(
    confirm: Confirm,
    call: OperatorCall,
    recipe: Recipe | tuple[Recipe, ...],
    ranks: int | tuple[int, ...],
    *,
    seed: int = 0,
    strict: bool = False,
    imports: Sequence[str] = (),
) -> Verdict:
    """What real ranks say of a recipe, each item under the name of these ranks.

    Args:
        imports: modules that a rank imports first: they bring the operator.

    Raises:
        UsageError: the recipe makes no sense, or there are no such ranks.
    """
    from paritas.partition.ranks.threads import confirm_on_ranks

    count = math.prod(ranks) if isinstance(ranks, tuple) else ranks
    check_confirm(confirm, device_of(call), count)
    real = confirm_on_ranks(confirm, call, recipe, ranks, seed=seed, strict=strict, imports=imports)
    return labelled(real, f"on {confirm} ranks, ")


def labelled(verdict: Verdict, label: str) -> Verdict:
    """The same verdict, each of its items under a label."""
    findings = tuple(
        msgspec.structs.replace(finding, path=f"{label}{finding.path}")
        for finding in verdict.findings
    )
    coverage = Coverage(
        compared=verdict.coverage.compared,
        skipped=tuple(f"{label}{item}" for item in verdict.coverage.skipped),
        unmatched=tuple(f"{label}{item}" for item in verdict.coverage.unmatched),
    )
    return msgspec.structs.replace(verdict, findings=findings, coverage=coverage)
