"""Probes of the private APIs of torch that paritas uses: does each behave as expected?"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from paritas.app.doctor import compiler_probes
from paritas.app.doctor.examination import run_check
from paritas.app.doctor.self_test import expect
from paritas.core.torch_private.global_state import quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.app.doctor.examination import Check


# --- Running operators ----------------------------------------------------------------------------

# Each probe imports its own subject: an import error fails only that probe.
ATEN, UNIT = torch.ops.aten, 2.0**-24


def _draw_values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def accumulation() -> None:
    """The error of a sum is predicted from the arguments of its operator."""
    from paritas.core.precision.accumulation import accumulation
    from paritas.core.precision.summing import UnperturbedCall

    x = _draw_values(4, 64)
    call = UnperturbedCall("mm", ATEN.mm.default, (x, x.t()), {}, x @ x.t())
    shapes = [
        tuple(tensor.shape) for tensor in accumulation(call) if isinstance(tensor, torch.Tensor)
    ]
    expect("amplitudes of a product", shapes, [(4, 4)])


def attention() -> None:
    """Attention kernels take the expected arguments, agree, and are seen as one function."""
    from paritas.core.precision.composites import ATTENTION
    from paritas.core.precision.lifting import DtypeLog
    from paritas.core.torch_private.kernels import BACKWARD, FORWARD, wide_attention

    for op in sorted(FORWARD | BACKWARD, key=str):
        expect(f"float64 form of {op}", callable(wide_attention(op)))
    form = wide_attention(ATEN._scaled_dot_product_flash_attention.default)  # noqa: SLF001
    q = _draw_values(1, 2, 4, 8).double()
    with DtypeLog() as log:
        plain = ATTENTION(q, q, q)
    expect("attention, seen as one function", log.calls.get((ATTENTION, 0)), torch.float64)
    expect("attention in float64", form is not None and torch.allclose(form(q, q, q)[0], plain))


def cancelling() -> None:
    """Sums that lose digits in float64 are distinguished from exact sums."""
    from paritas.core.precision.perturbing import is_exact_in_any_order

    for far, is_exact in ((2.0, True), (2.0**60, False)):
        terms = torch.tensor([1.0, far], dtype=torch.float64)
        expect(f"a sum of 1 and {far}", is_exact_in_any_order(terms, terms.sum()), wanted=is_exact)


def decisions() -> None:
    """The value before a rounding to integers is recorded."""
    from paritas.core.precision.lifting import LiftMode

    mode = LiftMode(torch.float32, torch.float32, remember_decisions=True)
    with mode:
        result = torch.full((2,), 2.25).floor().to(torch.int64)
    decision = mode.decision_for(result)
    margin = None if decision is None else decision.margin(result, result + 1)
    expect("margin of a floor", None if margin is None else margin.tolist(), [-0.75, -0.75])


def default_dtypes() -> None:
    """A mode sees tensors created without a dtype, and those that are already rounded."""
    from paritas.core.precision.lifting import LiftMode

    mode = LiftMode(torch.float32, torch.float32)
    with mode:
        tensors = [torch.ones(2), torch.arange(0, 1, 0.5), torch.arange(2) / 3]
    expect("default dtypes", {value.dtype for value in tensors}, {torch.float64})
    expect("a default that no mode can see", mode.asked_default, wanted=False)
    with mode:
        torch.tensor(0.1)
    expect("a number that was already rounded", mode.asked_default)


def equality() -> None:
    """Comparisons of floats for equality in a graph are made tolerant."""
    from paritas.core.torch_private.eager_graphs import nearly_equal, with_tolerant_equality
    from paritas.core.torch_private.graphs import trace_calls

    graph = with_tolerant_equality(trace_calls(lambda x: x == x.amax(0), [_draw_values(3, 2)]))
    targets = [] if graph is None else [node.target for node in graph.graph.nodes]
    expect("a graph with tolerant equality", nearly_equal in targets)


def foreach() -> None:
    """Many tensors are measured in one call."""
    from paritas.core.torch_private.tensors import figures_of_pairs

    left, right = [torch.tensor([0.0, 4.0])], [torch.tensor([0.0, 2.0])]
    expect("figures of a pair", figures_of_pairs(left, right), [(2.0, 2.0, 2.0, 0.5)])


def hooks() -> None:
    """Hooks of a tensor are visible, and so is a backward that is differentiable only once."""
    from paritas.core.torch_private import tensors

    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x.register_hook(torch.neg)
    x.register_post_accumulate_grad_hook(lambda _: None)
    tensors.copy_hooks(x, other)
    expect("a hook on a gradient", tensors.gradient_hooks(other), (torch.neg,))
    expect("hooks on its accumulation", len(tensors.accumulation_hooks(other)), 1)
    double = torch.autograd.function.once_differentiable(lambda _, gradient: gradient * 2)
    try:
        tensors.refuse_once_differentiable([double(None, x).sin()])
    except RuntimeError:
        return
    expect("a backward that is differentiable only once", "accepted", "refused")


def indexing() -> None:
    """Indices out of range are brought into range."""
    from paritas.core.torch_private.replaying import in_bounds

    call_args = (torch.zeros(3, 4), 1, torch.tensor([[0, -1, 9]]))
    expect("indices", in_bounds("gather", call_args)[2].tolist(), [[0, 3, 1]])


def kernel_checks() -> None:
    """Kernels that do not validate their arguments have the expected argument names."""
    from paritas.core.torch_private.named_operators import fits_kernel, operator_named

    taken = {name for name, _ in operator_named("aten.embedding_dense_backward.default").takes}
    expected = {"grad_output", "indices", "num_weights"}
    expect("arguments of embedding_dense_backward", expected <= taken)
    expect("arguments that do not fit", fits_kernel("embedding_dense_backward", {}), wanted=False)


def kernels() -> None:
    """True float64 kernels are distinguished from those with float32 constants inside."""
    from paritas.core.torch_private.kernels import GROUPED, float64_kernel

    kernel = float64_kernel(ATEN.gelu.default, (_draw_values(8).double(),))
    expect("the float64 kernel of gelu", kernel is ATEN.gelu.default)
    for op in GROUPED:
        names = [argument.name for argument in op._schema.arguments]  # noqa: SLF001
        expect(f"the arguments of {op}", names == ["self", "mat2", "offs", "bias", "out_dtype"])


def last_sums() -> None:
    """The rounding of a lifted run's last sum is found by its memory address."""
    from paritas.core.precision.lifting import LiftMode

    mode = LiftMode(torch.float32, torch.float32, remember_sums=True)
    with mode:
        total = _draw_values(64, 3).sum(0)
    noise = mode.least_noise_of(total)
    # A sum of a few numbers may be exact in float32.
    expect("rounding of a sum", noise is not None and bool((noise > 0).any()))


