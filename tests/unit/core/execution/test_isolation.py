from __future__ import annotations

import contextlib
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from paritas.core.execution.isolation import ProgramState, copy_inputs
from paritas.core.execution.saved_state import Copier, RandomState
from paritas.core.execution.subjects import Inputs
from paritas.core.precision.lifting import LiftMode


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


# --- copies of inputs -----------------------------------------------------------------------------

BASE = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
VIEWS = {
    "whole": BASE,
    "transposed": BASE.t(),
    "every second": BASE[::2, 1::3],
    "offset": BASE[3:],
    "expanded": BASE[:1].expand(5, 8),
    "scalar expanded": torch.tensor(2.0).expand(3, 4),
    "overlapping": BASE.reshape(-1).as_strided((6, 4), (2, 1)),
    "empty": BASE[:0],
    "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "conjugated": torch.complex(BASE, -BASE).conj(),
    "part of a conjugated": torch.complex(BASE, -BASE).conj()[1:].t(),
    "negated": torch.complex(BASE, -BASE).conj().imag,
    "integers": torch.arange(12).reshape(3, 4).t(),
    "bfloat16": BASE.to(torch.bfloat16).t(),
    "complex": torch.complex(BASE, -BASE).t(),
}
EVERY_VIEW = pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())


@EVERY_VIEW
def test_a_copy_has_the_values_strides_and_offset_of_the_original(tensor):
    copy = Copier().copy_tensor(tensor)
    assert torch.equal(copy, tensor)
    assert copy.dtype is tensor.dtype
    assert copy.stride() == tensor.stride()
    assert copy.storage_offset() == tensor.storage_offset()
    assert copy.is_conj() == tensor.is_conj()


@EVERY_VIEW
def test_a_copy_shares_no_storage_with_the_original(tensor):
    copy = Copier().copy_tensor(tensor)
    assert not tensor.numel() or memory(copy) != memory(tensor)
    before = tensor.clone()
    copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,), 0).zero_()
    assert torch.equal(tensor, before)


@EVERY_VIEW
def test_a_wide_copy_has_the_same_values_and_strides_in_float64(tensor):
    copy = Copier(widen=True).copy_tensor(tensor)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    assert copy.dtype is (
        wide if tensor.is_floating_point() or tensor.is_complex() else torch.int64
    )
    assert torch.equal(copy, tensor.to(copy.dtype))
    assert copy.stride() == tensor.stride()


@pytest.mark.parametrize("widen", [False, True])
def test_inputs_that_share_memory_share_it_in_the_copy(widen):
    x = torch.zeros(4, 4)
    inputs = Inputs(args=(x, [x[1:], x.t()]), kwargs={"same": x, "other": torch.zeros(4, 4)})
    fresh = copy_inputs(inputs, widen=widen)
    fresh.args[0][2, 3] = 7.0
    assert fresh.args[1][0][1, 3] == 7.0
    assert fresh.args[1][1][3, 2] == 7.0
    assert fresh.kwargs["same"][2, 3] == 7.0
    assert not fresh.kwargs["other"].any()
    assert not x.any()


def test_views_of_one_storage_in_two_dtypes_share_it_in_the_copy():
    x = torch.zeros(4, dtype=torch.complex64)
    fresh = copy_inputs(Inputs(args=(x, torch.view_as_real(x))))
    fresh.args[1][2, 1] = 5.0
    assert fresh.args[0][2] == 5j


def test_an_expanded_input_still_overlaps_itself():
    copy = Copier().copy_tensor(torch.zeros(1).expand(5))
    copy.as_strided((1,), (1,)).fill_(3.0)
    assert copy.tolist() == [3.0] * 5


@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_copy_is_a_leaf_that_requires_grad_as_the_original_does(widen, requires_grad):
    leaf = torch.ones(3, requires_grad=requires_grad)
    for original in (leaf, leaf * 2, nn.Parameter(torch.ones(3), requires_grad=requires_grad)):
        copy = Copier(widen=widen).copy_tensor(original)
        assert copy.is_leaf
        assert copy.requires_grad is requires_grad


