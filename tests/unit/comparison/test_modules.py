"""Eager code against captured graphs: by module, operator and order."""

from __future__ import annotations

import pytest

from unit.comparison.operand_samples import Side, found, told

ADDMM, LINE = "aten.addmm.default", "/code/net.py:7, in forward"


def call(side, name, module, op, shape, *, taken=((2, 3),), line=LINE, phase="forward", **site):
    more = {"module": module, "op": op, "line": line, "phase": phase, **site}
    for position, of_input in enumerate(taken):
        side.add(name, of_input, side="input", position=str(position), **more)
    side.add(name, shape, **more)


def eager(*, with_modules=True):
    """Linear `a`, then gelu, then LayerNorm `n`."""
    side = Side("eager", "op")
    if with_modules:
        side.add("Net", (2, 3), level="module", op="Net", module="Net", side="input")
    call(side, f"a/{ADDMM}", "a", ADDMM, (2, 8))
    if with_modules:
        same = len(side.operands) - 1
        side.add("a", (2, 8), level="module", op="Linear", module="a", alias_of=same)
    call(side, "Net/aten.gelu.default", "Net", "aten.gelu.default", (2, 8), taken=[(2, 8)])
    norm = "aten.native_layer_norm.default"
    call(side, f"n/{norm}", "n", norm, (2, 8), taken=[(2, 8)])
    call(side, f"b/{ADDMM}", "b", ADDMM, (2, 5), taken=[(2, 8)])
    return side


def graph():
    """The same, decomposed; the compiler calls the modules `s.a`, `s.n` and `s.b`."""
    side = Side("fx", "node", graph="g")
    side.add("x", (2, 3), op="placeholder", module="x").add("w", op="placeholder", module="s.a.w")
    call(side, "addmm", "s.a", ADDMM, (2, 8))
    for name, op in (("mul", "aten.mul.Tensor"), ("erf", "aten.erf.default")):
        call(side, name, "", op, (2, 8), taken=[(2, 8)])
    call(side, "mul_1", "", "aten.mul.Tensor", (2, 8), taken=[(2, 8), (2, 8)])
    call(side, "var_mean", "s.n", "aten.var_mean.correction", (2, 1), taken=[(2, 8)])
    call(side, "mul_2", "s.n", "aten.mul.Tensor", (2, 8), taken=[(2, 8)])
    call(side, "addmm_1", "s.b", ADDMM, (2, 5), taken=[(2, 8)])
    return side


def test_operators_are_found_by_module_and_decomposed_ones_at_their_last_value():
    matches = found(eager(), graph())
    assert [(my, golden) for _, my, golden in told(matches) if not my.endswith("input.0")] == [
        (f"a/{ADDMM}#0/output.0", "g/addmm#0/output.0"),
        ("a#0/output.0", "g/addmm#0/output.0"),
        ("Net/aten.gelu.default#0/output.0", "g/mul_1#0/output.0"),
        ("n/aten.native_layer_norm.default#0/output.0", "g/mul_2#0/output.0"),
        (f"b/{ADDMM}#0/output.0", "g/addmm_1#0/output.0"),
    ]
    assert told(matches)[0] == ("module", "Net#0/input.0", "g/x#0/output.0")
    assert sorted(matches.skipped) == [
        "1 graph input that eager code does not have",
        "11 values inside operators that the other side splits differently",
    ]
    assert {pair.matched_by for pair in matches.pairs} == {"module"}
    assert matches.notes == [
        "module paths of the graph start with 's.'; this prefix was ignored to match them"
    ]


def test_the_graph_may_be_mine():
    forth, back = found(eager(), graph()), found(graph(), eager())
    assert sorted((my, golden) for _, my, golden in told(forth)) == sorted(
        (golden, my) for _, my, golden in told(back)
    )


def test_operators_that_are_called_otherwise_often_are_not_taken_for_one_another():
    my = Side("eager", "op")
    call(my, "a/aten.mul.Tensor", "a", "aten.mul.Tensor", (2,), line="", phase="backward")
    call(my, f"a/{ADDMM}", "a", ADDMM, (3,), line="", phase="backward")
    golden = Side("fx", "node", graph="g")
    for name in ("mul", "mul_1", "mul_2"):
        call(golden, name, "a", "aten.mul.Tensor", (2,), line="", phase="backward")
    call(golden, "addmm", "a", ADDMM, (3,), line="", phase="backward")
    call(golden, "mul_3", "a", "aten.mul.Tensor", (2,), line="", phase="backward")
    pairs = [(my, golden) for _, my, golden in told(found(my, golden)) if my and golden]
    outputs = [golden for my, golden in pairs if "output" in golden]
    # Of what comes before the product that both have, the last; what comes after is alone.
    assert outputs == ["backward/g/mul_2#0/output.0", "backward/g/addmm#0/output.0"]


@pytest.mark.parametrize("often", [1, 2])
def test_what_a_module_gives_is_what_others_read_of_it(often):
    my = Side("eager", "module")
    for number in range(often):
        my.add("a", (2, 8), op="Block", module="a", call=number)
    golden = Side("fx", "node", graph="g")
    golden.add("mm", (2, 8), op="aten.mm.default", module="a", nodes=("mm",))
    golden.add("relu", (2, 8), op="aten.relu.default", module="a", side="input", nodes=("mm",))
    golden.add("relu", (2, 8), op="aten.relu.default", module="a", nodes=("relu",))
    golden.add("sum", (2, 8), op="aten.sum.default", side="input", nodes=("relu",))
    golden.add("saved", (2, 8), op="aten.permute.default", module="a", nodes=("saved",))
    pairs = [(my, golden) for _, my, golden in told(found(my, golden)) if my and golden]
    # A graph does not say which of several calls a node belongs to.
    assert pairs == ([("a#0/output.0", "g/relu#0/output.0")] if often == 1 else [])


def test_fused_kernels_are_no_operators_of_eager_code():
    golden = eager(with_modules=False)
    my = Side("fused", "buffer", graph="g")
    call(my, "addmm", "s.a", ADDMM, (2, 8), nodes=("addmm",), kernel="extern_kernels.addmm")
    call(
        my, "mul_2", "s.n", "aten.mul.Tensor", (2, 8), nodes=("mul", "mul_2"), kernel="cpp_fused_0"
    )
    call(my, "addmm_1", "s.b", ADDMM, (2, 5), nodes=("addmm_1",), kernel="extern_kernels.addmm")
    matches = found(my, golden)
    assert told(matches) == [
        ("module", "g/addmm#0/output.0", f"a/{ADDMM}#0/output.0"),
        ("module", "g/addmm_1#0/output.0", f"b/{ADDMM}#0/output.0"),
    ]
    assert "1 value of fused code that belongs to no operator of eager code" in matches.skipped
