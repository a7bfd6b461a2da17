"""Proofs of the library's rules, and of rules changed at random; processor time on one thread.

Each option of each sample of the library is decided, and each certificate is checked again by the
independent checker. Then rules are changed at random: what is proved must pass the numerical check,
and what that check finds wrong must be refuted, on shapes of at most 8 elements per dimension. With
BENCH_WHOLE=1 there are 10,000 of them. Last, all claims of DTensor about the operators of
docs/dtensor_rules.md. Each of the three parts leaves its own file; names of parts as arguments run
only these: `python benchmarks/bench_prove.py changed`.
"""

from __future__ import annotations

import collections
import itertools
import os
import statistics
import sys
import time
import warnings

from benchmarks.lab.figures import Figure, Report, Table, write

from paritas.sharding.operators.library import known
from paritas.sharding.operators.recipe_checks import check_recipe
from paritas.sharding.proofs.checker import Checker
from paritas.sharding.proofs.dtensor import prove_dtensor
from paritas.sharding.proofs.prove import Prover
from quality.dtensor_table import examples
from quality.partition_mutants import mutants
from quality.test_partition_library import RIGHT, calls_of

WHOLE = bool(os.environ.get("BENCH_WHOLE"))
MUTANTS = 10_000 if WHOLE else 500
MOST_ELEMENTS = 8


def library():
    """Every option of every sample."""
    counts, spent, undecided = collections.Counter(), [], []
    for name in known():
        for call, annotation in calls_of(name):
            options = annotation.options(call)
            began = time.process_time()
            prover = Prover(call, annotation)
            for option in options:
                proof = prover.decide(option)
                counts[proof.status] += 1
                counts["contradicted"] += "the numerical check says" in proof.reason
                if proof.certificate is None:
                    undecided.append([name, proof.rule, proof.split_by, proof.reason])
                else:
                    Checker(proof.certificate).check()
            spent += [(time.process_time() - began) / max(1, len(options))] * len(options)
    total = counts["proved"] + counts["refuted"] + counts["not decided"]
    decided = 100 * (counts["proved"] + counts["refuted"]) / total
    figures = [
        Figure("options of the library decided", decided, "%", 85.0, "higher"),
        Figure("options of the library", total, ""),
        Figure("proved, but numerically wrong", counts["contradicted"], "", 0.0),
        Figure("one option, median", statistics.median(spent), "s", 0.2),
        Figure("one option, most", max(spent), "s", 5.0),
    ]
    columns = ["operator", "rule", "split by", "what the theory does not have"]
    return figures, [Table("Not decided", columns, undecided)]


def changed_rules():
    """Rules changed at random, against the numerical check."""
    counts, spent = collections.Counter(), []
    for rule in itertools.islice(mutants(known(), calls_of, seed=11), MUTANTS):
        began = time.process_time()
        prover = Prover(rule.call, rule.annotation, check=False)
        proof = prover.prove(rule.recipe)
        spent.append(time.process_time() - began)
        right = check_recipe(rule.call, rule.recipe, 2).status in RIGHT
        counts["right" if right else "wrong"] += 1
        if proof.status == "proved":
            counts["proved right" if right else "proved wrong"] += 1
        elif not right:
            example = prover.refute(rule.recipe)
            spent[-1] = time.process_time() - began
            counts["refuted"] += example is not None
            sizes = [] if example is None else [n for s in example.shapes.values() for n in s]
            counts["small"] += example is not None and max(sizes) <= MOST_ELEMENTS
    small = 100 * counts["small"] / counts["wrong"]
    decided = 100 * counts["proved right"] / counts["right"]
    return [
        Figure("changed rules", counts["right"] + counts["wrong"], ""),
        Figure("changed rules that are wrong", counts["wrong"], ""),
        Figure("wrong rules that are proved", counts["proved wrong"], "", 0.0),
        Figure("wrong rules refuted", 100 * counts["refuted"] / counts["wrong"], "%"),
        Figure("wrong rules refuted on 8 elements at most", small, "%", 90.0, "higher"),
        Figure("changed rules that are still right, proved", decided, "%"),
        Figure("one changed rule, median", statistics.median(spent), "s", 0.2),
        Figure("one changed rule, most", max(spent), "s", 5.0),
    ], []


def dtensor():
    """All claims about the operators of the page."""
    counts, rows = collections.Counter(), []
    for example in examples():
        own = collections.Counter()
        for proof in prove_dtensor(example.op, example.args, example.kwargs, within=example.within):
            own[proof.status] += 1
            if proof.certificate is not None:
                Checker(proof.certificate).check()
        rows.append([example.name, own["proved"], own["refuted"], own["not decided"]])
        counts += own
    figures = [
        Figure(f"claims of DTensor, {status}", counts[status], "")
        for status in ("proved", "refuted", "not decided")
    ]
    return figures, [Table("DTensor", ["operator", "proved", "refuted", "not decided"], rows)]


PARTS = {"library": library, "changed": changed_rules, "dtensor": dtensor}


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.argv[1:] or PARTS:
            figures, tables = PARTS[name]()
            write(Report(f"prove_{name}", figures, tables, what=__doc__))