def test_a_copy_inside_a_mode_that_widens_is_refused_instead_of_read_beyond_its_storage():
    view = torch.arange(12.0).view(3, 4).t()
    with LiftMode(torch.float32, torch.float32), pytest.raises(RuntimeError, match="outside of it"):
        Copier().copy_tensor(view)


class Held:
    def __init__(self, *parts):
        self.parts = parts


@pytest.mark.parametrize("widen", [False, True])
def test_what_is_passed_twice_is_one_object_in_the_copy(widen):
    x, rows = torch.zeros(4), torch.zeros(4, 4)[1:]
    shared = Held(rows)
    kwargs = {"x": x, "first": Held(x, shared), "second": Held(shared), "third": shared}
    copy = copy_inputs(Inputs((x, rows, [x]), kwargs), widen=widen)
    first, second, third = (copy.kwargs[name] for name in ("first", "second", "third"))
    assert copy.args[0] is copy.args[2][0] is copy.kwargs["x"] is first.parts[0] is not x
    assert copy.args[1] is third.parts[0] is not rows
    assert first.parts[1] is second.parts[0] is third is not shared


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_among_the_inputs_stays_a_parameter(requires_grad):
    parameter = nn.Parameter(torch.ones(3), requires_grad=requires_grad)
    copy = Copier().copy_tensor(parameter)
    assert type(copy) is nn.Parameter
    assert copy.requires_grad is requires_grad
    assert memory(copy) != memory(parameter)


def test_a_sparse_tensor_is_copied():
    sparse = torch.eye(3).to_sparse()
    copy = Copier(widen=True).copy_tensor(sparse)
    assert copy.layout is torch.sparse_coo
    assert torch.equal(copy.to_dense(), torch.eye(3, dtype=torch.float64))


def test_the_tensors_of_an_unknown_object_are_not_shared():
    class Cache:
        def __init__(self):
            self.keys = torch.zeros(3)

    cache = Cache()
    fresh = copy_inputs(Inputs(args=(cache,)))
    fresh.args[0].keys.add_(1)
    assert not cache.keys.any()


def test_functions_and_plain_values_are_passed_on_as_they_are():
    inputs = Inputs(args=(torch.relu, "text", None, 3, nn.Linear(2, 2)), kwargs={"flag": True})
    fresh = copy_inputs(inputs)
    assert all(a is b for a, b in zip(fresh.args, inputs.args, strict=True))
    assert fresh.kwargs == {"flag": True}


