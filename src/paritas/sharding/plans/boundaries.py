"""Where blocks begin and end on ranks: in which form each rank gets and returns their values.

A rank may hold all of a value, a shard of it by DTensor or as a plain tensor, the rows of its own
samples, or a term of a sum. The form of each value is read off a native run of the parallel model,
by comparing what ranks hold with what the reference has there. A block can then be given the
reference's values, in the form in which the model gives it its own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import ParitasError
from paritas.core.execution.block_runs import Parked, TrainingRecorder
from paritas.core.execution.observation import OUTPUT
from paritas.core.numerics.bits import is_inexact
from paritas.core.numerics.contents import leaves, map_leaves
from paritas.core.placement.assembly import Segment, take
from paritas.core.placement.assembly import whole as all_of
from paritas.core.placement.meshes import lines_along
from paritas.core.placement.plain_parts import NearMatch, find_plain_part, split_dims
from paritas.core.placement.rank_pieces import RankPiece, assemble, locate
from paritas.core.results.items import LocalPlacement, Partial, Replicate, Shard
from paritas.sharding.plans.assembling import natural_chunk, sample_rows
from paritas.sharding.plans.traces import EqualPieces, piece_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from paritas.core.execution.block_runs import BlockCall
    from paritas.core.execution.saved_state import Surroundings
    from paritas.core.numerics.gates import Near
    from paritas.core.placement.assembly import Where
    from paritas.sharding.plans.plan import ParallelProgram
    from paritas.sharding.plans.traces import Trace


# --- How the values that ranks hold relate to the reference's: whole, shard, term or wrong --------


class Relation(enum.IntEnum):
    """From the best to the worst."""

    WHOLE = 0
    SHARD = 1
    PARTIAL = 2
    PERMUTED = 3
    UNKNOWN = 4
    WRONG = 5


@dataclasses.dataclass(frozen=True)
class Related:
    """What ranks hold, and what they should hold.

    Attributes:
        relation: the worst of all ranks.
        ranks: the wrong ranks; empty for all of them.
        expected: rank -> the whole value that its own belongs to.
        pieces: rank -> its value.
    """

    relation: Relation
    ranks: tuple[int, ...]
    expected: dict[int, Tensor]
    pieces: dict[int, RankPiece]

    @property
    def held(self) -> dict[int, Tensor]:
        """Rank -> its value."""
        return {rank: piece.local for rank, piece in self.pieces.items()}


def relate(
    program: ParallelProgram,
    samples: dict[int, tuple[int, int] | None],
    pieces: dict[int, RankPiece],
    reference: Tensor,
    near: Near,
    factors: tuple[float, ...] = (1.0,),
) -> Related:
    """Find the best relation of the pieces to the reference's value.

    Args:
        samples: rank -> its samples of the batch.
        factors: factors that values may have: gradients of a mean over a part of the batch are
            larger by the number of parts.
    """
    averages = program.data_ranks > 1 and not reference.dim()
    if averages and near(mean_of(pieces), reference):
        # A mean over samples: the mean of the ranks' means is the mean over all samples.
        return Related(Relation.WHOLE, (), dict.fromkeys(pieces, reference), pieces)
    groups: dict[int, dict[int, RankPiece]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(program.data_rank(rank), {})[rank] = piece
    relation, ranks = Relation.WHOLE, []
    expected: dict[int, Tensor] = {}
    for group in groups.values():
        tried = [
            (*_relate_group(program, group, whole, near), whole)
            for whole in _wholes(program, samples, group, reference, factors)
        ]
        # A value of the right shape that is wrong says more than one of another shape.
        best = min(tried, key=lambda one: (one[0] is Relation.UNKNOWN, one[0]))
        relation = max(relation, best[0])
        ranks += best[1]
        expected |= dict.fromkeys(group, best[2])
    wrong = tuple(sorted(ranks)) if len(ranks) < len(pieces) else ()
    return Related(relation, wrong, expected, pieces)


def alike(program: ParallelProgram, pieces: dict[int, RankPiece], near: Near) -> bool:
    """Whether ranks with the same samples hold the same value; False if a rank is alone."""
    groups: dict[int, list[RankPiece]] = {}
    for rank, piece in pieces.items():
        groups.setdefault(program.data_rank(rank), []).append(piece)
    return all(
        len(group) > 1 and all(near(piece.local, group[0].local) for piece in group[1:])
        for group in groups.values()
    )


def mean_of(pieces: dict[int, RankPiece]) -> Tensor:
    """The mean of the ranks' values."""
    return torch.stack([piece.local.double() for piece in pieces.values()]).mean(dim=0)


