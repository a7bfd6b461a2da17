"""Forged certificates: whatever is changed in one, it is refused or says the same."""

from __future__ import annotations

import copy
import json
import os
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from drawing import normal
from paritas.core.operators.calls import OperatorCall
from paritas.core.results.findings import Status
from paritas.sharding.operators.annotation import Annotation
from paritas.sharding.operators.library import annotation_of_call
from paritas.sharding.operators.recipe_checks import check_recipe
from paritas.sharding.proofs import checker, graph_checker
from paritas.sharding.proofs.checker import Checker
from paritas.sharding.proofs.graph_checker import GraphChecker
from paritas.sharding.proofs.graphs import all_reduce, prove_graph
from paritas.sharding.proofs.kernel import Refused
from paritas.sharding.proofs.prove import Prover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paritas.core.placement.placement import Recipe

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))


class Example(NamedTuple):
    call: OperatorCall
    split: str
    rule: str = ""

    def recipe(self, rule: str) -> Recipe:
        annotation = Annotation.parse(rule)
        recipes = [annotation.recipe(self.call, one) for one in annotation.options(self.call)]
        return next(recipe for recipe in recipes if recipe.identifier == self.split)

    def certificate(self) -> Any:
        """As it comes from a file."""
        annotation = Annotation.parse(self.rule) if self.rule else annotation_of_call(self.call)
        assert annotation is not None
        prover = Prover(self.call, annotation, check=False)
        proof = prover.prove(self.recipe(annotation.text))
        assert proof.status == "proved", proof.words
        return json.loads(json.dumps(proof.certificate))

    def holds(self, rule: str) -> bool:
        """Whether another rule passes the numerical check."""
        verdict = check_recipe(self.call, self.recipe(rule), 2)
        return verdict.status in (Status.IDENTICAL, Status.EQUIVALENT)


LINEAR = "torch.nn.functional.linear"
BATCH_NORM = "torch.nn.functional.batch_norm"
SINGLE = {
    "linear": Example(
        OperatorCall(F.linear, (normal(4, 6), normal(8, 6), normal(8)), name=LINEAR), "k"
    ),
    "loss": Example(
        OperatorCall(F.cross_entropy, (normal(6, 4), torch.tensor([0, 3, 1, 2, 2, 0]))), "a"
    ),
    "view": Example(
        OperatorCall(torch.Tensor.view, (normal(6, 4), (6, 2, 2))), "a", "a 4, ? -> a 2 2 ; 1[0]=a"
    ),
    "dropout": Example(OperatorCall(F.dropout, (normal(6, 4), 0.5)), "a"),
    "statistics": Example(
        OperatorCall(
            F.batch_norm,
            (normal(6, 4, 3), normal(4), normal(4).abs()),
            {"training": True},
            BATCH_NORM,
            frozenset([1, 2]),
        ),
        "b",
    ),
}


def changed_values(value: Any, others: list[Any]) -> Iterator[Any]:
    """Other values in the place of one: of the same kind, of another kind, empty, or taken away."""
    match value:
        case bool():
            yield not value
            yield int(value)
        case int():
            yield from (value + 1, 0, float(value), True)
        case str():
            yield from ("", value + "x", [value], None)
            yield from (other for other in others if other != value)
        case None:
            yield from (0, "", "any")
        case list():
            yield from ([], value[:-1], [*value, *value[-1:]], value[::-1])
        case dict():
            yield {}
            yield {**value, "another": 1}
            for key in value:
                yield {name: one for name, one in value.items() if name != key}


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, data
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


# What follows from the rest of a certificate, and is long; and certificates in that of a graph.
DERIVED = {"tensors", "numbers", "requires", "outputs", "certificate"}