def lifting() -> None:
    """A mode computes every operator in float64, forward and backward."""
    from paritas.core.precision.lifting import LiftMode

    weight, x = _draw_values(4, 4), _draw_values(3, 4).double().requires_grad_()
    with LiftMode(torch.float32, torch.float32):
        y = (x.float() @ weight).softmax(-1)
        (slope,) = torch.autograd.grad(y.square().sum(), x)
    wide = x.detach().requires_grad_()
    expected = (wide @ weight.double()).softmax(-1)
    (required,) = torch.autograd.grad(expected.square().sum(), wide)
    expect("a softmax in float64", float((y - expected).detach().abs().max()) < 1e-14)  # noqa: PLR2004
    expect("its gradient in float64", float((slope - required).abs().max()) < 1e-14)  # noqa: PLR2004


def memory() -> None:
    """Errors that say that memory ran out are recognized, and copies share memory until written."""
    from paritas.core.torch_private import tensors as subject

    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        expect("an allocation that is too large", subject.is_out_of_memory(error))
        expect("its size", subject.bytes_asked(error), 1 << 60)
    expect("free memory, if it is known", subject.free_bytes(torch.device("cpu")) != 0)
    model = torch.nn.Linear(2, 2)
    shared_copy, before = subject.copy_on_write(model), model.bias.tolist()
    expect("a copy that shares memory", subject.is_shared(shared_copy.bias))
    shared_copy.bias.data.add_(1)
    expect("the original after a write to the copy", model.bias.tolist(), before)