# --- the state of modules -------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("cache", None)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.steps = 0
        self.history = [1, 2]
        self.table = {"a": 1}
        self.kept = {"x"}
        self.plain = torch.zeros(2)
        self.deep = {"keys": torch.zeros(2), "rows": [[1], [2]]}

    def state(self):
        """Everything that a run could change, spelled out."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return repr((sorted(own.items()), sorted(tensors.items()), self.cache, self.training))


def change_parameters(m):
    m.linear.weight.detach().add_(1)
    m.linear.bias.detach().mul_(2)


def change_buffers(m):
    m.seen.add_(1)
    m.scratch.zero_()


def change_numbers(m):
    m.steps += 1
    m.history.append(3)
    m.history[0] = 9
    m.table["b"] = 2
    m.kept.clear()


CHANGES = {
    "parameters in place": change_parameters,
    "buffers in place": change_buffers,
    "a buffer replaced": lambda m: setattr(m, "seen", torch.ones(3)),
    "a buffer of another shape": lambda m: setattr(m, "seen", torch.ones(7)),
    "a buffer dropped": lambda m: setattr(m, "seen", None),
    "a buffer deleted": lambda m: delattr(m, "seen"),
    "a buffer filled for the first time": lambda m: setattr(m, "cache", torch.ones(4)),
    "a buffer registered": lambda m: m.register_buffer("mask", torch.ones(4)),
    "a parameter replaced": lambda m: setattr(m.linear, "bias", nn.Parameter(torch.ones(3))),
    "numbers, lists, dicts, sets": change_numbers,
    "a list replaced": lambda m: setattr(m, "history", []),
    "an attribute added": lambda m: setattr(m, "extra", 1),
    "an attribute deleted": lambda m: delattr(m, "steps"),
    "a tensor attribute in place": lambda m: m.plain.add_(1),
    "a tensor attribute replaced": lambda m: setattr(m, "plain", torch.ones(5)),
    "a tensor inside a dict": lambda m: m.deep["keys"].add_(1),
    "a list inside a dict": lambda m: m.deep["rows"][0].append(5),
    "the training flag": lambda m: m.eval(),
}
EVERY_CHANGE = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


@EVERY_CHANGE
def test_restoring_puts_everything_back(change):
    torch.manual_seed(0)
    module = Stateful()
    before = module.state()
    state = ProgramState({"": module})
    change(module)
    assert module.state() != before, "this change changes nothing: the test would pass on nothing"
    state.restore()
    assert module.state() == before


@EVERY_CHANGE
def test_what_runs_on_other_tensors_leaves_nothing_behind(change):
    torch.manual_seed(0)
    module = Stateful()
    before = module.state()
    state = ProgramState({"": module})
    with state.swap_tensors(state.widen_state()):
        change(module)
    state.restore()
    assert module.state() == before


@EVERY_CHANGE
@pytest.mark.parametrize("wide", [False, True], ids=["native", "wide"])
def test_a_change_is_told_without_a_walk_exactly_as_a_walk_tells_it(change, wide, monkeypatch):
    module = Stateful()
    state = ProgramState({"": module})
    with state.swap_tensors(state.widen_state()) if wide else contextlib.nullcontext():
        assert state.changed_values() == {}
        change(module)
        told = state.changed_values()
        assert told
        monkeypatch.setattr(ProgramState, "_is_nothing_replaced", lambda _: False)
        assert repr(told) == repr(state.changed_values())


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


KEPT = {"slots": Slotted(), "error": ValueError("one"), "step": functools.partial(max, default=1)}


def helper(x, by=[0]):  # noqa: B006
    return x + by[0] + len(KEPT) + globals().get("added_later", 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: setattr(KEPT["slots"], "count", 1), "global KEPT['slots'].count"),
        (lambda: setattr(KEPT["error"], "args", ("two",)), "global KEPT['error'].args[0]"),
        (
            lambda: KEPT["step"].keywords.update(default=2),
            "global KEPT['step'].keywords['default']",
        ),
        (lambda: helper.__defaults__[0].append(1), "function helper[0][1]"),
        (lambda: setattr(helper, "__defaults__", ([5],)), "function helper[0][0]"),
        (lambda: setattr(helper, "calls", 1), "function helper['calls']"),
        (lambda: globals().update(counted=1), "global counted"),
    ],
    ids=["slot", "error", "partial", "default", "defaults", "attribute", "global"],
)
def test_a_change_in_code_is_told_wherever_it_is_kept(change, name, monkeypatch):
    def program(x):
        return helper(x) + (counted if "counted" in globals() else 0)  # noqa: F821

    monkeypatch.setattr(helper, "__defaults__", ([0],))
    monkeypatch.setitem(KEPT, "slots", Slotted())
    monkeypatch.setitem(KEPT, "error", ValueError("one"))
    monkeypatch.setitem(KEPT, "step", functools.partial(max, default=1))
    state = ProgramState({}, program)
    assert state.changed_values() == {}
    try:
        change()
        assert name in state.changed_values()
    finally:
        globals().pop("counted", None)
        vars(helper).clear()


def test_objects_with_slots_and_names_that_dynamo_adds_need_no_walk(monkeypatch):
    state = ProgramState({}, helper)
    monkeypatch.setitem(globals(), "__compiled_fn_1", max)
    monkeypatch.setattr(ProgramState, "_walk", lambda _: pytest.fail("it was walked again"))
    assert state.changed_values() == {}


def test_restoring_keeps_the_identity_of_parameters_and_buffers():
    module = Stateful()
    weight, seen, plain, history = module.linear.weight, module.seen, module.plain, module.history
    state = ProgramState({"": module})
    module.linear.weight = nn.Parameter(torch.zeros(3, 3))
    module.seen, module.plain, module.history = torch.ones(3), torch.ones(3), []
    state.restore()
    assert module.linear.weight is weight
    assert module.tied.weight is weight
    assert module.seen is seen
    assert module.plain is plain
    assert module.history is history
    assert list(module.state_dict()) == list(Stateful().state_dict())


def test_tied_weights_are_one_entry_and_are_swapped_together():
    module = Stateful()
    state = ProgramState({"": module})
    assert "linear.weight" in state.tensors
    assert "tied.weight" not in state.tensors
    other = nn.Parameter(torch.zeros(3, 3))
    with state.swap_tensors({"linear.weight": other}):
        assert module.linear.weight is other
        assert module.tied.weight is other
    assert module.linear.weight is module.tied.weight
    assert module.linear.weight is not other


def test_only_what_changed_is_told_with_its_new_value():
    module = Stateful()
    state = ProgramState({"": module})
    assert state.changed_values() == {}
    module.seen.add_(2)
    changed = state.changed_values()
    assert list(changed) == ["seen"]
    module.seen.add_(1)
    assert changed["seen"].tolist() == [2.0] * 3, "what was told must not change any more"
    module.scratch = torch.zeros(2)
    assert sorted(state.changed_values()) == ["scratch", "seen"]


def test_a_wide_run_that_changes_nothing_tells_of_no_change():
    module = Stateful()
    state = ProgramState({"": module})
    with state.swap_tensors(state.widen_state()):
        assert state.changed_values() == {}
        module.seen.add_(1e-12)
        assert list(state.changed_values()) == ["seen"]


def test_wide_values_are_float64_parameters_and_buffers_in_storage_of_their_own():
    module = nn.BatchNorm1d(3)
    module.weight.requires_grad_(False)
    state = ProgramState({"": module})
    wide = state.widen_state()
    assert isinstance(wide["bias"], nn.Parameter)
    assert wide["bias"].dtype is torch.float64
    assert wide["bias"].requires_grad
    assert not wide["weight"].requires_grad
    assert not isinstance(wide["running_mean"], nn.Parameter)
    assert wide["num_batches_tracked"].dtype is torch.int64
    wide["num_batches_tracked"].add_(1)
    assert module.num_batches_tracked == 0


def test_swapping_is_undone_when_the_program_raises():
    module = Stateful()
    before = {name: id(tensor) for name, tensor in module.named_parameters()}
    state = ProgramState({"": module})

    def run():
        with state.swap_tensors(state.widen_state()):
            assert module.linear.weight.dtype is torch.float64
            module.steps = 99
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert {name: id(tensor) for name, tensor in module.named_parameters()} == before
    assert module.linear.weight.dtype is torch.float32
    assert module.steps == 0


def test_names_are_those_of_the_module_that_was_compiled():
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    assert list(ProgramState({"": compiled}).tensors) == ["0.weight", "0.bias"]


def test_a_write_in_place_leaves_no_graph_behind():
    module = Stateful()
    state = ProgramState({"": module})
    module.plain.copy_(module.linear(torch.ones(3))[:2])
    assert module.plain.grad_fn is not None
    state.restore()
    assert module.plain.is_leaf
    assert not module.plain.requires_grad
    assert module.plain.tolist() == [0.0, 0.0]


def test_gradients_are_put_back_and_told_when_they_change():
    module = Stateful()
    module.linear.bias.grad = first = torch.ones(3)
    state = ProgramState({"": module})
    assert state.changed_values() == {}
    module.linear(torch.ones(3)).sum().backward()
    assert sorted(state.changed_values()) == ["linear.bias.grad", "linear.weight.grad"]
    state.restore()
    assert module.linear.bias.grad is first
    assert first.tolist() == [1.0] * 3
    assert module.linear.weight.grad is None


def test_variables_of_closures_run_in_float64_and_are_put_back():
    table, counts = torch.ones(2), [0]

    def program(x):
        counts[0] += 1
        return x * table

    state = ProgramState({}, program)
    assert list(state.tensors) == ["variable table"]
    with state.swap_tensors(state.widen_state()):
        assert program(torch.ones(2, dtype=torch.float64)).dtype is torch.float64
        assert program.__closure__[1].cell_contents.dtype is torch.float64
    program(torch.ones(2))
    assert state.changed_values() == {"variable counts[0]": 1}
    state.restore()
    assert counts == [0]
    assert table.dtype is torch.float32


def test_generators_that_a_module_owns_draw_the_same_again():
    module = nn.Module()
    module.torch, module.python = torch.Generator().manual_seed(3), random.Random(3)
    module.numpy, module.old = np.random.default_rng(3), np.random.RandomState(3)

    def draw():
        return (
            torch.rand(1, generator=module.torch).item(),
            module.python.random(),
            module.numpy.random(),
            module.old.rand(),
        )

    state = ProgramState({"": module})
    first = draw()
    assert sorted(state.changed_values()) == ["numpy", "old", "python", "torch"]
    state.restore()
    assert draw() == first


class Publishing(nn.Module):
    """Most methods of a model of a library are never called by its forward."""

    def forward(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * SCALES["forward"]

    def publish(self):
        return UPLOADS


SCALES, UPLOADS = {"forward": 2.0}, {"count": 0}


def test_data_of_methods_that_no_code_names_are_not_the_state_of_a_call():
    model = Publishing()
    state = ProgramState({"": model})
    SCALES["forward"], UPLOADS["count"] = 3.0, 1
    assert list(state.changed_values()) == ["global SCALES['forward']"]
    state.restore()
    assert (SCALES["forward"], UPLOADS["count"]) == (2.0, 1)
    UPLOADS["count"] = 0


def test_a_library_that_is_imported_on_first_use_is_no_change(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text("TABLE = {'a': 1}\ndef read(): return TABLE\n")
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": "program"}
    code = """