def rows_of_rank(
    program: ParallelProgram,
    samples: dict[int, tuple[int, int] | None],
    rank: int,
    reference: Tensor,
) -> tuple[int, int] | None:
    """Begin and end of the rows of a value that belong to the samples of a rank, if it has some."""
    if program.data_ranks == 1 or not reference.dim():
        return None
    batch = max((s[1] for s in samples.values() if s is not None), default=0)
    return sample_rows(samples[rank], batch, reference.shape[0])


def _wholes(
    program: ParallelProgram,
    samples: dict[int, tuple[int, int] | None],
    group: dict[int, RankPiece],
    reference: Tensor,
    factors: tuple[float, ...],
) -> list[Tensor]:
    """The values that the ranks of one part of the batch may hold together."""
    found = [reference]
    rows = rows_of_rank(program, samples, next(iter(group)), reference)
    if rows is not None:
        found.insert(0, reference[rows[0] : rows[1]])
    if not reference.is_floating_point():
        return found
    return [value * factor if factor != 1 else value for value in found for factor in factors]


def _relate_group(
    program: ParallelProgram, pieces: dict[int, RankPiece], whole: Tensor, near: Near
) -> tuple[Relation, list[int]]:
    """How the pieces of ranks with the same samples relate to the whole, and the wrong ranks."""
    if any(piece.placement is not None for piece in pieces.values()):
        return _relate_placed(pieces, whole, near)
    relations = {
        rank: find_part(program, rank, piece.local, whole, near)[0]
        for rank, piece in pieces.items()
    }
    worst = max(relations.values())
    if worst is Relation.UNKNOWN or worst < Relation.PARTIAL:
        return worst, []
    if worst is Relation.WRONG and _sums_up(program, pieces, whole, near):
        return Relation.PARTIAL, []
    bad = [rank for rank, relation in relations.items() if relation is worst]
    return worst, bad


def _relate_placed(
    pieces: dict[int, RankPiece], whole: Tensor, near: Near
) -> tuple[Relation, list[int]]:
    shape = next(iter(pieces.values())).whole_shape
    if any(p.placement is None for p in pieces.values()) or shape != tuple(whole.shape):
        return Relation.UNKNOWN, []
    together = assemble(dict(pieces), whole.shape)
    if together.value is None:
        return Relation.UNKNOWN, []
    if near(together.value, whole) and together.disagreement is None:
        return Relation.WHOLE, []
    bad = [
        rank
        for rank, piece in pieces.items()
        if not near(piece.local, take(whole, locate(rank, piece)))
    ]
    if not bad:  # they differ by rounding
        return Relation.WHOLE, []
    return Relation.WRONG, bad


def find_part(
    program: ParallelProgram, rank: int, value: Tensor, whole: Tensor, near: Near
) -> tuple[Relation, Where | None]:
    """How a plain value relates to the whole, and which part of it it is by its values.

    A value that is wrong is taken for the part that is expected on this rank, if it has its shape.
    """
    if value.shape == whole.shape:
        where = tuple(map(all_of, whole.shape))
        return (Relation.WHOLE if near(value, whole) else Relation.WRONG), where
    if len(split_dims(whole.shape, value.shape) or ()) != 1:
        return Relation.UNKNOWN, None
    expected = functools.partial(natural_chunk, program, rank)
    part = find_plain_part(whole, value, expected, NearMatch(near))
    if part is None or not part.proven:
        return Relation.WRONG, None if part is None else part.where
    return (Relation.SHARD if part.chunk == part.natural else Relation.PERMUTED), part.where


# --- Terms of a sum -------------------------------------------------------------------------------


def _group_terms(program: ParallelProgram, ranks: list[int]) -> Iterator[list[list[int]]]:
    """The ranks that may hold the terms of one sum: all together, or those along one axis."""
    yield [ranks]
    coordinates = {rank: program.coordinate(rank) for rank in ranks}
    for axis in range(len(program.mesh)):
        yield lines_along(coordinates, axis)


def _add_terms(values: list[Tensor], near: Near) -> tuple[Tensor, float] | None:
    """The sum of terms, and the noise that it may have; None if these are no terms."""
    if len(values) < 2 or len({value.shape for value in values}) > 1:  # noqa: PLR2004
        return None
    terms = torch.stack([value.double() for value in values])
    return terms.sum(dim=0), near.reach * float(terms.abs().max()) if terms.numel() else 0.0


def _sums_up(
    program: ParallelProgram, pieces: dict[int, RankPiece], whole: Tensor, near: Near
) -> bool:
    """Whether the values of all ranks, or of those along one axis, add up to the whole."""
    return any(
        all(_adds(program, ranks, pieces, whole, near) for ranks in groups)
        for groups in _group_terms(program, list(pieces))
    )


