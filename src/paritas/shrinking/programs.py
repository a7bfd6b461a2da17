"""A failing program, and the oracle that says how it fails.

A program is a graph with real inputs; a candidate says how to compile it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs, VerifyConfig
from paritas.core.judging.failures import judging_only
from paritas.core.register import find_entry
from paritas.core.results.findings import Aspect, Status, Verdict
from paritas.core.torch_private.compile_time import quick_compiles
from paritas.core.torch_private.global_state import quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.fx import GraphModule, Node

    from paritas.core.execution.compilation import Candidate
    from paritas.core.results.findings import Diagnosis, Finding
    from paritas.core.time_limit import TimeLimit


# --- Program, candidate and signature -------------------------------------------------------------

# All of this is data. Parameters and buffers are inputs too: a program depends on its inputs only.

OUTPUT, GRADIENT, MUTATION, EXCEPTION = "output", "gradient", "mutation", "exception"
# Calls that only switch a mode; they do not count as operators.
_SWITCHES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast"})


@dataclasses.dataclass(frozen=True)
class FailingProgram:
    """A graph and its inputs.

    Attributes:
        graph: torch-level or aten calls; all its values come in through placeholders.
        inputs: one value per placeholder, in order: tensors, numbers.
        dynamic: the dynamic dimensions of placeholders, which stay dynamic.
        gradients: whether the backward pass is part of it.
    """

    graph: GraphModule
    inputs: tuple[Any, ...]
    dynamic: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    gradients: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.placeholders) != len(self.inputs):
            raise UsageError(
                f"the graph takes {len(self.placeholders)} inputs, got {len(self.inputs)}"
            )

    @property
    def placeholders(self) -> list[Node]:
        """The nodes of its inputs."""
        return list(self.graph.graph.find_nodes(op="placeholder"))

    @property
    def calls(self) -> list[Node]:
        """Its operator calls, without tuple items and mode switches."""
        return [node for node in self.graph.graph.nodes if is_call(node)]

    @property
    def given(self) -> dict[str, Any]:
        """The inputs by the names of their placeholders."""
        names = [node.name for node in self.placeholders]
        return dict(zip(names, self.inputs, strict=True))

    @contextlib.contextmanager
    def conditions(self) -> Iterator[None]:
        """Run it inside: with its random state and gradient mode, restored afterwards."""
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(self.gradients):
            torch.manual_seed(self.seed)
            yield

    @property
    def key(self) -> str:
        """Equal for equal programs on equal inputs."""
        digest = hashlib.blake2b(self.graph.code.encode(), digest_size=16)
        digest.update(repr((self.gradients, self.seed, sorted(self.dynamic.items()))).encode())
        for value in self.inputs:
            digest.update(describe_value(value).encode())
            if isinstance(value, torch.Tensor):
                digest.update(_raw_bytes(value))
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class FailureSignature:
    """Identifies a failure; a reduction that shows another one is rejected.

    Attributes:
        role: output, gradient, mutation or exception.
        nonfinite: whether NaN or infinity is what differs.
        exception: the class that the candidate raised.
        kind: of the diagnosis, if there is one.
    """

    status: Status
    aspect: Aspect
    role: str
    nonfinite: bool = False
    exception: str = ""
    kind: str = ""

    @property
    def is_mismatch(self) -> bool:
        """Whether something was compared and differs."""
        return self.status.is_wrong or self.status is Status.UNSTABLE

    @property
    def sentence(self) -> str:
        """A description for people."""
        if self.role == EXCEPTION:
            return f"the candidate raises {self.exception}"
        what = "NaN or infinity instead of a number, or the reverse" if self.nonfinite else ""
        return f"{self.status}: {self.aspect} of {self.role}" + (f", {what}" if what else "")


def same_failure(
    failure_signature: FailureSignature | None,
    other: FailureSignature | None,
    *,
    kind: bool = False,
) -> bool:
    """Whether two signatures are of one failure.

    Args:
        kind: also require the same kind of diagnosis, if both have one. It may change when
            operators are removed, but not when inputs get simpler.
    """
    if failure_signature is None or other is None:
        return False
    same = (
        failure_signature.is_mismatch == other.is_mismatch
        and failure_signature.aspect == other.aspect
        and failure_signature.role == other.role
        and failure_signature.nonfinite == other.nonfinite
        and failure_signature.exception == other.exception
    )
    return same and (
        not kind
        or not failure_signature.kind
        or not other.kind
        or failure_signature.kind == other.kind
    )


def is_failure_of_part(
    signature: FailureSignature | None, failure_signature: FailureSignature
) -> bool:
    """Whether a part of a program is wrong by itself in a way that the whole may be wrong for.

    How wrong values show at the end of a program is up to what comes after them: NaN may be masked
    or come about, and outputs may be within their limits where only gradients are not.
    """
    if signature is None or same_failure(signature, failure_signature):
        return signature is not None
    compared = (
        signature.is_mismatch and failure_signature.is_mismatch and signature.role != EXCEPTION
    )
    return (
        compared
        and signature.aspect == failure_signature.aspect
        and signature.status is Status.DIFFERENT
    )


def signature_of(verdict: Verdict) -> tuple[FailureSignature, Diagnosis | None] | None:
    """The signature and diagnosis of a verdict's first failure, or None if it passed.

    Outputs come before gradients, because a wrong output makes gradients wrong too, and before
    what is raised afterwards, as in the backward pass. A place is not a result: what is wrong there
    may be a gradient.
    """
    if verdict.passed:
        return None
    results = [failure for failure in verdict.failures if failure.origin is None]
    signed_findings = [
        (finding_signature(finding), finding) for finding in results or verdict.failures
    ]
    if not signed_findings:
        nothing = FailureSignature(status=verdict.status, aspect=Aspect.HARNESS, role=EXCEPTION)
        return nothing, None
    order = [OUTPUT, MUTATION, GRADIENT, EXCEPTION]

    def rank(pair: tuple[FailureSignature, Finding]) -> tuple[bool, int, int]:
        signature = pair[0]
        return not signature.is_mismatch, order.index(signature.role), -signature.status.gravity

    best, finding = min(signed_findings, key=rank)
    return best, finding.diagnosis


def finding_signature(finding: Finding) -> FailureSignature:
    """The signature of one failure."""
    role = OUTPUT
    if finding.item.kind.is_gradient:
        role = GRADIENT
    elif finding.item.kind.is_afterwards:
        role = MUTATION
    if finding.aspect in {Aspect.EXCEPTION, Aspect.HARNESS}:
        role = EXCEPTION
    best = finding.diagnosis.best if finding.diagnosis is not None else None
    metrics = finding.metrics
    return FailureSignature(
        status=finding.status,
        aspect=finding.aspect,
        role=role,
        nonfinite=metrics is not None and bool(metrics.nonfinite_mismatches),
        exception=(finding.raised or finding.reason[:120]) if role == EXCEPTION else "",
        kind=best.kind if best is not None else "",
    )


def is_call(node: Node) -> bool:
    """Whether a node calls an operator."""
    if node.op not in {"call_function", "call_method", "call_module"}:
        return False
    if node.target is operator.getitem:
        if getattr(node.args[0], "op", "") == "placeholder":
            return True  # inputs are tensors and numbers
        meta = getattr(node.args[0], "meta", {})
        return isinstance(meta.get("example_value", meta.get("val")), torch.Tensor)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name not in _SWITCHES


def describe_value(value: Any) -> str:
    """Equal for tensors that a compiler cannot distinguish, and for other equal values."""
    if isinstance(value, tuple):
        return repr([describe_value(item) for item in value])
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return repr((value.dtype, tuple(value.shape), value.stride(), value.requires_grad))


def fresh_copy(value: Any) -> Any:
    """A copy that a run may modify."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _raw_bytes(value: torch.Tensor) -> bytes:
    plain = value.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


