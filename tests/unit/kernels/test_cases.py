"""Cases are made from the given inputs, and keep what a kernel may rely on."""

from __future__ import annotations

import torch

from paritas.core.execution.observation import input_tensors
from paritas.core.execution.subjects import Inputs
from paritas.kernels.cases import CaseMaker, KernelCase, in_calling_order, other_sizes
from paritas.kernels.rows import CaseFamily


def made(*args: torch.Tensor, **further: bool) -> dict[CaseFamily, list[KernelCase]]:
    options = {"has_weights": False, "has_modes": False, **further}
    maker = CaseMaker(Inputs(args), None, seed=0, **options)
    return {family: list(cases) for family, cases in maker.all_families().items()}


def tensors(case: KernelCase) -> list[torch.Tensor]:
    return [tensor for _, tensor in input_tensors(case.inputs)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_equal_dimensions_change_together() -> None:
    cases = made(normal(4, 6), normal(6, 5))[CaseFamily.SIZES]
    joint = [case for case in cases if tensors(case)[0].shape[1] == tensors(case)[1].shape[0]]
    assert {tensors(case)[0].shape[1] for case in joint} >= {1, 0, 7}


def test_sizes_lie_around_tiles_and_are_odd() -> None:
    sizes = other_sizes(128)
    assert {0, 1, 127, 129} <= set(sizes)
    assert 128 not in sizes


def test_a_triangular_input_stays_triangular() -> None:
    found = made(torch.triu(normal(9, 9)))
    for cases in found.values():
        for case in cases:
            (x,) = tensors(case)
            assert torch.equal(torch.triu(x), x), case.name


def test_labels_stay_labels() -> None:
    found = made(normal(5, 4), torch.tensor([-1.0, 1.0] * 8))
    for case in (*found[CaseFamily.GIVEN], *found[CaseFamily.VALUES], *found[CaseFamily.SIZES]):
        assert set(tensors(case)[1].tolist()) <= {-1.0, 1.0}, case.name


def test_indices_stay_in_the_range_of_a_dimension() -> None:
    cases = made(torch.tensor([0, 3, 1]), normal(8, 2))[CaseFamily.VALUES]
    ends = [case for case in cases if case.name == "indices at their ends"]
    assert [int(tensors(case)[0].max()) for case in ends] == [7, 3]


def test_layouts_change_strides_and_not_values() -> None:
    given = normal(4, 6)
    for case in made(given)[CaseFamily.LAYOUTS]:
        (x,) = tensors(case)
        if case.name == "expanded inputs":
            assert x.stride(0) == 0
            continue
        assert torch.equal(x, given), case.name
        is_elsewhere = x.stride() != given.stride() or x.storage_offset() != 0
        assert is_elsewhere, case.name


def test_memory_is_reused_right_after_the_given_inputs() -> None:
    found = made(normal(4, 6))
    ordered = in_calling_order([case for cases in found.values() for case in cases], seed=3)
    place = next(n for n, case in enumerate(ordered) if case.is_given)
    assert ordered[place + 1].reuse
    assert not torch.equal(tensors(ordered[place + 1])[0], tensors(ordered[place])[0])
    assert ordered[-1].name == "as given, at the end"


def test_weights_and_modes_are_changed_only_in_modules() -> None:
    assert not made(normal(3, 4))[CaseFamily.WEIGHTS]
    found = made(normal(3, 4), has_weights=True, has_modes=True)
    assert [case.weights for case in found[CaseFamily.WEIGHTS]] == [1, 2, 0]
    assert {case.train for case in found[CaseFamily.MODES]} == {True, False}


def test_inputs_that_require_grad_are_leaves_in_every_case() -> None:
    for cases in made(normal(3, 4).requires_grad_(), normal(4, 3)).values():
        for case in cases:
            flags = [(one.is_leaf, one.requires_grad) for one in tensors(case)]
            assert flags == [(True, True), (True, False)], case.name
