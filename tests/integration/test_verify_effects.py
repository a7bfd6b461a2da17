"""What a call does besides returning: each wrong candidate beside its honest twin."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import random
import threading
import uuid
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paritas import Inputs, Status, UsageError, VerifyConfig, guard, verify

QUIET = VerifyConfig(raise_on_mismatch=False)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def verdict_on(reference: Any, candidate: Any, *inputs: Any) -> Any:
    torch.manual_seed(0)
    return verify(Inputs((torch.randn(4, 8), *inputs)), reference, candidate, QUIET)


def failed(verdict: Any) -> dict[str, Status]:
    return {finding.path: finding.status for finding in verdict.failures}


# --- what the two share, outside any module -------------------------------------------------------

TABLE = torch.linspace(0, 1, 8)


class Rope:
    cache: dict[int, torch.Tensor] = {}  # noqa: RUF012  (shared on purpose)

    @classmethod
    def of(cls, length: int) -> torch.Tensor:
        if length not in cls.cache:
            cls.cache[length] = torch.arange(length).float().cos()
        return cls.cache[length]


class Scale:
    def __init__(self) -> None:
        self.factor = 2.0
        self.table = torch.ones(8)


def by_table(x: torch.Tensor) -> torch.Tensor:
    return x * TABLE


def calls_by_table(x: torch.Tensor) -> torch.Tensor:
    return by_table(x)


def by_rope(x: torch.Tensor) -> torch.Tensor:
    return x * Rope.of(8)


LEVELS: list[int] = []  # the attribute of `Counting` has the same name


class Counting:
    LEVELS = 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.LEVELS


class CountingElsewhere(Counting):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        globals()["LEV" + "ELS"].append(1)
        return x * self.LEVELS


def test_an_attribute_with_the_name_of_a_global_does_not_reach_it() -> None:
    assert verdict_on(Counting(), CountingElsewhere()).passed


def overwrites_a_global(x: torch.Tensor) -> torch.Tensor:
    TABLE.mul_(1.5)
    return x * TABLE


def overwrites_the_rope(x: torch.Tensor) -> torch.Tensor:
    Rope.cache[8] = torch.arange(8).float().sin()
    return by_rope(x)


def test_a_global_that_the_candidate_overwrites_is_named_and_put_back() -> None:
    before = TABLE.clone()
    verdict = verdict_on(by_table, overwrites_a_global)
    assert failed(verdict)["state global TABLE after the call"] is Status.DIFFERENT
    assert torch.equal(before, TABLE)
    assert verdict_on(by_table, lambda x: TABLE * x).passed


def test_a_cache_of_a_class_that_the_candidate_overwrites_is_different() -> None:
    Rope.of(8)
    verdict = verdict_on(by_rope, overwrites_the_rope)
    assert failed(verdict)["state class Rope.cache[8] after the call"] is Status.DIFFERENT
    assert torch.equal(Rope.cache[8], torch.arange(8).float().cos())
    Rope.cache.clear()
    assert verdict_on(by_rope, lambda x: Rope.of(8) * x).passed, "filled by the first who asks"
    assert not Rope.cache


def test_a_table_in_a_closure_that_the_candidate_overwrites_is_different() -> None:
    table, scale = torch.linspace(0, 1, 8), Scale()

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x * table * scale.factor

    def spoils(x: torch.Tensor) -> torch.Tensor:
        out = x * table * scale.factor * 1.5
        table.mul_(1.5)
        return out

    def rescales(x: torch.Tensor) -> torch.Tensor:
        scale.factor = 3.0
        return x * table * scale.factor

    assert "state variable table after the call" in failed(verdict_on(reference, spoils))
    assert "state variable scale.factor after the call" in failed(verdict_on(reference, rescales))
    assert verdict_on(reference, lambda x: x * (table * scale.factor)).passed
    assert scale.factor == 2.0


def test_what_no_one_can_see_change_is_noticed_by_running_the_reference_again() -> None:
    hidden: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    hidden.put(torch.linspace(0, 1, 8))

    def multiplied(x: torch.Tensor, factor: float) -> torch.Tensor:
        table = hidden.get()
        hidden.put(table * factor)
        return x * table * factor

    verdict = verdict_on(lambda x: multiplied(x, 1.0), lambda x: multiplied(x, 1.5))
    assert not verdict.passed
    assert verdict_on(lambda x: multiplied(x, 1.0), lambda x: multiplied(x, 1.0)).passed
    late: queue.SimpleQueue[float] = queue.SimpleQueue()
    late.put(1.0)

    def drifting(x: torch.Tensor) -> torch.Tensor:
        factor = late.get()
        late.put(factor + 1.0)
        return x * factor

    drifted = verdict_on(drifting, drifting)
    assert not drifted.passed


# --- settings and functions of the process --------------------------------------------------------


def leaks(effect: Any) -> Any:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        effect()
        return x.sin()

    return candidate


LEAKS = {
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.is_grad_enabled()": lambda: torch.set_grad_enabled(False),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch.is_autocast_enabled('cpu')": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.get_num_threads()": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "Python's random state": random.random,
    "NumPy's random state": np.random.rand,
    "torch.nn.functional.linear": lambda: setattr(F, "linear", torch.mm),
    "torch.nn.functional.gelu": lambda: setattr(F, "gelu", torch.sigmoid),
    "torch.nn.functional.scaled_dot_product_attention": lambda: setattr(
        F, "scaled_dot_product_attention", max
    ),
    "torch.equal": lambda: setattr(torch, "equal", lambda *_: True),
    "torch.Tensor.mean": lambda: setattr(torch.Tensor, "mean", torch.Tensor.sum),
    "torch.Tensor.backward": lambda: setattr(torch.Tensor, "backward", print),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_setting_or_function_that_the_candidate_leaves_changed_is_put_back(name: str) -> None:
    settings = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    functions = F.linear, F.gelu, F.scaled_dot_product_attention, torch.equal
    states = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    verdict = verdict_on(torch.sin, leaks(LEAKS[name]))
    assert failed(verdict) == {name: Status.DIFFERENT}
    assert settings == (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )
    assert functions == (F.linear, F.gelu, F.scaled_dot_product_attention, torch.equal)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_what_both_sides_leave_changed_is_no_difference() -> None:
    effect = leaks(random.random)
    assert verdict_on(effect, leaks(random.random)).passed
    more = verdict_on(effect, leaks(lambda: (random.random(), random.random())))
    assert failed(more) == {"Python's random state": Status.DIFFERENT}


def test_a_class_whose_forward_the_candidate_replaces_is_different_and_put_back() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model, forward = Doubled(), Doubled.forward

    def candidate(x: torch.Tensor) -> torch.Tensor:
        Doubled.forward = lambda _, x: x * 2.1  # type: ignore[method-assign]
        return x * 2

    found = failed(verdict_on(model, candidate))
    assert [path for path in found if path.endswith("Doubled.forward after the call")]
    assert Doubled.forward is forward


def test_a_function_that_the_candidate_replaces_is_different_and_put_back() -> None:
    replaced = by_table

    def candidate(x: torch.Tensor) -> torch.Tensor:
        global by_table  # noqa: PLW0603
        by_table = torch.sin
        return x * TABLE

    found = failed(verdict_on(calls_by_table, candidate))
    assert found["state global by_table after the call"] is Status.DIFFERENT
    assert by_table is replaced


# --- inputs that are not tensors ------------------------------------------------------------------


@dataclasses.dataclass
class Cache:
    keys: torch.Tensor
    steps: int = 0


class Stubborn:
    def __init__(self) -> None:
        self.steps, self.lock = 0, threading.Lock()

    def __eq__(self, other: object) -> Any:
        return torch.ones(3)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is only one")

    __hash__ = None  # type: ignore[assignment]


class Slots:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = [torch.ones(2)]


INPUTS: dict[str, tuple[Any, Any, Any, Any]] = {
    "a list that is appended to": (
        list,
        lambda x, held: held.append(x + 1),
        lambda x, held: held.append(1 + x),
        lambda x, held: held.append(x + 2),
    ),
    "a dict that gets a key": (
        dict,
        lambda x, held: held.update(k=x * 2),
        lambda x, held: held.setdefault("k", x + x),
        lambda x, held: None,
    ),
    "a dict under another key": (
        dict,
        lambda x, held: held.update(k=x * 2),
        lambda x, held: held.update({"k": 2 * x}),
        lambda x, held: held.update(v=x * 2),
    ),
    "a counter in a dataclass": (
        lambda: Cache(torch.ones(2)),
        lambda x, held: setattr(held, "steps", 1),
        lambda x, held: setattr(held, "steps", held.steps + 1),
        lambda x, held: setattr(held, "steps", 2),
    ),
    "a tensor in a plain object, in place": (
        Scale,
        lambda x, held: held.table.add_(x[0]),
        lambda x, held: held.table.copy_(x[0] + held.table),
        lambda x, held: held.table.sub_(x[0]),
    ),
    "a tensor in a plain object, replaced": (
        Scale,
        lambda x, held: setattr(held, "table", held.table + x[0]),
        lambda x, held: held.table.add_(x[0]),
        lambda x, held: setattr(held, "table", x[0]),
    ),
    "a list in a slot": (
        Slots,
        lambda x, held: held.rows.append(x[0]),
        lambda x, held: setattr(held, "rows", [*held.rows, x[0].clone()]),
        lambda x, held: held.rows.insert(0, x[0]),
    ),
    "an object that refuses to be copied": (
        Stubborn,
        lambda x, held: setattr(held, "steps", held.steps + 1),
        lambda x, held: setattr(held, "steps", 1 + held.steps),
        lambda x, held: setattr(held, "steps", held.steps + 2),
    ),
    "a set": (
        set,
        lambda x, held: held.add(3),
        lambda x, held: held.update({3}),
        lambda x, held: held.add(4),
    ),
    "an array of NumPy": (
        lambda: np.zeros(3, dtype=np.float32),
        lambda x, held: np.add(held, 1, out=held),
        lambda x, held: held.fill(1),
        lambda x, held: held.fill(2),
    ),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_an_input_of_any_kind_is_compared_after_the_call_by_content(kind: str) -> None:
    make, *effects = INPUTS[kind]

    def program(effect: Any) -> Any:
        def call(x: torch.Tensor, held: Any) -> torch.Tensor:
            effect(x, held)
            return x.sin()

        return call

    reference, honest, wrong = map(program, effects)
    fine = verdict_on(reference, honest, make())
    assert fine.passed, str(fine)
    verdict = verdict_on(reference, wrong, make())
    assert verdict.status is Status.DIFFERENT
    assert all(path.startswith("input[1]") for path in failed(verdict))


# --- state of modules that is no buffer -----------------------------------------------------------


class Attentive(nn.Module):
    """Keeps keys and a count in plain attributes, as serving code does."""

    def __init__(self, weight: float = 1.0, step: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.keys: torch.Tensor | None = None
        self.last = torch.zeros(8)
        self.history: dict[str, list[int]] = {"steps": []}
        self.steps = 0
        self.weight, self.step = weight, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.step
        self.history["steps"].append(self.steps)
        self.last.copy_(x[0] * self.weight)
        new = self.linear(x)
        self.keys = new if self.keys is None else torch.cat([self.keys, new])
        return new + self.keys.sum(dim=0)


def attentive(weight: float = 1.0, step: int = 1) -> Attentive:
    torch.manual_seed(1)
    return Attentive(weight, step)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_with_state_in_plain_attributes_agrees_with_its_compiled_form(backend: str) -> None:
    model = attentive()
    verdict = verdict_on(model, torch.compile(model, backend=backend))
    assert verdict.passed, str(verdict)
    assert "state steps after the call (second call)" in [f.path for f in verdict.findings]
    assert (model.steps, model.keys, model.history) == (0, None, {"steps": []})


def test_wrong_state_in_a_plain_attribute_is_different_in_either_call() -> None:
    assert verdict_on(attentive(), attentive()).passed
    assert set(failed(verdict_on(attentive(), attentive(weight=1.1)))) >= {
        "state last after the call",
        "state last after the call (second call)",
    }
    wrong = failed(verdict_on(attentive(), attentive(step=2)))
    assert "state steps after the call" in wrong
    assert "state history['steps'][0] after the call" in wrong


def _scale(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1.01)


TO_A_SHARED_MODEL: dict[str, Any] = {
    "a module replaced": lambda model: model.__setitem__(0, nn.Linear(8, 8)),
    "a weight written to": _scale,
    "the training flag": lambda model: model.eval(),
    "requires_grad switched off": lambda model: model[0].weight.requires_grad_(False),
    "a hook registered": lambda model: model.register_forward_hook(print),
    "an attribute added": lambda model: setattr(model, "last", 1),
    "an attribute deleted": lambda model: vars(model).pop("kept", None),
    "a buffer of another dtype": lambda model: setattr(model, "seen", model.seen.double()),
    "forward replaced": lambda model: setattr(model, "forward", model[0].forward),
}


@pytest.mark.parametrize("kind", TO_A_SHARED_MODEL)
def test_what_the_candidate_does_to_a_model_that_both_use_is_different(kind: str) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8))
    model.kept = 1
    model.register_buffer("seen", torch.zeros(3))
    first, before = model[0], {name: t.clone() for name, t in model.state_dict().items()}

    def candidate(x: torch.Tensor) -> torch.Tensor:
        out = first(x)
        TO_A_SHARED_MODEL[kind](model)
        return out

    verdict = verdict_on(model, candidate)
    assert verdict.status is Status.DIFFERENT, str(verdict)
    assert model[0] is first
    assert first.weight.requires_grad
    assert model.training
    assert (model.kept, hasattr(model, "last"), len(model._forward_hooks)) == (1, False, 0)
    assert "forward" not in vars(model)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(value.dtype is after[name].dtype for name, value in before.items())


def test_state_in_a_closure_goes_on_from_call_to_call_on_both_sides() -> None:
    box, seen = [0], {}

    def counts(x: torch.Tensor) -> torch.Tensor:
        box[0] += 1
        seen["last"] = x * box[0]
        return x * box[0]

    verdict = verdict_on(counts, torch.compile(counts, backend="eager"))
    assert verdict.passed, str(verdict)
    assert (box, seen) == ([0], {})


def test_the_bookkeeping_of_one_side_alone_is_no_difference() -> None:
    log: list[Any] = []

    class Engine:
        def __init__(self) -> None:
            self.kernel: Any = None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            log.append(x.shape)
            self.kernel = self.kernel or torch.sin
            return self.kernel(x)

    verdict = verdict_on(torch.sin, Engine())
    assert verdict.passed, str(verdict)


def test_what_no_run_gives_again_is_not_compared() -> None:
    class Stamped(nn.Module):
        def __init__(self, step: int = 1) -> None:
            super().__init__()
            self.steps, self.step, self.name = 0, step, ""
            self.seen: dict[str, int] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += self.step
            self.name = uuid.uuid4().hex
            self.seen[self.name] = 1
            return x.sin()

    verdict = verdict_on(Stamped(), Stamped())
    assert verdict.passed, str(verdict)
    assert any(item.startswith("state name after the call") for item in verdict.coverage.skipped)
    assert set(failed(verdict_on(Stamped(), Stamped(step=2)))) == {
        "state steps after the call",
        "state steps after the call (second call)",
    }


def test_an_iterator_cannot_be_put_back_so_the_second_call_is_not_judged() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = iter([1.0] * 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * next(self.factors)

    verdict = verdict_on(Draws(), Draws())
    assert "the second call was not judged: factors cannot be restored" in verdict.notes


class Frozen(dict[str, Any]):
    """As the configurations of diffusers are: every method that writes is refused."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("frozen")

    __setitem__ = __delitem__ = update = clear = pop = setdefault = _refuse  # type: ignore[assignment]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.config = Frozen(width=8, layers=[1, 2])
        self.lock, self.thread = threading.RLock(), threading.current_thread()
        self.stubborn, self.opened = Stubborn(), open(__file__)  # noqa: PTH123, SIM115

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config["layers"].append(3)
        self.stubborn.steps += 1
        return self.linear(x) * len(self.config["layers"])


