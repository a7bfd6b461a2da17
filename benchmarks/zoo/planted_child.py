"""Faults planted in one model: strength measured by hand, then the verdict; one JSON row each.

Two routes. "compiler" uses a compiler with one mistake (`faulty_compiler`) and `paritas.verify` on
what `torch.compile` returns. "graph" plants the faults of `paritas.power`, and those of the
compiler pass, in the traced model, and judges them as `paritas.power` does. The strength is
measured here, without the judge: the error of the faulty program to the model in float64, for the
output, gradient or buffer where it is largest, over two yardsticks. One is eager's own error, the
other the noise: the largest error of eager and of other right ways to compute the same (`ways.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import time
import traceback
from pathlib import Path

import torch
from benchmarks.zoo import truth, ways
from benchmarks.zoo.child import build
from torch import Tensor, fx

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_ALARMS = {"different", "degraded"}
# The size of a fault that has one, before it is given a strength: well above rounding.
_FIRST_SIZE = {"bfloat16": 0.1, "float16": 0.02, "float32": 1e-3}
# Attempts per fault that is wanted: many change nothing on these inputs.
_ATTEMPTS = 4
# Faults above this strength are not judged a second time, without the lifted run.
_GROSS = 1e4


def band(ratio):
    """Strong, moderate, or too weak to count."""
    return "strong" if ratio > truth.FAULT else "moderate" if ratio > truth.NO_FAULT else "weak"


def strength(found, exact, yardsticks):
    """By each yardstick, the worst error in units of it; the band, and the item."""
    row = {}
    for prefix, own in yardsticks.items():
        worst, where = 0.0, ""
        for name, true in exact.items():
            if not true.numel():
                continue
            if name not in found or name not in own:
                worst, where = math.inf, name
                break
            ratio = truth.relative_error(found[name], true) / own[name]
            if ratio > worst:
                worst, where = ratio, name
        row |= {f"{prefix}ratio": worst, f"{prefix}item": where, f"{prefix}band": band(worst)}
    return row


def yardsticks(exact, eager, least, observe):
    """Item -> eager's own relative error, and the noise; `observe(way)` computes in that way."""
    own = {
        name: max(truth.relative_error(eager[name], true), least)
        for name, true in exact.items()
        if name in eager
    }
    noise, failed = ways.noise(observe, exact, eager, least)
    return {"": own, "noise_": noise}, failed


def emit(row):
    """Write one row; `job["out"]` names the file."""
    row = dict(row)
    with Path(row.pop("out")).open("a") as out:
        out.write(json.dumps(row, default=str) + "\n")


def findings(verdict):
    return [
        {"path": one.path, "status": str(one.status), "reason": one.reason[:160]}
        for one in verdict.findings
        if str(one.status) not in {"identical", "equivalent"}
    ][:3]


# --- A compiler with one mistake ------------------------------------------------------------------


class Subject:
    """The model, its inputs, and what is true about them."""

    def __init__(self, model, args, kwargs, *, gradients=True):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.gradients = gradients
        with truth.grouped_products():
            self.exact = self._observe(copy.deepcopy(model).to(torch.float64), torch.float64)
        self.eager = self._observe(copy.deepcopy(model))
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        least = max(torch.finfo(one).eps for one in (*dtypes, torch.float32))
        self.yardsticks, self.failed = yardsticks(self.exact, self.eager, least, self._observe_way)

    def _observe_way(self, way):
        with ways.WAYS[way]():
            return self._observe(copy.deepcopy(self.model))

    def _observe(self, model, dtype=None, run=None):
        before = {name: value.clone() for name, value in model.named_buffers()}
        args, kwargs = truth.move(self.args, dtype), truth.move(self.kwargs, dtype)
        try:
            found = truth.observe(
                model if run is None else run, model, args, kwargs, self.gradients
            )
            found |= {
                f"buffer {name}": value.detach().double().clone()
                for name, value in model.named_buffers()
                if value.is_floating_point() and not torch.equal(value, before[name])
            }
        finally:
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, value in model.named_buffers():
                    value.copy_(before[name])
        return found

    def strength(self, run):
        """Of what `run` computes."""
        return strength(self._observe(self.model, run=run), self.exact, self.yardsticks)


def draw_sites(sites, seed):
    """Sites in random order, one of each kind in turn; every fourth is planted everywhere."""
    draw = random.Random(seed)
    groups = {}
    for site in sites:
        groups.setdefault(site.kind, []).append(site)
    names = sorted(groups)
    draw.shuffle(names)
    while names:
        for name in list(names):
            group = groups[name]
            site = group.pop(draw.randrange(len(group)))
            if draw.random() < 0.25:
                site = dataclasses.replace(site, ordinal=None)
            yield site
            if not group:
                names.remove(name)


