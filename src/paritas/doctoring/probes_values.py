"""Probes of what runs operators: one for each module of `paritas._torch` that is about values.

Each imports what it probes, so that a module that cannot be imported fails alone.
"""

from __future__ import annotations

import torch

from paritas.doctoring.expecting import expect

__all__ = ["PROBES"]

ATEN = torch.ops.aten
UNIT = 2.0**-24


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def accumulation() -> None:
    """The error of a sum is foretold from the arguments of the operator that makes it."""
    from paritas._torch.accumulation import Call, accumulation

    x = _values(4, 64)
    call = Call("mm", ATEN.mm.default, (x, x.t()), {}, x @ x.t())
    shapes = [None if one is None else tuple(one.shape) for one in accumulation(call)]
    expect("amplitudes of a product", shapes, [(4, 4)])


def attention() -> None:
    """The attention kernels have the arguments that their plain forms read, and agree with one."""
    from paritas._torch.attention import BACKWARD, FORWARD, wide_attention

    for op in sorted(FORWARD | BACKWARD, key=str):
        expect(f"float64 form of {op}", callable(wide_attention(op)))
    form = wide_attention(ATEN._scaled_dot_product_flash_attention.default)  # noqa: SLF001
    q = _values(1, 2, 4, 8).double()
    plain = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    found = form(q, q, q)[0] if form is not None else None
    expect("attention in float64", found is not None and bool(torch.allclose(found, plain)))


def cancelling() -> None:
    """Sums that lose digits in float64 are told from those that lose none."""
    from paritas._torch.cancelling import is_exact_in_any_order

    terms = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expect("a sum of small numbers", is_exact_in_any_order(terms, terms.sum()))
    terms = torch.tensor([1.0, 2.0**60], dtype=torch.float64)
    expect("a sum of 1 and 2^60", is_exact_in_any_order(terms, terms.sum()), wanted=False)


def decisions() -> None:
    """What a rounding to integers was decided by is remembered."""
    from paritas._torch.lifting import LiftMode

    mode = LiftMode(torch.float32, torch.float32, remember_decisions=True)
    with mode:
        result = torch.full((2,), 2.25).floor().to(torch.int64)
    decision = mode.decision_for(result)
    margin = None if decision is None else decision.margin(result, result + 1)
    expect("margin of a floor", None if margin is None else margin.tolist(), [-0.75, -0.75])


def default_dtypes() -> None:
    """A mode hears of a tensor made without a dtype, and of one that was rounded before."""
    from paritas._torch.lifting import LiftMode

    mode = LiftMode(torch.float32, torch.float32)
    with mode:
        made = [torch.ones(2), torch.arange(0, 1, 0.5), torch.arange(2) / 3]
    expect("dtypes of what states none", {value.dtype for value in made}, {torch.float64})
    expect("a default that no mode can see", mode.asked_default, wanted=False)
    with mode:
        torch.tensor(0.1)
    expect("a number that was rounded before", mode.asked_default)


def equality() -> None:
    """A graph that asks for equality of floats is given a tolerant one."""
    from paritas._torch.equality import nearly_equal, with_tolerant_equality
    from paritas._torch.tracing import trace_calls

    graph = with_tolerant_equality(trace_calls(lambda x: x == x.amax(0), [_values(3, 2)]))
    targets = [] if graph is None else [node.target for node in graph.graph.nodes]
    expect("a graph with tolerant equality", nearly_equal in targets)


def foreach() -> None:
    """Many tensors are measured in one call."""
    from paritas._torch.foreach import figures_of_pairs

    left, right = [torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])]
    expect("figures of a pair", figures_of_pairs(left, right), [(5.0, 0.5, 0.5)])


def hooks() -> None:
    """The hooks of a tensor can be seen, and so can a backward that is differentiable only once."""
    from paritas._torch.hooks import (
        accumulation_hooks,
        copy_hooks,
        gradient_hooks,
        refuse_once_differentiable,
    )

    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x.register_hook(torch.neg)
    x.register_post_accumulate_grad_hook(lambda _: None)
    copy_hooks(x, other)
    expect("a hook on a gradient", gradient_hooks(other), (torch.neg,))
    expect("hooks on the accumulation of one", len(accumulation_hooks(other)), 1)
    double = torch.autograd.function.once_differentiable(lambda _, gradient: gradient * 2)
    try:
        refuse_once_differentiable([double(None, x).sin()])
    except RuntimeError:
        return
    expect("a backward that is differentiable only once", "let through", "refused")


def indexing() -> None:
    """Indices out of range are brought into it."""
    from paritas._torch.indexing import in_bounds

    given = (torch.zeros(3, 4), 1, torch.tensor([[0, -1, 9]]))
    expect("indices", in_bounds("gather", given)[2].tolist(), [[0, 3, 1]])


