"""Standalone Python scripts that reproduce a failure with torch alone.

`Script` is the content; `write` writes it, runs it in a process of its own and adds a note if it
does not show the failure. Values are written as code if that gives the same bits; otherwise they
are stored in a file beside the script.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import math
import operator
import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from paritas.core.errors import UsageError
from paritas.core.reporting.files import create_folder, replacing, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class NoScriptError(UsageError):
    """A failure cannot be reproduced by a script."""


# --- Values as code -------------------------------------------------------------------------------

# Tensors of up to this size are written as lists.
_LISTED = 64
# Integers of up to this size are written as lists instead of being drawn at random.
_LISTED_INTEGERS = 16
# Names of dtypes in safetensors. Other dtypes are stored as one of these.
_FILE_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def literal(value: Any) -> str:
    """The source code of a plain value, or of an object that has a name in a module.

    Raises:
        NoScriptError: it cannot be written as code.
    """
    match value:
        case enum.Enum():
            return f"{literal(type(value))}({literal(value.value)})"
        case None | bool() | int() | float() | complex() | str():
            return _plain_text(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case slice():
            return f"slice{literal((value.start, value.stop, value.step))}"
        case tuple() | list():
            return sequence_text(value, map(literal, value))
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    return _object_text(value)


def _plain_text(value: complex | str | None) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return f"complex{literal((value.real, value.imag))}"
    # A subclass, as of NumPy, may write itself differently.
    kinds = (bool, int, float, complex, str, type(None))
    plain: Any = next(kind for kind in kinds if isinstance(value, kind))
    return str(plain.__repr__(value))


def _object_text(value: Any) -> str:
    named = find_name(value)
    if named is not None:
        return import_text(*named)
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({literal(sorted(value, key=repr))})"
    if isinstance(value, functools.partial):
        words = [literal(part) for part in (value.func, *value.args)]
        words += [f"{name}={literal(argument)}" for name, argument in value.keywords.items()]
        return f"__import__('functools').partial({', '.join(words)})"
    raise NoScriptError(f"an argument of type {type(value).__name__} cannot be written as code")


def find_name(value: Any) -> tuple[str, str] | None:
    """The module and the name by which another process can import an object; None if it cannot.

    An object that does not know its name has one if a variable of its module holds it.
    """
    home = getattr(value, "__module__", None)
    if isinstance(value, functools.partial):
        home = getattr(value.func, "__module__", None)
    module = sys.modules.get(home) if isinstance(home, str) else None
    if module is None or home == "__main__":
        return None
    name = str(getattr(value, "__qualname__", ""))
    with contextlib.suppress(AttributeError):
        if name and "<" not in name and operator.attrgetter(name)(module) is value:
            return module.__name__, name
    names = (name for name, member in vars(module).items() if member is value)
    name = next(names, "")
    return (module.__name__, name) if name else None


def import_text(module: str, name: str) -> str:
    """The source code that imports an object of a module."""
    return f"__import__('importlib').import_module({module!r}).{name}"


def sequence_text(like: list[Any] | tuple[Any, ...], items: Iterable[str]) -> str:
    """The source code of a list or a tuple, given that of its items."""
    inside = ", ".join(items)
    inside += "," * (isinstance(like, tuple) and len(like) == 1)
    return f"[{inside}]" if isinstance(like, list) else f"({inside})"


class ScriptValues:
    """Expressions that reproduce values bit for bit.

    Attributes:
        stored: tensors without a short expression, by name; the script loads them from a file.
    """

    def __init__(self) -> None:
        self.stored: dict[str, Tensor] = {}

    def text(self, name: str, value: Any, position: int) -> str:
        """The expression of a value.

        Args:
            name: the key under which it is stored.
            position: among the inputs; formulas start there, which gives each other numbers.

        Raises:
            NoScriptError: it can neither be written as code nor stored.
        """
        if not isinstance(value, Tensor):
            return literal(value)
        if not is_storable(value.dtype):
            raise NoScriptError(
                f"input {name!r} has dtype {value.dtype}, which a script can neither write nor "
                "store; create such tensors inside the program"
            )
        text = _expression(value.detach().cpu(), position)
        if text is None:
            self.stored[name] = _stored_form(value)
            text = _restored_text(f"stored[{name!r}]", value.dtype)
        text = _with_layout(text, value.detach())
        if value.device.type != "cpu":
            text += f".to({str(value.device)!r})"
        return text + (".requires_grad_()" if value.requires_grad else "")

    def list_function(self, name: str, rows: Sequence[str]) -> str:
        """A function that returns a new list each time, because a program may write to it."""
        inside = "".join(f"        {row}\n" for row in rows)
        return f"\n\ndef {name}():\n{self.loading}    return [\n{inside}    ]\n"

    @property
    def loading(self) -> str:
        """The line that defines `stored`, if it is used."""
        return "    stored = load()\n" if self.stored else ""


def is_storable(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be stored in a file."""
    return dtype in _FILE_DTYPES or dtype.is_complex or _is_byte(dtype)


