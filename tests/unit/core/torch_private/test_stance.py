"""Every way to `torch.compile` can be given another backend, and keeps the rest of what it said.

These are the canaries of `dynamo` and `arrival` in `paritas.core.torch_private`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

from paritas.core.errors import UnsupportedTorchError
from paritas.core.torch_private import arrival, dynamo
from paritas.core.torch_private.arrival import HOOK, MODULE, on_first_compile
from paritas.core.torch_private.dynamo import keeping_backends, replacing_backends, unguarded
from paritas.core.torch_private.global_state import running_eagerly, taking_stance

X = torch.arange(4.0)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counting:
    """A backend around another; how many graphs it was given, with which options."""

    def __init__(self, backend):
        self.backend = backend
        self.graphs = 0

    def __call__(self, graph, example_inputs, **options):
        self.graphs += 1
        return self.backend(graph, example_inputs, **options)


class Replacements:
    """One `Counting` for each backend, as `replacing_backends` wants it."""

    def __init__(self):
        self.made = []

    def __call__(self, backend):
        if isinstance(backend, Counting):
            return None
        for known in self.made:
            if known.backend is backend or known.backend == backend:
                return known
        self.made.append(Counting(backend))
        return self.made[-1]

    @property
    def graphs(self):
        return sum(made.graphs for made in self.made)

    @property
    def names(self):
        return [getattr(made.backend, "compiler_name", "") for made in self.made]


@pytest.fixture
def replacements():
    replace = Replacements()
    with replacing_backends(replace):
        yield replace


def shifted(x):
    return x.sin() + 1


class Shift(nn.Module):
    def forward(self, x):
        return shifted(x)


def compile_in_place():
    module = Shift()
    module.compile(backend="eager")
    return module


def compile_as_decorator():
    @torch.compile(backend="eager")
    def inner(x):
        return x.sin() + 1

    return inner


WAYS = {
    "a function": lambda: torch.compile(shifted, backend="eager"),
    "without graph breaks": lambda: torch.compile(shifted, backend="eager", fullgraph=True),
    "with dynamic shapes": lambda: torch.compile(shifted, backend="eager", dynamic=True),
    "a module": lambda: torch.compile(Shift(), backend="eager"),
    "a module in place": compile_in_place,
    "a decorator": compile_as_decorator,
}


# --- who is reached -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compile_is_reached_once_per_graph(replacements, way):
    compiled = WAYS[way]()
    for _ in range(3):
        assert torch.equal(compiled(X), shifted(X))
    assert replacements.names == ["eager"]
    assert replacements.graphs == 1


def test_what_was_compiled_before_is_compiled_anew_and_kept_for_afterwards():
    graphs = []

    def plain(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(shifted, backend=plain)
    compiled(X)
    replace = Replacements()
    with replacing_backends(replace):
        compiled(X)
        assert replace.graphs == 1
        assert len(graphs) == 2
    compiled(X)
    assert replace.graphs == 1
    assert len(graphs) == 2


def test_equal_backends_share_their_compiled_code(replacements):
    for _ in range(2):
        torch.compile(shifted, backend="eager")(X)
    assert replacements.graphs == 1


def test_other_threads_are_reached(replacements):
    compiled = torch.compile(shifted, backend="eager")
    thread = threading.Thread(target=compiled, args=(X,))
    thread.start()
    thread.join()
    assert replacements.graphs == 1


@pytest.mark.parametrize("name", ["eager_then_compile", "aot_eager_then_compile"])
def test_a_stance_that_compiles_later_is_reached(replacements, name):
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    with torch.compiler.set_stance(name):
        for _ in range(3):
            compiled(X)
    assert replacements.names == ["eager"]
    assert replacements.graphs == 1


def test_a_backend_forced_by_a_stance_is_reached(replacements):
    compiled = torch.compile(shifted)
    with torch.compiler.set_stance(force_backend="eager"):
        for _ in range(3):
            compiled(X)
    assert [made.graphs for made in replacements.made] == [0, 1]
    assert replacements.names[0] == "inductor"


@pytest.mark.parametrize("name", ["force_eager", "eager_on_recompile"])
def test_a_stance_that_compiles_nothing_stays_so(replacements, name):
    compiled = torch.compile(shifted, backend="eager")
    with torch.compiler.set_stance(name):
        assert torch.equal(compiled(X), shifted(X))
    assert replacements.graphs == 0


def test_what_is_compiled_unguarded_keeps_its_backend(replacements):
    with unguarded():
        torch.compile(shifted, backend="eager")(X)
    assert replacements.made == []
    torch.compile(lambda x: x + 2, backend="eager")(X)
    assert replacements.graphs == 1


def test_what_is_asked_to_keep_its_backend_keeps_it_and_is_told():
    told = []
    with (
        replacing_backends(Replacements(), on_kept=lambda: told.append(True)),
        keeping_backends(),
    ):
        torch.compile(shifted, backend="eager")(X)
    assert told == [True]


def test_contexts_may_end_in_any_order():
    first, second = Replacements(), Replacements()
    contexts = [replacing_backends(first), replacing_backends(second)]
    for context in contexts:
        context.__enter__()
    contexts[0].__exit__(None, None, None)
    torch.compile(shifted, backend="eager")(X)
    contexts[1].__exit__(None, None, None)
    torch.compile(shifted, backend="eager")(X)
    assert (first.graphs, second.graphs) == (0, 1)


def test_an_export_is_left_alone(replacements):
    program = torch.export.export(Shift(), (X,), strict=True)
    assert torch.equal(program.module()(X), shifted(X))
    assert replacements.made == []


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"mode": "careful"}, {"options": {"level": 3}}], ids=str)
def test_mode_and_options_stay_with_their_backend(replacements, asked):
    given = []

    def picky(graph, example_inputs, **settings):
        given.append(settings)
        return graph.forward

    torch.compile(shifted, backend=picky, **asked)(X)
    assert given == [asked]
    assert replacements.graphs == 1


def test_the_options_of_inductor_are_seen_and_tell_two_apart(replacements):
    for size in (1, 2):
        with torch.compiler.set_stance("force_eager"):
            torch.compile(shifted, options={"max_fusion_size": size})(X)
    assert [made.backend.config["max_fusion_size"] for made in replacements.made] == [1, 2]


def test_a_graph_break_is_refused_where_it_was_to_be(replacements):
    def broken(x):
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(RuntimeError, match="branching"):
        torch.compile(broken, backend="eager", fullgraph=True)(X)


def test_dynamic_shapes_stay_dynamic(replacements):
    compiled = torch.compile(shifted, backend="eager", dynamic=True)
    for size in (3, 4, 5):
        compiled(torch.ones(size))
    assert replacements.graphs == 1


# --- where torch is another -----------------------------------------------------------------------


def test_torch_has_the_place():
    assert callable(arrival.compile_hook(sys.modules[MODULE]))


@pytest.mark.parametrize("enter", [replacing_backends, on_first_compile])
def test_a_torch_without_the_place_is_refused_by_name(monkeypatch, enter):
    monkeypatch.delattr(sys.modules[MODULE], HOOK)
    with pytest.raises(UnsupportedTorchError, match=rf"has no {MODULE}\.{HOOK}"), enter(lambda: 0):
        pass


def test_a_torch_whose_callbacks_cannot_be_cloned_is_refused(monkeypatch):
    def refuse(*args):
        raise TypeError("no clones")

    monkeypatch.setattr(dynamo, "catch_errors_wrapper", refuse)
    with (
        replacing_backends(Replacements()),
        pytest.raises(UnsupportedTorchError, match="does not allow replacing a backend: no clones"),
    ):
        torch.compile(shifted, backend="eager")(X)


def test_the_place_is_left_as_it_was():
    before = getattr(sys.modules[MODULE], HOOK)
    with replacing_backends(Replacements()):
        assert getattr(sys.modules[MODULE], HOOK) is not before
    with on_first_compile(lambda: None):
        torch.compile(shifted, backend="eager")(X)
    assert getattr(sys.modules[MODULE], HOOK) is before


# --- the first compile ----------------------------------------------------------------------------


def test_the_first_call_of_compiled_code_is_told_once_and_before_it_is_compiled():
    events = []

    def noting(graph, example_inputs):
        events.append("compiled")
        return graph.forward

    with on_first_compile(lambda: events.append("told")):
        compiled = torch.compile(shifted, backend=noting)
        assert events == []
        compiled(X)
        compiled(torch.ones(2, 2))
    assert events == ["told", "compiled", "compiled"]


def test_what_the_first_call_brings_along_stands_where_it_was_waited_for():
    """And so below what was added later, which is asked first."""
    inner, outer = Replacements(), Replacements()
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            on_first_compile(lambda: stack.enter_context(replacing_backends(outer)))
        )
        with replacing_backends(inner):
            torch.compile(shifted, backend="eager")(X)
            assert (inner.graphs, outer.graphs) == (1, 0)
        torch.compile(shifted, backend="eager")(X)
    assert (inner.graphs, outer.graphs) == (1, 1)


def test_torch_is_not_imported_before_the_program_imports_it(tmp_path):
    """With a stand-in that is imported in no time; torch itself comes late in integration/."""
    place = tmp_path / "torch" / "_dynamo"
    place.mkdir(parents=True)
    for folder in (place, place.parent):
        (folder / "__init__.py").touch()
    (place / "eval_frame.py").write_text(f"def {HOOK}(callback):\n    return callback\n")
    code = textwrap.dedent(f"""
        import sys
        from paritas.core.torch_private.arrival import MODULE, on_first_compile

        told = []
        with on_first_compile(lambda: told.append(True)):
            assert "torch" not in sys.modules
            import torch._dynamo.eval_frame as compiler
            assert MODULE in sys.modules
            assert told == []
            assert compiler.{HOOK}(len) is len
        assert told == [True], told
        assert not any("paritas" in type(finder).__module__ for finder in sys.meta_path)
    """)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=600)


def test_running_eagerly_ends_with_its_block_and_an_inner_stance_wins():
    counting = Counting(lambda graph, _: graph.forward)
    compiled = torch.compile(lambda x: x.sin(), backend=counting)
    with running_eagerly():
        compiled(X)
        assert counting.graphs == 0
        with taking_stance("default"):
            compiled(X)
        assert counting.graphs == 1
        torch.compiler.reset()
        compiled(X)
        assert counting.graphs == 1
    compiled(X)
    assert counting.graphs == 2
