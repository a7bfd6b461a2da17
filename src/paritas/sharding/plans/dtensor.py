"""Check DTensor's own sharding rules against the operator run whole."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.execution.evidence import Evidence
from paritas.core.execution.item_evidence import ItemEvidence
from paritas.core.execution.observation import Observation, note_decisions
from paritas.core.execution.program import Program
from paritas.core.judging.pairs import Pair, judge_pair
from paritas.core.numerics.contents import leaves
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Terms, split_tensor
from paritas.core.results.findings import Aspect, Coverage, Finding, Verdict, agreement, mismatch
from paritas.core.results.items import GRADIENTS, Item, Partial, Replicate, Shard, output
from paritas.core.results.items import gradient as gradient_of
from paritas.core.torch_private.operators import default_dtype
from paritas.core.torch_private.ranks import (
    Redistributed,
    of_ranks,
    parts_of,
    simulated_ranks,
    watch_redistribution,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.core.execution.observation import RunOptions
    from paritas.core.results.items import Reduction, Role


# --- DTensor's placements of a tensor, and what each rank then holds ------------------------------

_REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "max", "min")


def roles_of(tensor: Tensor, ranks: int) -> list[Role]:
    """All placements of a tensor; partial indices or masks mean nothing."""
    roles: list[Role] = [Replicate()]
    # Split as DTensor does: full parts first, then the rest, which may be empty.
    roles += [Shard(dim, cut="chunk") for dim, size in enumerate(tensor.shape) if size >= ranks]
    if tensor.is_floating_point():
        roles += [Partial(reduction) for reduction in _REDUCTIONS]
    return roles


def short_word(role: Role) -> str:
    """DTensor's abbreviation."""
    if isinstance(role, Shard):
        return f"S({role.dim})"
    return f"P({role.reduction})" if isinstance(role, Partial) else "R"


def dtensor_placement(role: Role | None) -> Any:
    """The placement as DTensor's own object; what is neither split nor partial is replicated."""
    from torch.distributed import tensor

    if isinstance(role, Shard):
        return tensor.Shard(role.dim)
    return tensor.Partial(role.reduction) if isinstance(role, Partial) else tensor.Replicate()


class ExactTerms(Terms):
    """Draws terms that add up bit for bit to a tensor with no more digits than float32."""

    def __init__(self, seed: int) -> None:
        """Draw with this seed."""
        super().__init__(seed, lifted=True)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, tensor: Tensor, reduction: str, ranks: int) -> list[Tensor]:
        """Terms of both signs, not proportional to the whole; for max and min, bounds."""
        if reduction in {"sum", "avg"}:
            drawn = [self._random(torch.randn, tensor) for _ in range(ranks - 1)]
            rest = tensor - sum(drawn, torch.zeros_like(tensor))
            return [*drawn, rest] if reduction == "sum" else [*(tensor + d for d in drawn), rest]
        # One rank has the element, and the others a smaller (max) or larger (min) one.
        holder = torch.randint(ranks, tensor.shape, generator=self._generator)
        beyond = 1 + 2 * self._random(torch.rand, tensor)
        other = tensor - beyond if reduction == "max" else tensor + beyond
        return [torch.where(holder == rank, tensor, other) for rank in range(ranks)]

    def _random(self, drawn: Callable[..., Tensor], like: Tensor) -> Tensor:
        return drawn(like.shape, generator=self._generator).to(like.dtype)


def describe_placement(leaf: Any) -> str:
    """The placement that DTensor claims for a result; `plain` means the same on all ranks."""
    placements = getattr(leaf, "placements", None)
    if placements is None:
        return "plain"
    words = []
    for placement in placements:
        if placement.is_shard():
            words.append(short_word(Shard(placement.dim)))
        elif placement.is_replicate():
            words.append(short_word(Replicate()))
        else:
            words.append(f"P({getattr(placement, 'reduce_op', placement)})")
    return " ".join(words)


# --- The operator run whole, in float64 -----------------------------------------------------------

# How often gradients are computed, each time with other random cotangents.
DRAWS = 2


