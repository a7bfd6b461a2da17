"""One Python file that shows a failure without paritas, and that was seen to show it."""

from __future__ import annotations

import dataclasses
import keyword
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from paritas.errors import UsageError
from paritas.graphs.script_text import is_storable, stored_form, taken_back
from paritas.shrinking.programs import EXCEPTION

if TYPE_CHECKING:
    from torch.fx import Node

    from paritas.results.findings import Diagnosis
    from paritas.shrinking.programs import Candidate, FailingProgram, FailureSignature


# --- What is the same in all scripts: how a script judges itself ----------------------------------

# Plain torch on purpose: a bug report must not ask its reader to install anything.
SCRIPT_CHECK = '''

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


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
        outputs = tensors(function(*leaves))
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


def excess(candidate, eager, wide):
    """How many times over what rounding explains; above 1 it is wrong."""
    if candidate is None or eager is None:
        return float("inf")
    if candidate.shape != eager.shape or candidate.dtype != eager.dtype:
        return float("inf")
    if not (eager.is_floating_point() or eager.is_complex()):
        return 0.0 if torch.equal(candidate, eager) else float("inf")
    kind = torch.complex128 if eager.is_complex() else torch.float64
    right = (eager if wide is None or wide.shape != eager.shape else wide).to(kind)
    c, e = candidate.to(kind), eager.to(kind)
    finite = torch.isfinite(e)
    same = torch.isnan(c) == torch.isnan(e)
    if not bool(torch.where(finite, torch.isfinite(c), same & ((c == e) | torch.isnan(e))).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    right = torch.where(torch.isfinite(right), right, e)[finite]
    scale = right.abs().square().mean().sqrt()
    rounding = torch.finfo(eager.dtype).eps / 2 * (right.abs() + scale)
    own = (e[finite] - right).abs().max()
    allowed = 12 * torch.maximum(own, rounding) + torch.finfo(torch.float64).tiny
    return float(((c[finite] - right).abs() / allowed).max())
'''

SCRIPT_MAIN = """

def main():
    eager = run(program)
    try:
        wide = run(program, torch.float64)
    except Exception:  # some programs insist on their dtypes
        wide = {}
    try:
        candidate = run(COMPILE)
    except Exception as error:
        print(f"the candidate raises {type(error).__name__}: {error}")
        if RAISES and type(error).__name__ == RAISES:
            print("the fault is there")
            return 1
        return 3
    torch.set_printoptions(threshold=64, edgeitems=4, precision=6)
    failing = 0
    for name in list(dict.fromkeys([*eager, *candidate])):
        left, right = eager.get(name), candidate.get(name)
        times = excess(right, left, wide.get(name))
        print(f"{name}: {'WRONG' if times > 1 else 'right'} ({times:.3g} times what is allowed)")
        if times <= 1:
            continue
        failing += 1
        print(f"  eager:    {left}")
        print(f"  compiled: {right}")
        if left is not None and right is not None and left.shape == right.shape and left.numel():
            gap = (right.double() - left.double()).abs().nan_to_num(float("inf")).reshape(-1)
            worst = int(gap.argmax())
            pair = left.reshape(-1)[worst].item(), right.reshape(-1)[worst].item()
            print(f"  worst at flat index {worst}: eager {pair[0]!r}, compiled {pair[1]!r}")
    print("the fault is there" if failing else "the fault is gone")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
"""


# --- Inputs as lines of code ----------------------------------------------------------------------

# A list of so many numbers can still be read.
_LISTED = 64


@dataclasses.dataclass(frozen=True)
class InputLines:
    """How a script gets its inputs.

    Attributes:
        expressions: one for each input.
        stored: tensors that have to be put into a file, by name.
    """

    expressions: tuple[str, ...]
    stored: dict[str, Tensor]


def input_lines(names: list[str], values: tuple[Any, ...]) -> InputLines:
    """Write each input as an expression; `stored` holds those that have none.

    Raises:
        UsageError: one is of a dtype that no file holds.
    """
    expressions, stored = [], {}
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        if not isinstance(value, Tensor):
            expressions.append(repr(value))
            continue
        if not is_storable(value.dtype):
            raise UsageError(
                f"input {name!r} is of dtype {value.dtype}, of which a script can neither write "
                "nor store the values; make such tensors inside the program"
            )
        text = _expression(value.detach(), position)
        if text is None:
            stored[name] = stored_form(value)
            text = taken_back(f"stored[{name!r}]", value.dtype)
        text = _with_layout(text, value)
        if value.device.type != "cpu":
            text += f".to({str(value.device)!r})"
        expressions.append(text + (".requires_grad_()" if value.requires_grad else ""))
    return InputLines(tuple(expressions), stored)


def _expression(value: Tensor, position: int) -> str | None:
    value = value.cpu()
    shape = ", ".join(map(str, value.shape))
    for text in _formulas(value, shape, position):
        if _reproduces(text, value):
            return text
    if value.numel() <= _LISTED and not value.is_quantized:
        text = f"torch.tensor({_list_text(value.tolist())}, dtype={value.dtype})"
        return text if value.numel() and _reproduces(text, value) else None
    return None


