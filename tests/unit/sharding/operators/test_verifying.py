"""The rules are explicit here, so that no test depends on the library or on discovery."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from paritas import ParityWarning, Status, UsageError, Verdict
from paritas.partition import (
    TensorInfo,
    VerifyConfig,
    annotated,
    check_partition,
    verify_partition_options,
)

MODULE = "operators_of_a_user"


@pytest.fixture(name="operators")
def _operators(monkeypatch):
    """A module of the user's own."""
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def config(name, *shapes, options=((0, 0),), noutputs=1, **kwargs):
    infos = [TensorInfo("shape", shape) for shape in shapes]
    parts = [dict(zip(("idx", "dim", "num"), option, strict=False)) for option in options]
    return VerifyConfig(f"{MODULE}.{name}", infos, kwargs, noutputs, parts)


def test_each_compared_item_is_reported_under_its_option(operators):
    operators.product = lambda a, b: a @ b
    asked = config("product", (4, 6), (6, 8), options=[(0, 0), (0, 1), (2, 1)])
    verdict = check_partition(asked, annotation="m k+, k+ n -> m n")
    assert verdict.passed, str(verdict)
    things = ["output", "gradient of args[0]", "gradient of args[1]"]
    options = ["{'idx': 0, 'dim': 0}: split by m", "{'idx': 0, 'dim': 1}: split by k"]
    options.append("{'idx': 2, 'dim': 1}: split by n")
    assert [f.path for f in verdict.findings] == [f"{o}, {t}" for o in options for t in things]
    assert verdict.notes[:2] == ("tensors drawn with seed 0", "rule: m k+, k+ n -> m n")


def test_one_wrong_option_of_two_fails_and_the_other_stays_right(operators):
    operators.flip = lambda x: x.flip(0)
    asked = config("flip", (4, 6), options=[(0, 0), (0, 1)])
    verdict = check_partition(asked, annotation="a b -> a b")
    assert verdict.status is Status.DIFFERENT
    assert all(finding.path.startswith("{'idx': 0, 'dim': 0}") for finding in verdict.failures)
    assert any(f.path.startswith("{'idx': 0, 'dim': 1}: split by b") for f in verdict.findings)


def test_the_number_of_ranks_is_set_for_all_options_or_for_one(operators, monkeypatch):
    from paritas.sharding.operators import verify

    counts = []
    original = verify.check_recipe

    def counted(call, recipe, ranks=2, **rest):
        counts.append(ranks)
        return original(call, recipe, ranks, **rest)

    monkeypatch.setattr(verify, "check_recipe", counted)
    operators.double = lambda x: 2 * x
    asked = config("double", (12, 6), options=[(0, 0), (0, 1, 2)])
    assert check_partition(asked, annotation="a b -> a b", ranks=3)
    assert counts == [3, 2]


def test_a_call_that_itself_fails_is_reported_once(operators):
    operators.product = lambda a, b: a @ b
    asked = config("product", (4, 6), (5, 8), options=[(0, 0), (1, 1)])
    verdict = check_partition(asked, annotation="m k+, k+ n -> m n")
    (finding,) = verdict.findings
    assert verdict.exit_code == 3
    assert finding.path == f"{MODULE}.product"
    assert finding.reason.startswith("the operator itself fails: RuntimeError: mat1 and")
    assert finding.reason.endswith("(tensors 0: (4, 6), 1: (5, 8))")


def test_a_wrong_number_of_outputs_is_reported(operators):
    operators.both = lambda x: (x, x)
    (finding,) = check_partition(config("both", (4,)), annotation="a -> a, a").findings
    assert finding.reason.startswith("the operator returns 2 tensors, but noutputs is 1")
    assert check_partition(config("both", (4,), noutputs=2), annotation="a -> a, a")


def test_an_empty_list_of_options_passes_with_a_note(operators):
    operators.double = lambda x: 2 * x
    verdict = check_partition(config("double", (4,), options=[]), annotation="a -> a")
    assert verdict.passed
    assert [finding.path for finding in verdict.findings] == [
        "not split, output",
        "not split, gradient of args[0]",
    ]
    assert verdict.notes[-1] == (
        "nothing to split: parti_options is empty; each of 2 ranks ran the whole operator "
        "for comparison"
    )


@pytest.mark.parametrize(("option", "word"), [((3, 0), "idx"), ((0, 5), "dim")])
def test_an_option_that_names_nothing_is_unverified(operators, option, word):
    operators.double = lambda x: 2 * x
    asked = config("double", (4,), options=[option, (0, 0)])
    verdict = check_partition(asked, annotation="a -> a")
    assert verdict.status is Status.UNVERIFIED
    (finding,) = verdict.failures
    assert f"{word} {option[0 if word == 'idx' else 1]}" in finding.reason


def test_a_frozen_dimension_is_split_anyway_to_report_what_goes_wrong(operators):
    operators.softmax = lambda x: torch.softmax(x, 1)
    asked = config("softmax", (4, 6), options=[(0, 1)])
    (finding,) = check_partition(asked, annotation="a b^ -> a b^").failures
    assert finding.status is Status.UNVERIFIED
    assert "b is frozen" in finding.reason
    assert "split anyway, output is different" in finding.reason


