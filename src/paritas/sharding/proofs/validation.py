"""Proofs against numbers: a definition compared with torch, the ranks of a graph run at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paritas.core.errors import UsageError, in_one_line
from paritas.core.operators.catalogue import Definition, tensors_by_name
from paritas.core.operators.definitions import flat, number_name
from paritas.core.operators.indices import atoms
from paritas.core.operators.terms import OutsideTheoryError, Term
from paritas.core.placement.assembly import reduce_terms
from paritas.core.placement.placement import Recipe, Terms, split_values
from paritas.core.results.items import Once, Partial, Replicate, Role, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paritas.core.operators.calls import OperatorCall
    from paritas.core.operators.catalogue import DefinedOutput
    from paritas.core.operators.indices import Atom, Poly
    from paritas.sharding.operators.annotation import Annotation


# --- A definition compared with torch: its terms are evaluated, and so are their gradients --------
# A definition is never trusted. Before anything is proved about a call, elements of its results
# are computed from the definition and compared with what torch returns, and so are their
# gradients.

# How many elements of each result are compared for a proof.
ELEMENTS = 3
_RELATIVE, _ABSOLUTE = 1e-7, 1e-9
_MOST_EVALUATED = 20_000


class DisagreementError(OutsideTheoryError):
    """A definition and torch disagree."""


def lift_call(call: OperatorCall) -> OperatorCall:
    """The call in float64, where rounding does not matter."""
    return call.map_tensors(
        lambda tensor: tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    )


def validate(definition: Definition, elements: int = ELEMENTS) -> int:
    """Compare elements of the results, and their gradients, with torch.

    Args:
        elements: how many of each result are compared; all if it has fewer.

    Returns:
        The number of elements that were compared.

    Raises:
        DisagreementError: they differ.
    """
    run = _Run(definition)
    results = [output for output in definition.outputs if output.written is None]
    if len(results) != len(run.results):
        raise DisagreementError(
            f"the definition has {len(results)} results, torch returns {len(run.results)}"
        )
    written = {output.written for output in definition.outputs}
    for name in run.changed_arguments():
        if name not in written:
            raise OutsideTheoryError(f"an operator that writes to its argument {name}")
    run.check_sizes()
    compared = 0
    places = random.Random(0)
    real = iter(run.results)
    for output in definition.outputs:
        value = next(real) if output.written is None else run.after[output.written]
        if value.dim() != len(output.index):
            raise DisagreementError(
                f"the definition has {len(output.index)} dimensions, torch {value.dim()}"
            )
        run.check_shape(output, value)
        compared += run.compare(
            output, value, places.sample(range(value.numel()), min(elements, value.numel()))
        )
    if not compared:
        raise OutsideTheoryError("a call without an element to compare")
    return compared


class _Run:
    """The operator on arguments of which gradients can be taken."""

    def __init__(self, definition: Definition) -> None:
        call = definition.call.call
        self.definition = definition
        self.before = tensors_by_name(call)
        still = set(map(str, call.without_gradient))
        self.leaves = {
            name: tensor.detach()
            .clone()
            .requires_grad_(tensor.is_floating_point() and name.partition("[")[0] not in still)
            for name, tensor in self.before.items()
        }
        self.after = {name: leaf.detach().clone() for name, leaf in self.leaves.items()}
        argument_tensors = {
            name: leaf.clone() if leaf.requires_grad else self.after[name]
            for name, leaf in self.leaves.items()
        }
        self._given = argument_tensors
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(call.seed)
            try:
                args = [
                    _rebuilt(str(at), value, argument_tensors) for at, value in enumerate(call.args)
                ]
                kwargs = {
                    n: _rebuilt(n, value, argument_tensors) for n, value in call.kwargs.items()
                }
                self.results = flat(call.function(*args, **kwargs))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise OutsideTheoryError(
                    f"a call that fails in float64: {in_one_line(error, 80)}"
                ) from error
        self.sizes = _sizes(definition)

    def changed_arguments(self) -> list[str]:
        """The arguments that the operator wrote to."""
        changed_names = []
        for name, before in self.before.items():
            now = self._given[name].detach()
            if now.shape == before.shape and not torch.equal(
                torch.nan_to_num(now), torch.nan_to_num(before)
            ):
                changed_names.append(name)
            self.after[name] = now
        return changed_names

    def check_sizes(self) -> None:
        """What the operator is said to need must be so: it ran."""
        evaluation = _Evaluation(self.definition, self.leaves, self.sizes)
        for kind, *sizes in self.definition.call.requires:
            if kind == "same" and len({evaluation.index(size, {}) for size in sizes}) > 1:
                raise DisagreementError(
                    "the definition needs sizes to be equal that are not: "
                    f"{' and '.join(str(evaluation.index(size, {})) for size in sizes)}"
                )

    def check_shape(self, output: DefinedOutput, value: torch.Tensor) -> None:
        """The shape that the definition gives must be that of torch, as far as it is given."""
        evaluation = _Evaluation(self.definition, self.leaves, self.sizes)
        for at, (size, real) in enumerate(zip(output.shape, value.shape, strict=True)):
            unknown = any(isinstance(atom, tuple) and atom[0] == "size" for atom in atoms(size))
            if not unknown and evaluation.index(size, {}) != real:
                raise DisagreementError(
                    f"dimension {at} of the result has length {evaluation.index(size, {})} by the "
                    f"definition, {real} in torch"
                )

    def compare(self, output: DefinedOutput, value: torch.Tensor, places: list[int]) -> int:
        """Compare elements of one result, and the gradients of the first ones."""
        chosen = [tuple(map(int, np.unravel_index(position, value.shape))) for position in places]
        function_cache: dict[Any, Tensor] = {}
        for turn, at in enumerate(chosen):
            differentiated = turn < 2 and output.written is None  # noqa: PLR2004 - two of them
            evaluation = _Evaluation(
                self.definition, self.leaves, self.sizes, None if differentiated else function_cache
            )
            env = dict(zip(output.index, at, strict=True))
            try:
                defined_value = evaluation.number(output.term, env)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise DisagreementError(
                    f"the definition cannot be evaluated: {in_one_line(error, 120)}"
                ) from error
            real = value[at]
            if not _close(defined_value.detach().reshape(()), real.detach()):
                raise DisagreementError(
                    f"at {list(at)} the definition gives {defined_value.detach().item()}, "
                    f"torch {real.detach().item()}"
                )
            if differentiated:
                self._compare_gradients(defined_value.reshape(()), real, at)
        return len(chosen)

    def _compare_gradients(
        self, defined_value: torch.Tensor, real: torch.Tensor, at: tuple[int, ...]
    ) -> None:
        if not real.requires_grad or not real.is_floating_point():
            return
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf.requires_grad}
        try:
            torch_own = torch.autograd.grad(
                real, list(leaves.values()), retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise OutsideTheoryError(
                f"a call whose gradient fails: {in_one_line(error, 120)}"
            ) from error
        ours: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
        if defined_value.requires_grad:
            ours = torch.autograd.grad(
                defined_value.to(real.dtype), list(leaves.values()), allow_unused=True
            )
        for name, defined_gradient, torch_gradient in zip(leaves, ours, torch_own, strict=True):
            zero = torch.zeros_like(leaves[name])
            left, right = (
                zero if gradient is None else gradient
                for gradient in (defined_gradient, torch_gradient)
            )
            if not _close(left, right):
                raise DisagreementError(
                    f"the gradient of the result at {list(at)} with respect to {name} differs"
                )


def _rebuilt(name: str, value: Any, argument_tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return argument_tensors[name]
    if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(
            argument_tensors[f"{name}[{at}]"] if isinstance(item, torch.Tensor) else item
            for at, item in enumerate(value)
        )
    return value


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_complex() or right.is_complex():
        pair = (
            torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
            for tensor in (left, right)
        )
        return _close(*pair)
    left, right = left.double(), right.double()
    scale = right[right.isfinite()].abs().max() if right.isfinite().any() else torch.tensor(0.0)
    return torch.allclose(
        left, right, rtol=_RELATIVE, atol=_ABSOLUTE * max(1.0, float(scale)), equal_nan=True
    )


def _sizes(definition: Definition) -> dict[Atom, int]:
    sizes: dict[Atom, int] = {}
    for name, tensor in definition.tensors.items():
        sizes |= {f"{name}.{at}": size for at, size in enumerate(tensor.shape)}
    call = definition.call.call
    for argument_place, item in definition.call.symbolic:
        value = (
            call.kwargs[argument_place]
            if isinstance(argument_place, str)
            else call.args[argument_place]
        )
        sizes[number_name(argument_place, item)] = value if item is None else value[item]
    return sizes


# --- Evaluation -----------------------------------------------------------------------------------


class _Evaluation:
    def __init__(
        self,
        definition: Definition,
        tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[Atom, int],
        function_cache: dict[Any, Tensor] | None = None,
    ) -> None:
        """With `function_cache`, a function is evaluated once for the same arrays."""
        self._known = function_cache
        self._functions = definition.call.functions
        self._draws = definition.call.draws
        self._tensors = tensors
        self._sizes = sizes
        self._steps = 0

    def index(self, poly: Poly, env: Mapping[Atom, int]) -> int:
        total = 0
        for monomial, value in poly:
            total += value * math.prod(self._atom(atom, env) for atom in monomial)
        return total

    def _atom(self, atom: Atom, env: Mapping[Atom, int]) -> int:
        if isinstance(atom, tuple):
            if atom[0] not in ("//", "%"):
                raise OutsideTheoryError("a size that only torch knows")
            left, right = self.index(atom[1], env), self.index(atom[2], env)
            return left // right if atom[0] == "//" else left % right
        return env[atom] if atom in env else self._sizes[atom]

    def number(self, term: Term, env: Mapping[Atom, int]) -> torch.Tensor:
        """The value of a term."""
        self._steps += 1
        if self._steps > _MOST_EVALUATED:
            raise OutsideTheoryError("a call too large to evaluate; use smaller shapes")
        kind = term[0]
        if kind == "num":
            return torch.tensor(float(Fraction(term[1])), dtype=torch.float64)
        if kind == "int":
            return torch.tensor(self.index(term[1], env))
        if kind in ("read", "draw"):
            tensor = self._tensors[term[1]] if kind == "read" else self._draws[term[1]]()
            return tensor[tuple(self.index(p, env) for p in term[-1])]
        if kind in ("add", "mul"):
            values = [self.number(operand, env) for operand in term[1]]
            total = values[0]
            for value in values[1:]:
                total = total + value if kind == "add" else total * value
            return total
        if kind == "inv":
            return 1.0 / self.number(term[1], env)
        if kind == "fn":
            return self._functions[term[1]]([self.number(argument, env) for argument in term[2]])
        if kind == "fun":
            arrays = [self._array(binders, body, env) for binders, body in term[2]]
            result = self._function(term[1], arrays)
            return result[tuple(self.index(position, env) for position in term[3])]
        return self._reduction(term, env)

    def _function(self, name: str, arrays: list[Tensor]) -> Tensor:
        if self._known is None:
            return self._functions[name](arrays)
        contents = tuple((tuple(array.shape), array.detach().numpy().tobytes()) for array in arrays)
        if (name, contents) not in self._known:
            self._known[name, contents] = self._functions[name](arrays).detach()
        return self._known[name, contents]

    def _reduction(self, term: Term, env: Mapping[Atom, int]) -> torch.Tensor:
        kind, name, size, body = term
        values = [self.number(body, {**env, name: at}) for at in range(self.index(size, env))]
        stacked = torch.stack([value.reshape(()) for value in values])
        if kind == "sum":
            return stacked.sum()
        if kind == "prod":
            return stacked.prod()
        return stacked.amax() if kind == "max" else stacked.amin()

    def _array(self, binders: Any, body: Term, env: Mapping[Atom, int]) -> torch.Tensor:
        sizes = [self.index(size, env) for _, size in binders]
        names = [name for name, _ in binders]
        sliced = self._slice(names, sizes, body, env) if body[0] == "read" else None
        if sliced is not None:
            return sliced
        values = [
            self.number(body, {**env, **dict(zip(names, at, strict=True))}).reshape(())
            for at in itertools.product(*map(range, sizes))
        ]
        return torch.stack(values).reshape(sizes)

    def _slice(
        self, names: list[str], sizes: list[int], body: Term, env: Mapping[Atom, int]
    ) -> torch.Tensor | None:
        """An array whose indices are places of one tensor, in their order."""
        at: list[Any] = []
        order: list[str] = []
        lengths = dict(zip(names, sizes, strict=True))
        for index_poly in body[2]:
            bound_monomials = [m for m, _ in index_poly if any(name in names for name in m)]
            nested = any(isinstance(atom, tuple) for m, _ in index_poly for atom in m)
            if not bound_monomials:
                at.append(self.index(index_poly, env))
                continue
            if (
                nested
                or len(bound_monomials) > 1
                or len(bound_monomials[0]) != 1
                or dict(index_poly)[bound_monomials[0]] != 1
            ):
                return None
            begin = self.index(
                tuple(poly_term for poly_term in index_poly if poly_term[0] != bound_monomials[0]),
                env,
            )
            name = bound_monomials[0][0]
            at.append(slice(begin, begin + lengths[name]))
            order.append(name)
        if order != names:
            return None
        return self._tensors[body[1]][tuple(at)]


# --- The ranks of a graph, all at once: parts, lengths of parts, collectives, results -------------
# A proof must agree with these numbers, and a program that is not proved is refuted by them only.

# How the parts of a value lie in it, by their shapes: all of it, or along a dimension; None if they
# do not fit.
Layout = int | str | None
WHOLE: Layout = "whole"


class OnRanks(Protocol):
    """A value on one device and on each rank."""

    whole: Any
    parts: list[Any]


def parts_of(whole_tensor: Tensor, role: Role, ranks: int) -> list[Tensor] | None:
    """The part of each rank; None if it cannot be split so."""
    match role:
        case Shard(dim=dim, pieces=pieces) if (
            dim < whole_tensor.dim() and whole_tensor.shape[dim] % (ranks * pieces) == 0
        ):
            cut = [piece.chunk(ranks, dim) for piece in whole_tensor.chunk(pieces, dim)]
            return [torch.cat([piece[rank] for piece in cut], dim) for rank in range(ranks)]
        case Replicate():
            return [whole_tensor] * ranks
        case Once():
            return [
                whole_tensor if rank == 0 else torch.zeros_like(whole_tensor)
                for rank in range(ranks)
            ]
        case Partial(reduction="sum"):
            terms = [whole_tensor * (rank + 2) for rank in range(ranks - 1)]
            return [*terms, whole_tensor - sum(terms)]
    return None


def assemble_parts(parts: list[Tensor], role: Role) -> list[Tensor]:
    """What should each be the whole, if the parts are placed so."""
    match role:
        case Shard(dim=dim, pieces=pieces) if dim < parts[0].dim():
            cut = [part.chunk(pieces, dim) for part in parts]
            fits = all(len(part_pieces) == pieces for part_pieces in cut)
            order = (
                [part_pieces[at] for at in range(pieces) for part_pieces in cut] if fits else parts
            )
            return [torch.cat(order, dim)]
        case Partial(reduction=reduction):
            return [reduce_terms(parts, reduction, accumulate="own")]
    return parts


def combine_parts(kind: str, parts: list[Any], dim_or_reduction: Any) -> list[Any]:
    """The parts after a collective; None if they do not fit together."""
    ranks = len(parts)
    try:
        if kind == "all_gather":
            return [torch.cat(parts, dim_or_reduction)] * ranks
        if kind == "all_reduce":
            return [reduce_terms(parts, dim_or_reduction, accumulate="own")] * ranks
        total = parts[0] if kind == "keep_slice" else reduce_terms(parts, "sum", accumulate="own")
        slices = list(total.chunk(ranks, dim_or_reduction))
        return slices if len(slices) == ranks else [None] * ranks
    except (RuntimeError, TypeError, AttributeError, IndexError):
        return [None] * ranks


def layout_of(value: OnRanks) -> Layout:
    """How the parts lie in the whole."""
    if not isinstance(value.whole, torch.Tensor):
        return WHOLE
    shapes = {tuple(part.shape) if isinstance(part, torch.Tensor) else None for part in value.parts}
    if len(shapes) != 1 or shapes == {None}:
        return None
    shape = shapes.pop() or ()
    whole_shape = tuple(value.whole.shape)
    if shape == whole_shape:
        return WHOLE
    if len(shape) != len(whole_shape):
        return None
    changed = [
        at
        for at, (part_length, all_) in enumerate(zip(shape, whole_shape, strict=True))
        if part_length != all_
    ]
    return changed[0] if len(changed) == 1 else None


def numbers_by_layout(
    call: OperatorCall,
    annotation: Annotation | None,
    layouts: Mapping[int | str, set[Layout]],
    ranks: int,
) -> list[dict[Any, Any]]:
    """Place -> the value on each rank, for arguments that are lengths of what is split."""
    nothing: list[dict[Any, Any]] = [{} for _ in range(ranks)]
    if annotation is None or all(layout == {WHOLE} for layout in layouts.values()):
        return nothing
    for option in annotation.options(call):
        try:
            recipe = annotation.recipe(call, dataclasses.replace(option, num=ranks))
        except UsageError:  # a length that cannot be divided
            continue
        if recipe.numbers and _fits(recipe, layouts):
            return _local_numbers(call, recipe, ranks)
    return nothing


def _fits(recipe: Recipe, layouts: Mapping[int | str, set[Layout]]) -> bool:
    for argument_place, place_layouts in layouts.items():
        role = recipe.placement(argument_place)
        if place_layouts != {role.dim if isinstance(role, Shard) else WHOLE}:
            return False
    return True


def _local_numbers(call: OperatorCall, recipe: Recipe, ranks: int) -> list[dict[Any, Any]]:
    values: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
    places = {argument_place for argument_place, _ in recipe.numbers}
    each = split_values(values, recipe, ranks, Terms(0, lifted=True))
    return [
        {
            argument_place: value
            for argument_place, value in rank_values.items()
            if argument_place in places
        }
        for rank_values in each
    ]


def run_part(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a rank computes; None if it raises, for a wrong plan may not even run."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
        return None


def distance(whole_result: Any, parts: list[Any], role: Role) -> float:
    """How far the ranks' result is off, relative to the largest value."""
    if not isinstance(whole_result, torch.Tensor):
        return float("nan")
    if any(not isinstance(part, torch.Tensor) for part in parts):
        return float("inf")
    if len({part.shape for part in parts}) > 1:
        return float("inf")
    together = assemble_parts(parts, role)
    if any(assembled_part.shape != whole_result.shape for assembled_part in together):
        return float("inf")
    exact = whole_result.double()
    largest = max(float(exact.abs().max()) if whole_result.numel() else 0.0, 1e-300)
    gaps = [
        (assembled_part.double() - exact).abs() / largest
        for assembled_part in together
        if assembled_part.numel()
    ]
    return max((float(gap.max()) for gap in gaps), default=0.0)
