"""Findings and verdicts: what was compared, how it ended, and how much was not compared."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from paritas.core.register import find_entry
from paritas.core.results.items import Item, Metrics, harness
from paritas.core.results.pictures import Picture
from paritas.core.results.report import Report

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence


# --- What kind of wrong a tensor is ---------------------------------------------------------------


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a tensor the wrong elements are.

    Attributes:
        kind: `slices`, `stride`, `tile tail`, `row`, `diagonal`, `above diagonal`, `border`,
            `nonfinite`, `scatter`, `everywhere` ...
        text: an index expression, `[:, :, 127:, :]`, or words if it cannot be indexed.
        elements: number of wrong elements.
        share: their share of all elements.
        sentence: for people.
        axes: the axes that limit it; none if it is limited by something else, or everywhere.
    """

    kind: str
    text: str
    elements: int
    share: float
    sentence: str = ""
    axes: tuple[int, ...] = ()


class PatternKind(enum.StrEnum):
    """What kind of wrong; from the most specific to what fits almost anything."""

    TIE_BREAKING = "tie-breaking"
    NONFINITE = "nonfinite"
    OVERFLOW = "overflow"
    WRAPPED = "wrapped"
    CLIPPED = "clipped"
    SWAPPED_OPERANDS = "swapped operands"
    OFF_BY_ONE = "off by one reduction"
    MASK = "mask"
    EPS = "eps"
    ZEROS = "zeros"
    MISSING_REDUCTION = "missing reduction"
    WRONG_AXIS = "wrong axis"
    ONE_RANKS_PART = "one rank's part"
    WRONG_RANKS_SHARD = "wrong rank's shard"
    DOUBLED_REDUCTION = "doubled reduction"
    PARTIAL_SUM = "partial sum"
    LOST_ACCUMULATION = "lost accumulation"
    WRONG_REDUCTION = "wrong reduction"
    STATISTICS = "wrong statistics"
    WRONG_INDEX = "wrong index"
    ARGUMENT = "wrong argument"
    OTHER_FUNCTION = "other function"
    FACTOR = "wrong factor"
    MISSING_OPERAND = "missing operand"
    SIGN = "sign"
    STALE = "stale"
    COPY = "copy"
    CONSTANT = "constant"
    SCALE = "scale"
    REPEATED_BIAS = "repeated bias"
    MISSING_BIAS = "missing bias"
    OFFSET = "offset"
    RESIDUAL = "residual"
    SHIFT = "shift"
    TRANSPOSE = "transpose"
    PERMUTATION = "permutation"
    UNINITIALISED = "uninitialised"
    AXIS_OFFSET = "axis offset"
    AXIS_SCALE = "axis scale"
    APPROXIMATION = "approximation"
    PRECISION = "precision"
    RANDOM_STREAM = "different random stream"


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of fault that explains the numbers.

    Attributes:
        kind: a `PatternKind`; text, so that kinds of other versions can be read.
        confidence: 0 to 1, how often statements that reproduce the candidate as well as this one
            were right about planted faults.
        sentence: what a person would write.
        evidence: the supporting figures, by name; `bit for bit` and `within the noise` are the
            shares of the candidate's elements that the pattern reproduces so.
    """

    kind: str
    confidence: float
    sentence: str
    evidence: dict[str, int | float | str] = {}

    @property
    def reproduction(self) -> str:
        """How well it reproduces the candidate, in words; may be empty."""
        exact, within = (self.evidence.get(name) for name in ("bit for bit", "within the noise"))
        if exact == 1:
            return "reproduces the candidate bit for bit"
        if isinstance(within, str) or within is None:
            return ""
        share = math.floor(1000 * within) / 10
        part = (
            "wrong elements" if self.evidence.get("extent") == "where it is wrong" else "elements"
        )
        return f"reproduces {share:g} % of the {part} within the noise"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where, and what kind of wrong.

    Attributes:
        where: the elements that are wrong.
        patterns: the kinds, the best first; may be empty.
        note: what was seen where no kind is stated, or why not all kinds were tried.
    """

    where: Region | None = None
    patterns: tuple[Pattern, ...] = ()
    note: str = ""

    @property
    def best(self) -> Pattern | None:
        """The pattern that fits best."""
        return self.patterns[0] if self.patterns else None

    @property
    def sentence(self) -> str:
        """The diagnosis in one line; may be empty."""
        kind = self.best.sentence if self.best else ""
        if self.best and self.best.reproduction:
            kind += f" ({self.best.reproduction})"
        parts = [kind, self.where.sentence if self.where else "", self.note]
        return "; ".join(part for part in parts if part)