def test_objects_that_refuse_to_be_written_to_are_put_back_all_the_same() -> None:
    model = Odd()
    try:
        verdict = verdict_on(model, torch.compile(model, backend="eager"))
        assert verdict.passed, str(verdict)
        assert model.config["layers"] == [1, 2]
        assert model.stubborn.steps == 0
    finally:
        model.opened.close()


# --- gradients that a program leaves on its tensors -----------------------------------------------


def test_a_program_that_runs_backward_itself_agrees_with_itself() -> None:
    model = nn.Linear(8, 8)
    model.weight.grad = torch.ones(8, 8)

    def wrapped(inner: Any) -> Any:
        def step(x: torch.Tensor) -> list[Any]:
            inner(x).square().sum().backward()
            return [parameter.grad for parameter in model.parameters()]

        return step

    verdict = verdict_on(wrapped(model), wrapped(torch.compile(model, backend="aot_eager")))
    assert verdict.passed, str(verdict)
    assert torch.equal(model.weight.grad, torch.ones(8, 8))
    assert model.bias.grad is None

    def wrong(x: torch.Tensor) -> list[Any]:
        (model(x).square().sum() * 1.01).backward()
        return [parameter.grad for parameter in model.parameters()]

    found = failed(verdict_on(wrapped(model), wrong))
    assert found["state weight.grad after the call"] is Status.DIFFERENT


