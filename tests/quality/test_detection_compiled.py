"""Compiled programs of benchmarks/detection: what is drawn, what a faulty pass does, what counts.

Nothing here calls the C++ compiler; whole runs do, by `python -m benchmarks.detection.compiled`.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

# The laboratory is no part of the package: it is found from the root of the repository.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.detection.benign_compiled import PLAIN, VARIANTS, compiled_variant
from benchmarks.detection.cases import Unit
from benchmarks.detection.compiled_measuring import (
    GUARD,
    GUARDED,
    MOST_CALLS_LOCATED,
    PLANTED,
    compiled_units,
    drawn_variants,
)
from benchmarks.detection.compiled_summing import compiled_report
from benchmarks.detection.families import FAMILIES
from benchmarks.detection.journal import gone_through
from benchmarks.detection.lowered_faults import FaultyPass, lowered_program
from benchmarks.detection.measuring import BENIGN, MUTANT, Entry, Outcome
from benchmarks.detection.programs import DTYPES, make_program
from benchmarks.detection.rules import OURS, OURS_NATIVE

from paritas.core.torch_private.graphs import copy_graph
from paritas.mutants.planting import judge_mutant, plant, program_noise, sites
from paritas.mutants.programs import FaultyCall

UNIT = Unit("softmax", 1, "float32", "cpu", 2, 0, 8)


@pytest.fixture(scope="module")
def lowered():
    return lowered_program(make_program("softmax", 1, "float32"))


def faulty(lowered, mutation):
    """A fault in the program as Inductor is given it: by itself, and as a pass plants it."""
    site = next(site for site in sites(lowered) if site.mutation == mutation)
    mutant = plant(lowered, site)
    call = next(node.target for node in mutant.graph.nodes if node.name == site.node)
    passed = copy_graph(lowered.module)
    FaultyPass(site.node, call)(passed.graph)
    passed.graph.lint()
    passed.recompile()
    return mutant, passed


@pytest.mark.parametrize("mutation", ["scaled_by_percent", "zero_row", "mul_to_add"])
def test_a_pass_plants_the_very_fault_as_plain_operators(lowered, mutation):
    mutant, passed = faulty(lowered, mutation)
    called = [n.target for n in passed.graph.nodes if n.op == "call_function"]
    assert not any(isinstance(target, FaultyCall) for target in called)
    wrong, right = mutant(*lowered.fresh_inputs()), lowered.module(*lowered.fresh_inputs())
    found = passed(*lowered.fresh_inputs())
    assert all(map(torch.equal, found, wrong))
    assert not all(map(torch.equal, found, right))


def test_a_pass_leaves_a_graph_without_its_node_alone(lowered):
    passed = copy_graph(lowered.module)
    FaultyPass("nowhere", torch.sin)(passed.graph)
    assert str(passed.graph) == str(lowered.module.graph)


def test_a_compiled_program_is_judged_like_any_candidate():
    program = make_program("softmax", 1, "float32")
    candidate = compiled_variant(program.module, "aot_eager_decomp_partition")
    assert judge_mutant(candidate, program_noise(program)).passed


def test_every_family_dtype_and_half_is_among_the_compiled():
    units = compiled_units()
    assert {unit.name for unit in units if unit.is_family} == set(FAMILIES)
    assert {(unit.dtype, unit.half) for unit in units} == {
        (dtype, half) for dtype in DTYPES for half in ("tuning", "held out")
    }
    assert len(set(units)) == len(units)
    assert any(unit.is_family for unit in units[:10]), "a short run sees operators alone"


def test_the_plain_compiler_is_always_among_the_variants():
    assert drawn_variants(UNIT)[0] == PLAIN
    assert set(drawn_variants(UNIT)) <= set(VARIANTS)
    assert len(set(drawn_variants(UNIT))) == UNIT.benign


# --- what is counted ------------------------------------------------------------------------------


def outcome(kind, change, **more):
    return Outcome(unit=UNIT, kind=kind, change=change, node="exp", **more)


def figures(*outcomes):
    report = compiled_report(outcomes, MOST_CALLS_LOCATED)
    return {figure.name: figure for figure in report.figures}, report


def test_a_variant_with_equal_bits_is_no_test_of_a_rule():
    silent = {OURS: False, OURS_NATIVE: False}
    same = outcome(BENIGN, PLAIN, alarms=silent)
    other = outcome(BENIGN, PLAIN, alarms={**silent, OURS: True}, bits=True)
    found, _ = figures(same, same, other)
    assert found["float32: false alarms on compiled programs"].value == 100
    assert found["float32: false alarms on compiled programs"].met is False


def test_nothing_measured_meets_no_bar():
    found, _ = figures(outcome(BENIGN, PLAIN, alarms={OURS: False}))
    assert math.isnan(found["clear faults caught, compiled"].value)
    assert found["guard: first wrong node, exact"].met is False


def test_a_place_that_the_guard_does_not_name_counts_as_missed():
    named = outcome(PLANTED, "zero_row", band="clear", alarms={GUARD: True}, distance=0)
    near = outcome(PLANTED, "zero_row", band="clear", alarms={GUARD: True}, distance=2)
    whole = outcome(PLANTED, "zero_row", band="clear", alarms={GUARD: True}, how="graph")
    escaped = outcome(PLANTED, "zero_row", band="moderate", alarms={GUARD: False})
    found, report = figures(named, near, whole, escaped)
    assert found["guard: first wrong node, exact"].value == pytest.approx(100 / 3)
    assert found["guard: first wrong node, within two edges"].value == pytest.approx(200 / 3)
    table = next(t for t in report.tables if t.title.startswith("The guard's misses (3"))
    assert [row[-1] for row in table.rows] == ["2 edges off", "elsewhere", "not caught"]


def test_what_does_not_compile_is_told_and_no_case():
    broken = outcome(MUTANT, "aliased_output", band="clear", error="InductorError: KeyError")
    asked = outcome(BENIGN, GUARDED, alarms={GUARD: "unverified: no"})
    found, report = figures(broken, asked)
    assert found["clear faults caught, compiled"].note == "of 0"
    assert found["cases on which ours came to no verdict"].value == 1
    table = next(t for t in report.tables if t.title.startswith("Could not be compiled"))
    assert table.rows[0][-1] == "InductorError: KeyError"


def test_a_run_goes_on_where_another_stopped(tmp_path):
    units = compiled_units()[:4]
    path = tmp_path / "journal.jsonl"

    def some(count):
        return lambda todo: (Entry(unit) for unit in todo[:count])

    assert len(gone_through(units, some(1), path, resume=False)) == 1
    with path.open("ab") as lines:
        lines.write(b'{"unit": cut off\n')
    done = gone_through(units, some(2), path, resume=True)
    assert [entry.unit for entry in done] == units[:3]
    assert len(gone_through(units, some(0), path, resume=False)) == 0