# --- Findings and their roll-up -------------------------------------------------------------------

# Everything here is data. `paritas.core.reporting` turns it into text, tables and colours.


class Status(enum.StrEnum):
    """How one compared item ended. A closed list, in order of gravity."""

    IDENTICAL = "identical"
    EQUIVALENT = "equivalent"
    UNSTABLE = "unstable"
    UNVERIFIED = "unverified"
    DEGRADED = "degraded"
    DIFFERENT = "different"

    @property
    def gravity(self) -> int:
        """Position in the order of gravity; the roll-up takes the gravest."""
        return list(Status).index(self)

    def passes(self, *, strict: bool = False) -> bool:
        """Whether this status counts as a pass."""
        # By identity: a guard calls this for every value of every call.
        if self is Status.EQUIVALENT or self is Status.IDENTICAL:
            return True
        return self is Status.UNSTABLE and not strict

    @property
    def is_wrong(self) -> bool:
        """Whether the candidate was compared and computes something else, or less accurately."""
        return self is Status.DIFFERENT or self is Status.DEGRADED

    def exit_code(self, *, strict: bool = False) -> int:
        """0 pass, 1 different or degraded (or unstable under strict), 3 unverified."""
        if self.passes(strict=strict):
            return 0
        return 3 if self is Status.UNVERIFIED else 1


class Aspect(enum.StrEnum):
    """Which property of an item was compared."""

    VALUE = "value"
    STRUCTURE = "structure"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    STRIDE = "stride"
    ALIAS = "alias"
    REQUIRES_GRAD = "requires_grad"
    RNG = "rng"
    SETTING = "setting"
    EXCEPTION = "exception"
    HARNESS = "harness"