def plant_sites(job, row, sites, measure, ask, deadline):
    """Plant faults of the compiler pass.

    `measure` gives the strength of a site, `ask` the verdict.
    """
    from benchmarks.zoo.mistakes import NATIVE_ONLY, SIZED

    seed = f"{job['seed']} {job['target']}"
    strengths = random.Random(seed)
    counted = 0
    sites = [site for site in sites if site.kind in (job["kinds"] or [site.kind])]
    for number, drawn in enumerate(draw_sites(sites, seed)):
        site = dataclasses.replace(drawn, size=_FIRST_SIZE[job["dtype"]])
        if counted == job["faults"] or number == _ATTEMPTS * job["faults"]:
            break
        if time.process_time() > deadline:
            return "out of time"
        mine = {**row, "number": number, "native_only": site.kind in NATIVE_ONLY}
        try:
            found = measure(site)
            if site.kind in SIZED and truth.NO_FAULT < found["ratio"] < math.inf:
                # Its effect is proportional to its size: give it a strength near the bars.
                wanted = truth.NO_FAULT * (job["most"] / truth.NO_FAULT) ** strengths.random()
                site = dataclasses.replace(site, size=site.size * wanted / found["ratio"])
                found = measure(site)
            mine |= found
            if mine["band"] != "weak":
                counted += 1
                mine |= ask(site, found["ratio"])
        except Exception as error:  # noqa: BLE001 - such a fault needs no verifier
            mine |= {"band": "raises", "reason": f"{type(error).__name__}: {error!s:.200}"}
        emit(mine | dataclasses.asdict(site))
    return "done"


def plant_by_compiler(job, row, model, args, kwargs, deadline):
    """Faults of a compiler behind `torch.compile`, judged by `verify`."""
    from benchmarks.zoo.faulty_compiler import FaultyCompiler

    import paritas

    torch._dynamo.config.allow_rnn = True  # noqa: SLF001, TID251  (as users set it)
    subject = Subject(model, args, kwargs)
    compiler = FaultyCompiler()
    compiled = torch.compile(model, backend=compiler.backend(job["compiler"]))
    # Gradients that the program does not compute by itself cost as much again.
    config = paritas.VerifyConfig(
        raise_on_mismatch=False, verify_input_gradients=False, verify_double_backward=False
    )

    def measure(site):
        compiler.active = site
        try:
            return subject.strength(compiled)
        finally:
            compiler.active = None

    def ask(site, _=None):
        compiler.active = site
        began = time.process_time()
        try:
            verdict = paritas.verify(paritas.Inputs(args, kwargs), model, compiled, config)
        finally:
            compiler.active = None
        spent = time.process_time() - began
        return {"status": str(verdict.status), "cpu": spent, "findings": findings(verdict)}

    honest = {"kind": "honest", **measure(None), "failed ways": subject.failed}
    sites = compiler.sites()
    emit({**row, **honest, **ask(None), "sites": len(sites)})
    return plant_sites(job, row, sites, measure, ask, deadline)


# --- The faults of paritas.power ------------------------------------------------------------------


class _InFloat64(fx.Interpreter):
    """A traced graph in float64, by rewriting the dtypes it states."""

    def run_node(self, n):
        value = super().run_node(n)
        is_given = n.op in {"placeholder", "get_attr"}
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_given and floats else value

    def call_function(self, target, args, kwargs):
        def widen(value):
            return torch.float64 if value in _NARROW else value

        args = [widen(value) if isinstance(value, torch.dtype) else value for value in args]
        kwargs = {
            name: widen(value) if isinstance(value, torch.dtype) else value
            for name, value in kwargs.items()
        }
        if str(target) in {"aten._softmax.default", "aten._log_softmax.default"}:
            args[2] = False  # half_to_float
        if str(target) == "aten._grouped_mm.default":
            return truth.grouped_product(*args)
        return super().call_function(target, tuple(args), kwargs)


_NARROW = {torch.float32, torch.bfloat16, torch.float16}