# --- The oracle: does a program fail, and how? ----------------------------------------------------

# From cheap to expensive: natively; also in float64; also with a second call.
_WAYS = (
    VerifyConfig(raise_on_mismatch=False, lift=False, verify_second_call=False, locate_seconds=0),
    VerifyConfig(raise_on_mismatch=False, verify_second_call=False, locate_seconds=0),
    VerifyConfig(raise_on_mismatch=False, locate_seconds=0),
)
_NOT_RUNNING = FailureSignature(status=Status.UNVERIFIED, aspect=Aspect.HARNESS, role=EXCEPTION)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a query: no signature if it passes, no verdict if the reference fails.

    Attributes:
        is_explained: it has a diagnosis if there is one; otherwise nobody asked for it.
    """

    signature: FailureSignature | None
    diagnosis: Diagnosis | None = None
    verdict: Verdict | None = None
    is_explained: bool = False


class Oracle:
    """Judges programs, each only once, and counts the compilations in `queries`."""

    def __init__(self, candidate: Candidate, limit: TimeLimit) -> None:
        """`limit` is for all queries together; one that is under way ends with it."""
        self.candidate = candidate
        self.limit = limit
        self.queries = 0
        self._way = 0
        self._known: dict[tuple[Any, ...], Answer] = {}

    def shows(
        self,
        program: FailingProgram | None,
        failure_signature: FailureSignature,
        *,
        kind: bool = False,
        explains: bool = False,
    ) -> bool:
        """Whether a program fails in the wanted way, and with `kind`, is of the same kind.

        With `explains`, the kind is found out in the same run, for whoever asks for it next.
        """
        if program is None:
            return False
        answer = self.ask(program, explains=kind or explains)
        return same_failure(answer.signature, failure_signature, kind=kind)

    def shows_part(
        self,
        part: FailingProgram | None,
        failure_signature: FailureSignature,
        *,
        explains: bool = False,
    ) -> bool:
        """Whether a part of a program that fails is wrong by itself; `explains` as in `shows`."""
        if part is None:
            return False
        return is_failure_of_part(self.ask(part, explains=explains).signature, failure_signature)

    def first(self, program: FailingProgram) -> Answer:
        """Judge a program that should fail; later queries use the cheapest way that showed it.

        Most failures show natively, with one compilation. Some show only in float64, or only in a
        second call.
        """
        answer = Answer(None)
        for self._way in range(len(_WAYS)):
            answer = self.ask(program, explains=True)
            if answer.signature is not None:
                return answer
        return answer

    @property
    def is_native(self) -> bool:
        """Whether failures show in the program's own dtypes."""
        return self._way == 0

    def becomes_native(self, program: FailingProgram, failure_signature: FailureSignature) -> bool:
        """Judge natively from now on, if the program then shows the failure."""
        before, self._way = self._way, 0
        if self.shows(program, failure_signature):
            return True
        self._way = before
        return False

    def ask(
        self,
        program: FailingProgram,
        candidate: Candidate | None = None,
        *,
        explains: bool = False,
    ) -> Answer:
        """Judge a program, or return the known answer.

        Args:
            explains: with the kind of failure, which takes as long as the verdict.

        Raises:
            OutOfTime: the time limit was reached.
        """
        how = candidate or self.candidate
        key = (program.key, self._way, repr(sorted(how.options.items())), how.backend, how.mode)
        known_answer = self._known.get(key)
        if known_answer is not None and (known_answer.is_explained or not explains):
            return known_answer
        with self.limit.interrupting():
            self._known[key] = self._judge(program, how, explains=explains)
        return self._known[key]

    @quietly()
    def _judge(self, program: FailingProgram, candidate: Candidate, *, explains: bool) -> Answer:
        if not reference_runs(program):
            return Answer(_NOT_RUNNING, is_explained=True)
        self.queries += 1
        dynamic = True if program.dynamic else None
        compiled = candidate.compile(program.graph, dynamic=dynamic)
        config = dataclasses.replace(_WAYS[self._way], verify_gradients=program.gradients)
        inputs = Inputs(tuple(program.inputs))
        # All C++ kernels of a query in one call of the compiler: the same code, in less time.
        together = quick_compiles() if candidate.may_use_inductor else contextlib.nullcontext()
        judging = contextlib.nullcontext() if explains else judging_only()
        verify = find_entry("verify")
        with program.conditions(), together, judging:
            verdict: Verdict = verify(inputs, program.graph, compiled, config)
        signature = signature_of(verdict)
        if signature is None:
            return Answer(None, None, verdict, is_explained=True)
        return Answer(signature[0], signature[1], verdict, is_explained=explains)


def reference_runs(program: FailingProgram) -> bool:
    """Whether the reference runs at all: a cheap test that may save a compilation."""
    # Not the module itself, which prints to stderr when it raises.
    call: Callable[..., Any] = program.graph.forward
    with program.conditions():
        try:
            call(*map(fresh_copy, program.inputs))
        except Exception:  # noqa: BLE001  (whatever it raises, this program is of no use)
            return False
    return True
