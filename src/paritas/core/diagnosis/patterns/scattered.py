"""Rows that were added to other places than their indices say: which, is found by the result."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# The indices and the rows of operators that add rows up.
_ROWS = {
    "embedding_dense_backward": ("indices", "grad_output"),
    "index_add": ("index", "source"),
}
_MOST_ROWS = 512
_NEAR = 1e-6


def scattered_rows(step: Step, candidate: Tensor) -> Iterator[Variation]:
    """A sum of rows by their indices, with the indices that give the candidate."""
    names = _ROWS.get(step.name)
    if names is None or step.values.get("padding_idx", -1) >= 0:
        return
    if step.values.get("dim", 0) != 0 or step.values.get("alpha", 1) != 1:
        return
    indices, grad = (step.values[name] for name in names)
    rows = grad.detach().cpu().double().reshape(indices.numel(), -1)
    into = step.values.get("self")
    count = step.values["num_weights"] if into is None else len(into)
    if into is not None and into.numel() == candidate.numel():
        candidate = candidate.reshape(into.shape) - into.detach().cpu().double()
    if not 1 < len(rows) <= _MOST_ROWS or candidate.numel() != count * rows.shape[1]:
        return
    places = _places_of(rows, candidate.reshape(count, -1))
    if places is None:
        return
    used = places >= 0
    right = indices.detach().cpu().reshape(-1)
    if bool((places[used] == right[used]).all()):
        return  # rows that are left out are another matter
    sentence = "rows are added to other places than their indices say"
    if not bool(used.all()):
        sentence += f", and {int((~used).sum())} of {len(used)} are left out"
    yield Variation(PatternKind.WRONG_INDEX, sentence, partial(_added_to, places=places))


def _added_to(step: Step, places: Tensor) -> Any:
    names = _ROWS[step.name]
    indices, grad = (step.values[name] for name in names)
    places = places.to(indices.device).reshape(indices.shape)
    used = (places >= 0).reshape(*places.shape, *[1] * (grad.dim() - places.dim()))
    return step.run(**{names[0]: places.clamp(min=0).to(indices.dtype), names[1]: grad * used})


def _places_of(rows: Tensor, sums: Tensor) -> Tensor | None:
    """The sum that each row is a term of, -1 for none; None if that is not known."""
    if rows.shape[1] >= len(rows):
        solution = torch.linalg.lstsq(rows.T, sums.T, driver="gelsd")
        weights = solution.solution.T
        rounded = weights.round()
        is_sum = float((rounded @ rows - sums).abs().max()) <= _NEAR * float(rows.abs().max())
        if int(solution.rank) < len(rows) or not is_sum:
            return None
        once = bool(((rounded == 0) | (rounded == 1)).all()) and bool((rounded.sum(0) <= 1).all())
        return torch.where(rounded.sum(0) > 0, rounded.argmax(0), -1) if once else None
    return _explain_pair_sums(rows, sums)


def _explain_pair_sums(rows: Tensor, sums: Tensor) -> Tensor | None:
    """The same for sums of at most two rows."""
    limit = _NEAR * float(rows.abs().max())
    places = torch.full((len(rows),), -1)
    first, second = torch.triu_indices(len(rows), len(rows), 1)
    # One number of each row, drawn at random, tells which rows may fit.
    key = torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0)).double()
    alone, both = rows @ key, (rows[first] + rows[second]) @ key
    for position in (sums.abs().amax(1) > limit).nonzero().reshape(-1).tolist():
        target = sums[position]
        number = target @ key
        wide = limit * rows.shape[1]
        for some in (
            [(int(index),) for index in ((alone - number).abs() <= wide).nonzero()],
            [
                (int(first[index]), int(second[index]))
                for index in ((both - number).abs() <= wide).nonzero()
            ],
        ):
            fitting = [
                indices
                for indices in some
                if float((rows[list(indices)].sum(0) - target).abs().max()) <= limit
            ]
            if fitting:
                break
        if len(fitting) != 1 or bool((places[list(fitting[0])] >= 0).any()):
            return None
        places[list(fitting[0])] = position
    return places
