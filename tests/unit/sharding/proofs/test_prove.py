"""Proving, refuting and leaving undecided; certificates and their checker."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from drawing import normal
from paritas.app.cli import main
from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.operators.definitions import OPERATORS, Array, by_slices
from paritas.core.results.findings import Aspect, Finding, Status, Verdict
from paritas.core.results.items import output
from paritas.partition import TensorInfo, VerifyConfig, prove
from paritas.sharding.operators.annotation import Annotation
from paritas.sharding.proofs import checker, kernel
from paritas.sharding.proofs import prove as proving
from paritas.sharding.proofs.dtensor import prove_dtensor


def config(operator, *shapes, options=(), **kwargs):
    args = [TensorInfo("shape", s) if isinstance(s, tuple) else s for s in shapes]
    return VerifyConfig(operator, args, kwargs, 1, list(options))


def define_as(monkeypatch, name, definition):
    operator = dataclasses.replace(OPERATORS[name], define=definition)
    monkeypatch.setitem(OPERATORS, name, operator)


LINEAR = ("torch.nn.functional.linear", (4, 6), (8, 6), (8,))


def test_every_split_of_a_linear_layer_is_proved_for_parts_of_any_size():
    proofs = prove(config(*LINEAR))

    assert [(proof.split_by, proof.status, proof.parts) for proof in proofs] == [
        ("m0", "proved", "any"),
        ("k", "proved", "any"),
        ("n", "proved", "any"),
    ]


def test_a_mean_of_means_is_proved_for_equal_parts_only():
    (rows, columns) = prove(config("torch.mean", (6, 4), dim=1))

    assert (rows.parts, columns.parts) == ("any", "equal")
    assert "parts of equal size" in columns.words


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(
    ("operator", "shapes", "kwargs", "rule", "split"),
    [
        ("torch.softmax", [(4, 6)], {"dim": 1}, "a b -> a b", "b"),
        (*LINEAR[:1], LINEAR[1:], {}, "m k+, n k+, n -> m n", "k"),
        ("torch.mm", [(4, 6), (6, 8)], {}, "m k, k n -> m n", "k"),
        ("torch.sum", [(4, 6)], {"dim": 1}, "a b+avg -> a", "b"),
        ("torch.flip", [(4, 6)], {"dims": (0,)}, "a b -> a b", "a"),
        ("torch.cumsum", [(4, 6)], {"dim": 0}, "a b -> a b", "a"),
        ("torch.amax", [(4, 6)], {"dim": 1}, "a b+ -> a", "b"),
    ],
)
def test_a_wrong_rule_is_refuted_on_small_shapes(operator, shapes, kwargs, rule, split):
    proofs = prove(config(operator, *shapes, **kwargs), annotation=rule)
    found = {proof.split_by: proof for proof in proofs}

    assert found[split].status == "refuted"
    example = found[split].counterexample
    assert max(size for shape in example.shapes.values() for size in shape) <= 8
    assert example.values
    assert found[split].words.startswith("refuted on [")


def test_what_the_theory_does_not_have_is_not_decided():
    ids = TensorInfo("shape", (4, 6), dtype=torch.int64)
    asked = config("torch.nn.functional.embedding", ids, (5, 6), scale_grad_by_freq=True)
    (proof,) = prove(asked)

    assert (proof.status, proof.reason) == (
        "not decided",
        "an embedding with scale_grad_by_freq",
    )
    assert proof.certificate is None


def test_a_view_is_proved_for_lengths_that_are_only_known_as_products():
    proofs = prove(config("torch.flatten", (4, 6, 3)), annotation="a b c^ -> (a b c^)")

    assert [(proof.split_by, proof.status) for proof in proofs] == [("a", "proved")]


def test_an_operator_without_a_rule_is_refused():
    with pytest.raises(
        UsageError, match=r"no rule is known for torch\.linalg\.svd: pass annotation="
    ):
        prove(config("torch.linalg.svd", (4, 4)))


def test_a_definition_that_disagrees_with_torch_proves_nothing(monkeypatch):
    def wrong(call):
        x = call.given("x")
        return Array(x.shape, lambda *at: ("mul", (("num", "2"), x[at])))

    define_as(monkeypatch, "torch.relu", wrong)
    proofs = prove(config("torch.relu", (4, 6)))

    assert {proof.status for proof in proofs} == {"not decided"}
    assert "the definition gives" in proofs[0].reason


def test_a_definition_with_another_gradient_proves_nothing(monkeypatch):
    def detached(call):
        x = call.given("x")
        name = call.known_function("detached", lambda one: one[0].detach().exp())
        return Array(x.shape, lambda *at: ("fn", name, (x[at],)))

    define_as(monkeypatch, "torch.exp", detached)
    (proof, _) = prove(config("torch.exp", (4, 6)))

    assert proof.status == "not decided"
    assert "the gradient of the result" in proof.reason


def test_a_proof_that_fails_the_numerical_check_is_no_proof(monkeypatch):
    failure = Finding(
        item=output("output"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        reason="off by one",
    )
    monkeypatch.setattr(proving, "check_recipe", lambda *_, **__: Verdict(findings=(failure,)))
    (proof, _) = prove(config("torch.relu", (4, 6)))

    assert proof.status == "not decided"
    assert proof.certificate is None
    assert "proved, but the numerical check says different: off by one" in proof.reason


def decide(function, args, rule, **kwargs):
    """The proofs of all options of a rule, by what they split."""
    call, annotation = OperatorCall(function, args, kwargs), Annotation.parse(rule)
    prover = proving.Prover(call, annotation)
    proofs = [prover.decide(option) for option in annotation.options(call)]
    return {proof.split_by: proof for proof in proofs}


@pytest.mark.usefixtures("undiagnosed")
def test_a_number_that_is_the_length_that_is_split_is_not_left_out_of_the_proof():
    rule = "b n^ k^ -> b n^ k^ ; diagonal=b"
    (proof,) = prove(config("torch.tril", (8, 3, 3), diagonal=8), annotation=rule)

    assert proof.status == "refuted"  # by shorter batches; on 8 x 3 x 3, nothing is cut off
    clamped = decide(torch.clamp, (10 * normal(8, 3),), "b n -> b n ; max=b", max=8)
    assert (clamped["b"].status, clamped["n"].status) == ("refuted", "proved")
    assert clamped["b"].reason == (
        "argument max is N, on a rank m(%r); how the operator depends on it is not written out"
    )
    moved = decide(torch.transpose, (normal(2, 3, 4), 1, 2), "a b c, ?, ? -> a c b ; 2=a")
    assert moved["b"].status != "proved"  # for other lengths of a, it swaps other dimensions


def test_a_size_that_depends_on_values_is_not_proved():
    ids = torch.tensor([0, 3, 1, 3])
    proof = decide(torch.nn.functional.one_hot, (ids,), "a -> a _")["a"]

    assert proof.status == "refuted"
    assert proof.reason == "one_hot without num_classes: its size depends on the values"
    assert decide(torch.nn.functional.one_hot, (ids, 4), "a, ? -> a 4")["a"].status == "proved"


def test_what_is_assumed_about_values_is_said():
    logits, target = normal(6, 4), torch.tensor([0, 3, 1, 2, 2, 0])
    loss = decide(torch.nn.functional.cross_entropy, (logits, target), "a+avg k^, a+avg -> 1")["a"]
    halves = decide(torch.chunk, (normal(4, 6), 2, 1), "a b^, ?, ? -> a _, a _")["a"]

    assert loss.words == (
        "proved over the reals, forward and backward, for all lengths and ranks, parts of equal "
        "size, if no target is ignore_index (-100)"
    )
    assert halves.assumes == ("chunk returns 2 tensors",)


@pytest.mark.usefixtures("undiagnosed")
def test_a_split_that_is_right_for_equal_parts_only_is_refuted_on_unequal_ones():
    (proof,) = prove(config("torch.mean", (5,)))

    assert (proof.status, proof.parts, proof.certificate) == ("refuted", "equal", None)
    assert proof.words.startswith("refuted on [5] over 2 ranks: output: ")
    assert proof.words.endswith("; for parts of equal size it is proved")


@pytest.mark.parametrize(
    ("equation", "rule"),
    [
        ("...ij,jk", "?, b i j+, j+ k -> b i k"),
        ("...j,jk->k", "?, b+ i+ j+, j+ k -> k"),
        ("i...j,j...->ij", "?, b i+ j, j i+ -> b j"),
    ],
)
def test_an_einsum_with_an_ellipsis_is_proved(equation, rule):
    pair = normal(4, 2, 3), normal(3, 5 if "k" in equation else 2)
    proofs = decide(torch.einsum, (equation, *pair), rule)

    assert {proof.status for proof in proofs.values()} == {"proved"}


def test_a_source_that_is_longer_than_its_index_is_not_decided():
    """torch itself cannot differentiate it."""
    index = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 1]])
    args = (normal(4, 3), 1, index, normal(4, 5))
    proof = decide(torch.scatter_add, args, "a b^, ?, a c^, a d^ -> a b^")["a"]

    assert proof.status == "not decided"
    assert proof.reason.startswith("a call whose gradient fails")
    still = OperatorCall(torch.scatter_add, args, without_gradient=frozenset([0, 3]))
    annotation = Annotation.parse("a b^, ?, a c^, a d^ -> a b^")
    prover = proving.Prover(still, annotation)
    assert prover.decide(annotation.options(still)[0]).status == "proved"


def test_a_rule_with_another_number_of_results_is_not_proved():
    proof = decide(torch.relu, (normal(4, 6),), "a b -> a b, a b")["a"]

    assert proof.status != "proved"


def test_a_definition_that_does_not_read_an_argument_proves_nothing(monkeypatch):
    """What it does not read would be the same on all ranks, whatever the rule says."""

    def of_first(call):
        x = call.given("x")
        return by_slices(call, {"x": (x, ["a", "b"])}, [["a", "b"]])

    define_as(monkeypatch, "torch.fmod", of_first)
    proofs = decide(torch.fmod, (normal(4, 6), torch.tensor(0.7)), "a b, ? -> a b")

    assert proofs["a"].reason == "a call of torch.fmod with argument 1, which it does not read"


# --- certificates ---------------------------------------------------------------------------------


def certificate(operator, *shapes, split, **kwargs):
    proofs = prove(config(operator, *shapes, **kwargs))
    return next(proof.certificate for proof in proofs if proof.split_by == split)


def test_the_kernel_of_the_checker_stands_alone_and_is_short():
    source = Path(kernel.__file__).read_text("utf-8")
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }

    assert len(source.splitlines()) <= 400
    assert not any(name.startswith(("paritas", "torch")) for name in imported)


def test_a_certificate_survives_a_file_and_is_checked_from_it(tmp_path, monkeypatch, capsys):
    path = tmp_path / "linear.json"
    path.write_bytes(msgspec.json.encode(certificate(*LINEAR, split="k")))
    monkeypatch.setattr("sys.argv", ["checker", str(path)])

    assert checker.main() == 0
    assert "split by k: proved" in capsys.readouterr().out


def _change(made, what):
    if what == "a result that is not reduced":
        made["outputs"][0]["role"] = ["replicate"]
    elif what == "another reduction":
        made["outputs"][0]["role"] = ["partial", "avg"]
    elif what == "a bias on every rank":
        made["tensors"]["2"]["role"] = ["replicate"]
    elif what == "a factor that is not split":
        made["tensors"]["1"]["role"] = ["replicate"]
    elif what == "another dimension":
        made["tensors"]["1"]["role"] = ["shard", 0]
    elif what == "another operator":
        first_column = [[[["%o0"], 1]], []]
        made["outputs"][0]["term"] = ["read", "0", first_column]


@pytest.mark.parametrize(
    "what",
    [
        "a result that is not reduced",
        "another reduction",
        "a bias on every rank",
        "a factor that is not split",
        "another dimension",
        "another operator",
    ],
)
def test_a_changed_certificate_is_refused(what):
    right = certificate(*LINEAR, split="k")
    checker.Checker(right).check()
    wrong = copy.deepcopy(right)
    _change(wrong, what)

    with pytest.raises(kernel.Refused):
        checker.Checker(wrong).check()
    if what != "another operator":  # which only the definition shows
        with pytest.raises((kernel.Refused, IndexError)):
            kernel.Kernel(wrong).check()


def test_a_certificate_for_equal_parts_does_not_hold_for_others():
    made = certificate("torch.mean", (6, 4), split="b", dim=1)
    checker.Checker(made).check()

    with pytest.raises(kernel.Refused):
        checker.Checker({**made, "parts": "any"}).check()


# --- the command, and DTensor ---------------------------------------------------------------------


def test_the_command_proves_and_writes_certificates(tmp_path):
    asked = ["partition", "torch.mm", "--arg", "4x6", "--arg", "6x8"]
    result = CliRunner().invoke(main, [*asked, "--certificates", str(tmp_path)])

    assert result.exit_code == 0
    assert "split by k: proved over the reals" in " ".join(result.output.split())
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        "torch_mm_k.json",
        "torch_mm_m.json",
        "torch_mm_n.json",
    ]
    for file in files:
        checker.Checker(json.loads(file.read_text("utf-8"))).check()


def test_a_split_that_is_not_decided_is_unverified():
    asked = ["partition", "torch.nn.functional.embedding", "--arg", "4x6:int64<5", "--arg", "5x6"]
    result = CliRunner().invoke(main, [*asked, "--kwarg", "scale_grad_by_freq=True", "--prove"])

    assert result.exit_code == 3
    shown = " ".join(result.output.split())
    assert "not decided: an embedding with scale_grad_by_freq" in shown


@pytest.mark.slow
def test_claims_of_dtensor_are_decided():
    x, target = torch.randn(4), torch.randn(4)
    proofs = list(prove_dtensor(torch.nn.functional.mse_loss, (x, target)))
    found = {proof.rule: proof.status for proof in proofs}

    assert found == {
        "R, R -> R": "proved",
        "S(0), S(0) -> P(avg)": "refuted",  # the gradient is divided by the size of the part
    }


def test_a_call_with_more_dimensions_than_the_rule_is_refused():
    call = OperatorCall(torch.relu, (torch.randn(2, 3, 4),), name="torch.relu")
    with pytest.raises(UsageError):
        proving.Prover(call, Annotation.parse("a b -> a b"))
