"""guard_everywhere(): one switch for every `torch.compile` of the process.

Dynamo's own test of `verify_correctness`, with this switch in place of that one, is executed in
docs/coming_from/dynamo.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import unittest

import pytest
import torch
from torch import nn

import paritas
from integration.odd_backends import on_results
from paritas import MismatchError, ParityWarning, Status, UsageError, guard_everywhere
from paritas.core.compiled import guard, guard_settings
from paritas.core.compiled.guard_settings import (
    GuardSettings,
    GuardWatch,
    environment_set_aside,
    summary_line,
)
from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private.arrival import HOOK, MODULE

pytestmark = pytest.mark.usefixtures("undiagnosed")
X = torch.arange(1.0, 9.0)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("PARITAS_GUARD", raising=False)
    before = getattr(sys.modules[MODULE], HOOK)
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
    assert getattr(sys.modules[MODULE], HOOK) is before


# --- who is guarded -------------------------------------------------------------------------------

wrong = on_results(lambda y: y + 1)


def doubled(x):
    return x * 2


def in_place():
    class Doubling(nn.Module):
        def forward(self, x):
            return doubled(x)

    module = Doubling()
    module.compile(backend=wrong)
    return module


def decorated():
    @torch.compile(backend=wrong)
    def inner(x):
        return x * 2

    return inner


WAYS = {
    "torch.compile": lambda: torch.compile(doubled, backend=wrong),
    "model.compile()": in_place,
    "a decorator": decorated,
    "options": lambda: torch.compile(doubled, backend=takes_options, options={"level": 3}),
    "mode": lambda: torch.compile(doubled, backend=takes_options, mode="careful"),
}


def takes_options(graph, example_inputs, **given):
    assert given in ({"options": {"level": 3}}, {"mode": "careful"})
    return wrong(graph, example_inputs)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compile_is_guarded(way):
    with guard_everywhere(), pytest.raises(MismatchError, match="different"):
        WAYS[way]()(X)


def test_it_is_in_force_until_it_is_switched_off():
    guards = guard_everywhere(on_mismatch="record")
    compiled = torch.compile(doubled, backend=wrong)
    compiled(X)
    assert guards.verdict().status is Status.DIFFERENT
    guards.off()
    guards.off()
    compiled(X)
    assert [entry.calls for entry in guards.journal.graphs] == [1]
    with guards:
        compiled(X)
    assert [entry.calls for entry in guards.journal.graphs] == [2]


def test_what_was_compiled_and_called_before_is_guarded_and_found_again_afterwards():
    graphs = []

    def noting(graph, example_inputs):
        graphs.append(graph)
        return wrong(graph, example_inputs)

    compiled = torch.compile(doubled, backend=noting)
    compiled(X)
    with guard_everywhere(locate=False), pytest.raises(MismatchError):
        compiled(X)
    compiled(X)
    assert len(graphs) == 2


def test_a_guard_of_one_s_own_is_not_wrapped_twice_and_that_is_said():
    own = paritas.guard("eager")
    with guard_everywhere() as guards:
        torch.compile(doubled, backend=own)(X)
    assert own.journal.graphs[0].checked == 1
    assert guards.journal.graphs == []
    assert guards.verdict().status is Status.UNVERIFIED
    assert any("has its own paritas.guard" in note for note in guards.verdict().notes)


def test_a_recording_backend_is_said_not_to_be_guarded(tmp_path):
    with guard_everywhere() as guards, paritas.record(tmp_path / "dump", source="fx") as recording:
        torch.compile(doubled, backend=recording)(X)
    assert guard.RECORDED in guards.verdict().notes


def test_threads_are_guarded_and_may_end_their_contexts_in_any_order():
    first, second = guard_everywhere(on_mismatch="record"), guard_everywhere(on_mismatch="record")
    compiled = torch.compile(doubled, backend=wrong)
    first.off()
    thread = threading.Thread(target=compiled, args=(X,))
    thread.start()
    thread.join()
    second.off()
    assert first.journal.graphs == []
    assert second.verdict().status is Status.DIFFERENT


def test_the_inner_one_has_its_way_and_the_outer_one_says_so():
    with guard_everywhere() as outer:
        with guard_everywhere(on_mismatch="record") as inner:
            torch.compile(doubled, backend=wrong)(X)
        with guard_everywhere(enabled=False) as left_alone:
            torch.compile(doubled, backend=wrong)(X)
        with pytest.raises(MismatchError):
            torch.compile(doubled, backend=wrong)(X)
    assert inner.verdict().status is Status.DIFFERENT
    assert set(outer.verdict().notes) >= {guard.OWN_GUARD, guard.SWITCHED_OFF}
    assert not left_alone.verdict().passed
    assert "guards are switched off" in str(left_alone.verdict())


def test_after_an_exception_nothing_is_guarded():
    @guard_everywhere()
    def failing():
        torch.compile(doubled, backend="eager")(X)
        raise LookupError

    with pytest.raises(LookupError):
        failing()
    with pytest.raises(LookupError), guard_everywhere():
        raise LookupError
    torch.compile(doubled, backend=wrong)(X)


def test_it_outlives_a_reset_of_the_compiler():
    with guard_everywhere() as guards:
        compiled = torch.compile(doubled, backend="eager")
        compiled(X)
        torch.compiler.reset()
        compiled(X)
        with pytest.raises(MismatchError):
            torch.compile(doubled, backend=wrong)(X)
    assert [entry.checked for entry in guards.journal.graphs] == [1, 1, 1]


def test_a_decorated_function_may_call_itself():
    @guard_everywhere(on_mismatch="warn")
    def descend(depth):
        if depth:
            descend(depth - 1)
        torch.compile(doubled, backend=wrong)(X)

    torch.compile(doubled, backend=wrong)(X)  # it is not in force outside
    with pytest.warns(ParityWarning) as told:
        descend(2)
    assert len(told) == 3


def test_the_tests_of_a_class_are_guarded_and_one_of_them_may_be_left_alone():
    seen = []

    @guard_everywhere()
    class TestTwo(unittest.TestCase):
        def setUp(self):
            seen.append("setUp")

        def test_guarded(self):
            with pytest.raises(MismatchError):
                torch.compile(doubled, backend=wrong)(X)

        @guard_everywhere(enabled=False)
        def test_left_alone(self):
            torch.compile(doubled, backend=wrong)(X)

    torch.compile(doubled, backend=wrong)(X)  # it is not in force outside
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(TestTwo).run(result)
    assert result.wasSuccessful(), (result.failures, result.errors)
    assert seen == ["setUp", "setUp"]


@pytest.mark.parametrize("wrong_thing", [nn.Linear, 3])
def test_what_cannot_be_decorated_is_refused_and_nothing_stays_switched_on(wrong_thing):
    with pytest.raises(
        UsageError, match=r"a function or a unittest\.TestCase, not .*; use it in a"
    ):
        guard_everywhere()(wrong_thing)


def test_what_captured_no_graph_is_said():
    with guard_everywhere() as guards:
        torch.compile(lambda x: x.tolist(), backend="eager")(X)
    verdict = guards.verdict()
    assert verdict.status is Status.UNVERIFIED
    assert "torch.compile was called (eager), but captured no graph" in verdict.notes


def test_the_environment_may_switch_it_off(monkeypatch):
    monkeypatch.setenv("PARITAS_GUARD", "0")
    with guard_everywhere() as guards:
        torch.compile(doubled, backend=wrong)(X)
    assert not guards.verdict().passed
    assert "PARITAS_GUARD=0 in the environment" in str(guards.verdict())


@pytest.mark.parametrize("arguments", [{"on_mismatch": "explode"}, {"every": 0}, {"enabled": 1}])
def test_an_argument_that_makes_no_sense_is_refused_and_nothing_switched_on(arguments):
    with pytest.raises(UsageError, match=f"not {next(iter(arguments.values()))!r}"):
        guard_everywhere(**arguments)


def test_a_torch_that_has_no_such_place_is_refused(monkeypatch):
    with monkeypatch.context() as patched:
        patched.delattr(sys.modules[MODULE], HOOK)
        with pytest.raises(UnsupportedTorchError, match=r"guard each one with torch\.compile"):
            guard_everywhere()


# --- switched on by the environment ---------------------------------------------------------------


def watched(monkeypatch, value):
    """What `import paritas` begins under that value; to be stopped by the test."""
    monkeypatch.setenv("PARITAS_GUARD", value)
    monkeypatch.setattr(guard_settings, "_watch", None)
    monkeypatch.setattr(guard_settings, "_commands", 0)
    registered = []
    monkeypatch.setattr(guard_settings.atexit, "register", registered.append)
    guard_settings.watch_by_environment()
    assert registered == [guard_settings._report_at_exit] * (guard_settings._watch is not None)
    return guard_settings._watch


@pytest.mark.parametrize("value", ["0", "", "off"])
def test_nothing_is_watched_unless_asked_for(value, monkeypatch):
    assert watched(monkeypatch, value) is None


def test_a_mismatch_raises_and_is_told_at_the_end(monkeypatch, capsys):
    with watched(monkeypatch, "1"):
        torch.compile(doubled, backend="eager")(X)
        with pytest.raises(MismatchError):
            torch.compile(doubled, backend=wrong)(X)
    guard_settings._report_at_exit()
    told = capsys.readouterr().err
    assert told.startswith(
        "paritas (PARITAS_GUARD=1): different: the candidate computes something else; "
    )
    assert "(2 graphs, 2 of 2 calls checked); first: graph 1" in told
    assert told.count("\n") == 1


def test_what_passes_is_told_and_the_rank_with_it(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with watched(monkeypatch, "record") as watch:
        torch.compile(doubled, backend="eager")(X)
    assert summary_line(watch) == (
        "paritas (PARITAS_GUARD=record, rank 3): identical: the candidate is equal bit for bit; "
        "1 item compared (1 graph, 1 of 1 call checked)"
    )


def test_that_nothing_was_compiled_is_told(monkeypatch):
    with watched(monkeypatch, "1") as watch:
        pass
    assert summary_line(watch) == (
        "paritas (PARITAS_GUARD=1): unverified: nothing was compiled: the program called "
        "nothing that torch.compile made"
    )


def test_a_word_that_means_nothing_is_refused_at_the_first_compiled_call(monkeypatch):
    message = "PARITAS_GUARD must be 0, 1, or the action on a mismatch"
    with watched(monkeypatch, "ture") as watch, pytest.raises(UsageError, match=message):
        torch.compile(doubled, backend="eager")(X)
    line = summary_line(watch)
    assert line.startswith(
        f"paritas (PARITAS_GUARD=ture): unverified: nothing was guarded: {message}"
    )
    with pytest.raises(UsageError, match=message), environment_set_aside():
        pass


def test_a_command_of_paritas_is_left_to_itself(monkeypatch):
    with watched(monkeypatch, "1") as watch:
        with environment_set_aside():
            torch.compile(doubled, backend=wrong)(X)
        assert summary_line(watch) == ""
        with pytest.raises(MismatchError):
            torch.compile(doubled, backend=wrong)(X)


def test_one_that_is_entered_before_the_first_compiled_call_is_still_the_inner_one(monkeypatch):
    """The environment's guard is made by the first call, and takes its own place under it."""
    with watched(monkeypatch, "1") as watch:
        with guard_everywhere(on_mismatch="record") as inner:
            torch.compile(doubled, backend=wrong)(X)
        with pytest.raises(MismatchError):
            torch.compile(doubled, backend=wrong)(X)
    assert inner.verdict().status is Status.DIFFERENT
    assert [entry.calls for entry in watch.journal.graphs] == [1]