def run(x):
    global late_library, read
    import late_library
    from late_library import read
    return x + len(read())
"""
    exec(code, namespace)
    state = ProgramState({}, namespace["run"])
    assert namespace["run"](1) == 2
    assert state.changed_values() == {}


def test_a_long_table_of_plain_values_is_put_back_though_it_is_not_looked_at():
    module = nn.Module()
    module.words = {f"word {number}": number for number in range(20_000)}
    state = ProgramState({"": module})
    module.words["word 3"] = 4
    del module.words["word 5"]
    assert state.changed_values() == {}
    state.restore()
    assert module.words == {f"word {number}": number for number in range(20_000)}
    assert list(module.words)[5] == "word 5"


class Kernel:
    """Holds what Triton's kernels hold: the globals of a module, and compiled code."""

    def __init__(self, function):
        self.function, self.__globals__ = function, function.__globals__
        self.compiled = {}

    @functools.cached_property
    def name(self):
        return "kernel"

    @property
    def source(self):
        return self._source

    @source.setter
    def source(self, text):
        self._source = text

    def run(self, x):
        if not self.compiled:
            self.compiler = compile
            self.source = self.name
        self.compiled[x.shape] = self.compiler
        return self.function(x)


Kernel.__module__ = "triton.runtime.jit"


