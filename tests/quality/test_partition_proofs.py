"""Proofs of splits: what is proved passes the check, and what is wrong is never proved."""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterator

import pytest

from paritas.partition.library import known
from paritas.partition.proofs.checker import Checker
from paritas.partition.proofs.prove import Prover, expand, resized
from paritas.partition.recipe_checks import check_recipe
from quality.partition_mutants import mutants
from quality.test_partition_library import RIGHT, calls_of

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# One spelling of each operator; the others have the same definition.
NAMES = known()  # before other tests register operators of their own
OPERATORS = sorted({name.rpartition(".")[2]: name for name in NAMES}.values())
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
    for name in OPERATORS[:: 1 if WHOLE else 6]:
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


def test_definitions_agree_with_torch_on_other_shapes() -> None:
    """Each definition is compared with torch wherever it is used; here, also on changed lengths."""
    compared = 0
    for number, name in enumerate(OPERATORS):
        if not WHOLE and number % 8:
            continue
        for call, annotation in itertools.islice(calls_of(name), 2):
            lengths = {
                each: length + 1 + number % 2
                for each, length in expand(annotation.signature, call).lengths.items()
                if length > 1 and each not in ("_", "k")
            }
            try:
                other = resized(call, expand(annotation.signature, call), lengths)
                other.function(*other.args, **other.kwargs)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the operator wants these lengths as they are
            prover = Prover(other, annotation)
            assert not prover.disagreement, (name, annotation.text, prover.disagreement)
            compared += prover.disagreement is not None

    assert compared > 25


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
