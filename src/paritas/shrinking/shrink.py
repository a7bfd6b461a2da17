"""From a failing program to the smallest one that fails in the same way, in a given time."""

from __future__ import annotations

import copy
import dataclasses
import operator
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from paritas.checks.locate import REMEDY_SWITCHES
from paritas.errors import UsageError
from paritas.reports.scripts import WrittenScript, write
from paritas.results.findings import Diagnosis
from paritas.results.progress import Progress
from paritas.results.report import Result
from paritas.results.wording import counted
from paritas.shrinking.nodes import reduce_nodes, wrong_part
from paritas.shrinking.programs import (
    EXCEPTION,
    OUTPUT,
    Candidate,
    FailingProgram,
    FailureSignature,
    Oracle,
    OutOfTimeError,
    reference_runs,
)
from paritas.shrinking.scripts import program_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.shrinking.programs import Answer


# --- Graphs inside a graph, written out in its place ----------------------------------------------

# Calls that only run the graph they are given, whatever else they ask of autograd.
_RUN = ("tag_activation_checkpoint", "wrap", "invoke_subgraph")


def inline_bodies(
    oracle: Oracle, program: FailingProgram, wanted: FailureSignature
) -> FailingProgram:
    """The program with the bodies of such calls in their place, if it fails the same way then."""
    if not any(_body_of(program.graph, node) is not None for node in program.graph.graph.nodes):
        return program
    opened = with_bodies_inlined(program)
    return opened if oracle.shows(opened, wanted) else program


def with_bodies_inlined(program: FailingProgram) -> FailingProgram:
    """The same program without such calls."""
    module = copy.deepcopy(program.graph)
    while True:
        found = ((node, _body_of(module, node)) for node in module.graph.nodes)
        call, body = next((pair for pair in found if pair[1] is not None), (None, None))
        if call is None or body is None:
            break
        _inline_body(module, call, body)
    module.graph.lint()
    module.recompile()
    return dataclasses.replace(program, graph=module)


def _body_of(module: GraphModule, node: Node) -> GraphModule | None:
    if node.op != "call_function" or not str(node.target).endswith(_RUN) or not node.args:
        return None
    first = node.args[0]
    if not isinstance(first, Node) or first.op != "get_attr":
        return None
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, GraphModule) else None


def _inline_body(module: GraphModule, call: Node, body: GraphModule) -> None:
    """Put the calls of `body` before `call`, and their results in its place."""
    holder = call.args[0]
    given = [arg for arg in call.args[1:] if not isinstance(arg, str)]
    table = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=False))
    with module.graph.inserting_before(call):
        results = module.graph.graph_copy(body.graph, table)
    values = results if isinstance(results, tuple | list) else (results,)
    for user in list(call.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(values[user.args[1]])  # type: ignore[index]
            module.graph.erase_node(user)
    module.graph.erase_node(call)
    if isinstance(holder, Node) and not holder.users:
        module.graph.erase_node(holder)


# --- Fewer outputs --------------------------------------------------------------------------------


def drop_outputs(
    oracle: Oracle, program: FailingProgram, wanted: FailureSignature
) -> FailingProgram:
    """Keep the first wrong output alone, if the failure is in an output and stays."""
    answer = oracle.ask(program)
    if wanted.role != OUTPUT or answer.verdict is None or _count_outputs(program) <= 1:
        return program
    for finding in answer.verdict.failures:
        found = re.match(r"output\[(\d+)\]", finding.path)
        if found is not None:
            smaller = with_output(program, int(found[1]))
            return smaller if oracle.shows(smaller, wanted) else program
    return program


def with_output(program: FailingProgram, position: int) -> FailingProgram:
    """The program that gives back one of its outputs, without what only the others needed."""
    module = copy.deepcopy(program.graph)
    last = next(iter(module.graph.find_nodes(op="output")))
    last.args = ((last.args[0][position],),)
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op == "placeholder")
    given = program.given
    kept = []
    for node in list(module.graph.find_nodes(op="placeholder")):
        if node.users:
            kept.append(given[node.name])
        else:
            module.graph.erase_node(node)
    module.recompile()
    names = {node.name for node in module.graph.find_nodes(op="placeholder")}
    dynamic = {name: dims for name, dims in program.dynamic.items() if name in names}
    return dataclasses.replace(program, graph=module, inputs=tuple(kept), dynamic=dynamic)


