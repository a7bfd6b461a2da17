"""The operators of a graph, split by split: a row for each operator, and their roll-up."""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Literal

import msgspec

from paritas.core.results.findings import Coverage, Finding, Status, Verdict
from paritas.core.results.rank_backends import BackendName
from paritas.core.results.report import Report
from paritas.sharding.rows import GraphProof, RuleProof

FORMAT = 1


# Where the rule of a split comes from.
RuleOrigin = Literal["declared", "registered", "library", "discovered"]


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

    backend: BackendName
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
        bad = [option for option in self.options if option.status.is_wrong]
        return tuple(sorted(bad, key=lambda operator_option: -operator_option.status.gravity))


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
    _summary: ClassVar[str] = "paritas.sharding.graphs.page:notebook_summary"

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
        calls_by_outcome = dict.fromkeys(CallOutcome, 0)
        for operator in self.operators:
            calls_by_outcome[operator.outcome] += len(operator.sites)
        return calls_by_outcome

    @property
    def verdict(self) -> Verdict:
        """The roll-up of everything compared, each item with its node and its split."""
        findings: list[Finding] = []
        coverage = Coverage()
        for operator in self.operators:
            for option in operator.options:
                site, label = operator.sites[0], f"{option.split}, {option.ranks} ranks"
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
        certificates_by_name: dict[str, dict[str, Any]] = {}
        for operator in self.operators:
            for option in operator.options:
                if option.proof is not None and option.proof.certificate is not None:
                    name = f"{operator.sites[0].node}_{operator.operator}_{option.proof.split_by}"
                    certificates_by_name[name] = option.proof.certificate
        if self.proof is not None and self.proof.certificate is not None:
            certificates_by_name["graph"] = self.proof.certificate
        return certificates_by_name

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a split or the placements are wrong, 3 something could not be checked."""
        outcomes = {operator.outcome for operator in self.operators}
        proof = "proved" if self.proof is None else self.proof.status
        if CallOutcome.FAILED in outcomes or proof == "refuted":
            return 1
        if proof == "not decided":
            return 3
        is_complete = self.ended and sum(self.counts().values()) == self.calls
        if (
            CallOutcome.UNSUPPORTED in outcomes
            or CallOutcome.VERIFIED not in outcomes
            or not is_complete
        ):
            return 3
        return 0

    def __str__(self) -> str:
        return f"{self._failure_text()}\n{self.verdict}"

    def _failure_text(self) -> str:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self.counts().items() if n)
        return f"{self.graph}: {counts or 'no calls'}"
