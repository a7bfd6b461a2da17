"""Proofs of splits: what is proved passes the check, and what is wrong is never proved."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from paritas.core.operators.catalogue import define
from paritas.core.operators.definitions import OPERATORS
from paritas.core.operators.terms import OutsideTheoryError
from paritas.sharding.operators.annotation import Annotation, expand
from paritas.sharding.operators.library import known
from paritas.sharding.operators.recipe_checks import check_recipe
from paritas.sharding.proofs.checker import Checker
from paritas.sharding.proofs.claims import symbolic_numbers
from paritas.sharding.proofs.prove import Prover, resize_call
from paritas.sharding.proofs.validation import DisagreementError, lift_call, validate
from quality.partition_mutants import mutants
from quality.test_partition_library import RIGHT, calls_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.operators.calls import OperatorCall

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# One spelling of each operator; the others have the same definition.
NAMES = known()  # before other tests register operators of their own
SPELLINGS = sorted({name.rpartition(".")[2]: name for name in NAMES}.values())
# One spelling for each definition.
DEFINED = {(name.rpartition(".")[2], OPERATORS[name].define): name for name in reversed(NAMES)}
# The operators of which a split is not decided, and why.
UNDECIDED = {
    "nnscaler.graph.function.wrapnn.wrap_batchnorm2d_func": "ranks exchange data",
    "nnscaler.graph.function.wrapnn.wrap_instancenorm2d_func": "running statistics",
    "torch.nn.functional.embedding": "scale_grad_by_freq",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_the_rules_of_the_library_are_proved_and_their_certificates_hold() -> None:
    undecided = []
    for name in SPELLINGS[:: 1 if WHOLE else 6]:
        for call, annotation in calls_of(name):
            prover = Prover(call, annotation)
            for option in annotation.options(call):
                recipe = annotation.recipe(call, dataclasses.replace(option, num=2))
                proof = prover.prove(recipe)
                if proof.certificate is None:
                    undecided.append((name, proof.reason))
                    continue
                Checker(proof.certificate).check()

    assert [one for one in undecided if UNDECIDED.get(one[0], "?") not in one[1]] == []


def small(
    call: OperatorCall, annotation: Annotation, draw: random.Random
) -> Iterator[OperatorCall]:
    """The call with short lengths drawn at random and other values, if the operator accepts it."""
    expansion = expand(annotation.signature, call)
    names = [name for name, length in expansion.lengths.items() if length > 1 and name != "_"]
    generator = torch.Generator().manual_seed(draw.randrange(1000))

    def other(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        order = torch.randperm(value.numel(), generator=generator)
        return value.detach().flatten()[order].reshape(value.shape)

    with contextlib.suppress(RuntimeError, ValueError, IndexError, TypeError):
        made = resize_call(call, expansion, {name: draw.choice((2, 3)) for name in names})
        made = made.map_tensors(other)
        made.function(*made.args, **made.kwargs)
        yield made


def test_every_definition_agrees_with_torch_on_all_elements() -> None:
    """The code of the definitions is what proofs trust: it is compared with torch.

    Each operator is called with each of its samples, with short lengths drawn at random if it
    accepts them. All elements are compared (400 of long results), and the gradients of two.
    """
    draw = random.Random(0)
    validated, disagreements = set(), []
    for key, name in DEFINED.items():
        for call, annotation in calls_of(name):
            for one in (*small(call, annotation, draw), call):
                try:
                    numbers = symbolic_numbers(expand(annotation.signature, one))
                    validate(define(lift_call(one), numbers), 400)
                    validated.add(key)
                    break
                except DisagreementError as error:
                    disagreements.append((name, annotation.text, str(error)))
                except OutsideTheoryError:
                    continue

    assert disagreements == []
    # A new definition needs a sample in `partition_samples`.
    assert sorted(name for key, name in DEFINED.items() if key not in validated) == []


@pytest.mark.usefixtures("undiagnosed")
def test_a_wrong_rule_is_never_proved_and_nearly_always_refuted() -> None:
    """Rules changed at random, against the numerical check."""
    wrong, refuted, right = 0, 0, 0
    for rule in itertools.islice(mutants(NAMES, calls_of, seed=3), 4000 if WHOLE else 80):
        prover = Prover(rule.call, rule.annotation, check=False)
        proof = prover.prove(rule.recipe)
        passed = check_recipe(rule.call, rule.recipe, 2).status in RIGHT
        if proof.status == "proved":
            assert passed, (rule.call.name, rule.recipe.words)
            right += 1
        elif not passed:
            wrong += 1
            example = prover.refute(rule.recipe)
            sizes = [] if example is None else [n for s in example.shapes.values() for n in s]
            refuted += example is not None and max(sizes) <= 8

    assert right > 10
    assert refuted >= 0.9 * wrong > 10
