"""Turns failures into programs that can be shrunk: models, guarded graphs, verdicts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError
from paritas.core.execution.compilation import Candidate
from paritas.core.execution.observation import RunConditions
from paritas.core.execution.running import running_subject
from paritas.core.execution.saved_state import Copier, RandomState
from paritas.core.execution.subjects import input_sets, inspect_subject
from paritas.core.judging.failures import FailedGraph, FailedPair, FailedSplit, recall_failed
from paritas.core.register import find_entry
from paritas.core.reporting.scripts import NoScriptError, find_name, literal
from paritas.core.results.progress import shows_progress
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.dynamo import (
    backends_of,
    dynamic_of,
    find_backend,
    is_registered,
    leaving_no_entries,
    original_of,
    room_for_entries,
)
from paritas.core.torch_private.graphs import copy_graph, placeholders
from paritas.shrinking.programs import (
    FailingProgram,
    fresh_copy,
    signature_of,
)
from paritas.shrinking.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.fx import GraphModule, Node

    from paritas.core.results.findings import Diagnosis, Verdict
    from paritas.core.shrinking import ShrinkReport
    from paritas.core.torch_private.dynamo import Backend


# --- The graphs that a compiler receives, with their real inputs ----------------------------------


def capture_programs(
    model: Callable[..., Any], inputs: Any, candidate: Candidate | None = None
) -> list[FailingProgram]:
    """The graphs that `torch.compile` makes of a model, in the order of their first calls.

    Only the first set of inputs is used. The candidate's `dynamic` decides which sizes are
    symbolic.
    """
    first_inputs = input_sets(inputs)[0]
    capture = ProgramCapture()
    dynamic = candidate.dynamic if candidate is not None else None
    compiled = torch.compile(model, backend=capture, dynamic=dynamic)
    side = inspect_subject(compiled, "candidate", "model")
    rng = RandomState.now()
    try:
        conditions = RunConditions(gradients=False, seed=0)
        # Dynamo runs what it has compiled too often without a backend.
        room = room_for_entries()
        with leaving_no_entries(), room, running_subject(side, rng, conditions) as call:
            run_outcome = call(first_inputs)
    finally:
        rng.restore()
    if run_outcome.error is not None and not capture.programs:
        raise run_outcome.error
    return capture.programs


class ProgramCapture:
    """A backend that runs each graph in eager mode, and keeps it with its first inputs."""

    def __init__(self) -> None:
        self.programs: list[FailingProgram] = []

    def __call__(self, graph: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Keep a graph when it is first called."""
        del example_inputs
        kept = False

        def run(*args: Any) -> Any:
            nonlocal kept
            if not kept:
                kept = True
                self.programs.append(program_of(graph, args))
            return graph.forward(*args)

        return run


def program_of(graph: GraphModule, args: tuple[Any, ...] | list[Any]) -> FailingProgram:
    """A graph and its inputs as a separate program."""
    copier = Copier()
    inputs = [copier.copy_tree(_as_plain_tensor(value)) for value in args]
    module = copy.deepcopy(graph)
    dynamic = {
        node.name: dims
        for node in module.graph.find_nodes(op="placeholder")
        if (dims := _symbolic_dims(node)) is not None
    }
    _settle_scalars(module, inputs)
    inputs += _lift_constants(module)
    module.recompile()
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return FailingProgram(module, tuple(inputs), dynamic, gradients)


def _as_plain_tensor(value: Any) -> Any:
    """Parameters as tensors: the class does not affect the computation."""
    if isinstance(value, torch.nn.Parameter):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _symbolic_dims(node: Node) -> tuple[int, ...] | None:
    """The symbolic dimensions of a placeholder; () for a symbol itself."""
    example = node.meta.get("example_value")
    if isinstance(example, torch.SymInt):
        return ()
    if not isinstance(example, torch.Tensor):
        return None
    dims = tuple(i for i, size in enumerate(example.shape) if isinstance(size, torch.SymInt))
    return dims or None


def _settle_scalars(module: GraphModule, inputs: list[Any]) -> None:
    """Write 0-d tensors that are only read as numbers (momentum, eps) into the calls."""
    for node, value in zip(placeholders(module), list(inputs), strict=True):
        users = list(node.users)
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        if not is_number or not users:
            continue
        if all(user.op == "call_method" and user.target == "item" for user in users):
            for user in users:
                _replace_by(user, value.item())
    for position in reversed(range(len(inputs))):
        node = placeholders(module)[position]
        if not node.users:
            module.graph.erase_node(node)
            del inputs[position]


def _replace_by(node: Node, number: float) -> None:
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda n: number if n is node else n)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda n: number if n is node else n)
    node.graph.erase_node(node)


def _lift_constants(module: GraphModule) -> list[Any]:
    """Make the tensors of a graph into inputs; returns their values."""
    values = []
    for node in list(module.graph.find_nodes(op="get_attr")):
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            continue
        last = placeholders(module)
        with module.graph.inserting_after(last[-1]) if last else module.graph.inserting_before():
            lifted = module.graph.placeholder(node.name)
        node.replace_all_uses_with(lifted)
        module.graph.erase_node(node)
        values.append(fresh_copy(value))
    return values


# --- Models, guarded graphs, verdicts -------------------------------------------------------------

_MAIN = "__main__"


