"""Shrinks a failing program to the smallest that fails in the same way, and writes its script."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import keyword
import platform
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.compiled.locate import REMEDY_SWITCHES
from paritas.core.errors import UsageError
from paritas.core.execution.compilation import Candidate
from paritas.core.reporting.scripts import (
    Script,
    ScriptValues,
    WrittenScript,
    import_text,
    literal,
)
from paritas.core.results.findings import Aspect, Diagnosis, Status
from paritas.core.results.wording import count_things
from paritas.core.shrinking import NothingFailsError, ShrinkReport, ShrinkSearch
from paritas.core.time_limit import TimeLimit
from paritas.core.torch_private.named_operators import is_operator, registering_module
from paritas.shrinking.nodes import (
    SIZES,
    drop_outputs,
    inline_bodies,
    reduce_nodes,
    with_bodies_inlined,
    wrong_part,
)
from paritas.shrinking.programs import (
    EXCEPTION,
    GRADIENT,
    OUTPUT,
    FailingProgram,
    FailureSignature,
    Oracle,
    reference_runs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.fx import Node

    from paritas.shrinking.programs import Answer


# --- Smaller and simpler inputs: shapes, then values, then dtypes ---------------------------------

# Lengths to try, smallest first: below, at and above the length of a CPU vector.
_LENGTHS = (2, 8, 16, 24)
# How many queries single lengths may cost after all were shrunk together.
_PATIENCE = 3


def reduce_shapes(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """Shorten dimensions; equal lengths together, because the graph may require it."""
    best = program
    for length in _LENGTHS:
        smaller = _resize_program(best, {size: length for size in _lengths(best) if size > length})
        if smaller is not None and oracle.shows(smaller, failure_signature, kind=True):
            best = smaller
            break
    tried = 0
    for size in sorted(_lengths(best), reverse=True):
        for length in _LENGTHS:
            if length >= size or tried >= _PATIENCE:
                break
            smaller = _resize_program(best, {size: length})
            if smaller is None:
                continue
            tried += 1
            if oracle.shows(smaller, failure_signature, kind=True):
                best = smaller
                break
    return best


def reduce_values(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """Replace values by numbers that are easy to read or to draw again."""
    for rounder in (_small_numbers, _halves, _draw, _two_digits):
        rounded = _with_values(program, rounder)
        if oracle.shows(rounded, failure_signature, kind=True):
            return rounded
    return program


def reduce_dtypes(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """float32 everywhere, if it shows the same failure: everybody can run it."""
    floats = {v.dtype for v in program.inputs if _is_float(v)}
    if not floats or floats == {torch.float32}:
        return program
    changed = _with_dtype(program, torch.float32)
    if reference_runs(changed) and oracle.shows(changed, failure_signature, kind=True):
        return changed
    return program


def in_double(
    oracle: Oracle, program: FailingProgram, failure_signature: FailureSignature
) -> FailingProgram:
    """The program on float64 inputs, if it fails natively there: a script can show that."""
    wide = _with_dtype(program, torch.float64)
    return wide if oracle.becomes_native(wide, failure_signature) else program


def _with_dtype(program: FailingProgram, dtype: torch.dtype) -> FailingProgram:
    return _with_values(program, lambda value, _: value.to(dtype) if _is_float(value) else value)


def _lengths(program: FailingProgram) -> set[int]:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    return {size for tensor in tensors for size in tensor.shape if size > 1}


def _resize_program(program: FailingProgram, lengths: dict[int, int]) -> FailingProgram | None:
    """The program with dimensions of these lengths cut, if it still runs.

    Equal numbers in the graph, as in a view, are changed too if that is needed.
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
            node.args = _replace_lengths(node.args, lengths)
            node.kwargs = _replace_lengths(node.kwargs, lengths)
    module.recompile()
    changed = dataclasses.replace(program, graph=module, inputs=inputs)
    return changed if reference_runs(changed) else None