def _adds(
    program: ParallelProgram,
    ranks: list[int],
    pieces: dict[int, RankPiece],
    whole: Tensor,
    near: Near,
) -> bool:
    added = _add_terms([pieces[rank].local for rank in ranks], near)
    if added is None:
        return False
    total, noise = added
    if total.shape == whole.shape:
        return near(total, whole.double(), noise)
    return find_part(program, ranks[0], total, whole.double(), near)[0] is Relation.SHARD


# --- The boundaries of a block --------------------------------------------------------------------


class NotByBlocksError(ParitasError, RuntimeError):
    """A plan that cannot be checked by blocks, or a block that cannot be cut out; it says why."""


# --- Recording the calls of blocks on a rank ------------------------------------------------------


class Boxed:
    """A value that is a leaf of nested values, though its class has fields."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class RankRecorder(TrainingRecorder):
    """Records what blocks get and return on a rank; values that ranks share are kept once."""

    def __init__(
        self, blocks: Mapping[str, nn.Module], equal: EqualPieces | None, step: int
    ) -> None:
        super().__init__(blocks)
        self._equal, self._step = equal, step

    def keep(self, tensor: Tensor) -> Boxed:
        """A copy of what this rank holds."""
        return Boxed(self.keep_gradient(tensor))

    def keep_gradient(self, value: Tensor) -> RankPiece:
        """The same of a gradient."""
        piece = piece_of(value)
        if self._equal is None:
            return piece
        # Blocks run in the same order on all ranks, so equal values are looked for in one shape.
        return self._equal.shared((self._step, "block", piece.whole_shape), piece)


# --- Forms ----------------------------------------------------------------------------------------


def _as_pieces(held: Mapping[int, Any]) -> Mapping[int, RankPiece | None]:
    """The gradients of a call: a `RankRecorder` keeps pieces where one device parks tensors."""
    return held


@dataclasses.dataclass(frozen=True)
class Form:
    """How a rank holds a value of the reference.

    Attributes:
        where: which part of these rows.
        rows: begin and end of the rows that belong to the samples of the rank; None for all.
        placement: of a distributed tensor; None for a plain one.
        factor: gradients of a mean over a part of the batch are larger by the number of parts.
        turn: for a term of a sum, its number among the terms; None for a value that is no term.
        agrees: whether it was the reference's value when its form was found.
    """

    where: Where
    rows: tuple[int, int] | None = None
    placement: LocalPlacement | None = None
    factor: float = 1.0
    turn: int | None = None
    agrees: bool = True

    def base(self, value: Tensor) -> Tensor:
        """The rows of the reference's value, with the factor."""
        rows = value if self.rows is None else value[self.rows[0] : self.rows[1]]
        return rows if self.factor == 1 else rows * self.factor

    def part_of(self, value: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """What the rank gets if the reference's value is this one."""
        local = take(self.base(value.detach()), self.where).clone()
        if self.turn is not None:  # the first rank has all of the sum
            local = local if self.turn == 0 else torch.zeros_like(local)
        return local if self.placement is None else _distributed(local, self.placement, mesh)

    def piece(self, tensor: Tensor) -> RankPiece:
        """What a rank holds of a value in this form."""
        made = piece_of(tensor)
        local = made.local if self.factor == 1 else made.local / self.factor
        if made.placement is not None:
            where = locate(0, made) if made.placement.coordinate else None
            return RankPiece(local, made.placement, where and self._in_whole(where))
        where = self._in_whole(self.where)
        if self.turn is None:
            return RankPiece(local, where=where)
        shape = tuple(local.shape)
        term = LocalPlacement(
            mesh=(self.turn + 1,),
            coordinate=(self.turn,),
            placements=("partial(sum)",),
            global_shape=shape,
            global_offset=(0,) * len(shape),
        )
        return RankPiece(local, term, where)

    def _in_whole(self, where: Where) -> Where:
        """A part of the rows as a part of the whole."""
        if self.rows is None or not where:
            return where
        begin = self.rows[0]
        first = tuple(Segment(one.source, one.target + begin, one.length) for one in where[0])
        return (first, *where[1:])


def _distributed(local: Tensor, placement: LocalPlacement, mesh: DeviceMesh | None) -> Tensor:
    """A DTensor of the ranks' parts."""
    from torch.distributed import tensor as dt

    names = placement.mesh_names
    own = _submesh(mesh, names)
    if own is None or tuple(own.shape) != placement.mesh:
        raise NotByBlocksError(f"the plan has a mesh ({', '.join(names)}) of its own")
    roles: list[Any] = []
    for role in placement.roles:
        match role:
            case Shard(dim=dim):
                roles.append(dt.Shard(dim))
            case Partial(reduction=reduction):
                roles.append(dt.Partial(reduction))
            case _:
                roles.append(dt.Replicate())
    shape = torch.Size(placement.global_shape)
    strides = torch.empty(shape, device="meta").stride()
    made: Tensor = dt.DTensor.from_local(
        local, own, roles, run_check=False, shape=shape, stride=strides
    )
    return made.detach()


def _submesh(mesh: DeviceMesh | None, names: tuple[str, ...]) -> DeviceMesh | None:
    if mesh is None or names == tuple(mesh.mesh_dim_names or ()):
        return mesh
    try:
        return mesh[names]
    except (KeyError, RuntimeError, ValueError):
        return None


# --- The forms of one call ------------------------------------------------------------------------


@dataclasses.dataclass
class CallForms:
    """One call of a block on one rank, with a form in place of each tensor.

    Attributes:
        args: nested positional arguments; what is not a tensor is the rank's own.
        kwargs: the same for keyword arguments.
        results: path of an output -> its form.
        upstream: path of an output -> the form of its upstream gradient.
        returned: (0 for positional or 1 for keyword, path) -> the form of the gradient that the
            call sends back to that argument.
        around: the modes of torch around it.
    """

    args: Any
    kwargs: Any
    results: dict[str, Form]
    upstream: dict[str, Form]
    returned: dict[tuple[int, str], Form]
    around: Surroundings


@dataclasses.dataclass
class FormFinder:
    """Finds the forms in which ranks hold the values at the boundaries of blocks.

    Attributes:
        program: the whole model under its plan.
        ranks: the native traces of the ranks.
        near: compares with the native reference.
    """

    program: ParallelProgram
    ranks: list[Trace]
    near: Near

    def forms(self, reference: BlockCall, step: int) -> dict[int, CallForms]:
        """Rank -> the forms of one call.

        Raises:
            NotByBlocksError: a value is on the ranks in a form that is not known.
        """
        calls: dict[int, BlockCall] = {}
        for trace in self.ranks:
            made = trace.steps[step].blocks.get(reference.name, [])
            if reference.number >= len(made):
                raise NotByBlocksError(f"rank {trace.rank} does not call it as one device does")
            calls[trace.rank] = made[reference.number]
        found = {r: CallForms(None, None, {}, {}, {}, call.around) for r, call in calls.items()}
        for place, field in enumerate(("args", "kwargs")):
            known = dict(leaves(getattr(reference, field)))
            held = {rank: dict(leaves(getattr(call, field))) for rank, call in calls.items()}
            forms = self._tree(f"its argument {'*' * (place + 1)}{field}", known, held)
            for rank, call in calls.items():
                setattr(found[rank], field, with_forms(getattr(call, field), forms[rank]))
            for key, parked in reference.returned.items():
                if key[0] == place:
                    pieces = _as_pieces({r: call.returned.get(key) for r, call in calls.items()})
                    values = {rank: forms[rank][key[1]] for rank in calls}
                    for rank, form in self._gradient(pieces, values, parked.back()).items():
                        found[rank].returned[key] = form
        known = dict(leaves(reference.result))
        results = {rank: dict(leaves(call.result)) for rank, call in calls.items()}
        forms = self._tree("its result", known, results)
        for item, parked in reference.upstream.items():
            path = item.name.removeprefix(OUTPUT)
            pieces = _as_pieces({rank: call.upstream.get(item) for rank, call in calls.items()})
            values = {rank: forms[rank][path] for rank in calls}
            for rank, form in self._gradient(pieces, values, parked.back()).items():
                found[rank].upstream[path] = form
        for rank, table in forms.items():
            found[rank].results = table
        return found

    def _tree(
        self, what: str, known: Mapping[str, Any], held: dict[int, dict[str, Any]]
    ) -> dict[int, dict[str, Form]]:
        """Rank -> path -> form, of all tensors in nested values."""
        found: dict[int, dict[str, Form]] = {rank: {} for rank in held}
        for path, value in known.items():
            if not isinstance(value, Parked):
                continue
            whole = value.back().detach().cpu()
            pieces = {
                rank: tree[path].value
                for rank, tree in held.items()
                if isinstance(tree.get(path), Boxed)
            }
            if len(pieces) < len(held):
                raise NotByBlocksError(f"{what}{path} is not a tensor on all ranks")
            for rank, form in self._value(f"{what}{path}", pieces, whole).items():
                found[rank][path] = form
        return found

    def _value(self, what: str, pieces: dict[int, RankPiece], whole: Tensor) -> dict[int, Form]:
        """The form of one value on each rank."""
        samples = {trace.rank: trace.samples for trace in self.ranks}
        found: dict[int, Form] = {}
        for rank, piece in pieces.items():
            rows = rows_of_rank(self.program, samples, rank, whole)
            tried = [
                form
                for some in dict.fromkeys((rows, None))
                if (form := self._form_in(rank, piece, Form((), some), whole)) is not None
            ]
            if not tried:
                shapes = f"{list(piece.whole_shape)}, on one device {list(whole.shape)}"
                raise NotByBlocksError(f"{what} has another shape on the ranks: {shapes}")
            found[rank] = next((form for form in tried if form.agrees), tried[0])
        return self._as_terms(pieces, found, whole)

    def _form_in(self, rank: int, piece: RankPiece, form: Form, whole: Tensor) -> Form | None:
        """The form of a piece that is a part of given rows; None if it has another shape."""
        base, place = form.base(whole), piece.placement
        if place is None:
            relation, where = find_part(self.program, rank, piece.local, base, self.near)
            agrees = relation in {Relation.WHOLE, Relation.SHARD}
            return None if where is None else dataclasses.replace(form, where=where, agrees=agrees)
        if place.global_shape != tuple(base.shape) or not place.coordinate:
            return None
        where = locate(rank, piece)
        at = zip(place.coordinate, place.roles, strict=True)
        terms = [place for place, role in at if role == Partial("sum")]
        known = [
            isinstance(role, Replicate) or (isinstance(role, Shard) and role.pieces == 1)
            for role in place.roles
        ]
        if sum(known) + len(terms) < len(place.roles):
            raise NotByBlocksError(f"it is distributed as {', '.join(place.placements)}")
        agrees = bool(terms) or self.near(piece.local, take(base, where))
        return dataclasses.replace(
            form, where=where, placement=place, turn=sum(terms) if terms else None, agrees=agrees
        )

    def _gradient(
        self, pieces: Mapping[int, RankPiece | None], values: dict[int, Form], whole: Tensor
    ) -> dict[int, Form]:
        """The forms of gradients; plain ones lie where the values lie whose gradients they are."""
        whole, factor = whole.detach().cpu(), float(self.program.data_ranks)
        held = {rank: piece for rank, piece in pieces.items() if piece is not None}
        found: dict[int, Form] = {}
        for rank, value in values.items():
            plain = dataclasses.replace(
                value, placement=None, turn=None, factor=factor, agrees=False
            )
            piece = held.get(rank)
            if piece is not None and piece.placement is not None:
                form = self._form_in(rank, piece, plain, whole)
                if form is None:
                    raise NotByBlocksError("a gradient has another shape on the ranks")
                found[rank] = form
            else:
                expected = take(plain.base(whole), plain.where)
                agrees = piece is not None and self.near(piece.local, expected)
                found[rank] = dataclasses.replace(plain, agrees=agrees)
        return self._as_terms(held, found, whole)

    def _as_terms(
        self, pieces: Mapping[int, RankPiece], forms: dict[int, Form], whole: Tensor
    ) -> dict[int, Form]:
        """Plain values that are wrong on each rank may be terms of a sum."""
        found = dict(forms)
        groups: dict[Any, list[int]] = {}
        for rank, form in forms.items():
            if form.placement is None and not form.agrees and rank in pieces:
                groups.setdefault((form.where, form.rows), []).append(rank)
        for ranks in groups.values():
            for parts in _group_terms(self.program, ranks):
                if all(self._add_up(part, pieces, forms, whole) for part in parts):
                    for part in parts:
                        for turn, rank in enumerate(part):
                            found[rank] = dataclasses.replace(forms[rank], turn=turn, agrees=True)
                    break
        return found

    def _add_up(
        self,
        ranks: list[int],
        pieces: Mapping[int, RankPiece],
        forms: Mapping[int, Form],
        whole: Tensor,
    ) -> bool:
        values = [pieces[rank].local for rank in ranks]
        added = _add_terms(values, self.near) if all(map(is_inexact, values)) else None
        if added is None:
            return False
        total, noise = added
        form = forms[ranks[0]]
        return self.near(total, take(form.base(whole), form.where).double(), noise)


def with_forms(tree: Any, forms: Mapping[str, Form]) -> Any:
    """Nested values with forms instead of tensors; paths are those of `leaves`."""
    order = iter([path for path, _ in leaves(tree)])
    boxed = {path: Boxed(form) for path, form in forms.items()}
    return map_leaves(tree, lambda leaf: boxed.get(next(order), leaf))