def test_a_gradient_that_only_the_candidate_writes_is_different() -> None:
    model = nn.Linear(8, 8)

    def candidate(x: torch.Tensor) -> torch.Tensor:
        model.bias.grad = torch.ones(8)
        return model(x)

    found = failed(verdict_on(model, candidate))
    assert found["state bias.grad after the call"] is Status.DIFFERENT
    assert all(path.startswith("state bias.grad after the call") for path in found)
    assert model.bias.grad is None


# --- memory ---------------------------------------------------------------------------------------


def test_an_output_that_the_next_call_overwrites_is_different() -> None:
    buffer, hidden = torch.zeros(4, 8), queue.SimpleQueue[torch.Tensor]()
    hidden.put(torch.zeros(4, 8))

    def into(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x, out=out)

    def unseen(x: torch.Tensor) -> torch.Tensor:
        out = hidden.get()
        hidden.put(out)
        return into(out, x)

    assert not verdict_on(torch.sin, lambda x: into(buffer, x)).passed
    verdict = verdict_on(torch.sin, unseen)
    assert failed(verdict) == {"output": Status.DIFFERENT}
    assert "memory of the next call's output" in verdict.failures[0].reason
    assert verdict_on(unseen, unseen).passed, "where the reference does so, it is its meaning"


def test_an_output_that_is_a_global_is_different() -> None:
    verdict = verdict_on(lambda x: TABLE * 1.0, lambda x: TABLE)
    assert failed(verdict)["output"] is Status.DIFFERENT
    assert verdict_on(lambda x: TABLE, lambda x: TABLE).passed


