"""One canary for each module of `core.torch_private`: a new torch fails here first, by name."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

from paritas.core.errors import UnsupportedTorchError
from paritas.core.numerics.contents import given_to_tensor
from paritas.core.operators import rounding
from paritas.core.operators.catalogue import SUMMATIONS, operators_of
from paritas.core.precision import lifting, perturbing, widening
from paritas.core.torch_private import dynamo, kernels, operators, tensors

ATEN = torch.ops.aten
FLOAT32 = frozenset({torch.float32})


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


def values(*shape, seed=0):
    """Float32 numbers, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def rms(tensor):
    return float(tensor.square().mean().sqrt())


# --- paritas.core.precision.accumulation ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SUMMATIONS))
def test_everything_that_sums_is_an_operator(name):
    assert getattr(ATEN, name).overloads()


# --- paritas.core.torch_private.dynamo ------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, "inductor"])
def test_a_torch_without_an_inductor_backend_is_named(answer, monkeypatch):
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: answer)
    with pytest.raises(UnsupportedTorchError, match="'inductor'"):
        dynamo.inductor_backend()


# --- paritas.core.torch_private.dynamo ------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()

    def encode(self, x):
        return self.linear(x)


def function(x):
    return x.sin() + 1


def custom(graph, example_inputs):
    return graph.forward


def compiled_in_place(backend):
    net = Net()
    net.compile(backend=backend)
    return net


def compiled_inside(backend):
    return nn.Sequential(Net(), nn.Sequential(torch.compile(Net(), backend=backend)))


MAKERS = {
    "module": lambda backend: torch.compile(Net(), backend=backend),
    "function": lambda backend: torch.compile(function, backend=backend),
    "bound method": lambda backend: torch.compile(Net().encode, backend=backend),
    "module.compile()": compiled_in_place,
    "nested": compiled_inside,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("backend", ["inductor", "eager", "aot_eager", custom])
def test_the_backend_behind_a_compiled_callable_is_found(make, backend):
    (found,) = dynamo.backends_of(make(backend))
    faithful = isinstance(backend, str)
    assert dynamo.backend_name(found) == (backend if faithful else "custom")
    assert dynamo.is_faithful(found) is faithful


@pytest.mark.parametrize("plain", [Net(), function, Net().encode, torch.relu, object()])
def test_what_is_not_compiled_has_no_backend_and_is_its_own_original(plain):
    assert dynamo.backends_of(plain) == []
    assert dynamo.original_of(plain) is plain


def test_several_backends_are_all_found_once():
    parts = [torch.compile(Net(), backend=name) for name in ("eager", "aot_eager", "eager")]
    found = dynamo.backends_of(nn.Sequential(*parts))
    assert [dynamo.backend_name(backend) for backend in found] == ["eager", "aot_eager"]


def test_a_function_of_another_s_that_bears_a_known_name_is_not_trusted():
    def inductor(graph, example_inputs):
        return graph.forward

    (found,) = dynamo.backends_of(torch.compile(function, backend=inductor))
    assert not dynamo.is_faithful(found)


def test_the_original_of_what_was_compiled_is_found():
    net = Net()
    assert dynamo.original_of(torch.compile(net, backend="eager")) is net
    assert dynamo.original_of(torch.compile(function, backend="eager")) is function
    bound = dynamo.original_of(torch.compile(net.encode, backend="eager"))
    assert bound.__self__ is net


def test_a_compiled_function_that_hides_its_context_is_an_error_that_says_so():
    def hidden(x):
        return x

    hidden._torchdynamo_wrapper_id = id(hidden)
    with pytest.raises(UnsupportedTorchError, match="hides the context"):
        dynamo.backends_of(hidden)


def test_there_is_room_for_more_entries_only_inside():
    before = torch._dynamo.config.recompile_limit
    with dynamo.room_for_entries():
        assert torch._dynamo.config.recompile_limit > before
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_forced_backend_is_reached(make, name):
    run = make(name)
    (inner,) = dynamo.backends_of(run)
    lifted = widening.LiftedBackend(inner, torch.float32, FLOAT32)
    with torch.no_grad():  # Dynamo warns of the gradient of what goes from one part to the next
        run(torch.ones(2, 4))
        with torch.compiler.set_stance("default", force_backend=lifted):
            run(torch.ones(2, 4))
    assert lifted.graphs > 0


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.float() / 3,
        lambda x: x.to(torch.float32) / 3,
        lambda x: x + torch.full((8,), 1 / 3, dtype=torch.float32),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.rand(8) + x / 3,
        lambda x: torch.rand_like(x) + x / 3,
    ],
)
def test_a_lifted_backend_computes_the_graph_in_float64(program, name):
    x = values(8)
    torch.manual_seed(1)
    native = program(x.float())
    run = torch.compile(program, backend=name)
    lifted = widening.LiftedBackend(dynamo.backends_of(run)[0], torch.float32, FLOAT32)
    torch.manual_seed(1)
    with torch.compiler.set_stance("default", force_backend=lifted):
        result = run(x)
    assert result.dtype is torch.float64
    assert lifted.leaks == set()
    assert 0 < rms(result - native.double()) < 1e-6, "not float64, or not the same numbers"


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_a_lifted_graph_draws_natively_and_goes_on_in_float64(draw, name):
    run = torch.compile(lambda x: draw(64).div(3), backend=name)
    lifted = widening.LiftedBackend(dynamo.backends_of(run)[0], torch.float32, FLOAT32)
    torch.manual_seed(1)
    with torch.compiler.set_stance("default", force_backend=lifted):
        result = run(values(8))
    torch.manual_seed(1)
    assert lifted.graphs == 1
    assert torch.equal(result, draw(64).double() / 3)