class Score(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate's error in multiples of the reference's own noise, and what was allowed.

    Attributes:
        max_z: the worst element's error over its noise.
        max_limit: the limit of `max_z`.
        rms_z: root mean square of that ratio over all elements.
        rms_limit: the limit of `rms_z`.
        index: where the worst element is.
        slice_axis: the axis of the worst slice.
        slice_index: its position along that axis.
        slice_z: root mean square over that slice.
        slice_limit: the limit of `slice_z`.
        noise: the source of the noise estimate, in words.
    """

    max_z: float
    max_limit: float
    rms_z: float
    rms_limit: float
    index: tuple[int, ...] | None = None
    slice_axis: int | None = None
    slice_index: int | None = None
    slice_z: float | None = None
    slice_limit: float | None = None
    noise: str = ""

    @property
    def passed(self) -> bool:
        """True only if every figure is a number within its limit (a NaN fails)."""
        slices = self.slice_z is None or (
            self.slice_limit is not None and self.slice_z <= self.slice_limit
        )
        return self.max_z <= self.max_limit and self.rms_z <= self.rms_limit and slices

    @property
    def excess(self) -> float:
        """The worst figure as a multiple of its limit; at most 1 for a pass."""
        ratios = [self.max_z / self.max_limit, self.rms_z / self.rms_limit]
        if self.slice_z is not None and self.slice_limit:
            ratios.append(self.slice_z / self.slice_limit)
        return math.nan if any(map(math.isnan, ratios)) else max(ratios)


class OriginKind(enum.StrEnum):
    """The kind of thing a difference was traced back to."""

    NODE = "node"
    FUSION = "fusion"
    PASS = "pass"  # noqa: S105  (a compiler's)
    PARTITION = "partition"
    GRAPH = "graph"
    MODULE = "module"
    TRAINING = "training"


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a difference starts.

    Attributes:
        kind: a node, a set of nodes compiled together, a compiler pass, the split of a graph into
            forward and backward, a whole graph, a module of a parallel model, or another part of
            its training: the loss, the reduction of gradients.
        name: the name of the node, the pass or the graph.
        operator: the operator that the node calls.
        module: path of the module it was called in.
        source: the user's file and line.
        code: the text of that line.
        nodes: all nodes of a fused set.
        remedies: compiler options; each of them alone removes the difference.
        ranks: the wrong ranks of a parallel model; empty if all are wrong.
        arguments: the operator's arguments in words: `input: float32 [4, 8]`, `eps=1e-05`.
        chain: what the fault passes through on its way to the results, from the place on.
    """

    kind: OriginKind
    name: str
    operator: str = ""
    module: str = ""
    source: str = ""
    code: str = ""
    nodes: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One compared item with its status and numbers.

    Attributes:
        item: what was compared.
        path: the item in words; it is always derived from the item.
        raised: the class of the exception that the candidate raised, if that is the difference.
        cause: the path of the finding where the difference starts, if this one only results from
            it; one cause has many results.
        picture: reference, candidate and difference, where the difference starts.
    """

    path: str = ""
    aspect: Aspect
    status: Status
    reason: str = ""
    advice: str = ""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    metrics: Metrics | None = None
    native: Score | None = None
    lifted: Score | None = None
    source: str | None = None
    origin: Origin | None = None
    diagnosis: Diagnosis | None = None
    item: Item
    raised: str = ""
    cause: str = ""
    picture: Picture | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "path", self.item.text)

    def __str__(self) -> str:
        from paritas.core.results.wording import finding_text

        return finding_text(self)


# A value gets its status from `core/judging/pairs.py`. These are findings of other kinds.


def finding_about(
    item: Item, aspect: Aspect, status: Status, reason: str, advice: str = "", **about: Any
) -> Finding:
    """A finding about something other than a value, or about a value that was judged before."""
    return Finding(item=item, aspect=aspect, status=status, reason=reason, advice=advice, **about)


def mismatch(item: Item, aspect: Aspect, reason: str, advice: str = "", **about: Any) -> Finding:
    """A finding about something other than a value that is not as in the reference."""
    return finding_about(item, aspect, Status.DIFFERENT, reason, advice, **about)


def agreement(item: Item, aspect: Aspect, reason: str, **about: Any) -> Finding:
    """A finding about something other than a value that is as in the reference."""
    return finding_about(item, aspect, Status.IDENTICAL, reason, **about)


def unverified(
    what: Item | str, reason: str, advice: str = "", aspect: Aspect = Aspect.HARNESS, **about: Any
) -> Finding:
    """A finding about something that could not be checked; a name is a part of the check itself."""
    item = harness(what) if isinstance(what, str) else what
    return finding_about(item, aspect, Status.UNVERIFIED, reason, advice, **about)


def starting_place(
    item: Item, failure: Finding, reason: str, aspect: Aspect = Aspect.VALUE, **about: Any
) -> Finding:
    """A finding about the place where a failure starts: it is as grave as what it explains."""
    return finding_about(item, aspect, failure.status, reason, **about)


class Coverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much was compared, and what was not, each with its reason.

    Attributes:
        not_selected: names that only one of two dumps was set to record.
    """

    compared: int = 0
    skipped: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    not_selected: tuple[str, ...] = ()

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(
            compared=self.compared + other.compared,
            skipped=_unique((*self.skipped, *other.skipped)),
            unmatched=_unique((*self.unmatched, *other.unmatched)),
            not_selected=_unique((*self.not_selected, *other.not_selected)),
        )


class Verdict(
    Report, frozen=True, kw_only=True, forbid_unknown_fields=True, weakref=True, dict=True
):
    """The roll-up of findings, with coverage. True in a boolean context only if it passed.

    Attributes:
        shrink_command: the command that makes the smallest script that shows the failure; empty if
            none is known, as for a verdict of a call from Python.
    """

    _called: ClassVar[str] = "a verdict"

    findings: tuple[Finding, ...] = ()
    coverage: Coverage = Coverage()
    notes: tuple[str, ...] = ()
    strict: bool = False
    enabled: bool = True
    shrink_command: str = ""

    @property
    def status(self) -> Status:
        """The gravest status of all findings; nothing compared is `unverified`."""
        statuses = [finding.status for finding in self.findings]
        if self.coverage.compared == 0 or not statuses:
            statuses.append(Status.UNVERIFIED)
        return max(statuses, key=lambda status: status.gravity)

    @property
    def verdict(self) -> Verdict:
        """Itself: every report has a verdict, and a verdict is a report."""
        return self

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Every finding that does not pass, gravest first, otherwise in program order."""
        bad = [f for f in self.findings if not f.status.passes(strict=self.strict)]
        return tuple(sorted(bad, key=lambda finding: -finding.status.gravity))

    @property
    def exit_code(self) -> int:
        """0 pass, 1 different or degraded (or unstable under strict), 3 unverified."""
        return self.status.exit_code(strict=self.strict) if self.enabled else 3

    def __str__(self) -> str:
        from paritas.core.results.wording import verdict_text

        return verdict_text(self)

    @property
    def worst(self) -> Finding | None:
        """The gravest finding, the first of several; None if there are no findings."""
        return max(self.findings, key=lambda finding: finding.status.gravity, default=None)

    def raise_if_failed(self) -> None:
        """Raise `MismatchError`, carrying this verdict, unless it passed.

        A verdict with `enabled=False` compared nothing at the caller's request: it is
        not a pass, and not an error either.
        """
        if self.enabled:
            Report.raise_if_failed(self)

    def shrink(
        self,
        *,
        seconds: float = 120.0,
        outdir: str | os.PathLike[str] | None = None,
        setup: Sequence[str] = (),
        on_progress: Callable[[str], None] | None = None,
    ) -> Any:
        """Make the failing program as small as possible, and write a script that reproduces it.

        Args:
            seconds: time limit; the best result so far is written when it is reached.
            outdir: the folder of the script; a new one by default.
            setup: statements that a fresh process must run first to reproduce the failure, such as
                the import of a module that registers a backend.
            on_progress: called with a few words before each step.

        Returns:
            A `paritas.core.shrinking.ShrinkReport`: the script, whether it reproduces the failure
            on its own, and the steps.

        Raises:
            UsageError: nothing failed, or the programs are not available (the verdict was read
                from a file), or none of their graphs fails on its own.
        """
        return find_entry("shrink")(
            self, seconds=seconds, outdir=outdir, setup=tuple(setup), on_progress=on_progress
        )

    @classmethod
    def merge(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """One verdict over several (input sets, ranks, graphs) that keeps everything.

        A part without comparisons and findings stays visible as an `unverified` finding.
        """
        parts = tuple(map(_with_unverified_finding, verdicts))
        coverage = Coverage()
        for part in parts:
            coverage += part.coverage
        return Verdict(
            findings=tuple(finding for part in parts for finding in part.findings),
            coverage=coverage,
            notes=_unique(note for part in parts for note in part.notes),
            strict=any(part.strict for part in parts),
            enabled=all(part.enabled for part in parts),
            shrink_command=next((p.shrink_command for p in parts if p.shrink_command), ""),
        )


def _with_unverified_finding(verdict: Verdict) -> Verdict:
    """Add an `unverified` finding to a verdict that fails without a failing finding."""
    if verdict.passed or verdict.failures or not verdict.enabled:
        return verdict
    silent = unverified("verdict", "nothing was compared")
    return msgspec.structs.replace(verdict, findings=(*verdict.findings, silent))


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
