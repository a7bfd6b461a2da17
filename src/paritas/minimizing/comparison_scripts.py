"""The script of an operator that was recorded: its inputs, what either side says it gave."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from paritas.comparison.replaying.runs import Leaf, Result
from paritas.errors import UsageError
from paritas.minimizing.script_inputs import input_lines
from paritas.minimizing.script_text import CHECK
from paritas.minimizing.scripts import write_file
from paritas.numerics.metrics import bitwise_equal

if TYPE_CHECKING:
    from torch import Tensor

    from paritas.comparison.replaying.runs import Program, Step

__all__ = ["Recorded", "WrittenRecord", "write_recorded"]

_MAIN = """

def wide(values):
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values
    ]


def main():
    torch.set_printoptions(threshold=64, edgeitems=4, precision=6)
    failing = 0
    for name, inputs, recorded in (("mine", mine, MINE), ("golden", golden, GOLDEN)):
        eager = program(*inputs())
        try:
            exact = program(*wide(inputs()))
        except RuntimeError:  # some operators insist on their dtypes
            exact = None
        # A side that computed in another dtype is judged in that one.
        times = excess(recorded, eager.to(recorded.dtype), exact)
        print(f"{name}: {'WRONG' if times > 1 else 'right'} ({times:.3g} times what is allowed)")
        if times <= 1:
            continue
        failing += 1
        print(f"  recorded:  {recorded}")
        print(f"  run again: {eager}")
        gap = (recorded.double() - eager.double()).abs().nan_to_num(float("inf")).reshape(-1)
        worst = int(gap.argmax())
        pair = recorded.reshape(-1)[worst].item(), eager.reshape(-1)[worst].item()
        print(f"  worst at flat index {worst}: recorded {pair[0]!r}, run again {pair[1]!r}")
    print("the fault is there" if failing else "the fault is gone")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
"""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What the script is about.

    Attributes:
        heading: what it says of itself, line by line.
        program: the operators.
        given: the values of its leaves, mine and golden.
        made: the recorded outputs, mine and golden.
    """

    heading: tuple[str, ...]
    program: Program
    given: tuple[Mapping[str, Any], ...]
    made: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class WrittenRecord:
    """Where it is, and what it loads."""

    path: Path
    data: Path | None


def write_recorded(facts: Recorded, path: Path) -> WrittenRecord:
    """Write the script, and beside it the values that are too many to be read.

    Raises:
        UsageError: an operator cannot be written as a line of Python.
    """
    keys = list(facts.given[0])
    names = {key: f"v{place}" for place, key in enumerate(keys)}
    titles: list[str] = []
    values: list[Any] = []
    for side, given in zip(("mine", "golden"), facts.given, strict=True):
        titles += [f"{side}_{names[key]}" for key in keys]
        values += [_bare(given[key]) for key in keys]
    titles += ["mine", "golden"]
    values += [_bare(value) for value in facts.made]
    lines = input_lines(titles, tuple(values))
    written = dict(zip(titles, lines.expressions, strict=True))
    data = path.with_suffix(".safetensors") if lines.stored else None
    parts = [_head(facts, data), _function(facts.program, names)]
    equal = all(_equal(*(given[key] for given in facts.given)) for key in keys)
    for side in ("mine",) if equal else ("mine", "golden"):
        rows = "".join(f"        {written[f'{side}_{names[key]}']},\n" for key in keys)
        parts.append(f"\n\ndef {side}():\n    return [\n{rows}    ]\n")
    if equal:
        parts.append("\n\ngolden = mine\n")
    parts.append(f"\n\nMINE = {written['mine']}\nGOLDEN = {written['golden']}\n")
    parts += ["\n\n", CHECK[CHECK.index("def excess") :], _MAIN]
    path.parent.mkdir(parents=True, exist_ok=True)
    if data is not None:
        write_file(data, save(lines.stored))
    write_file(path, "".join(parts).encode())
    return WrittenRecord(path, data)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and bitwise_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _bare(value: Any) -> Any:
    return value.detach().contiguous() if isinstance(value, torch.Tensor) else value


def _head(facts: Recorded, data: Path | None) -> str:
    heading = "\n".join(facts.heading).replace("\\", "/").replace('"""', "'''")
    imports = ["import operator", "import sys", "from pathlib import Path"] if data else []
    imports = imports or ["import operator", "import sys"]
    if not any(_is_plain(step) for step in facts.program.steps):
        imports.remove("import operator")
    text = f'"""{heading}\n"""\n\n' + "\n".join(imports) + "\n\nimport torch\n"
    if data is not None:
        text += "from safetensors.torch import load_file\n\n"
        text += f'stored = load_file(Path(__file__).with_name("{data.name}"))\n'
    return text


def _is_plain(step: Step) -> bool:
    return not step.operator.name.startswith(("aten.", "prims."))


def _function(program: Program, names: Mapping[str, str]) -> str:
    made: dict[str, str] = {}
    lines = [f"\n\ndef program({', '.join(names.values())}):"]
    for place, step in enumerate(program.steps):
        made[step.name] = f"r{place}"
        words = [_text(value, names, made) for value in step.args]
        named = step.operator.settled(dict(step.kwargs))
        words += [f"{key}={_text(value, names, made)}" for key, value in named.items()]
        lines.append(f"    r{place} = {_called(step)}({', '.join(words)})")
    last = f"r{len(program.steps) - 1}"
    if not program.position.isdecimal():
        raise UsageError(f"it is the argument {program.position!r} that the operator wrote to")
    lines.append(f"    return {last}[{program.position}] if isinstance({last}, tuple) else {last}")
    return "\n".join(lines) + "\n"


def _called(step: Step) -> str:
    name = step.operator.name
    if not _is_plain(step):
        return f"torch.ops.{name}"
    short = name.removeprefix("operator.")
    if not hasattr(operator, short):
        raise UsageError(f"{name} cannot be written as a line of Python")
    return f"operator.{short}"


def _text(value: Any, names: Mapping[str, str], made: Mapping[str, str]) -> str:
    if isinstance(value, Leaf):
        return names[value.key]
    if isinstance(value, Result):
        return made[value.step]
    if isinstance(value, list | tuple):
        inner = ", ".join(_text(item, names, made) for item in value)
        return f"[{inner}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)