def _formulas(value: Tensor, shape: str, position: int) -> list[str]:
    if value.numel() == 0:
        return [f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"]
    first = value.reshape(-1)[0].item()
    cast = "" if value.dtype == torch.float32 else f".to({value.dtype})"
    shaped = f".reshape({shape})" if value.dim() != 1 else ""
    count = value.numel()
    start = f"{position}, {position + count}" if position else f"{count}"
    texts = []
    if value.dtype == torch.bool or math.isfinite(abs(first)):
        texts.append(f"torch.full({tuple(value.shape)}, {first!r}, dtype={value.dtype})")
    if value.is_floating_point():
        drawn = f"torch.randn({shape}{', ' if shape else '(), '}"
        drawn += f"generator=torch.Generator().manual_seed({position})){cast}"
        texts.append(f"(torch.arange({start}) % 7 - 3).to({value.dtype}){shaped}")
        texts.append(drawn)
    elif not value.is_complex() and value.dtype != torch.bool:
        texts.append(f"torch.arange({count}, dtype={value.dtype}){shaped}")
    return texts if count > 1 else texts[:1]


def _reproduces(text: str, value: Tensor) -> bool:
    """Whether an expression that we wrote gives these bits."""
    try:
        made = eval(text, {"torch": torch})  # noqa: S307  (ours)
    except (RuntimeError, TypeError, ValueError, SyntaxError):
        return False
    if made.dtype != value.dtype or made.shape != value.shape:
        return False
    same = made.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(same, value.contiguous().reshape(-1).view(torch.uint8))


def _list_text(value: Any) -> str:
    """Numbers as Python spells them; `repr` of a float is exact."""
    return re.sub(r"\b(nan|inf)\b", r'float("\1")', repr(value))


def _with_layout(text: str, value: Tensor) -> str:
    if value.is_contiguous():
        return text
    laid = f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype})"
    return f"{laid}.copy_({text})"


# --- Writing a script and running it --------------------------------------------------------------

SHOWN = "the fault is there"
_LONG_NAME = 24
_KNOWN_GLOBALS = frozenset({"torch", "fx_pytree", "pytree", "NoneType"})


@dataclasses.dataclass(frozen=True)
class WrittenScript:
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
    program: FailingProgram,
    candidate: Candidate,
    signature: FailureSignature,
    diagnosis: Diagnosis | None,
    path: str | Path,
    *,
    notes: tuple[str, ...] = (),
    seconds: float = 120.0,
    run: bool = True,
) -> WrittenScript:
    """Write a standalone script, and run it in a process of its own before it is handed over.

    Args:
        notes: further lines for its docstring.
        seconds: time that the run may take.
        run: off, it is only written: the best so far, while shrinking goes on.
    """
    path = Path(path)
    names = _input_names(program)
    lines = input_lines(names, program.inputs)
    data_path = path.with_suffix(".safetensors") if lines.stored else None
    about = _describe_failure(program, signature, diagnosis, notes)
    text = _script_text(program, candidate, signature, about, (names, lines.expressions, data_path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if data_path is not None:
        write_file(data_path, save(lines.stored))
    write_file(path, text.encode())
    if not run:
        return WrittenScript(path, data_path, ran=False, failed=False, output="")
    ran, failed, output = run_script(path, seconds)
    if not failed:
        last = output.strip().splitlines()[-1:] or ["it printed nothing"]
        warning = f"NOTE: run by itself, this script did not show the failure: {last[0]:.200}"
        about = _describe_failure(program, signature, diagnosis, (warning, *notes))
        text = _script_text(
            program, candidate, signature, about, (names, lines.expressions, data_path)
        )
        write_file(path, text.encode())
    return WrittenScript(path, data_path, ran=ran, failed=failed, output=output)


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


def _describe_failure(
    program: FailingProgram,
    signature: FailureSignature,
    diagnosis: Diagnosis | None,
    notes: tuple[str, ...],
) -> str:
    said = diagnosis.sentence if diagnosis is not None else ""
    lines = [
        f"torch.compile and eager disagree: {signature.sentence}.",
        "",
        *([f"What kind of wrong, on the inputs it was found with: {said}."] if said else []),
        *(f"{note}." if not note.endswith(".") else note for note in notes),
        f"Operator calls: {', '.join(_operator_name(node) for node in program.calls)}.",
        *_source_lines(program),
        _versions(program.seed),
        "",
        "Exits 1 while the fault is there, 0 when it is gone, 3 if something else fails.",
    ]
    return "\n".join(lines).replace("\\", "/").replace('"""', "'''")


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


def _script_text(
    program: FailingProgram,
    candidate: Candidate,
    signature: FailureSignature,
    about: str,
    inputs: tuple[list[str], tuple[str, ...], Path | None],
) -> str:
    names, expressions, data_path = inputs
    imports, body = _function_text(program, names)
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
    parts += [SCRIPT_CHECK, SCRIPT_MAIN.replace("COMPILE", _compile_call(program, candidate))]
    return "".join(parts)


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


def _function_text(program: FailingProgram, names: list[str]) -> tuple[str, str]:
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
    return "\n".join(filter(None, imports)), "\n".join([head, *body, ""])


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
