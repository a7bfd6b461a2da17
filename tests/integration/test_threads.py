"""Several threads at once: each gets the verdict about its own model."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import paritas
from paritas.core.torch_private.operators import default_dtype
from sleeping import times_when_others_sleep
from spying import Spy

ROUNDS = 3
OTHERS_DRAW = "other threads used the random generators at the same time"


def net(width):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def at_once(*tasks):
    """What each task gives; they begin together."""
    ready = threading.Barrier(len(tasks))
    results = [None] * len(tasks)

    def work(place, task):
        ready.wait(600)
        try:
            results[place] = [task() for _ in range(ROUNDS)]
        except Exception as error:  # noqa: BLE001  (told by the test's own thread)
            results[place] = error

    threads = [threading.Thread(target=work, args=one) for one in enumerate(tasks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def verifying(width, fault):
    model, inputs = net(width), [torch.ones(3, width)]

    def verify():
        try:
            return paritas.verify(inputs, model, lambda x: model(x) + fault).status.value
        except paritas.MismatchError as error:
            return error.verdict.status.value

    return verify


def test_verify_in_two_threads_mixes_up_no_verdicts():
    torch.manual_seed(0)
    right, wrong = at_once(verifying(4, 0), verifying(6, 1))
    assert right == ["identical"] * ROUNDS
    assert wrong == ["different"] * ROUNDS


def guarding(width, backend):
    guarded = paritas.guard(backend, on_mismatch="record", locate=False)
    compiled = torch.compile(net(width).requires_grad_(False), backend=guarded)

    def call():
        compiled(torch.ones(3, width))
        return guarded.verdict().passed

    return call


def wrong_backend(graph, inputs):
    return lambda *args: [value + 1 for value in graph.forward(*args)]


def test_guards_in_two_threads_mix_up_no_verdicts():
    torch.manual_seed(0)
    # Compiled in turns, as torch does it: what is asked is whether calls disturb each other.
    tasks = guarding(4, "eager"), guarding(6, wrong_backend)
    for task in tasks:
        task()
    right, wrong = at_once(*tasks)
    assert right == [True] * ROUNDS
    assert wrong == [False] * ROUNDS


def test_verify_beside_a_guard_mixes_up_no_verdicts():
    torch.manual_seed(0)
    guard = guarding(4, "eager")
    guard()
    guarded, verified = at_once(guard, verifying(6, 0))
    assert guarded == [True] * ROUNDS
    assert verified == ["identical"] * ROUNDS


def test_threads_that_lift_at_once_leave_the_default_dtype_as_it_was():
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first():
        with default_dtype(torch.float64):
            first_in.set()
            second_in.wait(600)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_in.wait(600)
    with default_dtype(torch.float64):
        second_in.set()
        first_out.wait(600)
        assert torch.get_default_dtype() is torch.float64
    thread.join(600)
    assert torch.get_default_dtype() is torch.float32


def elsewhere(dtypes):
    """Note the dtype that another thread's tensors have right now."""
    thread = threading.Thread(target=lambda: dtypes.note(torch.ones(1).dtype))
    thread.start()
    thread.join(600)


def test_tensors_of_other_threads_keep_their_dtype_while_a_check_lifts():
    dtypes, widths = Spy(), Spy()

    def wavers(x):
        elsewhere(dtypes)
        y = x * torch.linspace(0, 1, 4) + torch.arange(4) / 3
        widths.note(y.dtype)
        return y

    with pytest.raises(paritas.MismatchError):
        paritas.verify([torch.ones(3, 4)], wavers, lambda x: wavers(x) * (1 + 2**-22))
    assert set(widths.notes()) == {torch.float32, torch.float64}
    assert set(dtypes.notes()) == {torch.float32}


def test_numbers_that_no_mode_sees_are_float64_in_lifted_runs_all_the_same():
    dtypes, tenths = Spy(), Spy()

    def tenth(x):
        value = torch.tensor(0.1)
        if value.dtype is torch.float64:
            elsewhere(dtypes)
        tenths.note(value.item())
        return x * value

    torch.manual_seed(0)
    verdict = paritas.verify([torch.randn(3, 4)], tenth, lambda x: x / 10)
    assert verdict.status.value == "equivalent"
    assert 0.1 in tenths.notes()
    # Told here, so that nobody believes otherwise: such a program changes it for every thread.
    assert set(dtypes.notes()) == {torch.float64}


def test_a_guard_leaves_tensors_of_other_threads_alone():
    dtypes = set()

    def backend(graph, inputs):
        return lambda *args: [value * (1 + 2**-22) for value in graph.forward(*args)]

    guarded = paritas.guard(backend, on_mismatch="record", locate=False)
    compiled = torch.compile(lambda x: x.sin() + torch.arange(4) / 3, backend=guarded)
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            dtypes.add(torch.ones(1).dtype)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(3):
            compiled(torch.ones(3, 4))
    finally:
        stop.set()
        thread.join(600)
    assert guarded.verdict().coverage.compared
    assert dtypes == {torch.float32}


