"""What is proved for all lengths holds for other lengths, also where numbers are tied to lengths.

Rules are drawn at random: a number of a call is said to be the length of some dimension. Whatever
is then proved is checked numerically on other lengths and numbers of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.operators.definitions import flat
from paritas.core.results.findings import Status
from paritas.sharding.operators.annotation import Annotation, Option, expand
from paritas.sharding.operators.recipe_checks import check_recipe
from paritas.sharding.operators.resolving import resolve_operator
from paritas.sharding.proofs.checker import Checker
from paritas.sharding.proofs.prove import Prover, resize_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RIGHT = (Status.IDENTICAL, Status.EQUIVALENT, Status.UNSTABLE)
LENGTHS = {"a": 4, "b": 6, "c": 8}


class Tied(NamedTuple):
    """A call with numbers that may be lengths, and what its rule says without them.

    The shape is `a b c`. A number that is drawn is `None` in the arguments.
    """

    name: str
    rule: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


LAST = "a b c^ -> a b c^"
EACH = "a b c -> a b c"
F = "torch.nn.functional."
CORPUS = [
    Tied("torch.tril", "a b^ c^ -> a b^ c^", (), {"diagonal": None}),
    Tied("torch.triu", "a b^ c^ -> a b^ c^", (None,)),
    Tied("torch.roll", LAST, (), {"shifts": None, "dims": 2}),
    Tied("torch.roll", "a^ b c -> a^ b c", (None, 0)),
    Tied("aten.slice", "a b c^ -> a b _", (2, 0, None)),
    Tied("aten.slice", "a b c^ -> a b _", (2, None, 8)),
    Tied("torch.narrow", "a b c^ -> a b _", (2, 0, None)),
    Tied("torch.select", "a b c^ -> a b", (2, None)),
    Tied("torch.chunk", "a b c^ -> a b _, a b _, a b _, a b _", (None, 2)),
    Tied("torch.split", "a b c^ -> a b _, a b _", (None, 2)),
    Tied("torch.clamp", EACH, (), {"max": None}),
    Tied("torch.clamp", EACH, (None, 9)),
    Tied(f"{F}hardtanh", EACH, (), {"min_val": -1, "max_val": None}),
    Tied("torch.fmod", EACH, (None,)),
    Tied("torch.pow", EACH, (None,)),
    Tied("torch.add", EACH, (None,)),
    Tied("torch.mul", EACH, (None,)),
    Tied(f"{F}leaky_relu", EACH, (), {"negative_slope": None}),
    Tied(f"{F}elu", EACH, (), {"alpha": None}),
    Tied(f"{F}threshold", EACH, (0.1, None)),
    Tied(f"{F}pad", "a b c^ -> a b _", ([1, None],)),
    Tied("torch.Tensor.unfold", "a b c^ -> a b _ _", (2, None, 1)),
    Tied("torch.Tensor.repeat", "a b c^ -> a b _", (1, 1, None)),
    Tied("torch.Tensor.expand", "a b c -> a b c", (None, -1, -1)),
    Tied("torch.Tensor.expand", "a b c -> d a b c", (None, -1, -1, -1)),
    Tied("torch.repeat_interleave", "a b c^ -> a b _", (None,), {"dim": 2}),
    Tied("torch.topk", "a b c^ -> a b _, a b _", (None,)),
    Tied("torch.kthvalue", "a b c^ -> a b, a b", (None,)),
    Tied("torch.diagonal", "a b^ c^ -> a _", (None, 1, 2)),
    Tied("torch.diff", "a b c^ -> a b _", (None,)),
    Tied("torch.cumsum", LAST, (None,)),
    Tied("torch.softmax", LAST, (None,)),
    Tied("torch.sum", "a b c+ -> a b", (None,)),
    Tied("torch.unsqueeze", "a b c -> a b c 1", (None,)),
    Tied("torch.transpose", "a b c -> a c b", (1, None)),
    Tied("torch.var", "a b c^ -> a b", (2,), {"correction": None}),
    Tied("torch.norm", "a b c^ -> a b", (None, 2)),
    Tied("torch.linalg.vector_norm", "a b c^ -> a b", (None, 2)),
    Tied(f"{F}adaptive_avg_pool1d", "a b c^ -> a b _", (None,)),
    Tied(f"{F}avg_pool1d", "a b c^ -> a b _", (None,)),
    Tied(f"{F}max_pool1d", "a b c^ -> a b _", (2, None)),
    Tied(f"{F}interpolate", "a b c^ -> a b _", (None,)),
    Tied(f"{F}local_response_norm", "a b^ c -> a b^ c", (None,)),
    Tied(f"{F}group_norm", "a b^ c^ -> a b^ c^", (None,)),
    Tied(f"{F}layer_norm", LAST, ((None,),)),
    Tied("torch.fft.rfft", "a b c^ -> a b _", (None,)),
    Tied("torch.Tensor.view", "a b c -> a b c", (None, -1, 8)),
    Tied("torch.unflatten", "a b c^ -> a b _ _", (2, (None, 2))),
    Tied("torch.flatten", "a b c^ -> a (b c^)", (None,)),
]


def tie(case: Tied, draw: random.Random) -> tuple[OperatorCall, Annotation]:
    """The call with a number that is a length, and the rule that says so."""
    x = torch.randn(*LENGTHS.values(), generator=torch.Generator().manual_seed(0))
    identifier = draw.choice(sorted(set(re.findall(r"[a-d]", case.rule))))
    value = LENGTHS.get(identifier, 2)
    place = next((name for name, one in case.kwargs.items() if one is None), "")
    for at, one in enumerate(case.args, 1):
        if one is None:
            place = str(at)
        elif isinstance(one, list | tuple) and None in one:
            place = f"{at}[{one.index(None)}]"

    def fill(one: Any) -> Any:
        if isinstance(one, list | tuple):
            return type(one)(map(fill, one))
        return value if one is None else one

    inputs, arrow, outputs = case.rule.partition(" ->")
    rule = f"{inputs}{', ?' * len(case.args)}{arrow}{outputs} ; {place}={identifier}"
    kwargs = {key: fill(one) for key, one in case.kwargs.items()}
    function = resolve_operator(case.name.replace("aten.", "torch.ops.aten."))
    call = OperatorCall(function, (x, *fill(case.args)), kwargs, case.name)
    return call, Annotation.parse(rule)


NOT_ACCEPTED = (UsageError, RuntimeError, IndexError, ValueError, TypeError)


def accepted_lengths(
    call: OperatorCall, annotation: Annotation, draw: random.Random
) -> Iterator[OperatorCall]:
    """The call with other lengths that the operator accepts."""
    expansion = expand(annotation.signature, call)
    for _ in range(5):
        lengths = {name: draw.randint(2, 12) for name in LENGTHS}
        with contextlib.suppress(*NOT_ACCEPTED):
            other = resize_call(call, expansion, lengths)
            annotation.check(other)
            count = len(flat(other.function(*other.args, **other.kwargs)))
            if count == len(annotation.signature.outputs):
                yield other


def failures(
    call: OperatorCall, annotation: Annotation, option: Option, draw: random.Random
) -> Iterator[tuple[Any, bool]]:
    """Whether the numerical check of a split fails, on other lengths and numbers of ranks."""
    identifier = annotation.recipe(call, option).identifier
    for other in accepted_lengths(call, annotation, draw):
        ranks = draw.choice([2, 3])
        with contextlib.suppress(UsageError):  # too few elements for the ranks
            recipe = annotation.recipe(other, dataclasses.replace(option, num=ranks))
            if recipe.identifier == identifier:
                shape = list(other.args[0].shape)
                said = (call.name, annotation.text, identifier, shape, ranks)
                yield said, check_recipe(other, recipe, ranks).status not in RIGHT


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.filterwarnings("ignore")
def test_what_is_proved_with_a_number_tied_to_a_length_holds_for_other_lengths():
    draw = random.Random(1)
    proved, checked = 0, []
    for case in CORPUS * 2:
        call, annotation = tie(case, draw)
        try:
            options = annotation.options(call)
            call.function(*call.args, **call.kwargs)
        except NOT_ACCEPTED:  # the number does not fit
            continue
        prover = Prover(call, annotation, check=False)
        for option in options:
            proof = prover.prove(annotation.recipe(call, option))
            if proof.status == "proved":
                proved += 1
                Checker(proof.certificate).check()
                checked += failures(call, annotation, option, draw)

    assert [said for said, fails in checked if fails] == []
    assert proved > 30
    assert len(checked) > 60