def kernel_checks() -> None:
    """Kernels that believe their arguments still name them so."""
    from paritas._torch.kernel_checks import fits_kernel
    from paritas._torch.named_operators import operator_named

    taken = {name for name, _ in operator_named("aten.embedding_dense_backward.default").takes}
    wanted = {"grad_output", "indices", "num_weights"}
    expect("arguments of embedding_dense_backward", wanted <= taken)
    expect("arguments that do not fit", fits_kernel("embedding_dense_backward", {}), wanted=False)


def kernels() -> None:
    """Torch's own float64 kernels are told from those with float32 constants inside."""
    from paritas._torch.kernels import float64_kernel

    kernel = float64_kernel(ATEN.gelu.default, (_values(8).double(),))
    expect("the float64 kernel of gelu", kernel is ATEN.gelu.default)


def last_sums() -> None:
    """What a lifted run's last sum must round is known by the memory that it lies in."""
    from paritas._torch.lifting import LiftMode

    mode = LiftMode(torch.float32, torch.float32, remember_sums=True)
    with mode:
        total = _values(64, 3).sum(0)
    known = mode.least_noise_of(total)
    # A sum of few numbers may happen to fit float32, and then it has no rounding.
    expect("rounding of a sum", known is not None and bool((known > 0).any()))


def lifting() -> None:
    """Every operator passes through a mode that computes in float64, forward and backward."""
    from paritas._torch.lifting import LiftMode

    weight, x = _values(4, 4), _values(3, 4).double().requires_grad_()
    with LiftMode(torch.float32, torch.float32):
        y = (x.float() @ weight).softmax(-1)
        (slope,) = torch.autograd.grad(y.square().sum(), x)
    wide = x.detach().requires_grad_()
    expected = (wide @ weight.double()).softmax(-1)
    (wanted,) = torch.autograd.grad(expected.square().sum(), wide)
    expect("a softmax in float64", float((y - expected).detach().abs().max()) < 1e-14)  # noqa: PLR2004
    expect("its gradient in float64", float((slope - wanted).abs().max()) < 1e-14)  # noqa: PLR2004


def modules() -> None:
    """The tensors of a module can be put into their places without registering them."""
    from paritas._torch.modules import INTERNALS, tensor_slots

    layer, other = torch.nn.Linear(2, 2), torch.zeros(2)
    tensor_slots(layer)[0]["bias"] = other
    expect("a parameter that was put into a module", layer.bias is other)
    expect("a module's own attributes", sorted(vars(layer).keys() - INTERNALS)[:1], ["in_features"])


def named_operators() -> None:
    """An operator is found by its name, and its cost is foretold without running it."""
    from paritas._torch.named_operators import operator_named

    found = operator_named("aten.mm.default")
    expect("aten.mm.default", found.func is ATEN.mm.default)
    expect("size of a product", found.foretell([torch.ones(4, 6), torch.ones(6, 4)], {}), 64)


def operators() -> None:
    """An operator's schema says what it writes to, views and draws."""
    from paritas._torch.operators import traits

    expect("what add_ writes to", traits(ATEN.add_.Tensor).mutates, {0, "self"})
    expect("whether t is a view", traits(ATEN.t.default).view)
    expect("whether rand draws", traits(ATEN.rand.default).random)


def perturbing() -> None:
    """A perturbed run differs by the rounding of the precision that it stands for."""
    from paritas._torch.perturbing import PerturbMode

    x, weight = _values(16, 16).double(), _values(16, 16)
    with PerturbMode(torch.float32, torch.float32, UNIT, seed=0):
        moved = x @ weight
    still = x @ weight.double()
    change = float((moved - still).norm() / still.norm())
    expect(f"a change by rounding ({change:.1e})", UNIT / 8 < change < UNIT * 8)


def sparse() -> None:
    """The values of a sparse tensor are changed where they are."""
    from paritas._torch.sparse import as_dense, map_values

    places = torch.eye(3).to_sparse()
    doubled = as_dense(map_values(places, lambda values: values * 2))
    expect("doubled values of a sparse tensor", torch.equal(doubled, 2 * torch.eye(3)))


PROBES = {
    "accumulation": accumulation,
    "attention": attention,
    "cancelling": cancelling,
    "decisions": decisions,
    "default_dtypes": default_dtypes,
    "equality": equality,
    "foreach": foreach,
    "hooks": hooks,
    "indexing": indexing,
    "kernel_checks": kernel_checks,
    "kernels": kernels,
    "last_sums": last_sums,
    "lifting": lifting,
    "modules": modules,
    "named_operators": named_operators,
    "operators": operators,
    "perturbing": perturbing,
    "sparse": sparse,
}