def _cut_value(value: Any, lengths: dict[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return _replace_lengths(value, lengths)
    part = value.detach()
    for dim, size in enumerate(value.shape):
        part = part.narrow(dim, 0, lengths.get(size, size))
    dense = part.clone() if value.is_contiguous() else _as_laid_out(part, value)
    return dense.requires_grad_(value.requires_grad)


def _as_laid_out(part: Tensor, like: Tensor) -> Tensor:
    """Dense, with the dimensions in the memory order of `like`."""
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return part.permute(order).contiguous().permute(back)


def _replace_lengths(value: Any, lengths: dict[int, int]) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return lengths.get(value, value)
    if isinstance(value, tuple | list):
        return type(value)(_replace_lengths(item, lengths) for item in value)
    if isinstance(value, dict):
        return {key: _replace_lengths(item, lengths) for key, item in value.items()}
    return value


def _with_values(
    program: FailingProgram, change: Callable[[Tensor, int], Tensor]
) -> FailingProgram:
    def change_inputs() -> Iterator[Any]:
        for position, value in enumerate(program.inputs):
            if not isinstance(value, torch.Tensor):
                yield value
                continue
            with torch.no_grad():
                new = change(value.detach(), position)
                # The failure may depend on the layout.
                strided_copy = torch.empty_like(value, dtype=new.dtype).copy_(new)
            yield strided_copy.requires_grad_(value.requires_grad)

    return dataclasses.replace(program, inputs=tuple(change_inputs()))


def _small_numbers(value: Tensor, position: int) -> Tensor:
    """-3, -2 ... 3, repeated; each input starts at another number."""
    if not _is_float(value):
        return value
    steps = torch.arange(value.numel(), dtype=torch.float64) + position
    return (steps % 7 - 3).reshape(value.shape).to(value.dtype)


def _halves(value: Tensor, _: int) -> Tensor:
    """The original values, rounded to halves."""
    return (value.double() * 2).round().div(2).to(value.dtype) if _is_float(value) else value


def _draw(value: Tensor, position: int) -> Tensor:
    """Normal numbers from a seed, which one line of code can draw again."""
    if not _is_float(value) or value.is_complex():
        return value
    source = torch.Generator().manual_seed(position)
    return torch.randn(value.shape, generator=source, dtype=torch.float32).to(value.dtype)


def _two_digits(value: Tensor, _: int) -> Tensor:
    """The original values, rounded to two decimals."""
    return value.double().round(decimals=2).to(value.dtype) if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# --- Compiler options that make the failure go away -----------------------------------------------


def decisive_options(oracle: Oracle, program: FailingProgram) -> list[str]:
    """Inductor options each of which alone makes the program pass; empty for other compilers.

    If the program fails with all of them together, none is tried alone.
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


# --- The script of a program that a compiler gets wrong -------------------------------------------

_RUN = '''

def run(function, dtype=None):
    """Everything that one call computes: outputs, modified inputs, gradients."""
    torch.manual_seed(SEED)
    leaves = inputs()
    if dtype is not None:
        leaves = [
            x.detach().to(dtype).requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in leaves
        ]
    before = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
    with torch.set_grad_enabled(GRADIENTS):
        outputs = flat(function(*leaves))
    seen = {f"output {i}": value.detach().clone() for i, value in enumerate(outputs)}
    for name, x, old in zip(NAMES, leaves, before):
        if not isinstance(x, torch.Tensor):
            continue
        now = x.detach()
        if not bool(((now == old) | ((now != now) & (old != old))).all()):
            seen[f"{name} after the call"] = x.detach().clone()
    pairs = [(n, x) for n, x in zip(NAMES, leaves) if isinstance(x, torch.Tensor)]
    wanted = [(n, x) for n, x in pairs if x.requires_grad]
    roots = [value for value in outputs if value.requires_grad]
    if GRADIENTS and wanted and roots:
        source = torch.Generator().manual_seed(SEED)
        weights = [
            torch.randn(value.shape, generator=source).to(value.device, value.dtype)
            for value in roots
        ]
        found = torch.autograd.grad(roots, [x for _, x in wanted], weights, allow_unused=True)
        seen.update({f"gradient of {n}": g for (n, _), g in zip(wanted, found) if g is not None})
    return seen


def main():
    eager = run(program)
    try:
        wide = run(program, torch.float64)
    except Exception:  # some programs need their own dtypes
        wide = {}
    try:
        found = run(compiled())
    except Exception as error:
        print(f"the candidate raises {type(error).__name__}: {error}")
        if type(error).__name__ == RAISES:
            print("the fault is there")
            return 1
        return 3
    return judged(eager, found, wide)
'''

_LONG_NAME = 24
_KNOWN_GLOBALS = frozenset({"torch", "fx_pytree", "pytree", "NoneType"})


def program_script(
    program: FailingProgram,
    candidate: Candidate,
    signature: FailureSignature | None,
    diagnosis: Diagnosis | None,
    remedies: tuple[str, ...] = (),
) -> Script:
    """The script of a program; its docstring names compiler options as remedies.

    Args:
        signature: of its failure; None if it was not seen to fail.
    """
    names = _input_names(program)
    values = ScriptValues()
    texts = [
        f"{values.text(name, value, position)},  # {name}"
        for position, (name, value) in enumerate(zip(names, program.inputs, strict=True))
    ]
    imports, body = _function_text(program, names)
    raises = signature is not None and signature.role == EXCEPTION
    expected = signature.exception if signature is not None and raises else ""
    function = [
        f"\n\n{body}",
        values.list_function("inputs", texts),
        f"\n\ndef compiled():\n    return {_compile_call(program, candidate)}\n",
        f"\n\nNAMES = {names!r}\nSEED = {program.seed}\nGRADIENTS = {program.gradients}\n",
        f"RAISES = {expected!r}\n",
    ]
    return Script(
        heading=_describe_failure(program, signature, diagnosis, remedies),
        imports=(*imports, *_registrations(program), *candidate.setup),
        values=values.stored,
        function="".join(function),
        run=_RUN,
        sides=("eager", "compiled"),
    )


def _describe_failure(
    program: FailingProgram,
    signature: FailureSignature | None,
    diagnosis: Diagnosis | None,
    remedies: tuple[str, ...],
) -> tuple[str, ...]:
    sentence = diagnosis.sentence if diagnosis is not None else ""
    system = f"{platform.system()} {platform.machine()}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {system}"
    return (
        f"torch.compile and eager disagree: {signature.sentence}."
        if signature is not None
        else f"torch.compile and eager may disagree: {_NOT_SEEN}.",
        "",
        *([f"What kind of wrong, on the original inputs: {sentence}."] if sentence else []),
        *(f"It goes away with {text}." for text in remedies),
        f"Operator calls: {', '.join(_operator_name(node) for node in program.calls)}.",
        *_source_lines(program),
        f"{versions}; seed {program.seed}.",
    )


def _source_lines(program: FailingProgram) -> list[str]:
    """The source lines of the calls, with file names but without folders."""
    places = []
    for node in program.calls:
        trace = str(node.meta.get("stack_trace") or "")
        frame_matches = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace)
        if frame_matches:
            file, line, code = frame_matches[-1]
            places.append(f"From {Path(file).name}:{line}: {code.strip()}")
    return list(dict.fromkeys(places))


def _operator_name(node: Node) -> str:
    if isinstance(node.target, str):
        return f"Tensor.{node.target}"
    if not callable(node.target):
        return str(node.target)
    # The class in which torch keeps `torch.softmax`.
    return str(torch.typename(node.target)).replace("_VariableFunctionsClass.", "")


def _compile_call(program: FailingProgram, candidate: Candidate) -> str:
    """The call of `torch.compile`, as the user would write it."""
    backend = repr(candidate.backend)
    if ":" in candidate.backend:
        module, _, name = candidate.backend.partition(":")
        backend = import_text(module, name)
    words = ["program", f"backend={backend}"]
    if candidate.mode:
        words.append(f"mode={candidate.mode!r}")
    if candidate.options:
        words.append(f"options={literal(dict(candidate.options))}")
    dynamic = True if program.dynamic else candidate.dynamic
    if dynamic is not None:
        words.append(f"dynamic={dynamic}")
    return f"torch.compile({', '.join(words)})"


def _function_text(program: FailingProgram, names: list[str]) -> tuple[list[str], str]:
    """The graph as a plain function, and the imports it needs."""
    graph_attributes = [node.name for node in program.graph.graph.find_nodes(op="get_attr")]
    if graph_attributes:
        raise UsageError(
            f"the program has nested graphs ({', '.join(graph_attributes)}), which cannot "
            "be written as a "
            "plain function; compile the model without checkpointing or control flow"
        )
    code = program.graph.graph.python_code("self")
    lines = [re.sub(r";  [\w. =]+ = None$", "", line) for line in code.src.splitlines()]
    body = [line for line in lines if line.startswith("    ") and line.strip()]
    renamed = dict(zip([str(n.target) for n in program.placeholders], names, strict=True))
    by_node = dict(zip([n.name for n in program.placeholders], names, strict=True))
    renamed |= by_node
    identifier = re.compile(r"(?<![\w.'\"])([A-Za-z_]\w*)")
    body = [identifier.sub(lambda m: renamed.get(m[1], m[1]), line) for line in body]
    body = [line for line in body if not re.fullmatch(r"\s*(\w+) = \1", line)]
    used = set(re.findall(r"\b\w+\b", "\n".join(body))) - _KNOWN_GLOBALS
    imports = [_import_line(name, value) for name, value in code.globals.items() if name in used]
    head = f"def program({', '.join(names)}):"
    return imports, "\n".join([head, *body, ""])


def _registrations(program: FailingProgram) -> list[str]:
    """Statements without which operators that torch does not have cannot be called."""
    called: list[Any] = [node.target for node in program.calls if is_operator(node.target)]
    foreign = [
        called_operator
        for called_operator in called
        if not str(called_operator).startswith(("aten.", "prims."))
    ]
    homes = dict.fromkeys(registering_module(called_operator) for called_operator in foreign)
    lines = [f"import {home}" for home in homes if home is not None]
    if None in homes:
        lines += [
            f"torch.ops.load_library({str(loaded_library)!r})"
            for loaded_library in torch.ops.loaded_libraries
        ]
    return lines


def _import_line(name: str, value: Any) -> str:
    if name in {"inf", "nan"}:
        return f"from math import {name}"
    module = getattr(value, "__module__", None)
    if module is None:
        return f"import {value.__name__} as {name}"
    return f"from {module} import {value.__name__} as {name}"


def _input_names(program: FailingProgram) -> list[str]:
    """The placeholders' names without Dynamo's prefixes."""
    taken = {node.name for node in program.graph.graph.nodes if node.op != "placeholder"}
    taken |= {"inputs", "program", "torch", "stored", "sys", "device", "inf", "nan"}
    names = []
    for position, node in enumerate(program.placeholders):
        short = re.sub(r"^l_(self_)?|modules_|parameters_|buffers_", "", node.name).strip("_")
        fits = short.isidentifier() and not keyword.iskeyword(short) and len(short) <= _LONG_NAME
        names.append(short if fits and short not in taken else f"x{position}")
        taken.add(names[-1])
    return names


# --- Shrinking ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The result of shrinking: the report, and the objects behind it."""

    report: ShrinkReport
    script: WrittenScript
    original: FailingProgram
    program: FailingProgram
    signature: FailureSignature | None


def shrink(
    program: FailingProgram | list[FailingProgram],
    candidate: Candidate | None = None,
    *,
    signature: FailureSignature | None = None,
    places: Mapping[str, Diagnosis | None] = MappingProxyType({}),
    limit: TimeLimit | None = None,
    outdir: str | Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Shrunk:
    """Make a failing program as small as possible and write a script that shows the failure.

    Args:
        program: what fails; of several, the first that fails is shrunk.
        candidate: how it is compiled.
        signature: of the failure, if a verdict already has it: then a part may be tried before the
            whole program is compiled again.
        places: source lines or nodes where the failure was seen to start, with what kind of wrong
            it is there; they are tried first.
        limit: the time limit, 120 seconds by default; when it is over, the best result so far is
            written.
        outdir: the folder for the script; a new folder by default.
        on_progress: called with a description before each step.

    Raises:
        UsageError: nothing fails.
    """
    programs = [program] if isinstance(program, FailingProgram) else list(program)
    search = ShrinkSearch(outdir, limit or TimeLimit(120.0), on_progress)
    return _Shrinking(candidate or Candidate(), search).run(programs, signature, places)


_Reduction = Callable[[Oracle, FailingProgram, FailureSignature], FailingProgram]
# Failures that single calls are tried for if the failure is not known: the most frequent first.
_LIKELY = tuple(
    FailureSignature(Status.DIFFERENT, Aspect.VALUE, role) for role in (OUTPUT, GRADIENT)
)
_NOT_SEEN = "the time was over before any graph was seen to fail"


class _Shrinking:
    """The state of a search.

    Attributes:
        original: the program that is shrunk, or the one that is tried now.
        best: the smallest part of it that is known to fail.
        wanted: the failure, once it has been seen.
    """

    original: FailingProgram
    best: FailingProgram
    wanted: FailureSignature | None

    def __init__(self, candidate: Candidate, search: ShrinkSearch) -> None:
        self.candidate = candidate
        self.search = search
        self.oracle = Oracle(candidate, search.limit)
        self.steps: list[str] = []
        self.remedies: tuple[str, ...] = ()
        self.diagnosis: Diagnosis | None = None

    def run(
        self,
        programs: list[FailingProgram],
        failure_signature: FailureSignature | None,
        places: Mapping[str, Diagnosis | None],
    ) -> Shrunk:
        if not programs:
            raise NothingFailsError(
                "torch.compile makes no graph of it: there is nothing to shrink"
            )
        self.original = self.best = programs[0]
        self.wanted = failure_signature
        with self.search.searching():
            self._search(programs, failure_signature, places)
        if not self.search.ended:
            over = f"the {self.search.limit.seconds:g} seconds for shrinking are over"
            self.steps.append("interrupted" if self.search.interrupted else over)
        written = self.search.write_and_run(self._make_script)
        report = self.search.report(
            written,
            what=_NOT_SEEN if self.wanted is None else self.wanted.sentence,
            before=count_things(len(self.original.calls), "operator call"),
            after=count_things(len(self.best.calls), "operator call"),
            diagnosis=self.diagnosis,
            steps=tuple(self.steps),
            remedies=self.remedies,
            queries=self.oracle.queries,
        )
        return Shrunk(report, written, self.original, self.best, self.wanted)

    def _search(
        self,
        programs: list[FailingProgram],
        failure_signature: FailureSignature | None,
        places: Mapping[str, Diagnosis | None],
    ) -> None:
        if not self._find_part(programs, failure_signature, places):
            self._find_failing(programs)
            self._reduce_calls()
        self._reduce_inputs()

    def _find_part(
        self,
        programs: list[FailingProgram],
        failure_signature: FailureSignature | None,
        places: Mapping[str, Diagnosis | None],
    ) -> bool:
        """Find the first program of which a small part shows the failure by itself.

        That compiles less than the program does. If the failure is not known, only single calls
        are tried. The places are tried in all programs first.
        """
        if failure_signature is not None and failure_signature.role == EXCEPTION:
            return False
        likely = _LIKELY if failure_signature is None else (failure_signature,)
        sizes = SIZES[:1] if failure_signature is None else SIZES
        for some, program in itertools.product([(), sizes] if places else [sizes], programs):
            self.original = self.best = program
            opened = with_bodies_inlined(program)
            one_by_one = f"trying the {len(program.calls)} operator calls one by one"
            self.search.show_step(one_by_one if some else "trying the place where it starts")
            for likely_signature in likely:
                if likely_signature.role == GRADIENT and not program.gradients:
                    continue
                part = wrong_part(self.oracle, opened, likely_signature, places, some)
                if part is not None:
                    smaller = f"{_describe_size(program)} -> {_describe_size(part)}"
                    self.steps.append(f"wrong on its own: {smaller}")
                    self.best, self.wanted = part, likely_signature
                    kinds = [places[node.name] for node in part.calls if node.name in places]
                    self.diagnosis = next(iter(kinds), None)
                    self.search.write(self._make_script())
                    return True
        return False

    def _find_failing(self, programs: list[FailingProgram]) -> None:
        """Find the first program that fails; if random numbers hide it, with those of eager."""
        unclear: list[str] = []
        for position, program in enumerate(programs):
            self.original = self.best = program
            self.search.show_step(
                f"looking for the failure in graph {position + 1} of {len(programs)}"
            )
            answer = self.oracle.first(program)
            # Something could not be compared, and nothing else is wrong.
            is_unclear = answer.signature is not None and not answer.signature.is_mismatch
            if is_unclear and self.candidate.backend == "inductor":
                answer = self._with_random_numbers_of_eager(program) or answer
            if answer.signature is None or not answer.signature.is_mismatch:
                unclear += [] if answer.signature is None else [answer.signature.sentence]
                continue
            self.diagnosis, self.wanted = answer.diagnosis, answer.signature
            return
        message = (
            f"none of the {len(programs)} graphs fails on its own, so there is nothing to shrink; "
            "the failure may need the code around them, or more than one call"
        )
        raise NothingFailsError("; ".join([message, *unclear[:1]]))

    def _with_random_numbers_of_eager(self, program: FailingProgram) -> Answer | None:
        """Make Inductor draw the random numbers of eager mode, which can be compared."""
        options = {**self.candidate.options, "fallback_random": True}
        self.candidate = dataclasses.replace(self.candidate, options=options)
        before, self.oracle.candidate = self.oracle.candidate, self.candidate
        answer = self.oracle.first(program)
        if answer.signature is not None and answer.signature.is_mismatch:
            self.steps.append("random numbers of eager mode")
            return answer
        self.candidate = self.oracle.candidate = before
        return None

    def _reduce_calls(self) -> None:
        if not self.oracle.is_native:
            self._step("float64 everywhere", in_double)
        self._step("nested graphs inlined", inline_bodies)
        self._step("fewer operator calls", reduce_nodes)

    def _reduce_inputs(self) -> None:
        answer = self.oracle.ask(self.best, explains=True)
        self.wanted = answer.signature or self.wanted
        if self.diagnosis is None or (answer.diagnosis is not None and answer.diagnosis.patterns):
            self.diagnosis = answer.diagnosis
        self._step("fewer outputs", drop_outputs)
        self._step("smaller shapes", reduce_shapes)
        self._step("simpler values", reduce_values)
        self._step("simpler dtypes", reduce_dtypes)
        self.search.show_step("compiler options")
        self.remedies = tuple(decisive_options(self.oracle, self.best))

    def _step(self, name: str, reduce: _Reduction) -> None:
        """Do one reduction, and write the result so far: the compiler may crash later."""
        if self.wanted is None:
            return
        self.search.show_step(f"{name} ({len(self.best.calls)} operator calls so far)")
        smaller = reduce(self.oracle, self.best, self.wanted)
        if smaller is self.best:
            return
        self.steps.append(f"{name}: {_describe_size(self.best)} -> {_describe_size(smaller)}")
        self.best = smaller
        self.search.write(self._make_script())

    def _make_script(self) -> Script:
        # A plain function has no nested graphs; whether it fails without them, the run shows.
        best = with_bodies_inlined(self.best)
        return program_script(best, self.candidate, self.wanted, self.diagnosis, self.remedies)


def _describe_size(program: FailingProgram) -> str:
    tensors = [value for value in program.inputs if isinstance(value, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    return f"{count_things(len(program.calls), 'call')} on {count_things(elements, 'number')}"