def wide(tensor: Tensor) -> Tensor:
    """A floating tensor in float64, with no more digits than float32 has.

    So its partial terms add up to it bit for bit.
    """
    tensor = tensor.detach()
    if tensor.is_floating_point():
        return tensor.to(torch.float32).to(torch.float64)
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.clone()


def argument_tensors(call: OperatorCall) -> dict[str, Tensor]:
    """The tensors of a call by path."""
    named_leaves = [*leaves(list(call.args), "args"), *leaves(call.kwargs, "kwargs")]
    return {path: leaf for path, leaf in named_leaves if isinstance(leaf, torch.Tensor)}


def tensors_of(result: Any) -> dict[str, Any]:
    """The results of a call by path."""
    return dict(leaves(result, "output"))


def draw_cotangents(outputs: Mapping[str, Any], seed: int) -> list[dict[str, Tensor]]:
    """Random cotangents of each result that requires a gradient, for each draw."""
    return [
        {
            path: draw_cotangent(output(path), leaf, seed + draw, torch.float32)
            for path, leaf in outputs.items()
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        }
        for draw in range(DRAWS)
    ]


def differentiate(
    outputs: Mapping[str, Any],
    arguments: Mapping[str, Tensor],
    cotangents: list[dict[str, Tensor]],
) -> dict[Item, Tensor | None]:
    """Gradients of all floating inputs, for each draw of cotangents."""
    grad_arguments = {path: leaf for path, leaf in arguments.items() if leaf.requires_grad}
    ends = {
        path: leaf
        for path, leaf in outputs.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    gradients: dict[Item, Tensor | None] = {}
    if not grad_arguments or not ends:
        return gradients
    for draw, upstream in enumerate(cotangents):
        leaf_gradients = torch.autograd.grad(
            list(ends.values()),
            list(grad_arguments.values()),
            [upstream[path] for path in ends],
            retain_graph=draw + 1 < len(cotangents),
            allow_unused=True,
        )
        which = f" (draw {draw + 1})"
        for path, gradient in zip(grad_arguments, leaf_gradients, strict=True):
            gradients[gradient_of(f"{path}{which}")] = gradient
    return gradients


@dataclasses.dataclass(eq=False)
class OperatorProgram(Program):
    """The operator on whole arguments in float64, forward and backward.

    Attributes:
        call: the operator and its arguments.
        seed: of the cotangents.
        cotangents: of its results, for each draw; made in the first run.
    """

    sets_default = True

    call: OperatorCall
    seed: int = 0
    cotangents: list[dict[str, Tensor]] | None = None

    def dtypes(self, native: list[Observation]) -> dict[torch.dtype, int]:
        """Only float64."""
        return {torch.float64: 1}

    def run(self, options: RunOptions) -> list[Observation]:
        """Run it forward and backward."""
        observation = Observation()
        try:
            with default_dtype(torch.float64), options.around():
                call = self.call.map_tensors(_leaf)
                arguments = argument_tensors(call)
                outputs = tensors_of(call.function(*call.args, **call.kwargs))
                if self.cotangents is None:
                    self.cotangents = draw_cotangents(outputs, self.seed)
                observation.gradients |= differentiate(outputs, arguments, self.cotangents)
        except Exception as error:  # noqa: BLE001  (there is no such run, which is reported)
            observation.error = error
            return [observation]
        for path, leaf in outputs.items():
            observation.outputs[output(path)] = (
                leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            )
        note_decisions(observation, observation.outputs, options.mode)
        return [observation]


def _leaf(tensor: Tensor) -> Tensor:
    leaf_copy = tensor.detach().clone()
    return leaf_copy.requires_grad_(leaf_copy.is_floating_point() or leaf_copy.is_complex())


# --- The claims -----------------------------------------------------------------------------------

# For every placement of the arguments that `torch.distributed.tensor` accepts without moving data,
# it claims the placement of the result: sharded, partial or replicated. Each claim is run on
# simulated ranks, forward and backward, and the assembled result is compared with the operator run
# whole. All of it is in float64, since a rule is right or wrong in any dtype.

Outcome = Literal["claimed", "redistributed", "refused"]


@dataclasses.dataclass(frozen=True)
class DTensorClaim:
    """What DTensor does with one placement of the arguments.

    Attributes:
        placements: of each tensor argument, in order: `R`, `S(0)`, `P(sum)`.
        outcome: `claimed` if it ran the operator on these placements; `redistributed` if it moved
            the arguments first; `refused` if it raised.
        results: the claimed placements of the results.
        verdict: whether the claim is true; None without a claim.
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
        input_placements = ", ".join(self.placements)
        return (
            f"{input_placements} -> {', '.join(self.results)}" if self.results else input_placements
        )


def check_dtensor(
    op: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int = 2,
    seed: int = 0,
    within: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> Verdict:
    """Check all that DTensor claims about an operator on these arguments.

    Args:
        op: the operator, or any function that takes DTensors.
        args: its arguments as plain, whole tensors.
        ranks: number of simulated ranks.
        seed: of the cotangents and of the terms of partial arguments.
        within: makes a context for forward and backward, such as `loss_parallel`.
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
) -> Iterator[DTensorClaim]:
    """Try every placement of the arguments, and yield the outcome of each.

    Raises:
        UsageError: the operator itself fails, or has no tensor argument.
    """
    call = OperatorCall(op, tuple(args), dict(kwargs or {})).map_tensors(wide)
    tensors = argument_tensors(call)
    if not tensors:
        raise UsageError(f"{_operator_name(op)} has no tensor argument: there is nothing to place")
    truth = Evidence(OperatorProgram(call, seed), seed=seed)
    error = truth.native[0].error
    if error is not None:
        raise UsageError(
            f"{_operator_name(op)} itself fails: {type(error).__name__}: {error}"
        ) from error
    context = within or contextlib.nullcontext
    trial = _Trial(truth, ranks, seed, context)
    choices = [roles_of(tensor, ranks) for tensor in tensors.values()]
    for combination in itertools.product(*choices):
        yield trial.examine(dict(zip(tensors, combination, strict=True)))