def _count_outputs(program: FailingProgram) -> int:
    last = next(iter(program.graph.graph.find_nodes(op="output")))
    returned = last.args[0]
    return len(returned) if isinstance(returned, tuple | list) else 1


# --- Smaller and rounder inputs: shapes, then values, then dtypes ---------------------------------

# Lengths to try, smallest first: a number or two, one vector of a CPU, a vector and a tail.
_LENGTHS = (2, 8, 16, 24)
# Queries that one length may cost by itself after all were shrunk together.
_PATIENCE = 3


def reduce_shapes(
    oracle: Oracle, program: FailingProgram, wanted: FailureSignature
) -> FailingProgram:
    """Shorter dimensions; those of one length are shrunk together, for the graph may tie them."""
    best = program
    for length in _LENGTHS:
        smaller = _resized(best, {size: length for size in _lengths(best) if size > length})
        if smaller is not None and oracle.shows(smaller, wanted, kind=True):
            best = smaller
            break
    tried = 0
    for size in sorted(_lengths(best), reverse=True):
        for length in _LENGTHS:
            if length >= size or tried >= _PATIENCE:
                break
            smaller = _resized(best, {size: length})
            if smaller is None:
                continue
            tried += 1
            if oracle.shows(smaller, wanted, kind=True):
                best = smaller
                break
    return best


def reduce_values(
    oracle: Oracle, program: FailingProgram, wanted: FailureSignature
) -> FailingProgram:
    """Values that a person can read, or that a line of code makes."""
    for rounder in (_small_numbers, _halves, _draw, _two_digits):
        rounded = _with_values(program, rounder)
        if oracle.shows(rounded, wanted, kind=True):
            return rounded
    return program


def reduce_dtypes(
    oracle: Oracle, program: FailingProgram, wanted: FailureSignature
) -> FailingProgram:
    """float32 throughout, where that shows the same: what everybody can run."""
    floats = {v.dtype for v in program.inputs if _is_float(v)}
    if not floats or floats == {torch.float32}:
        return program

    def widened(value: Tensor, _: int) -> Tensor:
        return value.to(torch.float32) if _is_float(value) else value

    changed = _with_values(program, widened)
    if reference_runs(changed) and oracle.shows(changed, wanted, kind=True):
        return changed
    return program


def _lengths(program: FailingProgram) -> set[int]:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    return {size for tensor in tensors for size in tensor.shape if size > 1}


def _resized(program: FailingProgram, lengths: dict[int, int]) -> FailingProgram | None:
    """The program with every dimension of these lengths cut, if it runs then.

    Where numbers of the graph name the lengths, as in a view, they are cut as well.
    """
    if not lengths:
        return None
    inputs = tuple(_cut_value(value, lengths) for value in program.inputs)
    plain = dataclasses.replace(program, inputs=inputs)
    if reference_runs(plain):
        return plain
    module = copy.deepcopy(program.graph)
    for node in module.graph.nodes:
        if node.op.startswith("call"):
            node.args = _renumbered(node.args, lengths)
            node.kwargs = _renumbered(node.kwargs, lengths)
    module.recompile()
    changed = dataclasses.replace(program, graph=module, inputs=inputs)
    return changed if reference_runs(changed) else None


