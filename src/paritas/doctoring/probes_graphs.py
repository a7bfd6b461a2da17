"""Probes of what reads, copies and runs graphs; see `probes_values`."""

from __future__ import annotations

from typing import Any

import torch

from paritas.doctoring.expecting import expect

__all__ = ["PROBES"]

ATEN = torch.ops.aten


def _wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + x


def _traced() -> Any:
    from paritas._torch.tracing import trace_calls

    return trace_calls(_wave, [torch.ones(3, 4)])


def _names(module: Any) -> list[str]:
    return [node.name for node in module.graph.nodes]


def _captured(look: Any) -> Any:
    """What is seen in a graph that Dynamo captured of a module, before it is gone."""
    seen: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(look(graph))
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(torch.nn.Linear(4, 2), backend=backend)(torch.ones(1, 4))
    torch.compiler.reset()
    return seen[0]


def draw_keys() -> None:
    """Inductor's random operators take what keys are read from."""
    from paritas._torch import draw_keys as keys

    for op in (keys.SEED, keys.SEEDS, ATEN.rand.default):
        expect(f"whether {op} draws", keys.may_draw(op))
    expect("whether inductor_random draws by itself", keys.may_draw(keys.RANDOM), wanted=False)


def exported_programs() -> None:
    """A graph's values are foretold without running it, and the range of a symbol is told."""
    from paritas._torch.exported_programs import foretell_values, is_operator, symbol_ranges

    expect("whether relu is an operator", is_operator(ATEN.relu.default))
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    shapes = [tuple(value.shape) for value in foretell_values(graph, [torch.ones(2, 3)]).values()]
    expect("foretold shapes", shapes, [(2, 3), (2, 4)])
    length = torch.export.Dim("length", min=3, max=64)
    program = torch.export.export(
        torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: length},)
    )
    expect("the range of a symbol", list(symbol_ranges(program).values()), [(3, 64)])


def exported_lifting() -> None:
    """An exported program's casts to less than float64 are widened."""
    from paritas._torch.exported_lifting import lift_captured

    class Casting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() / 3

    x = torch.ones(2, dtype=torch.float64)
    program, leaks = lift_captured(
        torch.export.export(Casting(), (x,)), (x,), frozenset({torch.float32})
    )
    expect("what could not be lifted", sorted(leaks), [])
    expect("the dtype of a lifted program", program.module()(x).dtype, torch.float64)


def frozen() -> None:
    """A graph is known to be the same until it changes."""
    from paritas._torch.frozen import Fingerprint

    module = _traced()
    before = Fingerprint(module)
    expect("a graph that did not change", before.same(Fingerprint(module)))
    (node,) = module.graph.find_nodes(op="call_function", target=ATEN.sin.default)
    node.target = ATEN.cos.default
    expect("a graph that changed", before.same(Fingerprint(module)), wanted=False)


def graphs() -> None:
    """A captured node knows the module it was called in."""
    from paritas._torch import graphs as fx

    copied = fx.copy_graph(_traced())
    expect("inputs of a copied graph", len(fx.placeholders(copied)), 1)
    where = _captured(lambda graph: fx.provenance(fx.returned(graph)[0]))
    expect("the operator of a captured node", where.operator, "linear")


def higher_order() -> None:
    """The operators with bodies are those that have plain forms."""
    from paritas._torch.exported_programs import is_higher_order
    from paritas._torch.higher_order import PLAIN_FORMS

    for op in PLAIN_FORMS:
        expect(f"whether {op} takes a body", is_higher_order(op))


def naming() -> None:
    """The inputs of a captured graph are named as in the user's program."""
    from paritas._torch.naming import captured_input_names

    names = {name.rpartition(".")[2] for name in _captured(captured_input_names)}
    expect(f"inputs of a captured layer ({sorted(names)})", {"bias", "weight"} <= names)


def overwriting() -> None:
    """A traced graph is rewritten to write results over operands."""
    from paritas._torch.overwriting import overwriting as lean

    found = lean(_traced())
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    same = found is not None and bool(torch.equal(found(x)[0], _wave(x)))
    expect("a lean graph's values", same)


def random_twins() -> None:
    """Inductor's random operators are told from torch's."""
    from paritas._torch.random_twins import draws_by_inductor

    for name in ("inductor_seeds", "inductor_random", "inductor_randint"):
        expect(f"prims.{name}", draws_by_inductor(getattr(torch.ops.prims, name).default))
    expect("aten.rand", draws_by_inductor(ATEN.rand.default), wanted=False)


def replaying() -> None:
    """A frozen graph runs node by node to the same values."""
    from paritas._torch.frozen import freeze
    from paritas._torch.replaying import replay

    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    (result,) = replay(freeze(_traced()), [x], {})
    expect("a replayed graph's values", bool(torch.equal(result, _wave(x))))


def selecting() -> None:
    """Single nodes can be marked for compilation, and inductor has the option that heeds it."""
    from paritas._torch.inductor import current_settings
    from paritas._torch.selecting import ONLY_MARKED, compilable, with_compiled

    expect("the option of inductor", ONLY_MARKED.keys() <= current_settings().keys())
    expect("nodes that can be compiled", compilable(_traced()), ["sin", "mul", "add"])
    expect("a marked graph", _names(with_compiled(_traced(), ["sin"])), _names(_traced()))


def tapping() -> None:
    """Every value of a graph can be made an output of it."""
    from paritas._torch.tapping import tapped

    module, names = tapped(_traced())
    expect("tapped values", names, ["sin", "mul", "add"])
    expect("outputs of a tapped graph", len(module(torch.ones(3, 4))), 4)


def tracing() -> None:
    """A function is traced to one flat graph of operators, its gradients among them."""
    from paritas._torch.tracing import trace_calls

    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.relu().sum(), x)

    found = set(_names(trace_calls(step, [torch.ones(2, 3)])))
    expect("operators of a traced step", {"relu", "threshold_backward"} <= found)


def watching() -> None:
    """Operators of an eager program are seen, and none after one stopped looking."""
    from paritas._torch import watching as watch

    seen: list[str] = []

    class Watcher:
        def listens(self) -> bool:
            return True

        def before(self, func: Any, _args: Any, _kwargs: Any) -> None:
            seen.append(str(func))

        def after(self, _token: Any, _result: Any) -> None:
            pass

    end = watch.push_watch(Watcher())
    (torch.ones(2, 2) @ torch.ones(2, 2)).tanh()
    expect("whether the watch ended", end())
    expect("modes that were left behind", watch.mode_depth(), 0)
    wanted = {"aten.mm.default", "aten.tanh.default"}
    expect("operators that were seen", wanted <= set(seen))


def widening() -> None:
    """A traced graph is rewritten to compute in float64."""
    from paritas._torch.widening import widened

    wide = widened(_traced(), frozenset())
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    found = None if wide is None else wide(x)[0]
    same = found is not None and bool(torch.equal(found, _wave(x.double())))
    expect("a widened graph's values", same)


PROBES = {
    "draw_keys": draw_keys,
    "exported_programs": exported_programs,
    "exported_lifting": exported_lifting,
    "frozen": frozen,
    "graphs": graphs,
    "higher_order": higher_order,
    "naming": naming,
    "overwriting": overwriting,
    "random_twins": random_twins,
    "replaying": replaying,
    "selecting": selecting,
    "tapping": tapping,
    "tracing": tracing,
    "watching": watching,
    "widening": widening,
}
