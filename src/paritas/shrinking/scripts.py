"""The script of a program that a compiler gets wrong."""

from __future__ import annotations

import keyword
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.errors import UsageError
from paritas.core.reporting.scripts import Script, ScriptValues, import_text, literal
from paritas.core.torch_private.named_operators import is_operator, registering_module
from paritas.shrinking.programs import EXCEPTION, FailingProgram, FailureSignature

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.core.execution.compilation import Candidate
    from paritas.core.results.findings import Diagnosis

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
        else f"torch.compile and eager may disagree: {NOT_SEEN}.",
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


NOT_SEEN = "the time was over before any graph was seen to fail"
