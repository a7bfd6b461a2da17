"""What all of sharding shares: proofs as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paritas.core.results.findings import Aspect, Finding, Status, mismatch, unverified
from paritas.core.results.items import harness

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
        place_words = f" ({self.place})" if self.place else ""
        at = f"{self.node}{place_words}: " if self.node else ""
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
    if proof.status == "refuted":
        return mismatch(harness(name), Aspect.VALUE, proof.words)
    return unverified(harness(name), proof.words)


def status_of_proof(status: ProofStatus) -> Status:
    """What a proof counts as in a verdict."""
    return _STATUSES[status]