def test_a_cast_narrower_than_the_reference_s_stays_in_the_lifted_graph():
    run = torch.compile(lambda x: x.to(torch.bfloat16).double(), backend="eager")
    (inner,) = dynamo.backends_of(run)
    x = values(8)
    for used, rounds in ((FLOAT32, True), (FLOAT32 | {torch.bfloat16}, False)):
        torch._dynamo.reset()
        lifted = widening.LiftedBackend(inner, torch.float32, used)
        with torch.compiler.set_stance("default", force_backend=lifted):
            assert torch.equal(run(x), x) is not rounds


def test_one_lifted_backend_serves_a_function_for_good():
    run = torch.compile(function, backend="eager")
    (inner,) = dynamo.backends_of(run)
    make = functools.partial(widening.lifted_backend, run, inner, torch.float32)
    assert make(FLOAT32) is make(FLOAT32)
    assert make(FLOAT32) is not make(FLOAT32 | {torch.bfloat16})


def test_torch_takes_backward_kernels_apart_by_their_own_arguments():
    args = values(4, 3), values(4, 6, seed=1), 1
    apart = kernels.decomposition_of(ATEN.glu_backward.default)
    torch.testing.assert_close(apart(*args), ATEN.glu_backward(*args))
    assert kernels.decomposition_of(ATEN.mm.default) is None


# --- paritas.core.precision.lifting ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounding", "margin"),
    [
        (lambda x: x.round().clamp(-8, 7).to(torch.int8), -0.25),
        (lambda x: x.floor().to(torch.int64), -0.75),
        (lambda x: x.ceil().long() - 0, None),  # what was done to it afterwards is not followed
        (lambda x: x.to(torch.int32), -0.75),
    ],
)
def test_the_margin_of_a_rounding_is_the_distance_to_its_edge(rounding, margin):
    mode = lifting.LiftMode(torch.float32, torch.float32, remember_decisions=True)
    x = torch.full((3,), 2.25)
    with mode:
        result = rounding(x)
    decision = mode.decision_for(result)
    if margin is None:
        assert decision is None
        return
    assert isinstance(decision, lifting.Decision)
    assert decision.margin(result, result + 1).tolist() == [margin] * 3
    assert decision.margin(result, result + 2) is None, "no rounding leads two steps away"


# --- paritas.core.torch_private.tensors -----------------------------------------------------------


def test_the_hooks_of_a_tensor_are_seen_and_stand_on_another():
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert tensors.gradient_hooks(x) == tensors.accumulation_hooks(x) == ()
    heard = []
    x.register_hook(torch.neg)
    x.register_post_accumulate_grad_hook(heard.append)
    assert tensors.gradient_hooks(x) == (torch.neg,)
    assert tensors.accumulation_hooks(x) == (heard.append,)
    tensors.copy_hooks(x, other)
    other.sum().backward()
    assert heard == [other]
    assert other.grad.tolist() == [-1, -1]


@pytest.mark.parametrize("once", [True, False])
def test_a_backward_that_is_differentiable_only_once_is_seen_in_the_graph(once):
    def backward(ctx, gradient):
        return gradient * 2

    mark = torch.autograd.function.once_differentiable if once else lambda function: function

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    Twice.backward = staticmethod(mark(backward))
    x, cotangent = (torch.ones(2, requires_grad=True) for _ in range(2))
    (found,) = torch.autograd.grad(Twice.apply(x.sin()).exp(), x, cotangent, create_graph=True)
    if not once:
        tensors.refuse_once_differentiable([found])
        return
    with pytest.raises(RuntimeError, match="once_differentiable"):
        tensors.refuse_once_differentiable([found])