def test_a_frozen_dimension_that_can_be_split_here_is_found_right_and_noted(operators):
    operators.double = lambda x: 2 * x
    verdict = check_partition(config("double", (4, 6)), annotation="a^ b -> a^ b")
    assert verdict.passed
    assert any("is right for this call, although" in note for note in verdict.notes)


def test_a_rule_that_does_not_fit_the_call_is_unverified(operators):
    operators.double = lambda x: 2 * x
    verdict = check_partition(config("double", (4, 6)), annotation="a b c -> a b c")
    assert verdict.status is Status.UNVERIFIED


def test_an_operator_without_a_rule_is_split_as_running_it_shows(operators):
    operators.shifted = lambda x: x.roll(1, 0) + 1
    asked = config("shifted", (4, 6), options=[(0, 0), (0, 1)])
    verdict = check_partition(asked)
    assert verdict.status is Status.UNVERIFIED
    (finding,) = verdict.failures
    assert finding.path == "{'idx': 0, 'dim': 0}"
    assert f"no rule is known for {MODULE}.shifted" in finding.reason
    assert "register an annotation" in finding.advice
    assert any(f.path.startswith("{'idx': 0, 'dim': 1}: ") for f in verdict.findings)


def test_a_decorated_function_brings_its_rule(operators):
    def sorted_rows(x):
        return x.sort(1).values

    sorted_rows.__module__, sorted_rows.__qualname__ = MODULE, "sorted_rows"
    operators.sorted_rows = annotated("a b -> a b")(sorted_rows)
    asked = config("sorted_rows", (4, 6), options=[(0, 0), (0, 1)])
    verdict = check_partition(asked)
    assert "rule: a b -> a b" in verdict.notes
    assert {f.path[:20] for f in verdict.failures} == {"{'idx': 0, 'dim': 1}"}


def test_an_option_that_compared_nothing_does_not_borrow_from_its_neighbour(operators, monkeypatch):
    from paritas.sharding.operators import verify

    original, verdicts = verify.check_recipe, [Verdict()]
    monkeypatch.setattr(
        verify,
        "check_recipe",
        lambda *a, **k: verdicts.pop() if verdicts else original(*a, **k),
    )
    operators.double = lambda x: 2 * x
    asked = config("double", (4, 6), options=[(0, 0), (0, 1)])
    verdict = check_partition(asked, annotation="a b -> a b")
    assert verdict.status is Status.UNVERIFIED
    assert [f.reason for f in verdict.failures] == ["nothing was compared"]


def test_an_excluded_argument_has_no_gradient(operators):
    operators.product = lambda a, b: a @ b
    infos = [TensorInfo("shape", (4, 6)), TensorInfo("shape", (6, 8), requires_grad=False)]
    asked = VerifyConfig(f"{MODULE}.product", infos, {}, 1, [{"idx": 0, "dim": 1}])
    paths = [f.path for f in check_partition(asked, annotation="m k+, k+ n -> m n").findings]
    assert [path.rpartition(", ")[2] for path in paths] == ["output", "gradient of args[0]"]


def test_the_arguments_are_left_as_they_are_and_so_is_the_state_of_the_generator(operators):
    operators.add_one = lambda x: x.add_(1)
    given = torch.zeros(4)
    asked = VerifyConfig(
        f"{MODULE}.add_one", [TensorInfo("value", given)], {}, 1, [{"idx": 0, "dim": 0}]
    )
    before = torch.get_rng_state()
    check_partition(asked, annotation="a -> a")
    assert torch.equal(given, torch.zeros(4))
    assert torch.equal(before, torch.get_rng_state())


def test_the_tensors_of_a_list_are_left_as_they_are(operators):
    operators.add_one = lambda tensors: tensors[0].add_(1)
    given = torch.zeros(4)
    asked = VerifyConfig(
        f"{MODULE}.add_one", [TensorInfo("value", [given])], {}, 1, [{"idx": 0, "dim": 0}]
    )
    check_partition(asked, annotation="a -> a")
    assert torch.equal(given, torch.zeros(4))


@pytest.mark.parametrize("ranks", [1, True, 2.0])
def test_ranks_that_split_nothing_are_refused(operators, ranks):
    operators.double = lambda x: 2 * x
    with pytest.raises(UsageError, match="an integer of 2 or more"):
        check_partition(config("double", (4,)), ranks=ranks)


def test_the_bool_is_true_only_where_all_was_compared_and_right(operators):
    asked = [TensorInfo("shape", (4, 6))]
    right = VerifyConfig("torch.abs", asked, {}, 1, [{"idx": 0, "dim": 0}])
    assert verify_partition_options(right) is True
    operators.flipped = lambda x: x.flip(0)
    with pytest.warns(ParityWarning, match=r"operators_of_a_user\.flipped: unverified"):
        assert verify_partition_options(config("flipped", (4,))) is False