def _is_byte(dtype: torch.dtype) -> bool:
    """Whether it is a floating dtype of at most eight bits, which is stored as bytes."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _stored_form(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
    if plain.is_complex():
        return torch.view_as_real(plain)
    return plain.view(torch.uint8) if _is_byte(plain.dtype) else plain


def _restored_text(text: str, dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return f"torch.view_as_complex({text})"
    return f"{text}.view({dtype})" if _is_byte(dtype) else text


def _expression(value: Tensor, position: int) -> str | None:
    """A short expression that gives the same bits, if there is one."""
    texts = _formulas(value, position)
    if 0 < value.numel() <= _LISTED and not value.is_quantized:
        texts.append(f"torch.tensor({literal(value.tolist())}, dtype={value.dtype})")
    return next((text for text in texts if _reproduces(text, value)), None)


def _formulas(value: Tensor, position: int) -> list[str]:
    if value.numel() == 0:
        return [f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"]
    shape = ", ".join(map(str, value.shape))
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
    """Whether an expression gives these bits."""
    try:
        rebuilt_tensor = eval(text, {"torch": torch})  # noqa: S307  (written above)
    except (RuntimeError, TypeError, ValueError):
        return False
    if rebuilt_tensor.dtype != value.dtype or rebuilt_tensor.shape != value.shape:
        return False
    same = rebuilt_tensor.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(same, value.contiguous().reshape(-1).view(torch.uint8))


def _with_layout(text: str, value: Tensor) -> str:
    if value.is_contiguous():
        return text
    try:
        value.new_empty_strided(value.shape, value.stride()).copy_(value)
    except RuntimeError:  # elements that share memory cannot be written
        return text
    laid = f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype})"
    return f"{laid}.copy_({text})"


def drawn_text(tensor: Tensor) -> str:
    """An expression that draws a tensor of this shape and value range with `generator`."""
    shape, dtype = list(tensor.shape), tensor.dtype
    cast = f".to({dtype})"
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return f"torch.empty({shape}, dtype={dtype})"
    if dtype is torch.bool:
        return f"torch.rand({shape}, generator=generator) > 0.5"
    if tensor.numel() <= _LISTED_INTEGERS and not tensor.is_floating_point():
        return f"torch.tensor({literal(tensor.tolist())}, dtype={dtype})"
    if tensor.is_complex():
        return f"torch.randn({shape}, generator=generator, dtype=torch.complex128){cast}"
    low, high = tensor.min().item(), tensor.max().item()
    if low == high or not (math.isfinite(low) and math.isfinite(high)):
        return f"torch.full({shape}, {literal(low)}, dtype={dtype})"
    if not tensor.is_floating_point():
        return f"torch.randint({low}, {high + 1}, {shape}, generator=generator){cast}"
    if low < 0:
        return f"torch.randn({shape}, generator=generator){cast}"
    scale = "" if high <= 1 else f" * {high:.3g}"
    return f"(torch.rand({shape}, generator=generator){scale}){cast}"


# --- Code that all scripts share: loading values, judging -----------------------------------------

# Only torch: a bug report must not require its readers to install anything else.
_LOADER = '''

def load():
    """Values from the file beside this one (safetensors: a header, then the bytes)."""
    content = bytearray(Path(__file__).with_name({name!r}).read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    dtypes = {{{dtypes}}}
    found = {{}}
    for name, entry in json.loads(content[8:begin]).items():
        first, last = entry["data_offsets"]
        raw = torch.frombuffer(
            content, dtype=torch.uint8, offset=begin + first, count=last - first
        )
        found[name] = raw.clone().view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found
'''

_JUDGE = '''

def flat(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if not isinstance(result, (list, tuple)):
        return []
    return [one for item in result for one in flat(item)]


def excess(found, expected, wide, times, least):
    """The error divided by what rounding explains; above 1 it is wrong."""
    if found is None or expected is None:
        return float("inf")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    kind = torch.complex128 if expected.is_complex() else torch.float64
    right = (expected if wide is None or wide.shape != expected.shape else wide).to(kind)
    f, e = found.to(kind), expected.to(kind)
    finite = torch.isfinite(e)
    same = torch.isnan(f) == torch.isnan(e)
    if not bool(torch.where(finite, torch.isfinite(f), same & ((f == e) | torch.isnan(e))).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    right = torch.where(torch.isfinite(right), right, e)[finite]
    scale = right.abs().square().mean().sqrt()
    eps = torch.finfo(expected.dtype).eps
    rounding = eps / 2 * (right.abs() + scale)
    own = (e[finite] - right).abs().max()
    allowed = times * torch.maximum(own, rounding)
    allowed += (eps if least is None else least) * right.abs().max()
    return float(((f[finite] - right).abs() / (allowed + torch.finfo(torch.float64).tiny)).max())


def is_wrong(name, expected, found, times):
    """Print what was found, and where it is worst."""
    print(f"{name}: {'WRONG' if times > 1 else 'right'} ({times:.3g} times what is allowed)")
    if times <= 1:
        return False
    width = max(map(len, SIDES)) + 1
    for side, value in zip(SIDES, (expected, found)):
        print(f"  {side + ':':<{width}} {value}")
    if expected is None or found is None or expected.shape != found.shape:
        return True
    if expected.numel():
        e, f = expected.to(torch.complex128), found.to(torch.complex128)
        gap = (f - e).abs().masked_fill((f == e) | (f.isnan() & e.isnan()), 0)
        gap = gap.nan_to_num(float("inf"))
        worst = tuple((gap == gap.max()).nonzero()[0].tolist())
        pair = expected[worst].item(), found[worst].item()
        print(f"  worst at {list(worst)}: {SIDES[0]} {pair[0]!r}, {SIDES[1]} {pair[1]!r}")
    return True


def judged(expected, found, wide, times=12, least=0.0):
    """Compare all values; the exit code is 1 if one is wrong.

    Errors up to `times` the rounding error, plus `least` times the largest number (None: the eps
    of the dtype), are allowed.
    """
    torch.set_printoptions(threshold=64, edgeitems=4, precision=6)
    wrong = []
    for name in dict.fromkeys([*expected, *found]):
        pair = expected.get(name), found.get(name)
        wrong.append(is_wrong(name, *pair, excess(*pair[::-1], wide.get(name), times, least)))
    print("the fault is there" if any(wrong) else "the fault is gone")
    return int(any(wrong))
'''

_EXCEPTIONS = '''

def stop(*error):
    """An error outside of the candidate is not the fault: Python would exit with 1."""
    sys.__excepthook__(*error)
    sys.exit(3)


sys.excepthook = stop
'''

_END = """