@dataclasses.dataclass
class _TrialResult:
    """The outcome of one placement of the arguments: every item as each rank holds it."""

    results: tuple[str, ...] = ()
    outputs: dict[Item, list[Any]] = dataclasses.field(default_factory=dict)
    gradients: dict[Item, list[Tensor] | None] = dataclasses.field(default_factory=dict)
    refused: str = ""
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class _Trial:
    truth: Evidence[OperatorProgram]
    ranks: int
    seed: int
    within: Callable[[], contextlib.AbstractContextManager[Any]]

    def examine(self, roles: Mapping[str, Role]) -> DTensorClaim:
        """Run one placement of the arguments, and judge DTensor's claim."""
        words = tuple(map(short_word, roles.values()))
        arguments = argument_tensors(self.truth.program.call)
        # Made outside the simulation, where each rank would advance the generator.
        parts = {
            path: split_tensor(
                tensor, roles[path], self.ranks, ExactTerms(self.seed + number), path
            )
            for number, (path, tensor) in enumerate(arguments.items())
        }
        trial_result = _TrialResult()
        with simulated_ranks(self.ranks) as mesh, default_dtype(torch.float64), self.within():
            # Do not raise through the contexts: `loss_parallel` would stay enabled.
            try:
                self._run(roles, arguments, parts, mesh, trial_result)
            except Exception as error:  # noqa: BLE001  (DTensor has no rule for it)
                trial_result.error = error
        if isinstance(trial_result.error, Redistributed):
            return DTensorClaim(words, "redistributed")
        if trial_result.error is not None:
            return DTensorClaim(
                words, "refused", trial_result.results, reason=in_one_line(trial_result.error, 160)
            )
        claim = DTensorClaim(words, "claimed", trial_result.results)
        return dataclasses.replace(claim, verdict=self._judge(claim, trial_result))

    def _run(
        self,
        roles: Mapping[str, Role],
        arguments: Mapping[str, Tensor],
        parts: Mapping[str, list[Tensor]],
        mesh: DeviceMesh,
        trial_result: _TrialResult,
    ) -> None:
        leaves = {
            path: _distribute(tensor, parts[path], roles[path], mesh)
            for path, tensor in arguments.items()
        }
        by_identity = {id(tensor): leaves[path] for path, tensor in arguments.items()}
        call = self.truth.program.call.map_tensors(lambda tensor: by_identity[id(tensor)])
        with watch_redistribution(stop=True):
            raw = tensors_of(call.function(*call.args, **call.kwargs))
        trial_result.results = tuple(describe_placement(leaf) for leaf in raw.values())
        full_tensors = {path: _full_tensor(leaf) for path, leaf in raw.items()}
        trial_result.outputs = {
            output(path): self._parts(leaf) for path, leaf in full_tensors.items()
        }
        try:
            gradients = differentiate(full_tensors, leaves, self.truth.program.cotangents or [])
            trial_result.gradients = {
                item: self._gradient(leaf) for item, leaf in gradients.items()
            }
        except Exception as error:  # noqa: BLE001  (a refusal, which is reported)
            trial_result.refused = f"backward raised {in_one_line(error, 160)}"

    def _parts(self, leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor):
            return list(parts_of(leaf, self.ranks))
        return [leaf] * self.ranks

    def _gradient(self, leaf: Tensor | None) -> list[Tensor] | None:
        return None if leaf is None else parts_of(_full_tensor(leaf), self.ranks)

    def _judge(self, claim: DTensorClaim, trial_result: _TrialResult) -> Verdict:
        outputs, gradients, refused = (
            trial_result.outputs,
            trial_result.gradients,
            trial_result.refused,
        )
        truth = self.truth.native[0]
        findings: list[Finding] = []
        notes: list[str] = []
        compared = 0
        if outputs.keys() != truth.outputs.keys():
            reason = f"{len(outputs)} results instead of {len(truth.outputs)}"
            item = output().in_graph(claim.words)
            findings.append(mismatch(item, Aspect.STRUCTURE, reason))
        trial_values: dict[Item, Any] = {**outputs, **gradients}
        for item, true in truth.items():
            if item not in trial_values:
                continue
            compared += 1
            new, noted = self._compare(claim, item, true, trial_values[item])
            findings += new
            notes += noted
        skipped = (f"{claim.words}: gradients ({refused})",) if refused else ()
        if not refused and gradients.keys() != truth.gradients.keys():
            reason = "there is no gradient: the results do not require one"
            item = GRADIENTS.in_graph(claim.words)
            findings.append(mismatch(item, Aspect.REQUIRES_GRAD, reason))
        coverage = Coverage(compared=compared, skipped=skipped)
        return Verdict(findings=tuple(findings), coverage=coverage, notes=tuple(notes))

    def _compare(
        self, claim: DTensorClaim, item: Item, true: Any, parts: list[Any] | None
    ) -> tuple[list[Finding], list[str]]:
        """Compare each rank's value with the truth; only once if the ranks agree."""
        shown = item.in_graph(claim.words)
        if parts is None or true is None:
            if parts is None and (true is None or not bool(true.count_nonzero())):
                return [agreement(shown, Aspect.VALUE, "none")], []
            reason = "the gradient is missing" if parts is None else "an unexpected gradient"
            return [mismatch(shown, Aspect.STRUCTURE, reason)], []
        evidence = ItemEvidence(self.truth, item)
        agree = all(_is_same_value(part, parts[0]) for part in parts[1:])
        findings: list[Finding] = []
        notes: list[str] = []
        for rank, part in enumerate(parts[:1] if agree else parts):
            where = shown if agree else msgspec.structs.replace(shown, part=rank)
            new, noted = judge_pair(Pair(where, true, part, evidence))
            findings += new
            notes += noted
        return findings, notes


def _distribute(tensor: Tensor, parts: list[Tensor], role: Role, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor

    dtensor = DTensor.from_local(
        of_ranks([part.clone() for part in parts]),
        mesh,
        [dtensor_placement(role)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    ).detach()
    return dtensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _full_tensor(leaf: Any) -> Any:
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf


def _is_same_value(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(
            torch.equal(left, right) or torch.allclose(left, right, 0.0, 0.0, equal_nan=True)
        )
    return bool(left == right)


def _operator_name(op: Callable[..., Any]) -> str:
    return getattr(op, "__qualname__", None) or repr(op)