@torch.compiler.allow_in_graph
def pause(x):
    if not PAUSES:
        return x.clone()
    PAUSES.pop()()
    return x.clone()


PAUSES = []


def in_another_thread(task):
    thread = threading.Thread(target=task)
    thread.start()
    thread.join(600)
    assert not thread.is_alive()


def test_calls_of_other_threads_run_compiled_and_are_counted_while_one_is_checked():
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(threading.current_thread())
            return [value + 1 for value in graph.forward(*args)]  # wrong

        return run

    guarded = paritas.guard(backend, on_mismatch="record", locate=False)
    other = torch.compile(lambda x: x.sin(), backend=guarded)
    checked = paritas.guard("eager", on_mismatch="record", locate=False)
    paused = torch.compile(lambda x: pause(x).cos(), backend=checked)
    other(torch.ones(4))
    paused(torch.ones(4))
    # The reference runs first: the check of this thread is under way when the other one calls.
    PAUSES.append(lambda: in_another_thread(lambda: other(torch.ones(4))))
    paused(torch.ones(4))
    assert not PAUSES
    assert len(calls) == 2
    (entry,) = guarded.journal.graphs
    assert (entry.calls, entry.checked, entry.failed) == (2, 2, 2)
    assert checked.verdict().status == "identical"


class Drawing:
    """A thread that draws one random number when it is asked to."""

    def __init__(self):
        self.wanted, self.drawn = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        while self.wanted.acquire(timeout=600) and not self.is_over:
            torch.rand(1)
            self.drawn.release()

    def draw(self):
        self.wanted.release()
        assert self.drawn.acquire(timeout=600)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.wanted.release()
        self.thread.join(600)


def drawing_backend(draw):
    """A right backend during whose calls `draw` is called."""

    def backend(graph, inputs):
        def run(*args):
            draw()
            return graph.forward(*args)

        return run

    return paritas.guard(backend, on_mismatch="record", locate=False)


def test_a_draw_of_another_thread_is_not_blamed_on_a_graph_and_is_told():
    torch.manual_seed(0)
    with Drawing() as other:
        guarded = drawing_backend(other.draw)
        compiled = torch.compile(lambda x: x.sin(), backend=guarded)
        for _ in range(2):
            compiled(torch.ones(4))
    after = torch.rand(1)
    verdict = guarded.verdict()
    assert verdict.status == "identical"
    (skipped,) = verdict.coverage.skipped
    assert skipped == f"graph 0: the random numbers of 2 of 2 calls, because {OTHERS_DRAW}"
    torch.manual_seed(0)
    torch.rand(1), torch.rand(1)
    assert torch.equal(after, torch.rand(1))  # and the other thread's draws were not undone


def test_a_draw_of_the_code_itself_is_blamed_beside_a_thread_that_sleeps():
    with Drawing() as other:
        other.draw()
        guarded = drawing_backend(lambda: torch.rand(1))
        compiled = torch.compile(lambda x: x.sin(), backend=guarded)
        times_when_others_sleep()
        compiled(torch.ones(4))
        (failure,) = guarded.verdict().failures
    assert failure.aspect == "rng"


def test_a_graph_that_draws_is_not_checked_beside_a_thread_that_draws():
    torch.manual_seed(0)
    with Drawing() as other:
        guarded = drawing_backend(other.draw)
        compiled = torch.compile(
            lambda x: torch.nn.functional.dropout(x, 0.5, training=True), backend=guarded
        )
        x = torch.ones(4, requires_grad=True)
        compiled(x).sum().backward()
        before = torch.get_rng_state()
        compiled(x).sum().backward()
    verdict = guarded.verdict()
    assert not verdict.failures
    assert verdict.coverage.skipped == (
        f"graph 0: 2 of 2 calls, because {OTHERS_DRAW}",
        f"graph 0 gradients: 1 of 1 calls, because {OTHERS_DRAW}",
    )
    # The second call drew what it draws without a guard.
    now = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(1)
    torch.nn.functional.dropout(torch.ones(4), 0.5)
    assert torch.equal(now, torch.get_rng_state())


def test_four_threads_that_call_one_function_on_random_numbers_are_no_alarm():
    guarded = paritas.guard("aot_eager", on_mismatch="record", locate=False)
    compiled = torch.compile(lambda x: x.sin() + 1, backend=guarded)
    compiled(torch.randn(4))
    at_once(*[lambda: compiled(torch.randn(4))] * 4)
    verdict = guarded.verdict()
    assert verdict.status == "identical"
    (entry,) = guarded.journal.graphs
    assert entry.calls == entry.checked == 1 + 4 * ROUNDS


def test_operators_of_other_threads_alone_are_told_to_be_missing(tmp_path):
    model = net(4).requires_grad_(False)
    with (
        pytest.raises(paritas.UsageError, match="nothing ran"),
        paritas.capture(tmp_path / "dump", level="op"),
    ):
        at_once(lambda: model(torch.ones(3, 4)))