@shows_progress
def shrink_verdict(
    verdict: Verdict,
    *,
    seconds: float = 120.0,
    outdir: str | Path | None = None,
    setup: tuple[str, ...] = (),
    on_progress: Callable[[str], None] | None = None,
) -> ShrinkReport:
    """Shrink the failure behind a verdict of `verify`, a guard or a partition.

    Raises:
        UsageError: nothing failed, the programs are not available, or no graph fails on its own.
    """
    limit = TimeLimit(seconds)
    if verdict.passed or not verdict.enabled:
        raise UsageError(
            f"nothing failed (the verdict is {verdict.status}), so there is nothing to shrink"
        )
    failed = recall_failed(verdict)
    if not failed:
        raise UsageError(_why_unknown(verdict))
    splits = [failed_check for failed_check in failed if isinstance(failed_check, FailedSplit)]
    if splits:
        split_options = {"seconds": seconds, "setup": setup, "on_progress": on_progress}
        report: ShrinkReport = find_entry("shrink splits")(splits, outdir, **split_options)
        return report
    pairs = [failed_check for failed_check in failed if not isinstance(failed_check, FailedSplit)]
    programs, candidate = programs_of(pairs[0], setup)
    for other in pairs[1:]:
        more, other_candidate = programs_of(other, setup)
        # An oracle uses one compiler.
        programs += more if other_candidate == candidate else []
    # A verdict on a graph below autograd describes the failure differently.
    known_signature = signature_of(verdict) if isinstance(pairs[0], FailedPair) else None
    return shrink(
        programs,
        candidate,
        signature=None if known_signature is None else known_signature[0],
        places=_places_of(verdict),
        limit=limit,
        outdir=outdir,
        on_progress=on_progress,
    ).report


def _places_of(verdict: Verdict) -> dict[str, Diagnosis | None]:
    """The nodes and the source lines where the failures start, with what kind of wrong it is."""
    return {
        name: finding.diagnosis
        for finding in reversed(verdict.failures)  # the first finding about a place counts
        if (origin := finding.origin) is not None
        for name in (origin.name, origin.source, *origin.nodes)
        if name
    }


def _why_unknown(verdict: Verdict) -> str:
    if not any(failure.status.is_wrong for failure in verdict.failures):
        return (
            f"nothing is certainly wrong (the verdict is {verdict.status}), so there is nothing to "
            "shrink"
        )
    return (
        "the programs behind this verdict are not available: it was read from a file, merged, or "
        "comes from another process; shrink the verdict that verify(), guard().verdict() or "
        "check_partition() returned, or use the command paritas shrink"
    )


def programs_of(
    failed: FailedPair | FailedGraph, setup: tuple[str, ...] = ()
) -> tuple[list[FailingProgram], Candidate]:
    """The programs of a failure, and how they are compiled."""
    if isinstance(failed, FailedGraph):
        return _programs_of_graph(failed, setup)
    backends = backends_of(failed.candidate)
    if not backends:
        raise UsageError(
            f"the candidate {failed.candidate!r:.80} was not made by torch.compile, so there is no "
            "graph to shrink; if you use your own compiler, pass it to torch.compile as a backend"
        )
    backend = find_backend(backends[0])
    candidate = candidate_of(backend, setup=setup, dynamic=dynamic_of(failed.candidate))
    first_inputs = failed.inputs[0]
    return capture_programs(original_of(failed.candidate), first_inputs, candidate), candidate


def _programs_of_graph(
    failed: FailedGraph, setup: tuple[str, ...] = ()
) -> tuple[list[FailingProgram], Candidate]:
    """A guarded forward or backward graph on the arguments of the failed call."""
    candidate = candidate_of(failed.made_by.backend, failed.made_by.given, setup=setup)
    module = copy_graph(failed.module)
    for node in placeholders(module):
        # Below autograd, the traced value with the symbolic sizes has another name.
        if "example_value" not in node.meta and "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]
    program = program_of(module, list(failed.inputs))
    return [program], candidate


def candidate_of(
    backend: Backend,
    given_settings: Mapping[str, Any] | None = None,
    *,
    setup: tuple[str, ...] = (),
    dynamic: bool | None = None,
) -> Candidate:
    """How a script can use a backend by name.

    Args:
        given_settings: mode and options of `torch.compile`, in addition to those of the backend.
        setup: statements that come first in a script.
    """
    if backend.is_inductor:
        options = backend.inductor_options(dict(given_settings or {}))
        _check_options(options)
        return Candidate("inductor", options=options, dynamic=dynamic, setup=setup)
    all_settings = {**backend.settings, **(given_settings or {})}
    options, mode = all_settings.get("options") or {}, all_settings.get("mode")
    function = backend.function
    home = str(getattr(function, "__module__", ""))
    _check_options(options)
    if is_registered(backend.name, function):
        is_preloaded = home.partition(".")[0] in {"torch", "functorch", _MAIN, ""}
        first = () if is_preloaded else (f"import {home}",)
        statements = tuple(dict.fromkeys((*setup, *first)))
        return Candidate(backend.name, mode, options, dynamic, statements)
    named = find_name(function)
    if named is None:
        raise UsageError(
            f"the backend {backend.name!r} cannot be imported by name (module {home!r}), so a "
            "script cannot call it; define it as a function at the top level of a module"
        )
    return Candidate(":".join(named), mode, options, dynamic, setup)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse an option that no script could pass, before the search."""
    for name, value in options.items():
        try:
            literal(value)
        except NoScriptError:
            raise UsageError(
                f"the compiler option {name!r} is {value!r:.160}, which a script can neither write "
                "as code nor import by name; define it at the top level of a module"
            ) from None