def test_what_is_left_alone_before_the_environment_s_guard_is_made_is_told(monkeypatch):
    with watched(monkeypatch, "1") as watch, guard_everywhere(enabled=False):
        torch.compile(doubled, backend=wrong)(X)
    assert summary_line(watch) == (
        "paritas (PARITAS_GUARD=1): unverified: nothing was compared (0 graphs, 0 of 0 calls "
        f"checked); {guard.SWITCHED_OFF}"
    )


def test_a_watch_that_is_stopped_and_started_goes_on_with_its_journal():
    watch = GuardWatch(GuardSettings(on_mismatch="record"))
    for _ in range(2):
        with watch:
            torch.compile(doubled, backend="eager")(X)
        torch.compile(doubled, backend=wrong)(X)
    assert [(entry.calls, entry.failed) for entry in watch.journal.graphs] == [(2, 0)]


@pytest.mark.slow
def test_an_unmodified_program_is_guarded_where_a_sitecustomize_imports_paritas(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import paritas\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(
        "import sys, torch\n"
        "torch.compile(lambda x: x * 2, backend='eager')(torch.ones(3))\n"
        "print('paritas' in sys.modules)\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PARITAS_GUARD": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert ended.stdout == "True\n"
    assert ended.stderr == (
        "paritas (PARITAS_GUARD=1): identical: the candidate is equal bit for bit; 1 item compared "
        "(1 graph, 1 of 1 call checked)\n"
    )