def modules() -> None:
    """Tensors of a module can be replaced without registering them."""
    from paritas.core.torch_private.tensors import INTERNALS, tensor_slots

    layer, other = torch.nn.Linear(2, 2), torch.zeros(2)
    tensor_slots(layer)[0]["bias"] = other
    expect("a replaced parameter of a module", layer.bias is other)
    expect("a module's own attributes", sorted(vars(layer).keys() - INTERNALS)[:1], ["in_features"])


def named_operators() -> None:
    """An operator is found by its name, and its cost is predicted without running it."""
    from paritas.core.torch_private.named_operators import operator_named

    operator = operator_named("aten.mm.default")
    expect("aten.mm.default", operator.func is ATEN.mm.default)
    expect("size of a product", operator.foretell([torch.ones(4, 6), torch.ones(6, 4)], {}), 64)


def operator_samples() -> None:
    """An operator is found by its name, and the database of torch's tests is where it was."""
    from paritas.core.torch_private.named_operators import DATABASE, find_operator

    expect("aten.add.Tensor", find_operator("aten.add.Tensor") is ATEN.add.Tensor)
    expect("aten.relu", find_operator("aten.relu") is ATEN.relu.default)
    expect("an operator that does not exist", find_operator("aten.no_such_operator"), None)
    expect(DATABASE, importlib.util.find_spec(DATABASE) is not None)


def operators() -> None:
    """An operator's schema says whether it mutates, views or is random."""
    from paritas.core.torch_private.operators import traits

    expect("what add_ mutates", traits(ATEN.add_.Tensor).mutates, {0, "self"})
    expect("whether t is a view", traits(ATEN.t.default).view)
    expect("whether rand is random", traits(ATEN.rand.default).random)


def perturbing() -> None:
    """A perturbed run differs by the rounding of the simulated precision."""
    from paritas.core.precision.perturbing import PerturbMode

    x, weight = _draw_values(16, 16).double(), _draw_values(16, 16)
    with PerturbMode(torch.float32, torch.float32, UNIT, seed=0):
        moved = x @ weight
    still = x @ weight.double()
    change = float((moved - still).norm() / still.norm())
    expect(f"a change by rounding ({change:.1e})", UNIT / 8 < change < UNIT * 8)


def sparse() -> None:
    """The values of a sparse tensor are changed in place."""
    from paritas.core.torch_private.tensors import as_dense, map_values

    places = torch.eye(3).to_sparse()
    doubled = as_dense(map_values(places, lambda values: values * 2))
    expect("doubled values of a sparse tensor", torch.equal(doubled, 2 * torch.eye(3)))


# --- Reading, copying and running graphs ----------------------------------------------------------


def _wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + x


def _trace_wave() -> Any:
    from paritas.core.torch_private.graphs import trace_calls

    return trace_calls(_wave, [torch.ones(3, 4)])


def _node_names(module: Any) -> list[str]:
    return [node.name for node in module.graph.nodes]


def _look_at_captured(look: Any) -> Any:
    """Apply `look` to a graph that Dynamo captures, while it exists."""
    visited: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        visited.append(look(graph))
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(torch.nn.Linear(4, 2), backend=backend)(torch.ones(1, 4))
    torch.compiler.reset()
    return visited[0]


def draw_keys() -> None:
    """Inductor's random operators take the expected keys."""
    from paritas.core.torch_private import replaying as keys

    for op in (keys.SEED, keys.SEEDS, ATEN.rand.default):
        expect(f"whether {op} is random", keys.may_draw(op))
    expect("whether inductor_random is random", keys.may_draw(keys.RANDOM), wanted=False)


def exported_programs() -> None:
    """The values of a graph and the range of a symbol are predicted without running it."""
    from paritas.core.torch_private.graphs import predict_values, symbol_ranges
    from paritas.core.torch_private.named_operators import is_operator

    expect("whether relu is an operator", is_operator(ATEN.relu.default))
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    shapes = [
        tuple(predict_value.shape)
        for predict_value in predict_values(graph, [torch.ones(2, 3)])[0].values()
    ]
    expect("predicted shapes", shapes, [(2, 3), (2, 4)])
    length = torch.export.Dim("length", min=3, max=64)
    program = torch.export.export(
        torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: length},)
    )
    expect("the range of a symbol", list(symbol_ranges(program).values()), [(3, 64)])