if __name__ == "__main__":
    sys.exit(main())
"""
SHOWN = "the fault is there"
_EXIT_CODES = "Exits 1 while the fault is there, 0 when it is gone, 3 if something else fails."


# --- Writing and running a script -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Script:
    """The content of a script.

    Attributes:
        heading: lines of its docstring: a title, an empty line, and more.
        imports: lines besides the import of torch.
        values: tensors that `load()` returns, by name.
        function: the code of the computation and its inputs.
        run: the code of `main()`, which returns the result of `judged`.
        sides: short names of the expected and the found values.
    """

    heading: tuple[str, ...]
    imports: tuple[str, ...]
    values: Mapping[str, Tensor]
    function: str
    run: str
    sides: tuple[str, str]

    def text(self, path: Path) -> str:
        """The whole script, as it is written to a path; its values lie beside it."""
        heading = "\n".join((*self.heading, "", _EXIT_CODES))
        heading = heading.replace("\\", "\\\\").replace('"""', "'''")
        folders = _folders_of_modules(["\n".join(self.imports), self.function, self.run], path)
        data, loading = data_path(path), ["import sys"]
        if self.values or folders:
            loading.append("from pathlib import Path")
        if self.values:
            loading.insert(0, "import json")
        dtypes = {value.dtype for value in self.values.values()}
        named = [f'"{name}": {dtype}' for dtype, name in _FILE_DTYPES.items() if dtype in dtypes]
        parts = [
            f'"""{heading}\n"""\n\n',
            "\n".join(loading),
            "\n\nimport torch\n",
            _EXCEPTIONS,
            *(
                f"\nsys.path.append(str({folder_code}))  # {names}\n"
                for folder_code, names in folders.items()
            ),
            *(f"{line}\n" for line in self.imports),
            self.function,
            f"\n\nSIDES = {self.sides!r}\n",
            _LOADER.format(name=data.name, dtypes=", ".join(named)) if self.values else "",
            _JUDGE,
            self.run,
            _END,
        ]
        return "".join(parts)