class TracedSubject:
    """The model as one traced graph, forward and backward, with its noise."""

    def __init__(self, model, args, kwargs, seed):
        import paritas
        from paritas.mutants.planting import program_noise
        from paritas.mutants.power import _call_positionally
        from paritas.mutants.programs import trace_program

        torch.manual_seed(seed)
        call = _call_positionally(model, paritas.Inputs(args, kwargs))
        self.program = trace_program(call, [*args, *kwargs.values()], gradients=True, seed=0)
        torch.set_default_dtype(torch.float64)
        try:
            self.exact = self._observe(_InFloat64(self.program.module).run)
        finally:
            torch.set_default_dtype(torch.float32)
        self.eager = self._observe(self.program.module)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        least = max(torch.finfo(one).eps for one in (*dtypes, torch.float32))
        self.yardsticks, self.failed = yardsticks(
            self.exact,
            self.eager,
            least,
            lambda way: self._observe(ways.under(way, self.program.module)),
        )
        self.noise = program_noise(self.program)

    def _observe(self, run):
        values = run(*self.program.fresh_inputs())
        return {
            item.text: value.detach().double()
            for item, value in zip(self.program.results, values, strict=True)
            if value.is_floating_point()
        }

    def strength(self, mutant):
        """Of a mutant."""
        return strength(self._observe(mutant), self.exact, self.yardsticks)

    def ask(self, mutant, ratio):
        """The verdict of power, and what the native run alone would say."""
        from paritas.mutants.planting import judge_mutant

        began = time.process_time()
        verdict = judge_mutant(mutant, self.noise)
        found = {"status": str(verdict.status), "findings": findings(verdict)}
        if ratio < _GROSS:
            native = judge_mutant(mutant, self.noise, lift=False)
            found |= {"native": str(native.status), "native_findings": findings(native)}
        return {**found, "cpu": time.process_time() - began}


def plant_in_graph(job, row, model, args, kwargs, deadline):
    """Faults of `paritas.power` and of the compiler pass in a traced graph, judged as power does.

    There is nothing to compile, so that a fault costs a few runs of the model.
    """
    from benchmarks.zoo.faulty_compiler import FaultyProgram, Graph

    from paritas.mutants.rewrites import rewritable, rewrite_call
    from paritas.mutants.sites import turns

    subject = TracedSubject(model, args, kwargs, job["seed"])
    program = subject.program
    for name in turns(rewritable(program), str, job["seed"])[:2]:
        words, mutant = rewrite_call(program, name)
        honest = {"kind": "honest", **subject.strength(mutant), "failed ways": subject.failed}
        honest |= subject.ask(mutant, honest["ratio"])
        emit({**row, **honest, "variant": words, "operator": name})
    if plant_mutants(job, row, subject, deadline) == "out of time":
        return "out of time"
    graph = Graph(program.module, backward=program.backward)
    return plant_sites(
        job,
        {**row, "source": "pass"},
        list(graph.sites),
        lambda site: subject.strength(FaultyProgram(graph, site)),
        lambda site, ratio: subject.ask(FaultyProgram(graph, site), ratio),
        deadline,
    )


def plant_mutants(job, row, subject, deadline):
    """Plant the faults of `paritas.power`."""
    from paritas.mutants.planting import plant, sites
    from paritas.mutants.sites import turns

    program, counted = subject.program, 0
    order = turns(sites(program), lambda site: site.mutation, _seed(job))
    for number, site in enumerate(order[: _ATTEMPTS * job["mutants"]]):
        if counted == job["mutants"]:
            break
        if time.process_time() > deadline:
            return "out of time"
        mutant = plant(program, site)
        if mutant is None:
            continue
        mine = {
            **row, "source": "power", "kind": site.mutation, "variant": site.detail,
            "operator": site.node, "backward": site.node in program.backward, "number": number,
            "native_only": site.mutation == "internal_downcast",
        }  # fmt: skip
        try:
            mine |= subject.strength(mutant)
            if mine["band"] != "weak":
                counted += 1
                mine |= subject.ask(mutant, mine["ratio"])
        except Exception as error:  # noqa: BLE001
            mine |= {"band": "raises", "reason": f"{type(error).__name__}: {error!s:.200}"}
        emit(mine)
    return "done"


def _seed(job):
    return random.Random(f"{job['seed']} {job['target']}").randrange(1 << 30)


# --- One job --------------------------------------------------------------------------------------

MOST_PARAMETERS = 12_000_000


def run_all(job):
    """Emit the rows of one job; the last says how it ended."""
    torch.set_num_threads(1)
    try:
        emit(run(job))
    except Exception:  # noqa: BLE001 - a crash is a row
        emit({**job, "stage": "crashed", "reason": traceback.format_exc()[-1500:]})


def run(job):
    """Emit the rows of one job and return the last."""
    import paritas

    row = dict(job)
    began = time.process_time()
    try:
        model, args, kwargs = build(job["target"], train=job["train"], seed=job["seed"])
    except paritas.UsageError as error:
        return {**row, "stage": "not built", "reason": str(error)[:300]}
    many = sum(one.numel() for one in model.parameters())
    modules = len(list(model.modules()))
    if many > MOST_PARAMETERS or modules > job["modules"]:
        return {**row, "stage": "too large", "reason": f"{many} parameters, {modules} modules"}
    dtype = _DTYPES[job["dtype"]]
    model = model.train(job["train"]).to(dtype=dtype)
    args, kwargs = truth.move(args, dtype), truth.move(kwargs, dtype)
    by = plant_by_compiler if job["route"] == "compiler" else plant_in_graph
    ended = by(job, row, model, args, kwargs, began + job["seconds"])
    return {**row, "stage": ended, "parameters": many, "cpu": time.process_time() - began}