def exported_lifting() -> None:
    """Casts of an exported program are widened to float64."""
    from paritas.core.precision.widening import lift_captured

    class Casting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() / 3

    x = torch.ones(2, dtype=torch.float64)
    program, leaks = lift_captured(
        torch.export.export(Casting(), (x,)), (x,), frozenset({torch.float32})
    )
    expect("parts that could not be lifted", sorted(leaks), [])
    expect("the dtype of a lifted program", program.module()(x).dtype, torch.float64)


def frozen() -> None:
    """A change of a graph is detected."""
    from paritas.core.torch_private.passes import Fingerprint

    module = _trace_wave()
    before = Fingerprint(module)
    expect("a graph that did not change", before.same(Fingerprint(module)))
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.sin.default)
    node.target = ATEN.cos.default
    expect("a graph that changed", before.same(Fingerprint(module)), wanted=False)


def graphs() -> None:
    """A captured node records the module that called it; autocast is found in a graph."""
    from paritas.core.torch_private import graphs as fx

    copied = fx.copy_graph(_trace_wave())
    expect("inputs of a copied graph", len(fx.placeholders(copied)), 1)
    where = _look_at_captured(lambda graph: fx.provenance(fx.returned_values(graph)[0]))
    expect("the operator of a captured node", where.operator, "linear")
    counts: list[int] = []

    def erase_from(graph: Any, _inputs: Any) -> Any:
        counts.append(len(graph.graph.nodes))
        fx.erase_idle_autocast(graph)
        counts.append(len(graph.graph.nodes))
        return graph.forward

    @torch.compile(backend=erase_from)
    def without_autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.sin()

    without_autocast(torch.ones(3))
    expect("nodes of a graph with and without idle autocast", counts, [5, 3])


def higher_order() -> None:
    """Operators with plain forms are higher-order operators; values inside `vmap` can be seen."""
    from paritas.core.torch_private import vmapped as inner
    from paritas.core.torch_private.eager_graphs import PLAIN_FORMS
    from paritas.core.torch_private.graphs import is_higher_order

    for op in PLAIN_FORMS:
        expect(f"whether {op} is a higher-order operator", is_higher_order(op))
    with inner.inside_vmap(3, "error") as level:
        sums = inner.show_dimension(inner.hide_dimension(torch.ones(3, 2), level).sum(), level, 3)
    expect("sums inside torch.vmap", sums.tolist(), [2.0] * 3)


def naming() -> None:
    """Inputs of a captured graph have the names of the user's program."""
    from paritas.core.torch_private.graphs import captured_input_names

    names = {name.rpartition(".")[2] for name in _look_at_captured(captured_input_names)}
    expect(f"inputs of a captured layer ({sorted(names)})", {"bias", "weight"} <= names)


def overwriting() -> None:
    """A traced graph is rewritten to overwrite its operands."""
    from paritas.core.torch_private.eager_graphs import overwrite_operands

    rewritten_wave = overwrite_operands(_trace_wave())
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    same = rewritten_wave is not None and bool(torch.equal(rewritten_wave(x)[0], _wave(x)))
    expect("whether the values of a rewritten graph are right", same)


def random_twins() -> None:
    """Inductor's random operators are distinguished from torch's."""
    from paritas.core.torch_private.eager_graphs import draws_by_inductor

    for name in ("inductor_seeds", "inductor_random", "inductor_randint"):
        expect(f"prims.{name}", draws_by_inductor(getattr(torch.ops.prims, name).default))
    expect("aten.rand", draws_by_inductor(ATEN.rand.default), wanted=False)


def replaying() -> None:
    """A frozen graph that runs node by node gives the same values."""
    from paritas.core.torch_private.passes import freeze
    from paritas.core.torch_private.replaying import replay

    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    (result,) = replay(freeze(_trace_wave()), [x], {})
    expect("whether the values of a replayed graph are right", bool(torch.equal(result, _wave(x))))


def selecting() -> None:
    """Single nodes can be marked for compilation, and inductor has the option to respect that."""
    from paritas.core.torch_private.inductor import (
        ONLY_MARKED,
        compilable,
        current_settings,
        with_compiled,
    )

    expect("the option of inductor", ONLY_MARKED.keys() <= current_settings().keys())
    expect("nodes that can be compiled", compilable(_trace_wave()), ["sin", "mul", "add"])
    expect(
        "a marked graph",
        _node_names(with_compiled(_trace_wave(), ["sin"])),
        _node_names(_trace_wave()),
    )


