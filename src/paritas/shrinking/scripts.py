"""The script of a program that a compiler gets wrong: eager and compiled, side by side."""

from __future__ import annotations

import keyword
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paritas.errors import UsageError
from paritas.reports.scripts import Script, ScriptValues
from paritas.shrinking.programs import EXCEPTION

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.results.findings import Diagnosis
    from paritas.shrinking.programs import Candidate, FailingProgram, FailureSignature


_RUN = '''

def run(function, dtype=None):
    """Everything that one call gives: outputs, inputs that it wrote to, gradients."""
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
    except Exception:  # some programs insist on their dtypes
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
    signature: FailureSignature,
    diagnosis: Diagnosis | None,
    notes: tuple[str, ...] = (),
) -> Script:
    """The script of a failing program.

    Args:
        notes: further lines for its docstring.

    Raises:
        UsageError: the program, or one of its inputs, cannot be written down.
    """
    names = _input_names(program)
    values = ScriptValues()
    texts = [
        f"{values.text(name, value, position)},  # {name}"
        for position, (name, value) in enumerate(zip(names, program.inputs, strict=True))
    ]
    imports, body = _function_text(program, names)
    expected = signature.exception if signature.role == EXCEPTION else ""
    function = [
        f"\n\n{body}",
        values.list_function("inputs", texts),
        f"\n\ndef compiled():\n    return {_compile_call(program, candidate)}\n",
        f"\n\nNAMES = {names!r}\nSEED = {program.seed}\nGRADIENTS = {program.gradients}\n",
        f"RAISES = {expected!r}\n",
    ]
    return Script(
        heading=_describe_failure(program, signature, diagnosis, notes),
        imports=(*imports, *candidate.setup),
        values=values.stored,
        function="".join(function),
        run=_RUN,
        sides=("eager", "compiled"),
    )


def _describe_failure(
    program: FailingProgram,
    signature: FailureSignature,
    diagnosis: Diagnosis | None,
    notes: tuple[str, ...],
) -> tuple[str, ...]:
    said = diagnosis.sentence if diagnosis is not None else ""
    return (
        f"torch.compile and eager disagree: {signature.sentence}.",
        "",
        *([f"What kind of wrong, on the inputs it was found with: {said}."] if said else []),
        *(f"{note}." if not note.endswith(".") else note for note in notes),
        f"Operator calls: {', '.join(_operator_name(node) for node in program.calls)}.",
        *_source_lines(program),
        _versions(program.seed),
    )


def _versions(seed: int) -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {system}; seed {seed}."


def _source_lines(program: FailingProgram) -> list[str]:
    """Where the calls stand in the program they were taken from: the line, without its folders."""
    places = []
    for node in program.calls:
        trace = str(node.meta.get("stack_trace") or "")
        found = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace)
        if found:
            file, line, code = found[-1]
            places.append(f"From {Path(file).name}:{line}: {code.strip()}")
    return list(dict.fromkeys(places))


def _operator_name(node: Node) -> str:
    if isinstance(node.target, str):
        return f"Tensor.{node.target}"
    if not callable(node.target):
        return str(node.target)
    # Where torch keeps what people call `torch.softmax`.
    return str(torch.typename(node.target)).replace("_VariableFunctionsClass.", "")


def _compile_call(program: FailingProgram, candidate: Candidate) -> str:
    """The call of `torch.compile`, as the user would write it."""
    backend = repr(candidate.backend)
    if ":" in candidate.backend:
        module, _, name = candidate.backend.partition(":")
        backend = f"__import__('importlib').import_module({module!r}).{name}"
    words = ["program", f"backend={backend}"]
    if candidate.mode:
        words.append(f"mode={candidate.mode!r}")
    if candidate.options:
        words.append(f"options={dict(candidate.options)!r}")
    dynamic = True if program.dynamic else candidate.dynamic
    if dynamic is not None:
        words.append(f"dynamic={dynamic}")
    return f"torch.compile({', '.join(words)})"


def _function_text(program: FailingProgram, names: list[str]) -> tuple[list[str], str]:
    """The graph as a plain function, and the imports it needs."""
    held = [node.name for node in program.graph.graph.find_nodes(op="get_attr")]
    if held:
        message = (
            f"the program holds sub-graphs ({', '.join(held)}), which cannot be written as a "
            f"plain function; compile the model without checkpointing or control flow in it"
        )
        raise UsageError(message)
    code = program.graph.graph.python_code("self")
    lines = [re.sub(r";  [\w. =]+ = None$", "", line) for line in code.src.splitlines()]
    body = [line for line in lines if line.startswith("    ") and line.strip()]
    renamed = dict(zip([str(n.target) for n in program.placeholders], names, strict=True))
    by_node = dict(zip([n.name for n in program.placeholders], names, strict=True))
    body = [_rename_in(line, {**renamed, **by_node}) for line in body]
    body = [line for line in body if not re.fullmatch(r"\s*(\w+) = \1", line)]
    imports = [
        _import_line(name, value) for name, value in code.globals.items() if _is_used(name, body)
    ]
    head = f"def program({', '.join(names)}):"
    return imports, "\n".join([head, *body, ""])


def _rename_in(line: str, names: dict[str, str]) -> str:
    return re.sub(r"(?<![\w.'\"])([A-Za-z_]\w*)", lambda m: names.get(m[1], m[1]), line)


def _is_used(name: str, body: list[str]) -> bool:
    return name not in _KNOWN_GLOBALS and any(re.search(rf"\b{name}\b", line) for line in body)


def _import_line(name: str, value: Any) -> str:
    if name in {"inf", "nan"}:
        return f"from math import {name}"
    module = getattr(value, "__module__", None)
    if module is None:
        return f"import {value.__name__} as {name}"
    return f"from {module} import {value.__name__} as {name}"


def _input_names(program: FailingProgram) -> list[str]:
    """The placeholders' names without what only says where Dynamo found them."""
    taken = {node.name for node in program.graph.graph.nodes if node.op != "placeholder"}
    taken |= {"inputs", "program", "torch", "stored", "sys", "device", "inf", "nan"}
    names = []
    for position, node in enumerate(program.placeholders):
        short = re.sub(r"^l_(self_)?|modules_|parameters_|buffers_", "", node.name).strip("_")
        fits = short.isidentifier() and not keyword.iskeyword(short) and len(short) <= _LONG_NAME
        names.append(short if fits and short not in taken else f"x{position}")
        taken.add(names[-1])
    return names