def _cut_value(value: Any, lengths: dict[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return _renumbered(value, lengths)
    part = value.detach()
    for dim, size in enumerate(value.shape):
        part = part.narrow(dim, 0, lengths.get(size, size))
    dense = part.clone() if value.is_contiguous() else _as_laid_out(part, value)
    return dense.requires_grad_(value.requires_grad)


def _as_laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Dense, with the dimensions in the order of memory that `like` has them in."""
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return part.permute(order).contiguous().permute(back)


def _renumbered(value: Any, lengths: dict[int, int]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return lengths.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_renumbered(item, lengths) for item in value)
    if isinstance(value, dict):
        return {key: _renumbered(item, lengths) for key, item in value.items()}
    return value


def _with_values(
    program: FailingProgram, change: Callable[[Tensor, int], Tensor]
) -> FailingProgram:
    def changed() -> Iterator[Any]:
        for position, value in enumerate(program.inputs):
            if not isinstance(value, torch.Tensor):
                yield value
                continue
            with torch.no_grad():
                new = change(value.detach(), position)
                # The layout is part of the failure.
                kept = torch.empty_like(value, dtype=new.dtype).copy_(new)
            yield kept.requires_grad_(value.requires_grad)

    return dataclasses.replace(program, inputs=tuple(changed()))


def _small_numbers(value: Tensor, position: int) -> Tensor:
    """-3, -2 ... 3 and again from the start; each input begins elsewhere."""
    if not _is_float(value):
        return value
    steps = torch.arange(value.numel(), dtype=torch.float64) + position
    return (steps % 7 - 3).reshape(value.shape).to(value.dtype)


def _halves(value: Tensor, position: int) -> Tensor:
    """The values it had, rounded to halves."""
    del position
    return (value.double() * 2).round().div(2).to(value.dtype) if _is_float(value) else value


def _draw(value: Tensor, position: int) -> Tensor:
    """Normal numbers from a seed, which a line of code draws again."""
    if not _is_float(value) or value.is_complex():
        return value
    source = torch.Generator().manual_seed(position)
    return torch.randn(value.shape, generator=source, dtype=torch.float32).to(value.dtype)


def _two_digits(value: Tensor, position: int) -> Tensor:
    """The values it had, with two decimals."""
    del position
    return value.double().round(decimals=2).to(value.dtype) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# --- Which compiler option makes the failure go away ----------------------------------------------


def decisive_options(oracle: Oracle, program: FailingProgram) -> list[str]:
    """Inductor's options each of which alone makes it pass; other compilers are not asked.

    If it fails with all of them together, none is tried alone.
    """
    if oracle.candidate.backend != "inductor" or oracle.candidate.mode is not None:
        return []
    everything = {key: value for options, _ in REMEDY_SWITCHES for key, value in options.items()}
    if not _passes_with(oracle, program, everything):
        return []
    return [text for options, text in REMEDY_SWITCHES if _passes_with(oracle, program, options)]


def _passes_with(oracle: Oracle, program: FailingProgram, options: dict[str, Any]) -> bool:
    candidate = oracle.candidate
    changed = dataclasses.replace(candidate, options={**candidate.options, **options})
    answer = oracle.ask(program, changed)
    return answer.signature is None and answer.verdict is not None and answer.verdict.passed


# --- Shrinking ------------------------------------------------------------------------------------

SCRIPT = "repro.py"
# Kept back for the run of the script itself.
_SCRIPT_SHARE = 0.25
# But never less: importing torch and compiling take their time on a busy machine.
_SCRIPT_SECONDS = 60.0


class NothingFailsError(UsageError):
    """No graph fails by itself: there is nothing to shrink."""


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """What shrinking came to.

    Attributes:
        script: the script and how its own run ended; None if no program failed.
        program: the smallest program.
        signature: of its failure, the same as that of the program it was made of.
        diagnosis: what kind of wrong it is, where that is known.
        nodes_before: operator calls at the start.
        nodes_after: and at the end.
        queries: programs that were compiled.
        seconds: it took, the run of the script included.
        steps: what was done, in words, in order.
        remedies: compiler options each of which alone makes the failure go away.
        ended: False if the time ran out or it was interrupted; the best so far is what was kept.
        interrupted: whether it was.
    """

    script: WrittenScript
    program: FailingProgram
    signature: FailureSignature
    diagnosis: Diagnosis | None
    nodes_before: int
    nodes_after: int
    queries: int
    seconds: float
    steps: tuple[str, ...]
    remedies: tuple[str, ...]
    ended: bool
    interrupted: bool = False


def shrink(
    program: FailingProgram | list[FailingProgram],
    candidate: Candidate | None = None,
    *,
    signature: FailureSignature | None = None,
    seconds: float = 120.0,
    outdir: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Shrunk:
    """Make a failing program as small as it gets and write the script that shows the failure.

    Args:
        program: what fails; of several, the first that does is shrunk.
        candidate: how the candidate is made.
        signature: of the failure, where a verdict has told it already: a part may then be tried
            before the whole is compiled again.
        seconds: for all of it; when they are over, the best so far is written.
        outdir: where the script goes; a new folder by default.
        on_progress: called with a few words before each step.

    Raises:
        UsageError: if nothing fails.
    """
    programs = [program] if isinstance(program, FailingProgram) else list(program)
    folder = script_folder(outdir, seconds)
    work = _Shrinking(candidate or Candidate(), seconds, folder, on_progress or (lambda _: None))
    return work.run(programs, signature)


def script_folder(outdir: str | Path | None, seconds: float) -> Path:
    """Where a script goes: a new folder, unless one is named.

    Raises:
        UsageError: there is no time to write it in.
    """
    if not seconds > 0:
        raise UsageError(f"seconds must be a positive number, not {seconds!r}")
    return Path(tempfile.mkdtemp(prefix="paritas-shrink-") if outdir is None else outdir)


# The program that fails, what is known to be enough of it, and how it fails.
_Start = tuple[FailingProgram, FailingProgram, FailureSignature]


class _Shrinking:
    best: FailingProgram

    def __init__(
        self, candidate: Candidate, seconds: float, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self.candidate = candidate
        self.seconds = seconds
        self.folder = folder
        self.tell = tell
        self.started = time.monotonic()
        self.oracle = Oracle(candidate, seconds * (1 - _SCRIPT_SHARE))
        self.steps: list[str] = []
        self.remedies: tuple[str, ...] = ()
        self.diagnosis: Diagnosis | None = None

    def run(self, programs: list[FailingProgram], known: FailureSignature | None) -> Shrunk:
        try:
            program, self.best, wanted = self._known(programs, known) or self._failing(programs)
        except OutOfTimeError as error:
            message = f"{error} before a graph was seen to fail; give more of them"
            raise UsageError(message) from None
        ended, interrupted = True, False
        try:
            if self.best is program:
                self._reduce_calls(wanted)
            self._reduce_inputs(wanted)
        except (OutOfTimeError, KeyboardInterrupt) as stop:
            ended, interrupted = False, isinstance(stop, KeyboardInterrupt)
            self.steps.append("interrupted" if interrupted else str(stop))
        self.tell("running the script by itself")
        try:
            written = self._write(wanted, run=True)
        except KeyboardInterrupt:
            interrupted = True
            written = self._write(wanted, run=False)
        return Shrunk(
            script=written,
            program=self.best,
            signature=wanted,
            diagnosis=self.diagnosis,
            nodes_before=len(program.calls),
            nodes_after=len(self.best.calls),
            queries=self.oracle.queries,
            seconds=time.monotonic() - self.started,
            steps=tuple(self.steps),
            remedies=self.remedies,
            ended=ended,
            interrupted=interrupted,
        )

    def _known(
        self, programs: list[FailingProgram], known: FailureSignature | None
    ) -> _Start | None:
        """The first program of which a small part shows a known failure."""
        if known is None or known.role == EXCEPTION:
            return None
        for program in programs:
            self._tell(f"trying the {len(program.calls)} operator calls by themselves")
            part = wrong_part(self.oracle, program, known)
            if part is not None:
                self.steps.append(
                    f"wrong by itself: {_describe_size(program)} -> {_describe_size(part)}"
                )
                return program, part, known
        return None

    def _failing(self, programs: list[FailingProgram]) -> _Start:
        """The first program that fails; where random numbers hide it, with those of eager."""
        unclear: list[str] = []
        for position, program in enumerate(programs):
            self._tell(f"looking for the failure in graph {position + 1} of {len(programs)}")
            answer = self.oracle.first(program)
            if _is_unclear(answer) and self.candidate.backend == "inductor":
                answer = self._with_random_numbers_of_eager(program) or answer
            if answer.signature is None or not answer.signature.is_mismatch:
                unclear += [] if answer.signature is None else [answer.signature.sentence]
                continue
            self.diagnosis = answer.diagnosis
            return program, program, answer.signature
        message = (
            f"none of the {len(programs)} graphs fails by itself, so there is nothing to shrink; "
            f"the failure may need what is around them, or more than one call"
        )
        raise NothingFailsError(message + "".join(f"; {text}" for text in unclear[:1]))

    def _with_random_numbers_of_eager(self, program: FailingProgram) -> Answer | None:
        """Inductor's own random numbers cannot be compared; those that eager draws can."""
        options = {**self.candidate.options, "fallback_random": True}
        self.candidate = dataclasses.replace(self.candidate, options=options)
        before, self.oracle.candidate = self.oracle.candidate, self.candidate
        answer = self.oracle.first(program)
        if answer.signature is not None and answer.signature.is_mismatch:
            self.steps.append("random numbers as eager draws them")
            return answer
        self.candidate = self.oracle.candidate = before
        return None

    def _reduce_calls(self, wanted: FailureSignature) -> None:
        if not self.oracle.is_native:
            self._step("float64 throughout", lambda: in_double(self.oracle, self.best, wanted))
        self._step("sub-graphs laid open", lambda: inline_bodies(self.oracle, self.best, wanted))
        self._step("fewer operator calls", lambda: reduce_nodes(self.oracle, self.best, wanted))

    def _reduce_inputs(self, wanted: FailureSignature) -> None:
        answer = self.oracle.ask(self.best)
        wanted = answer.signature or wanted
        self.diagnosis = answer.diagnosis or self.diagnosis
        self._step("fewer outputs", lambda: drop_outputs(self.oracle, self.best, wanted))
        self._step("smaller shapes", lambda: reduce_shapes(self.oracle, self.best, wanted))
        self._step("rounder values", lambda: reduce_values(self.oracle, self.best, wanted))
        self._step("plainer dtypes", lambda: reduce_dtypes(self.oracle, self.best, wanted))
        self._tell("compiler options")
        self.remedies = tuple(decisive_options(self.oracle, self.best))

    def _step(self, name: str, reduce: Callable[[], FailingProgram]) -> None:
        """Take a step, and write what is known by then: a compiler may take us down with it."""
        self._tell(f"{name} ({len(self.best.calls)} operator calls so far)")
        smaller = reduce()
        if smaller is self.best:
            return
        self.steps.append(f"{name}: {_describe_size(self.best)} -> {_describe_size(smaller)}")
        self.best = smaller
        signature = self.oracle.check(smaller)
        if signature is not None:
            self._write(signature, run=False)

    def _tell(self, words: str) -> None:
        """Of a step that ends when the time is over."""
        self.tell(Progress(words, at_most=self._left()))

    def _left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def _write(self, wanted: FailureSignature, *, run: bool) -> WrittenScript:
        notes = [f"It goes away with {text}" for text in self.remedies]
        script = program_script(self.best, self.candidate, wanted, self.diagnosis, tuple(notes))
        seconds = max(self._left(), _SCRIPT_SECONDS) if run else None
        return write(script, self.folder / SCRIPT, seconds)


def in_double(oracle: Oracle, program: FailingProgram, wanted: FailureSignature) -> FailingProgram:
    """The program on float64 inputs, if it fails natively there: a script can show that."""
    inputs = tuple(
        value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in program.inputs
    )
    wide = dataclasses.replace(program, inputs=inputs)
    return wide if oracle.becomes_native(wide, wanted) else program


def _is_unclear(answer: Answer) -> bool:
    """Whether something could not be compared, and nothing else is wrong."""
    return answer.signature is not None and not answer.signature.is_mismatch


def _describe_size(program: FailingProgram) -> str:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    count = len(program.calls)
    return f"{count} call{'s' * (count != 1)} on {elements} numbers"


# --- The report -----------------------------------------------------------------------------------


class ShrinkReport(Result, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A script, and how it came about.

    Attributes:
        script: its path.
        data: of the values it loads, if they lie beside it.
        shows: whether it was run and showed the failure by itself.
        what: the failure, in words.
        before: how large the program was, in words.
        after: how large it is now.
        diagnosis: what kind of wrong it is.
        steps: what was done, in order.
        remedies: compiler options each of which makes the failure go away.
        queries: how many programs were tried.
        seconds: it took.
        ended: False if it was stopped before it could get no smaller.
        interrupted: it was Ctrl-C that stopped it.
        said: what the script printed last.
    """

    _called: ClassVar[str] = "a report on what was shrunk"

    script: str
    shows: bool
    what: str
    data: str | None = None
    before: str = ""
    after: str = ""
    diagnosis: Diagnosis | None = None
    steps: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    queries: int = 0
    seconds: float = 0.0
    ended: bool = True
    interrupted: bool = False
    said: str = ""

    @property
    def exit_code(self) -> int:
        """1, for a fault was found; 3 where the script does not show it itself; 130 on Ctrl-C."""
        if self.interrupted:
            return 130
        return 1 if self.shows else 3


def report_of(shrunk: Shrunk) -> ShrinkReport:
    """The report on a program of a compiler."""
    written = shrunk.script
    return ShrinkReport(
        script=str(written.path),
        data=None if written.data_path is None else str(written.data_path),
        shows=written.shows,
        what=shrunk.signature.sentence,
        before=counted(shrunk.nodes_before, "operator call"),
        after=counted(shrunk.nodes_after, "operator call"),
        diagnosis=shrunk.diagnosis,
        steps=shrunk.steps,
        remedies=shrunk.remedies,
        queries=shrunk.queries,
        seconds=shrunk.seconds,
        ended=shrunk.ended,
        interrupted=shrunk.interrupted,
        said=written.said,
    )