def test_a_tensor_without_the_place_of_its_hooks_is_a_torch_we_do_not_know():
    with pytest.raises(UnsupportedTorchError, match="_backward_hooks"):
        tensors.gradient_hooks(object())


# --- paritas.core.torch_private.kernels -----------------------------------------------------------


def test_a_float64_kernel_with_a_float32_constant_is_replaced(monkeypatch):
    simpler = lambda x: x * torch.clamp(x + 3, 0, 6) * (1 / 6)  # noqa: E731
    monkeypatch.setattr(kernels, "_KNOWN_KERNELS", {})
    monkeypatch.setattr(kernels, "_other_ways", kernels._other_ways.__wrapped__)
    monkeypatch.setitem(kernels.decomposition_table, ATEN.hardswish.default, simpler)
    assert kernels.float64_kernel(ATEN.hardswish.default, (values(8),)) is ATEN.hardswish.default
    coarse = lambda x: x * torch.clamp(x + 3, 0, 6) * float(torch.tensor(1 / 6))  # noqa: E731
    kernels._KNOWN_KERNELS.clear()
    monkeypatch.setitem(kernels.decomposition_table, ATEN.hardswish.default, coarse)
    assert kernels.float64_kernel(ATEN.hardswish.default, (values(8),)) is coarse


# --- paritas.core.precision.lifting ---------------------------------------------------------------


def test_every_operator_passes_through_a_lifting_mode_forward_and_backward():
    hidden = values(8, 8, seed=3).float()
    x = values(4, 8).requires_grad_()
    with lifting.LiftMode(torch.float32, torch.float32) as mode:
        y = F.softmax(x.float() @ hidden, dim=-1, dtype=torch.float32)
        (slope,) = torch.autograd.grad(y.square().sum(), x)
    wide = x.detach().requires_grad_()
    expected = F.softmax(wide @ hidden.double(), dim=-1)
    (expected_slope,) = torch.autograd.grad(expected.square().sum(), wide)
    assert mode.casts == {torch.float32}
    assert float((y - expected).detach().abs().max()) < 1e-15
    assert float((slope - expected_slope).abs().max()) < 1e-15


def test_reading_the_bits_of_a_float_is_seen_by_a_lifting_mode():
    with (
        lifting.LiftMode(torch.float32, torch.float32),
        pytest.raises(lifting.LiftingError, match="reads the bits of a float"),
    ):
        torch.ones(4).view(torch.int32)


def test_the_dtype_of_every_call_is_written_down():
    log = lifting.DtypeLog()
    with log:
        x = torch.ones(2, 2)
        y = x.mm(x).to(torch.bfloat16)
        y.mm(y).argmax()
    assert log.calls[ATEN.mm.default, 0] is torch.float32
    assert log.calls[ATEN.mm.default, 1] is torch.bfloat16
    assert log.calls[ATEN._to_copy.default, 0] is torch.bfloat16
    assert not [call for call in log.calls if call[0] is ATEN.argmax.default]


# --- paritas.core.torch_private.tensors -----------------------------------------------------------


def test_the_slots_of_a_module_are_where_it_reads_its_tensors_from():
    norm = nn.BatchNorm1d(3)
    parameters, buffers = tensors.tensor_slots(norm)
    assert list(parameters) == ["weight", "bias"]
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    other = torch.full((3,), 2.0)
    parameters["weight"] = buffers["running_mean"] = other
    assert norm.weight is other
    assert norm.running_mean is other
    assert next(iter(norm.state_dict())) == "weight"


def test_what_a_module_has_of_its_own_is_told_from_torch_s():
    net = Net()
    net.steps = 1
    net(torch.ones(1, 4))
    assert set(vars(net)) - tensors.INTERNALS == {"steps", "training"}


