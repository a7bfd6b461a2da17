"""The script of a failure is standalone, and agrees with the check: wrong, or right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.reporting.scripts import NoScriptError, literal
from paritas.core.results.items import Partial, Replicate, Shard
from paritas.core.torch_private.operators import WIDE
from paritas.sharding.graphs import scripts
from paritas.sharding.graphs.scripts import (
    Facts,
    function_text,
    split_script,
    stem_of,
    write_script,
)
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.recipe_checks import check_recipe

SEED = 0


def r(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + sum(shape)))


def ids(*shape):
    return torch.randint(8, shape, generator=torch.Generator().manual_seed(SEED))


VOCABULARY = {"padding_idx": None, "start": 0, "stop": 8}
LINEAR = ("torch.nn.functional.linear", functional.linear, (r(4, 24), r(6, 24), r(6)), {})
EMBEDDING = (
    "nnscaler.runtime.function.embedding",
    nnscaler_functions.embedding,
    (ids(3, 5), r(8, 4)),
    VOCABULARY,
)
NORM = (
    "torch.nn.functional.batch_norm",
    functional.batch_norm,
    (r(4, 6), torch.zeros(6), torch.ones(6), r(6), r(6)),
    {"training": True},
)

SOFTMAX = ("torch.softmax", torch.softmax, (r(4, 8), 1), {})
MUL = ("torch.mul", torch.mul, (r(4, 8), r(8)), {})
MEAN = ("torch.mean", torch.mean, (r(4, 8), 1), {})
SORT = ("torch.sort", torch.sort, (r(4, 8), 1), {})
ARGMAX = ("torch.argmax", torch.argmax, (r(4, 8), 1), {})
MM = ("aten.mm.default", torch.ops.aten.mm.default, (r(4, 8), r(8, 6)), {})
VIEW = ("torch.Tensor.view", torch.Tensor.view, (r(4, 8), (4, 8)), {})

# An operator, an annotation and an option: correct and wrong ones side by side.
CASES = {
    "bias once": (*LINEAR, "m k+, n k+, n : !k -> m n", (0, 1)),
    "bias on each rank": (*LINEAR, "m k+, n k+, n -> m n", (0, 1)),
    "terms that are not summed": (*LINEAR, "m k, n k, n -> m n", (0, 1)),
    "softmax beside its dimension": (*SOFTMAX, "a b, ? -> a b", (0, 0)),
    "softmax along its dimension": (*SOFTMAX, "a b, ? -> a b", (0, 1)),
    "gradient that is summed": (*MUL, "a b, b -> a b", (0, 0)),
    "gradient that is not": (*MUL, "a b, b : / -> a b", (0, 0)),
    "offsets of a vocabulary": (*EMBEDDING, "a b, n+ e -> a b e ; start:stop=n", (1, 0)),
    "no offsets of it": (*EMBEDDING, "a b, n+ e -> a b e", (1, 0)),
    "mean as a mean": (*MEAN, "a b+avg, ? -> a", (0, 1)),
    "mean as a sum": (*MEAN, "a b+, ? -> a", (0, 1)),
    "indices that ranks disagree on": (*ARGMAX, "a b, ? -> a", (0, 1)),
    "two results": (*SORT, "a b, ? -> a b, a b", (0, 0)),
    "two results, wrong": (*SORT, "a b, ? -> a b, a b", (0, 1)),
    "an operator of aten": (*MM, "m k, k n -> m n", (0, 1)),
    "statistics by channel": (*NORM, "n c, c, c, c, c -> n c", (0, 1)),
    "statistics by batch": (*NORM, "n c, c, c, c, c -> n c", (0, 0)),
    "ranks that fail": (*VIEW, "a b, ? -> a b", (0, 0)),
}


def facts_of(name, ranks=2):
    operator, function, args, kwargs, annotation, (idx, dim) = CASES[name]
    buffers = frozenset({1, 2}) if operator.endswith("batch_norm") else frozenset()
    call = OperatorCall(function, args, kwargs, name=operator, without_gradient=buffers)
    recipe = Annotation.parse(annotation).recipe(call, Option(idx, dim, ranks))
    written = (1, 2) if buffers else ()
    return Facts(operator, call, recipe, ranks, ("A failure.",), written=written)


def script_text(facts):
    return split_script(facts).text(Path("script.py"))


def exit_code(text, capsys, path="script.py"):
    names = {"__name__": "script", "__file__": str(path)}
    exec(compile(text, "script.py", "exec"), names)
    code = names["main"]()
    return code, capsys.readouterr().out


@pytest.mark.one_in(4)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_script_says_what_the_check_says(name, ranks, capsys):
    facts = facts_of(name, ranks)
    verdict = check_recipe(facts.call, facts.recipe, ranks, seed=SEED)
    code, printed = exit_code(script_text(facts), capsys)
    assert code == verdict.exit_code, printed
    assert "paritas" not in script_text(facts)


def test_a_script_prints_both_losses_and_the_worst_element(capsys):
    code, printed = exit_code(script_text(facts_of("bias on each rank")), capsys)
    assert code == 1
    lines = printed.splitlines()
    assert lines[0].startswith("loss on one device:")
    assert lines[1].startswith("loss on 2 devices:")
    assert any(line.startswith("output[0]: WRONG (") for line in lines)
    assert any(line.startswith("  worst at [") for line in lines)
    assert lines[-1] == "the fault is there"


@pytest.mark.unforked
@pytest.mark.slow
def test_the_script_fails_on_its_own_and_passes_when_the_rule_is_right(tmp_path, capsys):
    outcome = write_script(tmp_path, "00_linear", facts_of("bias on each rank"), recorded=True)
    assert outcome.path == "repro/00_linear.py"
    assert not outcome.note
    assert {path.name for path in (tmp_path / "repro").iterdir()} == {
        "00_linear.py",
        "00_linear.safetensors",
    }
    script = tmp_path / outcome.path
    text = script.read_text()
    assert "    # args[1]: split along dimension 1" in text
    mended = text.replace(
        "    return ranks\n", "    ranks[1][2] = given[2] * 0\n    return ranks\n"
    )
    code, printed = exit_code(mended, capsys, path=script)
    assert code == 0, printed
    assert printed.splitlines()[-1] == "the fault is gone"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_arguments_are_stored_and_come_back(tmp_path, untried, dtype):
    generator = torch.Generator().manual_seed(0)
    args = tuple(torch.randn(9, 8, generator=generator, dtype=dtype) for _ in range(2))
    call = OperatorCall(torch.mul, args, {}, name="torch.mul")
    recipe = Annotation.parse("a b, a b -> a b").recipe(call, Option(0, 0, 2))
    facts = Facts("torch.mul", call, recipe, 2, ("A failure.",))
    outcome = write_script(tmp_path, "00_mul", facts, recorded=True)
    script = tmp_path / outcome.path
    names = {"__name__": "script", "__file__": str(script)}
    exec(compile(script.read_text(), "script.py", "exec"), names)
    given = names["arguments"](None)
    assert all(torch.equal(given[place], value) for place, value in enumerate(args))


def test_a_script_lifts_what_a_check_lifts():
    namespace = {"torch": torch}
    exec(scripts._RUN, namespace)
    assert namespace["lifted"](torch.complex32, True) is torch.complex128
    assert namespace["WIDE"] == WIDE


def test_a_note_says_that_a_script_shows_nothing(tmp_path, monkeypatch):
    said = 0, "the fault is gone\n"
    monkeypatch.setattr("paritas.core.reporting.scripts.run_script", lambda *_: said)
    outcome = write_script(tmp_path, "00_linear", facts_of("bias once"))
    assert outcome.path == "repro/00_linear.py"
    problem = "it exits with 0: the fault is gone"
    assert outcome.note == f"repro/00_linear.py does not reproduce the failure: {problem}"
    assert f"did not show the failure: {problem}" in (tmp_path / outcome.path).read_text()


def test_a_function_made_in_memory_has_no_script():
    with pytest.raises(NoScriptError, match=r"own\.f exists only in memory"):
        function_text("own.f", lambda x: x)


def test_an_importable_function_is_imported_and_the_script_says_so():
    lines, module = function_text(
        "unit.sharding.graphs.small_graphs.value", sys.modules[__name__].ids
    )
    assert module == __name__
    assert lines[0] == f"from {__name__} import ids"


def test_terms_that_a_script_cannot_draw_are_refused():
    call = OperatorCall(torch.relu, (r(4, 8),), name="torch.relu")
    recipe = Recipe(((0, Partial("max")),), (Replicate(),))
    with pytest.raises(NoScriptError, match="terms of a max"):
        script_text(Facts("torch.relu", call, recipe, 2, ("A failure.",)))


def test_terms_of_a_sum_and_lists_of_tensors_are_written_out(capsys):
    call = OperatorCall(torch.relu, (r(4, 8),), name="torch.relu")
    facts = Facts("torch.relu", call, Recipe(((0, Partial()),), (Replicate(),)), 2, ("A failure.",))
    assert exit_code(script_text(facts), capsys)[0] == 1
    call = OperatorCall(torch.cat, ([r(4, 8), r(2, 8)],), {"dim": 0}, name="torch.cat")
    for dim, code in ((1, 0), (0, 1)):
        facts = Facts("torch.cat", call, Recipe(((0, Shard(dim)),), (Shard(dim),)), 2, ("A",))
        assert exit_code(script_text(facts), capsys)[0] == code


def test_plain_values_are_written_as_python_reads_them():
    plain = (None, True, 2, -0.5, "x", (1,), [2, 3], slice(None, 4, 2), {"a": (1, 2)})
    for value in plain:
        assert eval(literal(value)) == value
    assert literal(float("-inf")) == 'float("-inf")'
    assert literal(torch.float32) == "torch.float32"
    assert literal(torch.device("cpu")) == "torch.device('cpu')"
    with pytest.raises(NoScriptError, match="type object"):
        literal(object())


def test_a_heading_cannot_end_the_docstring(capsys):
    facts = facts_of("bias once")
    told = ('"""', 'raise SystemExit(7)  # """', "\\")
    hostile = Facts(facts.operator, facts.call, facts.recipe, 2, told)
    assert exit_code(script_text(hostile), capsys)[0] == 0


def test_a_files_name_is_plain_whatever_the_operator_is_called():
    assert stem_of(3, "torch.nn.functional.linear") == "03_linear"
    assert stem_of(12, "aten.mm.default") == "12_mm"
    assert stem_of(0, "../../etc/passwd") == "00__etc_passwd"
