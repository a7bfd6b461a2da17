"""DTensor's own rules, held against the truth.

For every way to place the arguments of an operator that `torch.distributed.tensor` takes as it is,
it says what the result is: sharded, partial, whole on each rank. Each of these claims is run on
simulated ranks, forward and backward, and what the parts come to is compared with the operator run
whole. All of it is in float64: a rule is right or wrong whatever the dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Literal

import torch

from paritas._torch.default_dtypes import default_dtype
from paritas._torch.sharding_rules import Redistributed, watch_redistribution
from paritas._torch.simulated_ranks import of_ranks, parts_of, simulated_ranks
from paritas.checking.evidence import ItemEvidence
from paritas.errors import UsageError
from paritas.numerics.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.numerics.pairing import Checks, check_pair
from paritas.partition.dtensor.terms import Place, describe_placement, place_parts, places_of
from paritas.partition.dtensor.truth import (
    TruthRuns,
    argument_tensors,
    differentiate,
    map_call,
    tensors_of,
    wide,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Claim", "check_dtensor", "examine_dtensor"]

Outcome = Literal["claimed", "redistributed", "refused"]
_CHECKS = Checks()


@dataclasses.dataclass(frozen=True)
class Claim:
    """What DTensor makes of one way to place the arguments.

    Attributes:
        placements: of each tensor among the arguments, in order: `R`, `S(0)`, `P(sum)`.
        outcome: `claimed` where it ran the operator on these placements; `redistributed` where it
            moved the arguments to others first; `refused` where it raised.
        results: the placements that it says the results have.
        verdict: whether that is so; of a claim only.
        reason: what it raised.
    """

    placements: tuple[str, ...]
    outcome: Outcome
    results: tuple[str, ...] = ()
    verdict: Verdict | None = None
    reason: str = ""

    @property
    def words(self) -> str:
        """`S(0), R -> S(0)`."""
        given = ", ".join(self.placements)
        return f"{given} -> {', '.join(self.results)}" if self.results else given


def check_dtensor(
    op: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int = 2,
    seed: int = 0,
    within: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Verdict:
    """Whether all that DTensor claims of an operator on these arguments is true.

    Args:
        op: the operator, or any function that takes DTensors.
        args: its arguments as plain, whole tensors.
        ranks: how many are simulated.
        seed: of the cotangents and of the terms of partial arguments.
        within: makes a context in which forward and backward are run, such as `loss_parallel`.
    """
    claims = list(examine_dtensor(op, args, kwargs, ranks=ranks, seed=seed, within=within))
    checked = [claim.verdict for claim in claims if claim.verdict is not None]
    merged = Verdict.merge(checked)
    skipped = tuple(
        f"{claim.words}: {claim.outcome}" + (f" ({claim.reason})" if claim.reason else "")
        for claim in claims
        if claim.verdict is None
    )
    counted = (
        f"DTensor of torch {torch.__version__} on {ranks} simulated ranks: {len(claims)} ways "
        f"to place the arguments, {len(checked)} of them claimed"
    )
    return Verdict(
        findings=merged.findings,
        coverage=merged.coverage + Coverage(skipped=skipped),
        notes=(*merged.notes, counted),
    )


def examine_dtensor(
    op: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int = 2,
    seed: int = 0,
    within: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Iterator[Claim]:
    """Every way to place the arguments, one by one, with what became of it.

    Raises:
        UsageError: the operator itself fails, or takes no tensor.
    """
    args, kwargs = map_call(tuple(args), kwargs or {}, wide)
    tensors = argument_tensors(args, kwargs)
    if not tensors:
        raise UsageError(f"{_name(op)} is given no tensor: there is nothing to place")
    truth = TruthRuns(op, args, kwargs, seed)
    error = truth.native[0].error
    if error is not None:
        raise UsageError(f"{_name(op)} itself fails: {type(error).__name__}: {error}") from error
    context = within or contextlib.nullcontext
    trial = _Trial(truth, ranks, seed, context)
    choices = [places_of(tensor, ranks) for tensor in tensors.values()]
    for combination in itertools.product(*choices):
        yield trial.examine(dict(zip(tensors, combination, strict=True)))


@dataclasses.dataclass
class _Seen:
    """What became of one way to place the arguments: every item as each rank has it."""

    results: tuple[str, ...] = ()
    outputs: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    gradients: dict[str, list[Tensor] | None] = dataclasses.field(default_factory=dict)
    refused: str = ""
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class _Trial:
    truth: TruthRuns
    ranks: int
    seed: int
    within: Callable[[], contextlib.AbstractContextManager[Any]]

    def examine(self, places: Mapping[str, Place]) -> Claim:
        """Run one way to place the arguments, and judge what DTensor says of it."""
        words = tuple(place.words for place in places.values())
        given = argument_tensors(self.truth.args, self.truth.kwargs)
        # Made outside: within the simulation a generator would be moved on by each rank.
        parts = {
            path: place_parts(tensor, places[path], self.ranks, self.seed + number)
            for number, (path, tensor) in enumerate(given.items())
        }
        seen = _Seen()
        with simulated_ranks(self.ranks) as mesh, default_dtype(torch.float64), self.within():
            # Nothing is raised through the contexts: `loss_parallel` would stay switched on.
            try:
                self._run(places, given, parts, mesh, seen)
            except Exception as error:  # noqa: BLE001  (DTensor has no rule for it, or says so late)
                seen.error = error
        if isinstance(seen.error, Redistributed):
            return Claim(words, "redistributed")
        if seen.error is not None:
            return Claim(words, "refused", seen.results, reason=_described(seen.error))
        claim = Claim(words, "claimed", seen.results)
        return dataclasses.replace(claim, verdict=self._judge(claim, seen))

    def _run(
        self,
        places: Mapping[str, Place],
        given: Mapping[str, Tensor],
        parts: Mapping[str, list[Tensor]],
        mesh: DeviceMesh,
        seen: _Seen,
    ) -> None:
        leaves = {
            path: _distributed(tensor, parts[path], places[path], mesh)
            for path, tensor in given.items()
        }
        args, kwargs = _filled(self.truth.args, self.truth.kwargs, given, leaves)
        with watch_redistribution(stop=True):
            raw = tensors_of(self.truth.operator(*args, **kwargs))
        seen.results = tuple(describe_placement(leaf) for leaf in raw.values())
        whole = {path: _full(leaf) for path, leaf in raw.items()}
        seen.outputs = {path: self._parts(leaf) for path, leaf in whole.items()}
        try:
            found = differentiate(whole, leaves, self.truth.cotangents or [])
            seen.gradients = {path: self._gradient(leaf) for path, leaf in found.items()}
        except Exception as error:  # noqa: BLE001  (a refusal, which is told)
            seen.refused = f"backward raised {_described(error)}"

    def _parts(self, leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor):
            return list(parts_of(leaf, self.ranks))
        return [leaf] * self.ranks

    def _gradient(self, leaf: Tensor | None) -> list[Tensor] | None:
        return None if leaf is None else parts_of(_full(leaf), self.ranks)

    def _judge(self, claim: Claim, seen: _Seen) -> Verdict:
        outputs, gradients, refused = seen.outputs, seen.gradients, seen.refused
        truth = self.truth.native[0]
        findings: list[Finding] = []
        notes: list[str] = []
        compared = 0
        if outputs.keys() != truth.outputs.keys():
            reason = f"{len(outputs)} results instead of {len(truth.outputs)}"
            findings.append(_failed(f"{claim.words}: output", Aspect.STRUCTURE, reason))
        found: dict[str, Any] = {**outputs, **gradients}
        for path, true in truth.items():
            if path not in found:
                continue
            compared += 1
            new, noted = self._compare(claim, path, true, found[path])
            findings += new
            notes += noted
        skipped = (f"{claim.words}: gradients ({refused})",) if refused else ()
        if not refused and gradients.keys() != truth.gradients.keys():
            reason = "no gradient comes back: the results do not require one"
            findings.append(_failed(f"{claim.words}: gradients", Aspect.REQUIRES_GRAD, reason))
        coverage = Coverage(compared=compared, skipped=skipped)
        return Verdict(findings=tuple(findings), coverage=coverage, notes=tuple(notes))

    def _compare(
        self, claim: Claim, path: str, true: Any, parts: list[Any] | None
    ) -> tuple[list[Finding], list[str]]:
        """Each rank's value with the truth; once, where the ranks agree."""
        name = f"{claim.words}: {path}"
        if parts is None or true is None:
            if parts is None and (true is None or not bool(true.count_nonzero())):
                return [
                    Finding(path=name, aspect=Aspect.VALUE, status=Status.IDENTICAL, reason="none")
                ], []
            missing = "is missing" if parts is None else "where there should be none"
            return [_failed(name, Aspect.STRUCTURE, f"the gradient {missing}")], []
        evidence = ItemEvidence(self.truth, path)
        agree = all(_same(part, parts[0]) for part in parts[1:])
        findings: list[Finding] = []
        notes: list[str] = []
        for rank, part in enumerate(parts[:1] if agree else parts):
            where = name if agree else f"{name} on rank {rank}"
            new, noted = check_pair(where, true, part, _CHECKS, evidence)
            findings += new
            notes += noted
        return findings, notes


def _distributed(tensor: Tensor, parts: list[Tensor], place: Place, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        of_ranks(parts),
        mesh,
        [place.placement()],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    ).detach()
    return made.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _filled(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with their tensors replaced; a tensor given twice is told by its identity."""
    by_identity = {id(tensor): leaves[path] for path, tensor in given.items()}
    return map_call(args, kwargs, lambda tensor: by_identity[id(tensor)])


def _full(leaf: Any) -> Any:
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(
            torch.equal(left, right) or torch.allclose(left, right, 0.0, 0.0, equal_nan=True)
        )
    return bool(left == right)


def _failed(path: str, aspect: Aspect, reason: str) -> Finding:
    return Finding(path=path, aspect=aspect, status=Status.DIFFERENT, reason=reason)


def _described(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]:.160}"


def _name(op: Callable[..., Any]) -> str:
    return getattr(op, "__qualname__", None) or repr(op)
