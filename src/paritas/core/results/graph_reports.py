"""The results of checking a graph's operators, split by split, and what is proved about them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import harness
from paritas.core.results.report import Report

if TYPE_CHECKING:
    from collections.abc import Iterable

# --- What is known about a split, or about a graph of split calls, over the real numbers ----------
# Everything here is data. `paritas.sharding.proofs` fills it in; certificates are checked by
# programs of their own there.

ProofStatus = Literal["proved", "refuted", "not decided"]

# A proof passes, a counterexample is a difference, and anything else is not verified.
_STATUSES: dict[ProofStatus, Status] = {
    "proved": Status.EQUIVALENT,
    "refuted": Status.DIFFERENT,
    "not decided": Status.UNVERIFIED,
}


class Counterexample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes on which the numerical check finds a split wrong.

    Attributes:
        shapes: of each tensor argument, by its place.
        ranks: the number of ranks.
        seed: of the check.
        reason: what the check says.
        values: of the tensors, if there are few.
    """

    shapes: dict[str, tuple[int, ...]]
    ranks: int
    seed: int
    reason: str
    values: dict[str, Any] = {}


class RuleProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about the split of one identifier.

    Attributes:
        operator: its name.
        rule: the annotation.
        split_by: the identifier that is split.
        reason: why it is not proved, or what is proved.
        parts: whether parts may be unequal ("any") or must be equal ("equal").
        assumes: what is taken for granted about values.
        certificate: what `checker` checks, as JSON data.
        seconds: the time that it took.
    """

    operator: str
    rule: str
    split_by: str
    status: ProofStatus
    reason: str = ""
    parts: str = ""
    assumes: tuple[str, ...] = ()
    certificate: dict[str, Any] | None = None
    counterexample: Counterexample | None = None
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """The result in one line."""
        if self.status == "proved":
            parts = "parts of any size" if self.parts == "any" else "parts of equal size"
            return (
                "proved over the reals, forward and backward, for all lengths and ranks, "
                f"{parts}{assuming(self.assumes)}"
            )
        if self.counterexample is None:
            return f"not decided: {self.reason}"
        example = self.counterexample
        shapes = ", ".join(f"{list(shape)}" for shape in example.shapes.values())
        otherwise = "; for parts of equal size it is proved" if self.parts == "equal" else ""
        return f"refuted on {shapes} over {example.ranks} ranks: {example.reason}{otherwise}"

    def finding(self) -> Finding | None:
        """What fails if it is not proved."""
        return _finding(f"proof of the split by {self.split_by}", self)


def assuming(assumptions: Iterable[str]) -> str:
    """The assumptions at the end of a sentence."""
    words = " and ".join(assumptions)
    return f", if {words}" if words else ""


class GraphProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about a graph under placements.

    Attributes:
        node: where the proof stopped; empty if it is proved.
        reason: why it stopped there.
        place: the module and the user's source line of that node, as far as they are known.
        placements: value -> its placement, as far as it is known.
        off_by: how far the ranks are off in the counterexample, relative to the largest value.
        shapes: of the inputs of the numerical check that are not parameters.
        ranks: its number of ranks.
        assumes: what is taken for granted about values.
        certificate: what `graph_checker` checks, as JSON data.
    """

    status: ProofStatus
    node: str = ""
    reason: str = ""
    place: str = ""
    placements: dict[str, str] = {}
    off_by: float | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    ranks: int = 2
    assumes: tuple[str, ...] = ()
    certificate: dict[str, Any] | None = None

    @property
    def words(self) -> str:
        """The result in one line."""
        if self.status == "proved":
            return (
                "proved over the reals, forward and backward, for all lengths and ranks that the "
                f"rules allow, parts of equal size{assuming(self.assumes)}; checked numerically on "
                f"{self.ranks} ranks"
            )
        place = f" ({self.place})" if self.place else ""
        at = f"{self.node}{place}: " if self.node else ""
        if self.status == "not decided":
            return f"not decided: {at}{self.reason}"
        shapes = ", ".join(str(list(shape)) for shape in self.shapes.values())
        off = "which have other shapes" if self.off_by is None else _off_words(self.off_by)
        return f"refuted on {shapes} over {self.ranks} ranks, {off}; {at}{self.reason}"

    def finding(self) -> Finding | None:
        """What fails if it is not proved."""
        return _finding("proof of the graph", self)


def _off_words(off: float) -> str:
    return f"which are off by {off:.2g} times the largest value"


def _finding(name: str, proof: RuleProof | GraphProof) -> Finding | None:
    if proof.status == "proved":
        return None
    refuted = proof.status == "refuted"
    return Finding(
        item=harness(name),
        aspect=Aspect.VALUE if refuted else Aspect.HARNESS,
        status=status_of_proof(proof.status),
        reason=proof.words,
    )


def status_of_proof(status: ProofStatus) -> Status:
    """What a proof counts as in a verdict."""
    return _STATUSES[status]


# --- The report of a graph ------------------------------------------------------------------------
# Everything here is data. `sharding.graphs` fills it in, `core.reporting` puts it into words.

FORMAT = 1

# Where the rule of a split comes from.
RuleOrigin = Literal["declared", "registered", "library", "discovered"]
# How ranks in separate processes communicate.
Confirm = Literal["gloo", "nccl"]


class CallOutcome(enum.StrEnum):
    """How a call of the graph ended. A closed list."""

    VERIFIED = "verified"
    NOTHING = "nothing to check"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


class CallSite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in the graph a call stands.

    Attributes:
        position: in the order of the graph.
        node: what the graph calls it.
        source: the user's file and line.
        code: the text of that line.
        module: path of the module it was called in.
    """

    position: int
    node: str
    source: str = ""
    code: str = ""
    module: str = ""


class Confirmation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a split on ranks in separate processes.

    Attributes:
        backend: how they communicate.
        status: the gravest status on them.
        simulated: the gravest status on the simulated ranks before.
    """

    backend: Confirm
    status: Status
    simulated: Status


class OptionResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to split an operator, checked.

    Attributes:
        idx: which tensor is split: the inputs, then the outputs.
        dim: along which dimension.
        split: the same in the words of the rule: `split by k`.
        identifier: the rule's name of that dimension: `k`; empty if it has none.
        rule: the annotation.
        origin: where the rule comes from.
        ranks: number of ranks.
        status: the gravest status, including real ranks and the proof if requested.
        reason: why it does not pass, in a sentence.
        loss_whole: the sum of all results on one device; None if there is none.
        loss_split: the same sum of the results assembled from the ranks.
        gradients: what was found for gradients, in a few words.
        verdict: everything that was compared.
        confirmation: the result on real ranks; None if they were not used.
        proof: what is known for all shapes and numbers of ranks; None if it was not requested.
    """

    idx: int
    dim: int
    split: str
    rule: str
    origin: RuleOrigin
    ranks: int
    status: Status
    reason: str = ""
    loss_whole: float | None = None
    loss_split: float | None = None
    gradients: str = ""
    verdict: Verdict = Verdict()
    confirmation: Confirmation | None = None
    seconds: float = 0.0
    identifier: str = ""
    proof: RuleProof | None = None


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator on arguments of one kind, checked once for all its calls.

    Attributes:
        key: unique; the same for the same operator, arguments and settings.
        operator: what is called.
        signature: shapes, dtypes and other arguments, for people.
        sites: all its calls, in the order of the graph.
        outcome: how it ended.
        reason: the reason for this outcome; empty if it is verified.
        options: the splits that were checked.
        notes: what a reader should know: shapes that were capped, values that were drawn.
        script: a script that reproduces the failure, relative to the folder of the results.
    """

    key: str
    operator: str
    signature: str
    sites: tuple[CallSite, ...]
    outcome: CallOutcome
    reason: str = ""
    options: tuple[OptionResult, ...] = ()
    notes: tuple[str, ...] = ()
    script: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[OptionResult, ...]:
        """The splits that are wrong, gravest first."""
        bad = [one for one in self.options if one.status in {Status.DIFFERENT, Status.DEGRADED}]
        return tuple(sorted(bad, key=lambda one: -one.status.gravity))


class GraphReport(Report, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All operators of a graph.

    Attributes:
        graph: the file or other source of the graph.
        settings: the settings of the check, for people and for resuming.
        versions: versions of the software used.
        operators: in the order of their first calls.
        calls: number of calls in the graph.
        notes: what a reader should know.
        seconds: the time of this run.
        resumed: number of operators reused from an earlier run of this graph.
        shared: number of operators verified before, for another graph of the same folder.
        ended: False if it was interrupted.
        number: number of the graph in its folder, in the order of registration.
        others: the other graphs of the folder; exit code and verdict leave them out.
        proof: of the graph under stated placements; None if none were stated.
    """

    _called: ClassVar[str] = "the results of a graph"

    graph: str
    kind: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    operators: tuple[OperatorResult, ...] = ()
    calls: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    resumed: int = 0
    shared: int = 0
    ended: bool = True
    strict: bool = False
    number: int = 1
    others: tuple[GraphReport, ...] = ()
    proof: GraphProof | None = None
    format: int = FORMAT

    def counts(self) -> dict[CallOutcome, int]:
        """Number of calls per outcome."""
        found = dict.fromkeys(CallOutcome, 0)
        for one in self.operators:
            found[one.outcome] += len(one.sites)
        return found

    @property
    def verdict(self) -> Verdict:
        """The roll-up of everything compared, each item with its node and its split."""
        findings: list[Finding] = []
        coverage = Coverage()
        for one in self.operators:
            for option in one.options:
                site, label = one.sites[0], f"{option.split}, {option.ranks} ranks"
                findings += [
                    msgspec.structs.replace(
                        f, item=f.item.under(label).in_graph(site.node), source=site.source
                    )
                    for f in option.verdict.findings
                ]
                coverage += option.verdict.coverage
        notes = self.notes
        if self.proof is not None:
            unproved = self.proof.finding()
            findings += [] if unproved is None else [unproved]
            notes = (*notes, f"the graph under its placements: {self.proof.words}")
        return Verdict(findings=tuple(findings), coverage=coverage, notes=notes, strict=self.strict)

    def certificates(self) -> dict[str, dict[str, Any]]:
        """What the checkers check, by a name for each."""
        found: dict[str, dict[str, Any]] = {}
        for one in self.operators:
            for option in one.options:
                if option.proof is not None and option.proof.certificate is not None:
                    name = f"{one.sites[0].node}_{one.operator}_{option.proof.split_by}"
                    found[name] = option.proof.certificate
        if self.proof is not None and self.proof.certificate is not None:
            found["graph"] = self.proof.certificate
        return found

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a split or the placements are wrong, 3 something could not be checked."""
        outcomes = {one.outcome for one in self.operators}
        proof = "proved" if self.proof is None else self.proof.status
        if CallOutcome.FAILED in outcomes or proof == "refuted":
            return 1
        if proof == "not decided":
            return 3
        whole = self.ended and sum(self.counts().values()) == self.calls
        if CallOutcome.UNSUPPORTED in outcomes or CallOutcome.VERIFIED not in outcomes or not whole:
            return 3
        return 0

    def __str__(self) -> str:
        return f"{self._failure_text()}\n{self.verdict}"

    def _failure_text(self) -> str:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self.counts().items() if n)
        return f"{self.graph}: {counts or 'no calls'}"