def forgeries(data: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The certificate with one thing changed: a sample of everything in it."""
    words = sorted({value for _, value in places(data) if isinstance(value, str)})
    draw = random.Random(0)
    changes = [
        (path, other)
        for path, value in places(data)
        for other in changed_values(value, draw.sample(words, 2))
        if json.dumps(other) != json.dumps(value)
    ]
    stated = [change for change in changes if not DERIVED & set(change[0][:-1])]
    derived = [change for change in changes if DERIVED & set(change[0][:-1])]
    if not WHOLE:
        stated = draw.sample(stated, min(len(stated), 150))
        derived = draw.sample(derived, 50)
    for path, other in stated + derived:
        if not path:
            yield path, other
            continue
        forged = copy.deepcopy(data)
        holder = forged
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = other
        yield path, forged


@pytest.mark.parametrize("name", SINGLE)
def test_whatever_is_changed_in_a_certificate_is_refused_or_says_the_same(name):
    right = SINGLE[name].certificate()
    theorem = Checker(right).check()
    tried, believed = 0, []
    for path, forged in forgeries(right):
        tried += 1
        try:
            said = Checker(forged).check()
        except Refused:
            continue
        believed.append(path)
        if path == ("rule",):  # another name in it
            assert SINGLE[name].holds(forged["rule"]), said
        else:
            assert said == theorem, path

    assert tried > 120
    # The lengths of the example are not part of the theorem, nor is the precision.
    assert {path[0] for path in believed} <= {"call", "rule"}


@pytest.mark.parametrize(
    ("name", "field", "other"),
    [
        ("linear", "operator", "torch.matmul"),
        ("linear", "operator", "os.system"),
        ("linear", "rule", "m k, n k, n -> m n"),
        ("linear", "split by", "n"),
        ("linear", "paritas certificate", 1),
        ("linear", "outputs", []),
        ("loss", "assumes", []),
        ("loss", "assumes", ["nothing"]),
        ("loss", "parts", "any"),
    ],
)
def test_a_forged_label_is_refused(name, field, other):
    data = SINGLE[name].certificate()
    with pytest.raises(Refused):
        Checker({**data, field: other}).check()


def test_a_call_that_writes_to_its_argument_is_refused():
    data = Example(OperatorCall(F.relu, (normal(6, 4), False)), "a", "a b, ? -> a b").certificate()
    text = json.dumps(data).replace("inplace=False", "inplace=True")
    forged = json.loads(text)
    forged["call"]["args"][1] = True
    with pytest.raises(Refused, match="an operator that writes to its argument 0"):
        Checker(forged).check()


def test_a_term_set_to_zero_and_a_bias_left_out_are_refused():
    data = SINGLE["linear"].certificate()
    (result,) = data["outputs"]
    zero = {**data, "outputs": [{**result, "term": ["num", "0"]}]}
    total, bias = result["term"][1]
    assert bias[0] == "read"
    without = {**data, "outputs": [{**result, "term": total}]}
    for forged in (zero, without):
        with pytest.raises(Refused, match="`outputs` is not what follows from the operator"):
            Checker(forged).check()


def test_the_checker_prints_the_theorem_that_it_checked(tmp_path, monkeypatch, capsys):
    path = tmp_path / "loss.json"
    path.write_text(json.dumps(SINGLE["loss"].certificate()), "utf-8")
    monkeypatch.setattr("sys.argv", ["checker", str(path)])

    assert checker.main() == 0
    assert capsys.readouterr().out == (
        f"{path}: torch.nn.functional.cross_entropy([a k] shard(0), [a] shard(0)) -> partial(avg), "
        "a+avg k^, a+avg -> 1, split by a: proved over the reals, forward and backward, for all "
        "lengths and ranks, parts of equal size, if no target is ignore_index (-100)\n"
    )


def test_a_file_that_is_no_certificate_is_refused(tmp_path, monkeypatch, capsys):
    for content in ("[]", "3", "{}", '{"operator": 1}', "not JSON", "null"):
        path = tmp_path / "other.json"
        path.write_text(content, "utf-8")
        for program in (checker, graph_checker):
            monkeypatch.setattr("sys.argv", ["checker", str(path)])
            assert program.main() == 1
            assert f"{path}: refused: " in capsys.readouterr().out


def test_all_files_are_checked_and_none_is_not_success(tmp_path, monkeypatch, capsys):
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    data = SINGLE["view"].certificate()
    right.write_text(json.dumps(data), "utf-8")
    wrong.write_text(json.dumps({**data, "outputs": []}), "utf-8")
    files = [str(wrong), str(tmp_path / "missing.json"), str(right)]
    for program in (checker, graph_checker):
        monkeypatch.setattr("sys.argv", ["checker", *files])
        assert program.main() == 1
        first, second, third = capsys.readouterr().out.splitlines()
        assert "refused: " in first
        assert "refused: " in second
        assert "proved over the reals" in third
        monkeypatch.setattr("sys.argv", ["checker"])
        assert program.main() == 2
        assert "name the certificates to check" in capsys.readouterr().out


# --- graphs ---------------------------------------------------------------------------------------


def layer(x, norm, up, down, bias):
    hidden = F.gelu(F.linear(F.rms_norm(x, (8,), norm), up))
    return all_reduce(F.linear(hidden, down, bias))


@pytest.fixture(scope="module")
def graph() -> Any:
    inputs = {
        "x": normal(2, 6, 8),
        "norm": normal(8),
        "up": normal(12, 8),
        "down": normal(8, 12),
        "bias": normal(8),
    }
    proof = prove_graph(layer, inputs, {"up": "shard(0)", "down": "shard(1)", "bias": "once"})
    assert proof.status == "proved", proof.words
    return json.loads(json.dumps(proof.certificate))


def test_the_graph_checker_prints_the_program_that_it_checked(graph):
    assert GraphChecker(graph).check().splitlines() == [
        (
            "proved over the reals, forward and backward, for all lengths and ranks that the rules "
            "allow, parts of equal size"
        ),
        "  input x: replicate",
        "  input norm: replicate",
        "  input up: shard(0)",
        "  input down: shard(1)",
        "  input bias: once",
        "  rms_norm = any function of x, norm that gives float64 [2, 6, 8]: replicate",
        "  linear = torch.nn.functional.linear(rms_norm, up): shard(2)",
        "  gelu = torch.nn.functional.gelu(linear): shard(2)",
        "  linear_1 = torch.nn.functional.linear(gelu, down, bias): partial(sum)",
        "  all_reduce = all_reduce(linear_1, sum): replicate",
        "  result all_reduce: replicate",
    ]


def test_whatever_is_changed_in_the_certificate_of_a_graph_is_refused_or_shown(graph):
    theorem = GraphChecker(graph).check().splitlines()
    tried, believed = 0, 0
    for path, forged in forgeries(graph):
        tried += 1
        try:
            said = GraphChecker(forged).check().splitlines()
        except Refused:
            continue
        believed += 1
        # Of what any function may be, something else may be said, and it is shown.
        changed = set(said) ^ set(theorem)
        assert all("any function of" in line for line in changed), (path, changed)

    assert tried > 120
    assert believed < tried / 5