def test_elements_that_share_memory_are_different_where_the_references_do_not() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=0, keepdim=True).expand(4, 8)

    verdict = verdict_on(lambda x: spread(x).contiguous(), spread)
    assert failed(verdict) == {"output": Status.DIFFERENT}
    assert "its elements share memory" in verdict.failures[0].reason
    assert verdict_on(spread, spread).passed


def test_an_output_that_a_thread_changes_afterwards_is_different() -> None:
    threads: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        while not threads.empty():  # the thread of the call before has had its time
            threads.get().join()
        out = x.sin()
        thread = threading.Thread(target=out.detach().add_, args=(1,))
        threads.put(thread)
        threading.Timer(0, thread.start).start()
        return out

    def slow(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    verdict = verdict_on(slow, candidate)
    assert not verdict.passed


@pytest.mark.parametrize("are_held", [True, False])
def test_outputs_that_are_not_large_are_looked_at_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch, *, are_held: bool
) -> None:
    returned: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def candidate(x: torch.Tensor) -> torch.Tensor:
        out = x.sin()
        returned.put(out.detach())
        return out

    def reference(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64 and not returned.empty():  # all calls have been made
            returned.get().add_(1)
        return x.sin() * 3 / 3

    if not are_held:
        monkeypatch.setattr("paritas.verification.verify.MOST_HELD", 0)
    verdict = verdict_on(reference, candidate)
    assert verdict.passed is not are_held
    assert are_held is any("written to after" in one.reason for one in verdict.failures)
    assert are_held is not any("writes to outputs" in what for what in verdict.coverage.skipped)


def test_a_backend_that_returns_the_same_buffer_again_is_different_under_the_guard() -> None:
    buffer, constant = torch.zeros(4, 8), torch.ones(4, 8)

    def static(graph: Any, inputs: list[Any]) -> Any:
        del inputs

        def run(*args: Any) -> Any:
            return tuple(buffer.copy_(result) for result in graph(*args))

        return run

    def calls(backend: Any, function: Any) -> Any:
        guarded = guard(backend, on_mismatch="record")
        compiled = torch.compile(function, backend=guarded)
        with torch.no_grad():
            kept = [compiled(torch.randn(4, 8)) for _ in range(2)]
        assert len(kept) == 2
        return guarded.verdict()

    wrong = calls(static, torch.sin)
    assert wrong.status is Status.DIFFERENT
    assert "memory of an output of the previous call" in wrong.failures[-1].reason
    assert calls("eager", torch.sin).passed
    assert calls("eager", lambda x: (x.sin(), constant)[1]).passed


# --- inputs as people have them -------------------------------------------------------------------


def test_a_dict_is_keyword_arguments() -> None:
    def attends(input_ids: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return input_ids * mask

    given = {"input_ids": torch.randn(3), "mask": torch.ones(3)}
    verdict = verify(given, attends, lambda *, input_ids, mask: mask * input_ids, QUIET)
    assert verdict.passed, str(verdict)
    with pytest.raises(UsageError, match="its keys must be names, not 3"):
        verify({3: torch.ones(3)}, attends, attends, QUIET)


def test_programs_without_arguments_are_called_with_empty_inputs() -> None:
    assert verify(Inputs(), lambda: TABLE * 2, lambda: TABLE + TABLE, QUIET).passed
    with pytest.raises(UsageError, match=r"Inputs\(\) to call both sides without arguments"):
        verify([], lambda: TABLE, lambda: TABLE, QUIET)


# --- what was compiled already is not compiled again ----------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_the_user_has_compiled_and_run_is_not_compiled_again(mode: Any) -> None:
    narrow: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def backend(graph: Any, inputs: list[Any]) -> Any:
        if any(value.dtype is torch.float32 for value in inputs):
            narrow.put(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    compiled, x = torch.compile(model, backend=backend), torch.randn(4, 8)
    with mode():
        compiled(x)
        assert narrow.qsize() == 1
        assert verify([x], model, compiled, QUIET).passed
        assert narrow.qsize() == 1


def test_a_function_of_which_only_sizes_are_compiled_is_unverified() -> None:
    @torch.compiler.disable
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def sizes(x: torch.Tensor) -> Any:
        return hidden(x), x.shape[0] * 2

    guarded = guard("eager", on_mismatch="record")
    torch.compile(sizes, backend=guarded, dynamic=True)(torch.randn(3, 4))
    verdict = guarded.verdict()
    assert verdict.status is Status.UNVERIFIED
    assert "torch.compile compiled nothing" in verdict.notes[0]
    compiled = torch.compile(sizes, backend="eager", dynamic=True)
    assert verdict_on(sizes, compiled).status is Status.UNVERIFIED


class DropsLayers(nn.Module):
    """Draws a number in every call, as models that drop layers do, and uses it in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(())
        y = self.linear(x).tanh()
        return y * (drawn < 0.5) if self.training else y


@pytest.mark.parametrize("training", [False, True])
def test_other_random_numbers_matter_only_where_a_value_depends_on_them(training: bool) -> None:
    torch.manual_seed(0)  # with others, both sides may keep the layer
    # Without gradients, which take twice as long to compile.
    model = DropsLayers().train(training).requires_grad_(requires_grad=False)
    verdict = verify([torch.randn(4, 8)], model, torch.compile(model), QUIET)
    (state,) = (f for f in verdict.findings if f.path == "random state")
    (value,) = (f for f in verdict.findings if f.path == "output")
    if training:
        assert (state.status, value.status) == (Status.UNVERIFIED, Status.UNVERIFIED)
    else:
        assert (
            state.reason == "the candidate draws other random numbers, but no value depends on them"
        )
        assert verdict.status is Status.EQUIVALENT


class DrawsAnOrder(nn.Module):
    """Takes its rows in an order that it draws: a sum over them is the same but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.rand(64).argsort()
        return self.linear(x.index_select(0, order)).tanh().sum(0)


def test_random_numbers_that_decide_an_order_alone_do_not_matter() -> None:
    torch.manual_seed(0)
    model = DrawsAnOrder().requires_grad_(requires_grad=False)
    verdict = verify([torch.randn(64, 8)], model, torch.compile(model), QUIET)
    assert verdict.status is Status.EQUIVALENT, str(verdict)


def test_a_reference_that_raises_when_it_runs_once_more_is_not_a_pass():
    weight, x = torch.randn(8, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    numbers = itertools.count()  # not restored between runs: native, in float64, and once more

    def reference(x):
        if next(numbers) == 2:
            raise RuntimeError("late")
        return x @ weight

    verdict = verify([x], reference, lambda x: x @ weight, QUIET)
    assert verdict.status is Status.UNVERIFIED
    assert "when run once more at the end" in str(verdict)
