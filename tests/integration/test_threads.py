"""Several threads at once: each gets the verdict about its own model."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import paritas
from paritas._torch.operators import default_dtype
from spying import Spy

ROUNDS = 3


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


def test_operators_of_other_threads_alone_are_told_to_be_missing(tmp_path):
    model = net(4).requires_grad_(False)
    with (
        pytest.raises(paritas.UsageError, match="nothing ran"),
        paritas.capture(tmp_path / "dump", level="op"),
    ):
        at_once(lambda: model(torch.ones(3, 4)))
