"""Certificates: a theorem about a call, and the definition and the split that it is about.

The theorem is the operator, its arguments (of tensors the shape and the dtype), the rule and what
it splits, or without a rule the placements, and what is assumed. Everything else in a certificate
follows from these: `checker` derives it again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.numerics.bits import dtype_name
from paritas.core.operators import indices
from paritas.core.operators.calls import OperatorCall
from paritas.core.operators.catalogue import Definition, define, operator_called
from paritas.core.operators.terms import OutsideTheoryError
from paritas.sharding.operators.annotation import Annotation
from paritas.sharding.operators.resolving import resolve_operator
from paritas.sharding.proofs.claims import Claims, placed_claim

if TYPE_CHECKING:
    from paritas.sharding.proofs.splits import Claim, RoleWords

VERSION = 2
GRAPH_VERSION = 2


def certificate_of(
    definition: Definition, claim: Claim, parts: str, rule: str | None, split_by: str | None
) -> dict[str, Any]:
    """All that `checker` needs, as JSON data.

    Args:
        parts: whether parts may be of any size, or must be equal.
        rule: the annotation; None if the claim is about placements.

    Raises:
        OutsideTheoryError: an argument cannot be written to a file.
    """
    drawn: dict[str, Any] = {}
    call = definition.call.call
    outputs = [
        {
            "shape": output.shape,
            "index": output.index,
            "term": _with_draws(output.term, claim, drawn),
            "role": role,
            "written": output.written,
        }
        for output, role in claim.outputs
    ]
    certificate = {
        "paritas certificate": VERSION,
        "operator": call.name,
        "call": {
            "args": [_write(value) for value in call.args],
            "kwargs": {name: _write(value) for name, value in call.kwargs.items()},
        },
        "rule": rule,
        "split by": split_by,
        "parts": parts,
        "assumes": definition.call.assumes,
        "tensors": {
            name: {"sizes": sizes, "role": role}
            for name, (sizes, role) in {**claim.tensors, **drawn}.items()
        },
        "numbers": claim.numbers,
        "requires": claim.requires,
        "outputs": outputs,
    }
    # Tuples become lists, as in a file.
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(certificate))
    return decoded


def _with_draws(term: Any, claim: Claim, drawn: dict[str, Any]) -> Any:
    """A term in which random tensors are arguments, of which each rank has its part."""
    if not isinstance(term, tuple):
        return term
    if term[:1] != ("draw",):
        return tuple(_with_draws(part, claim, drawn) for part in term)
    whole_sizes = {
        f"{n}.{at}": s for n, (sizes, _) in claim.tensors.items() for at, s in enumerate(sizes)
    }
    split = {f"{n}.{role[1]}" for n, (_, role) in claim.tensors.items() if role[0] == "shard"}
    sizes = tuple(indices.replace(size, whole_sizes, {}) for size in term[2])
    dims = [at for at, size in enumerate(term[2]) if split & set(indices.atoms(size))]
    drawn[f"draw {term[1]}"] = (sizes, ("shard", dims[0]) if dims else ("replicate",))
    return ("read", f"draw {term[1]}", term[3])


# --- The same certificate, from its theorem -------------------------------------------------------


def derive_certificate(data: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The certificate of the theorem that a certificate states, and the results without values.

    Raises:
        OutsideTheoryError: the theory has no such theorem.
        UsageError: the rule does not fit the call.
    """
    try:
        return _derive(data, read_call(data, "meta"))
    except (NotImplementedError, RuntimeError):  # an operator that looks at values
        return _derive(data, read_call(data, "cpu"))


def _derive(data: Any, call: OperatorCall) -> tuple[dict[str, Any], list[torch.Tensor]]:
    rule, assumed = data["rule"], data["assumes"]
    if rule is None:
        definition = define(call, (), assumed)
        roles = {name: _role(data["tensors"][name]["role"]) for name in definition.tensors}
        results = [_role(output["role"]) for output in data["outputs"]]
        claim, split_by = placed_claim(definition, roles, results), None
    else:
        annotation = Annotation.parse(rule)
        claims = Claims(call, annotation, assumed)
        recipes = [annotation.recipe(call, option) for option in annotation.options(call)]
        matching_recipes = [recipe for recipe in recipes if recipe.identifier == data["split by"]]
        if not matching_recipes:
            raise OutsideTheoryError(f"a split by {data['split by']!r:.40} under {annotation.text}")
        definition, claim = claims.definition, claims.claim(matching_recipes[0])
        rule, split_by = annotation.text, matching_recipes[0].identifier
    derived = certificate_of(definition, claim, data["parts"], rule, split_by)
    return derived, definition.results


def read_call(data: Any, device: str) -> OperatorCall:
    """The call of a certificate, with tensors of ones, or without values on the device `meta`."""
    name, call_data = data["operator"], data["call"]
    if not isinstance(name, str) or operator_called(name) is None:  # nothing else is imported
        raise OutsideTheoryError(f"no definition of {name!r:.80}")
    function = resolve_operator(f"torch.ops.{name}" if name.startswith("aten.") else name)
    args = tuple(_read(value, device) for value in call_data["args"])
    kwargs = {key: _read(value, device) for key, value in call_data["kwargs"].items()}
    return OperatorCall(function, args, kwargs, name)


def _role(words: list[Any]) -> RoleWords:
    return tuple(words)


# --- Arguments as JSON ----------------------------------------------------------------------------


def describe_tensor(value: torch.Tensor) -> dict[str, Any]:
    """The shape and the dtype of a tensor."""
    return {"tensor": list(value.shape), "dtype": dtype_name(value.dtype)}


def _write(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list | tuple):
        return {
            "list" if isinstance(value, list) else "tuple": [_write(element) for element in value]
        }
    if isinstance(value, slice):
        return {
            "slice": [_write(slice_bound) for slice_bound in (value.start, value.stop, value.step)]
        }
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": dtype_name(value)}
    raise OutsideTheoryError(f"an argument of type {type(value).__name__} in a certificate")


# An operator that looks at values gets tensors of ones, which must not fill the memory.
_MOST_ONES = 1 << 22


def _read(data: Any, device: str) -> Any:
    match data:
        case {"tensor": list(shape), "dtype": str(dtype)}:
            if device != "meta" and math.prod(shape) > _MOST_ONES:
                raise OutsideTheoryError(f"a tensor of shape {shape} for an operator of values")
            return torch.ones(shape, dtype=_torch_value(dtype), device=device)
        case {"float": ("inf" | "-inf" | "nan") as word}:
            return float(word)
        case {"list": list(items)}:
            return [_read(item, device) for item in items]
        case {"tuple": list(items)}:
            return tuple(_read(item, device) for item in items)
        case {"slice": [start, stop, step]}:
            return slice(*(_read(slice_bound, device) for slice_bound in (start, stop, step)))
        case {"ellipsis": True}:
            return ...
        case {"torch": str(name)}:
            return _torch_value(name)
        case None | bool() | int() | float() | str():
            return data
    raise OutsideTheoryError(f"the argument {data!r:.80}")


def _torch_value(name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        raise OutsideTheoryError(f"the argument torch.{name:.40}")
    return value