# --- paritas.core.torch_private.operators ---------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "name", "flags"),
    [
        (ATEN.add.Tensor, "add", {"rounds"}),
        (ATEN.add_.Tensor, "add", {"rounds", "mutates"}),
        (ATEN.mm.default, "mm", {"rounds"}),
        (ATEN.mm.out, "mm", {"rounds", "mutates"}),
        (ATEN._softmax.default, "_softmax", {"rounds"}),
        (ATEN._to_copy.default, "_to_copy", {"rounds"}),
        (ATEN.relu.default, "relu", set()),
        (ATEN.relu_.default, "relu", {"mutates"}),
        (ATEN.topk.default, "topk", set()),
        (ATEN.where.self, "where", set()),
        (ATEN.view.default, "view", {"view"}),
        (ATEN.view.dtype, "view", {"view", "reads_bits"}),
        (ATEN.t.default, "t", {"view"}),
        (ATEN.slice.Tensor, "slice", {"view"}),
        (ATEN.bernoulli_.float, "bernoulli", {"random", "mutates"}),
        (ATEN.rand.default, "rand", {"random"}),
        (ATEN.native_dropout.default, "native_dropout", {"random"}),
    ],
)
def test_the_traits_of_an_operator(operator, name, flags):
    kind = operators.traits(operator)
    assert kind.name == name
    assert kind.namespace == "aten"
    shown = {flag for flag in ("view", "mutates", "random", "reads_bits") if getattr(kind, flag)}
    shown |= {"rounds"} if rounding.rounds(kind) else set()
    assert shown == flags


def test_an_argument_that_is_written_to_is_known_by_place_and_name():
    assert operators.traits(ATEN.add_.Tensor).mutates == {0, "self"}
    assert operators.traits(ATEN.mm.out).mutates == {2, "out"}


@pytest.mark.parametrize("name", sorted(operators_of("comparisons", "choices")))
def test_every_operator_that_decides_exists(name):
    assert getattr(ATEN, name).overloads()


# --- paritas.core.precision.perturbing ------------------------------------------------------------


def test_a_perturbed_run_differs_by_the_noise_of_the_precision_it_stands_for():
    x, hidden = values(32, 32), values(32, 32, seed=1).float()
    still = x @ hidden.double()
    with perturbing.PerturbMode(torch.float32, torch.float32, 2.0**-24, seed=0):
        moved = x @ hidden
    assert 1e-8 < rms(moved - still) / rms(still) < 1e-6


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operators_on_jagged_tensors_come_to_a_mode_as_operators_on_dense_ones():
    nested = torch.nested.as_nested_tensor(
        [torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged
    )
    assert lifting.is_jagged(type(nested))
    assert not lifting.is_jagged(torch.Tensor)
    with lifting.LiftMode(torch.float32, torch.float32):
        result = nested / 3
    assert result.values().dtype is torch.float64
    assert torch.equal(result.values(), torch.ones(4, 2).double() / 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantising_takes_float32_alone_and_its_codes_are_decided_by_what_is_rounded():
    mode = lifting.LiftMode(torch.float32, torch.float32, remember_decisions=True)
    with mode:
        codes = torch.quantize_per_tensor(values(3), 0.5, 1, torch.qint8)
    decision = mode.decision_for(codes)
    assert decision.kind == "round"
    assert torch.equal(decision.left, values(3) / 0.5 + 1)


# --- attributes and backward functions ------------------------------------------------------------

MARKS = {
    "dynamic": lambda x: torch._dynamo.mark_dynamic(x, 0),
    "maybe dynamic": lambda x: torch._dynamo.maybe_mark_dynamic(x, 0),
    "unbacked": lambda x: torch._dynamo.decorators.mark_unbacked(x, 0),
    "static": lambda x: torch._dynamo.mark_static(x, 0),
    "static address": torch._dynamo.mark_static_address,
}


@pytest.mark.parametrize("mark", MARKS)
def test_the_marks_of_dynamo_are_no_attributes_of_a_program(mark):
    x = torch.ones(4, 4)
    MARKS[mark](x)
    assert vars(x)
    assert given_to_tensor(x) == {}


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2

    @staticmethod
    def backward(_, gradient):
        return gradient * 2


def test_a_backward_of_a_program_is_told_from_that_of_torch():
    x = torch.ones(3, requires_grad=True)
    assert tensors.has_own_backward([x.sin(), Doubling.apply(x.cos()).exp()])
    assert not tensors.has_own_backward([x.sin()])
    assert not tensors.has_own_backward([torch.ones(3)])


def test_the_tables_of_hooks_are_those_that_torch_calls():
    x = torch.ones(3, requires_grad=True)
    assert tensors.hook_tables(x) == {}
    x.register_hook(torch.neg)
    tensors.hook_tables(x)["_backward_hooks"].clear()
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_compiled_code_has_no_backward_of_its_own():
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    assert not tensors.has_own_backward([compiled(x)])


def test_the_backward_of_a_custom_operator_is_its_own():
    @torch.library.custom_op("canaries::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_autograd(lambda _, gradient: gradient * 2)
    assert tensors.has_own_backward([doubled(torch.ones(3, requires_grad=True))])