@dataclasses.dataclass(frozen=True)
class WrittenScript:
    """A script on disk, and the result of running it.

    Attributes:
        data_path: the file with its values.
        exit_code: None if it was not run, or did not finish.
        output: what it printed, or why it did not finish.
    """

    path: Path
    data_path: Path | None = None
    exit_code: int | None = None
    output: str = ""

    @property
    def shows(self) -> bool:
        """Whether it reproduced the failure."""
        return self.exit_code == 1 and SHOWN in self.output.splitlines()

    @property
    def said(self) -> str:
        """What it printed last, before any warning of torch; empty if it was not run."""
        if self.shows:
            return SHOWN
        lines = self.output.strip().splitlines()
        if not lines:
            return "" if self.exit_code is None else "it prints nothing"
        return lines[-1]

    @property
    def problem(self) -> str:
        """What it does instead of showing the failure."""
        ended = "" if self.exit_code is None else f"it exits with {self.exit_code}: "
        return ended + self.said


def write(script: Script, path: Path, seconds: float | None) -> WrittenScript:
    """Write a script and run it; if it does not show the failure, add a note to its docstring.

    Args:
        path: of the script. Its values go to the same name with another suffix.
        seconds: the time limit of the run; None: do not run it.

    Raises:
        UsageError: it cannot be written.
    """
    data = data_path(path)
    create_folder(path.parent)
    if script.values:
        with replacing(data) as unfinished:
            unfinished.write_bytes(save(dict(script.values)))
    _write_text(script, path)
    if not script.values:  # from an earlier script with this name
        data.unlink(missing_ok=True)
    written = WrittenScript(path, data if script.values else None)
    if seconds is None:
        return written
    exit_code, output = run_script(path, seconds)
    written = dataclasses.replace(written, exit_code=exit_code, output=output)
    if not written.shows:
        ended = "run by itself, this script did not show the failure"
        if exit_code is None:
            ended = "this script was not run to its end"
        note = f"NOTE: {ended}: {written.problem:.200}"
        heading = (*script.heading[:2], note, *script.heading[2:])
        _write_text(dataclasses.replace(script, heading=heading), path)
    return written


def data_path(path: Path) -> Path:
    """The file with the values of a script."""
    return path.with_suffix(".safetensors")


def _write_text(script: Script, path: Path) -> None:
    write_whole(path, script.text(path).removesuffix("\n").encode())


def _folders_of_modules(codes: Iterable[str], path: Path) -> dict[str, str]:
    """The folders of modules that a script imports and Python does not find by itself.

    A module beside the program that is checked is found from there only: `python bug/repro.py`
    looks in `bug`. Folder, as code -> the modules in it. A folder above the script is written
    relative to it, so that both can be moved.
    """
    names_by_folder: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for code in codes for name in _imported_names(code)):
        folder = _own_folder(name)
        if folder is None:
            continue
        above = [parent.resolve() for parent in path.absolute().parents]
        code = repr(str(folder))
        if folder in above:
            code = f"Path(__file__).resolve().parents[{above.index(folder)}]"
        names_by_folder.setdefault(code, []).append(name)
    return {folder: ", ".join(names) for folder, names in names_by_folder.items()}


def _imported_names(code: str) -> Iterator[str]:
    """The names of the packages and modules that code imports."""
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (
                str(argument.value).partition(".")[0]
                for argument in node.args
                if isinstance(argument, ast.Constant)
            )


def _own_folder(name: str) -> Path | None:
    """The folder in which a module of the user lies; None for what is installed."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a file, as that of a notebook
        return None
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    files = [
        Path(position).resolve() for position in places if position and Path(position).exists()
    ]
    if not files:
        return None
    installed = {Path(folder).resolve() for folder in sysconfig.get_paths().values()}
    if installed & set(files[0].parents):
        return None
    return files[0].parent


def run_script(path: Path, seconds: float) -> tuple[int | None, str]:
    """Run a script as a user does: its exit code (None if it did not finish) and its output."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, str(path.absolute())],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(seconds, 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"it takes more than {seconds:.0f} s"
    except OSError as error:
        return None, f"it cannot be run: {error}"
    return done.returncode, done.stdout + done.stderr