def tapping() -> None:
    """Every value of a graph can be made an output of it."""
    from paritas.core.torch_private.graphs import tap_values

    module, names = tap_values(_trace_wave())
    expect("tapped values", names, ["sin", "mul", "add"])
    expect("outputs of a tapped graph", len(module(torch.ones(3, 4))), 4)


def tracing() -> None:
    """A function and its gradients are traced to one flat graph of operators."""
    from paritas.core.torch_private.graphs import trace_calls

    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.relu().sum(), x)

    node_names = set(_node_names(trace_calls(step, [torch.ones(2, 3)])))
    expect("operators of a traced step", {"relu", "threshold_backward"} <= node_names)


def watching() -> None:
    """Operators of an eager program are observed until the watch ends."""
    from paritas.core.torch_private import watching as watch

    visited: list[str] = []

    class Watcher:
        def listens(self) -> bool:
            return True

        def before(self, func: Any, _args: Any, _kwargs: Any) -> None:
            visited.append(str(func))

        def after(self, _token: Any, _result: Any) -> Any:
            return torch.zeros(()) if visited[-1] == "aten.cos.default" else None

    end = watch.push_watch(Watcher())
    (torch.ones(2, 2) @ torch.ones(2, 2)).tanh()
    replaced = torch.zeros(()).cos()
    expect("whether the watch ended", end())
    expect("a result that the watcher replaced", replaced.item(), 0.0)
    expect("remaining modes", watch.mode_depth(), 0)
    expected = {"aten.mm.default", "aten.tanh.default"}
    expect("whether the operators were observed", expected <= set(visited))


def unseen_kernels() -> None:
    """Calls of an autograd function, and its backward pass, are observed until the watch ends."""
    from paritas.core.precision.unwritten import UnwrittenMemory
    from paritas.core.torch_private import unseen_kernels as unseen
    from paritas.core.torch_private.operators import traits

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            return 2 * gradient

    visited: list[int] = []

    def around(_function: Any, args: Any, kwargs: Any, call: Any) -> Any:
        visited.append(len(args))
        return call(*args, **kwargs)

    plain = torch.autograd.Function.__dict__["apply"], Double.__dict__["backward"]
    end = unseen.watch_autograd_functions(around, around, set())
    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    end()
    now = torch.autograd.Function.__dict__["apply"], Double.__dict__["backward"]
    expect("calls of the function and of its backward pass", visited, [1, 2])
    expect("whether the classes are restored", plain == now)
    memory, y = UnwrittenMemory(), torch.ones(2)
    memory.note(traits(ATEN.empty.memory_format), (), {}, y)
    memory.note(traits(ATEN.add.Tensor), (y, y), {}, y + y)
    expect("whether a read of unwritten memory is noticed", memory.is_read)
    kernel = unseen.unseen_kernel(Double, unseen.Launch.APPLY)
    expect("the call as an operator", (str(kernel), kernel(x).tolist()), ("unseen.Double", [2, 2]))


def leftovers() -> None:
    """Modes, hooks of all modules and replaced kernels that a program leaves behind are seen."""
    from paritas.core.torch_private import watching as left

    readers = left.mode_depths, left.saved_tensor_hooks, left.module_hooks
    before: list[Any] = [left.present_modes(), *(read() for read in readers)]
    torch.overrides.TorchFunctionMode().__enter__()
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    visited = [
        read() != value_before for read, value_before in zip(readers, before[1:], strict=True)
    ]
    left.restore_modes(before[0])
    left.restore_saved_tensor_hooks(before[2])
    left.restore_module_hooks(before[3])
    expect("modes, saved_tensors_hooks and hooks of all modules", visited, [True, True, True])
    expect("what is left of them", [read() for read in readers] == before[1:])
    expect("whether kernels are listed", left.replaced_kernels(left.library_kernels()) == [])
    expect("changed operators", left.put_back_operators(left.loaded_operators()), {})


def widening() -> None:
    """A traced graph is rewritten to compute in float64."""
    from paritas.core.precision.widening import widen_graph

    wide = widen_graph(_trace_wave(), frozenset())
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    result = None if wide is None else wide(x)[0]
    same = result is not None and bool(torch.equal(result, _wave(x.double())))
    expect("whether the values of a widened graph are right", same)