def test_what_a_kernel_compiles_is_no_state_but_what_a_program_keeps_in_it_is():
    kernel = Kernel(lambda x: x + 1)

    def program(x):
        kernel.last, kernel.new = kernel.run(x), 1
        return kernel.last

    kernel.last = torch.zeros(2)
    state = ProgramState({}, program)
    assert not any("__globals__" in name or "compiled" in name for name in state.containers)
    for _ in range(2):  # what was compiled is still there
        program(torch.ones(3))
        assert list(state.changed_values()) == ["variable kernel.last", "variable kernel.new"]
        state.restore()
        assert kernel.last.tolist() == [0.0, 0.0]
        assert not hasattr(kernel, "new")


# --- random numbers -------------------------------------------------------------------------------


def draws():
    return torch.rand(3).tolist(), random.random(), np.random.rand()  # noqa: NPY002


def test_restoring_makes_every_generator_draw_the_same_again():
    start = RandomState.now()
    first = draws()
    assert draws() != first
    start.restore()
    assert draws() == first


def test_the_generators_of_torch_are_compared_and_no_others():
    start = RandomState.now()
    random.random()
    np.random.rand()  # noqa: NPY002
    assert RandomState.now().same_torch(start)
    torch.rand(1)
    assert not RandomState.now().same_torch(start)
