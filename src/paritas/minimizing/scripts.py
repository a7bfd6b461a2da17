"""One Python file that shows a failure without paritas, and that was seen to show it."""

from __future__ import annotations

import dataclasses
import keyword
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from paritas.errors import UsageError
from paritas.minimizing.programs import EXCEPTION
from paritas.minimizing.script_inputs import input_lines
from paritas.minimizing.script_text import CHECK, MAIN

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.minimizing.programs import Candidate, Program, Signature
    from paritas.numerics.diagnoses import Diagnosis

__all__ = ["Written", "run_script", "write_script"]

SHOWN = "the fault is there"
_LONG_NAME = 24
_KNOWN_GLOBALS = frozenset({"torch", "fx_pytree", "pytree", "NoneType"})


@dataclasses.dataclass(frozen=True)
class Written:
    """A script on disk, and what became of it when it was run.

    Attributes:
        path: the script.
        data_path: inputs that it loads, beside it.
        ran: whether it came to an end within its time.
        failed: whether it showed the failure; otherwise its docstring says that it did not.
        output: what it printed.
    """

    path: Path
    data_path: Path | None
    ran: bool
    failed: bool
    output: str


def write_script(  # noqa: PLR0913  (what it is about, and what is known of it)
    program: Program,
    candidate: Candidate,
    signature: Signature,
    diagnosis: Diagnosis | None,
    path: str | Path,
    *,
    notes: tuple[str, ...] = (),
    seconds: float = 120.0,
    run: bool = True,
) -> Written:
    """Write a standalone script, and run it in a process of its own before it is handed over.

    Args:
        notes: further lines for its docstring.
        seconds: time that the run may take.
        run: off, it is only written: the best so far, while shrinking goes on.
    """
    path = Path(path)
    names = _names(program)
    lines = input_lines(names, program.inputs)
    data_path = path.with_suffix(".safetensors") if lines.stored else None
    about = _about(program, signature, diagnosis, notes)
    text = _text(program, candidate, signature, about, (names, lines.expressions, data_path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if data_path is not None:
        write_file(data_path, save(lines.stored))
    write_file(path, text.encode())
    if not run:
        return Written(path, data_path, ran=False, failed=False, output="")
    ran, failed, output = run_script(path, seconds)
    if not failed:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        warning = f"NOTE: run by itself, this script did not show the failure: {last[0]:.200}"
        about = _about(program, signature, diagnosis, (warning, *notes))
        text = _text(program, candidate, signature, about, (names, lines.expressions, data_path))
        write_file(path, text.encode())
    return Written(path, data_path, ran=ran, failed=failed, output=output)


def write_file(path: Path, content: bytes) -> None:
    """Write it whole or not at all: Ctrl-C may come while the best so far is written."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def run_script(path: Path, seconds: float) -> tuple[bool, bool, str]:
    """Run a script by itself: whether it ended, whether it showed its failure, what it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, path.name],
            cwd=path.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(seconds, 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, False, f"it did not end within {seconds:.0f} s"
    output = done.stdout + done.stderr
    return True, done.returncode == 1 and SHOWN in done.stdout, output


def _about(
    program: Program,
    signature: Signature,
    diagnosis: Diagnosis | None,
    notes: tuple[str, ...],
) -> str:
    said = diagnosis.sentence if diagnosis is not None else ""
    lines = [
        f"torch.compile and eager disagree: {signature.sentence}.",
        "",
        *([f"What kind of wrong, on the inputs it was found with: {said}."] if said else []),
        *(f"{note}." if not note.endswith(".") else note for note in notes),
        f"Operator calls: {', '.join(_operator(node) for node in program.calls)}.",
        *_places(program),
        _versions(program.seed),
        "",
        "Exits 1 while the fault is there, 0 when it is gone, 3 if something else fails.",
    ]
    return "\n".join(lines).replace("\\", "/").replace('"""', "'''")


def _versions(seed: int) -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {system}; seed {seed}."


def _places(program: Program) -> list[str]:
    """Where the calls stand in the program they were taken from: the line, without its folders."""
    places = []
    for node in program.calls:
        trace = str(node.meta.get("stack_trace") or "")
        found = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', trace)
        if found:
            file, line, code = found[-1]
            places.append(f"From {Path(file).name}:{line}: {code.strip()}")
    return list(dict.fromkeys(places))


def _operator(node: Node) -> str:
    if isinstance(node.target, str):
        return f"Tensor.{node.target}"
    if not callable(node.target):
        return str(node.target)
    # Where torch keeps what people call `torch.softmax`.
    return str(torch.typename(node.target)).replace("_VariableFunctionsClass.", "")


def _text(
    program: Program,
    candidate: Candidate,
    signature: Signature,
    about: str,
    inputs: tuple[list[str], tuple[str, ...], Path | None],
) -> str:
    names, expressions, data_path = inputs
    imports, body = _function(program, names)
    loads = "from safetensors.torch import load_file\n" if data_path else ""
    parts = [f'"""{about}\n"""\n\nimport sys\n{imports}\nimport torch\n{loads}']
    parts += [f"{line}\n" for line in candidate.setup]
    if data_path:
        parts.append("from pathlib import Path\n\n")
        where = f'Path(__file__).with_name("{data_path.name}")'
        parts.append(f"stored = load_file({where})\n")
    given = "".join(
        f"        {text},  # {name}\n" for name, text in zip(names, expressions, strict=True)
    )
    parts.append(f"\n\n{body}\n\ndef inputs():\n    return [\n{given}    ]\n\n")
    parts.append(f"\nNAMES = {names!r}\nSEED = {program.seed}\nGRADIENTS = {program.gradients}\n")
    expected = signature.exception if signature.role == EXCEPTION else ""
    parts.append(f"RAISES = {expected!r}\n")
    parts += [CHECK, MAIN.replace("COMPILE", _compile(program, candidate))]
    return "".join(parts)


def _compile(program: Program, candidate: Candidate) -> str:
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


def _function(program: Program, names: list[str]) -> tuple[str, str]:
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
    body = [_renamed(line, {**renamed, **by_node}) for line in body]
    body = [line for line in body if not re.fullmatch(r"\s*(\w+) = \1", line)]
    imports = [_import(name, value) for name, value in code.globals.items() if _used(name, body)]
    head = f"def program({', '.join(names)}):"
    return "\n".join(filter(None, imports)), "\n".join([head, *body, ""])


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"(?<![\w.'\"])([A-Za-z_]\w*)", lambda m: names.get(m[1], m[1]), line)


def _used(name: str, body: list[str]) -> bool:
    return name not in _KNOWN_GLOBALS and any(re.search(rf"\b{name}\b", line) for line in body)


def _import(name: str, value: Any) -> str:
    if name in {"inf", "nan"}:
        return f"from math import {name}"
    module = getattr(value, "__module__", None)
    if module is None:
        return f"import {value.__name__} as {name}"
    return f"from {module} import {value.__name__} as {name}"


def _names(program: Program) -> list[str]:
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