# --- Simulated ranks and distributed tensors ------------------------------------------------------


def placements() -> None:
    """Plain and distributed tensors are distinguished, and placements are read."""
    from torch.distributed.tensor import DTensor, Shard

    from paritas.core.torch_private.ranks import of_ranks, simulated_ranks
    from paritas.core.torch_private.tensors import local_part

    expect("the part of a plain tensor", local_part(torch.ones(2)), None)
    with simulated_ranks(2) as mesh:
        local = of_ranks([torch.ones(2, 3), torch.ones(2, 3)])
        part = local_part(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    expect("the whole shape", None if part is None else part.placement.global_shape, (4, 3))


def rank_lifting() -> None:
    """Programs of ranks are lifted to float64 like other programs."""
    from paritas.core.precision.lifting import RankLiftMode

    with RankLiftMode(torch.float32, torch.float32):
        total = torch.full((2,), 0.3).double() / 3
    expect("the dtype of a lifted result", total.dtype, torch.float64)


def sharding_rules() -> None:
    """Redistributions of an operator's arguments by DTensor are observed."""
    from torch.distributed.tensor import DTensor, Partial

    from paritas.core.torch_private.ranks import of_ranks, simulated_ranks, watch_redistribution

    with simulated_ranks(2) as mesh:
        local = of_ranks([torch.ones(2, 4), torch.ones(2, 4)])
        terms = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        with watch_redistribution() as moved:
            torch.relu(terms)
    # Once DTensor has cached a call, it no longer reports the operator.
    expect("the number of operators with redistributed arguments", len(moved), 1)


def pipelines() -> None:
    """A pipeline schedule runs on ranks that are threads, and its loss can be replaced."""
    from torch.distributed import pipelining

    from paritas.core.torch_private.ranks import knows_factors, pipeline_of, run_in_threads

    def program(rank: int) -> Any:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(layer.weight, 3.0)
        stage = pipelining.PipelineStage(layer, rank, 2, torch.device("cpu"))
        pipeline = pipeline_of(pipelining.Schedule1F1B(stage, 2, loss_fn=lambda *_: None))
        if pipeline is None:
            return None
        rows = torch.arange(2)
        pipeline.step(lambda output, _: output.mean(), rows, (torch.ones(2, 1),), {})
        return None if layer.weight.grad is None else float(layer.weight.grad)

    values = [outcome.value for outcome in run_in_threads(program, 2, timeout=30)]
    expect("the gradients of two stages", values, [3.0, 3.0])
    expect("the function with FSDP's divisors", knows_factors())


def simulated_ranks() -> None:
    """Threads can act as ranks in collectives, and what they give to these is heard."""
    from paritas.core.torch_private.ranks import listening, run_in_threads

    def program(rank: int) -> Any:
        value = torch.tensor(float(rank + 1))
        with listening([]) as heard:
            torch.distributed.all_reduce(value)
        return float(value), heard[0].kind

    values = [outcome.value for outcome in run_in_threads(program, 2, timeout=30)]
    expect("a sum over ranks", values, [(3.0, "allreduce")] * 2)


# --- Running the probes ---------------------------------------------------------------------------

GROUP = "hooks into torch"
# Every public function above, by name; each module of `core.torch_private` has at least one.
PROBES: dict[str, Callable[[], None]] = {
    name: probe
    for home in (sys.modules[__name__], compiler_probes)
    for name, probe in vars(home).items()
    if inspect.isfunction(probe) and probe.__module__ == home.__name__ and not name.startswith("_")
}
ADVICE = (
    "results that depend on this hook cannot be trusted with this torch; use a version that "
    "paritas is tested with, or a newer paritas"
)


def run_probes() -> Iterator[Check]:
    """Run every probe; one that fails does not stop the others."""
    for name, probe in PROBES.items():
        yield run_check(GROUP, name, functools.partial(_run_probe, probe), ADVICE)


def _run_probe(probe: Callable[[], None]) -> str:
    try:
        with quietly():
            probe()
    except BaseException:
        # A failed probe must not affect the next one.
        with contextlib.suppress(Exception):
            torch.compiler.reset()
        raise
    return " ".join((probe.__doc__ or "").split())
