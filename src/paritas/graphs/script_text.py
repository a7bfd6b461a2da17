"""The text of a script that shows a failure with torch alone."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import textwrap
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from paritas.numerics.contents import map_leaves
from paritas.placement.placement import Terms, bounds
from paritas.placement.recipes import name_of, split_values, tensors_in
from paritas.results.placements import Once, Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from paritas.placement.recipes import OperatorCall, Place, Recipe
    from paritas.results.placements import Role


# --- Tensors of a script in a safetensors file beside it, which does not know every dtype of ------


def is_storable(dtype: torch.dtype) -> bool:
    """Whether `stored_form` of a tensor can be put into a file."""
    return dtype.is_complex or _is_known(dtype)


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a file can hold: complex numbers that it does not know as pairs of real ones."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
    return torch.view_as_real(plain) if _in_pairs(tensor.dtype) else plain


def taken_back(text: str, dtype: torch.dtype) -> str:
    """The expression that gives the tensor again, where `text` gives what was stored of it."""
    return f"torch.view_as_complex({text})" if _in_pairs(dtype) else text


def _in_pairs(dtype: torch.dtype) -> bool:
    return dtype.is_complex and not _is_known(dtype)


@functools.cache
def _is_known(dtype: torch.dtype) -> bool:
    """Asked of the library itself: a later one may know more."""
    try:
        save({"nothing": torch.empty(0, dtype=torch.uint8).view(dtype)})
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


# --- Arguments and functions, written as Python that needs torch alone ----------------------------

# A tensor that is written down element by element has no more than this.
_MOST_ELEMENTS = 16
_OWN_MODULE = "paritas.partition.configuration.nnscaler_functions"


class NoScriptError(Exception):
    """Why a failure cannot be shown by a script of its own."""


# --- arguments ------------------------------------------------------------------------------------


def literal(value: Any) -> str:
    """A plain value, as it is written.

    Raises:
        NoScriptError: it has no such form.
    """
    match value:
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case None | bool() | int() | float() | complex() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case slice():
            return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
        case tuple():
            inside = ", ".join(map(literal, value))
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
    raise NoScriptError(f"an argument of type {type(value).__name__} cannot be written down")


def drawn(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """A tensor of this shape and with values in this range, drawn by `generator`."""
    shape, cast = list(tensor.shape), f".to({dtype})"
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return f"torch.empty({shape}, dtype={dtype})"
    if tensor.dtype is torch.bool:
        return f"torch.rand({shape}, generator=generator) > 0.5"
    if tensor.numel() <= _MOST_ELEMENTS and not tensor.is_floating_point():
        return f"torch.tensor({map_leaves(tensor.tolist(), _Verbatim)}, dtype={dtype})"
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


class _Verbatim:
    """An element in a list of lists, shown as it is written."""

    def __init__(self, value: Any) -> None:
        self._text = literal(value)

    def __repr__(self) -> str:
        return self._text


def stored_tensors(value: Any, path: str) -> dict[str, torch.Tensor]:
    """The tensors of an argument by their paths, ready to be put into a file."""
    if isinstance(value, torch.Tensor):
        return {path: stored_form(value)}
    if isinstance(value, list | tuple):
        found: dict[str, torch.Tensor] = {}
        for place, item in enumerate(value):
            found |= stored_tensors(item, f"{path}[{place}]")
        return found
    return {}


# --- functions ------------------------------------------------------------------------------------


def function_text(
    name: str, function: Callable[..., Any], imports: tuple[str, ...] = ()
) -> tuple[list[str], str]:
    """Lines that make `compute` the operator, and the module of yours that they need, if any.

    Args:
        name: the operator, as the graph names it.
        function: what was run for it.
        imports: modules that bring operators.

    Raises:
        NoScriptError: it lives in memory alone.
    """
    module, short = inspect.getmodule(function), getattr(function, "__name__", "")
    if module is not None and module.__name__ == _OWN_MODULE:
        return [*_source_lines(module, short), "", "", f"compute = {short}"], ""
    if name.startswith("torch.") and callable(_at(torch, name.split(".")[1:])):
        return [f"compute = {name}"], ""
    if short and getattr(operator, short, None) is function:
        return ["import operator", "", f"compute = operator.{short}"], ""
    plain = name.replace("::", ".").removeprefix("torch.ops.")
    if plain.startswith(("aten.", "prims.")) and all(map(str.isidentifier, plain.split("."))):
        overload = plain if plain.count(".") > 1 else f"{plain}.default"
        return [f"compute = torch.ops.{overload}"], ""
    if type(function).__name__ in {"OpOverload", "OpOverloadPacket"}:
        return _registered(str(function), imports)
    qualified, home = getattr(function, "__qualname__", ""), getattr(module, "__name__", "")
    if home and home != "__main__" and _at(module, qualified.split(".")) is function:
        first = qualified.partition(".")[0]
        return [f"from {home} import {first}", "", f"compute = {qualified}"], home
    raise NoScriptError(f"{name} was made in memory: no script can import it")


def _at(owner: Any, parts: list[str]) -> Any:
    for part in parts:
        owner = getattr(owner, part, None)
    return owner


def _registered(name: str, imports: tuple[str, ...]) -> tuple[list[str], str]:
    """An operator that a program put into torch's registry: the module that does so is needed."""
    if not imports:
        raise NoScriptError(f"{name} is registered by a program that a script does not know")
    lines = [f"import {module}  # registers the operator" for module in imports]
    return [*lines, "", f"compute = torch.ops.{name}"], ", ".join(imports)


def _source_lines(module: ModuleType, name: str) -> list[str]:
    """The text of a function, and of what it uses of its module."""
    needed: dict[str, str] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        value = getattr(module, one)
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            needed[one] = textwrap.dedent(inspect.getsource(value)).rstrip()
            waiting += [
                used
                for used in value.__code__.co_names
                if hasattr(module, used) and used not in needed
            ]
        elif inspect.ismodule(value):
            needed[one] = _import_line(value, one)
        elif isinstance(value, type):
            needed[one] = f"{one} = ValueError"
        else:
            needed[one] = f"{one} = {literal(value)}"
    functions = [text for text in needed.values() if text.startswith("def ")]
    others = sorted(text for text in needed.values() if not text.startswith("def "))
    lines = [*others, *("\n\n" + text for text in reversed(functions))]
    return [line for text in lines for line in text.splitlines()]


def _import_line(module: ModuleType, name: str) -> str:
    parent, _, last = module.__name__.rpartition(".")
    if not parent:
        return f"import {module.__name__}" + (f" as {name}" if name != module.__name__ else "")
    return f"from {parent} import {last}" + (f" as {name}" if name != last else "")


# --- What is the same in every script: running the operator whole and on ranks, and judging -------

LOADER = '''

def load():
    """The arguments, from the file beside this one (safetensors: a header, then the bytes)."""
    content = bytearray((Path(__file__).parent / "{name}").read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    dtypes = {{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
              "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
              "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
              "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
              "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}}
    found = {{}}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            dtype, shape = dtypes[entry["dtype"]], entry["shape"]
            if begin == end:
                found[name] = torch.empty(shape, dtype=dtype)
                continue
            raw = torch.frombuffer(content, dtype=torch.uint8, offset=begin, count=end - begin)
            found[name] = raw.clone().view(dtype).reshape(shape)
    return found'''

BODY = '''

def same(parts, full):
    """All ranks should have it: where they disagree, it is none of theirs."""
    first = parts[0]
    if not (first.is_floating_point() or first.is_complex()):
        unequal = torch.stack([part != first for part in parts]).any(dim=0)
        return first.double() + unequal
    if full:  # each rank sends back the gradient of the whole of it
        return first + sum(part - part.detach() for part in parts[1:])
    return sum(part * weight for part, weight in zip(parts, WEIGHTS))


def weighted(tensor, weight):
    """The tensor, whose gradient counts so much: gradients that agree come to just that."""
    return tensor.detach() + weight * (tensor - tensor.detach())


def flat(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if not isinstance(result, (list, tuple)):
        return []
    return [one for item in result for one in flat(item)]


def copied(value):
    """The operator may write to what it is given."""
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def called(given):
    """Call the operator; gives its results, and its arguments as they are afterwards."""
    mine = {place: copied(value) for place, value in given.items()}
    args = [mine[place] for place in sorted(place for place in mine if isinstance(place, int))]
    named = {place: value for place, value in mine.items() if isinstance(place, str)}
    return flat(compute(*args, **named)), mine


def run_whole(given, full):
    """On one device."""
    results, mine = called(given)
    found = {f"output[{at}]": result for at, result in enumerate(results)}
    return found | {
        f"{'kwargs' if isinstance(place, str) else 'args'}[{place!r}] after the call": mine[place]
        for place in WRITTEN
    }


def run_split(given, full):
    """On ranks, one after the other."""
    pairs = [called(mine) for mine in rank_arguments(given)]
    return together([results for results, _ in pairs], [mine for _, mine in pairs], full)


def observed(run, asked, claimed, wide):
    """Results and gradients under one random cotangent."""
    found = {}
    for targets, full in ((asked, False), (claimed, True)):
        given = arguments(wide)
        leaves = [
            (place, at, leaf.requires_grad_())
            for place in asked
            for at, leaf in enumerate(flat(given[place]))
            if leaf.is_floating_point() or leaf.is_complex()
        ]
        outputs = run(given, full)
        found = {name: value.detach() for name, value in outputs.items()} | found
        live = {name: value for name, value in outputs.items() if value.requires_grad}
        if not live or not targets:
            continue
        random = torch.Generator().manual_seed(1)
        sent = [
            torch.randn(value.shape, generator=random, dtype=torch.float64).to(value.dtype)
            for value in live.values()
        ]
        chosen = [(place, at, leaf) for place, at, leaf in leaves if place in targets]
        grads = torch.autograd.grad(
            list(live.values()), [leaf for *_, leaf in chosen], sent, allow_unused=True
        )
        for (place, at, leaf), grad in zip(chosen, grads):
            found[f"gradient of {place!r}[{at}]"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def loss(found):
    """The sum of all results."""
    return sum(
        value.double().sum().item()
        for name, value in found.items()
        if name.startswith("output") and value.is_floating_point()
    )


def differences(whole, split):
    """Element by element; where one of them is no number and the other is, it is infinite."""
    wide = torch.complex128 if whole.is_complex() or split.is_complex() else torch.float64
    whole, split = whole.to(wide), split.to(wide)
    found = (split - whole).abs()
    found[whole == split] = 0
    found[whole.isnan() & split.isnan()] = 0
    found[found.isnan()] = float("inf")
    return found


def place_of(worst, shape):
    """The index of an element, given its number."""
    index = []
    for size in reversed(shape):
        worst, here = divmod(worst, size)
        index.insert(0, here)
    return index
'''

JUDGING = '''
def is_wrong(name, whole, split, exact):
    """In float64 rounding is some 1e-16 of the largest element."""
    if whole.shape != split.shape:
        print(f"{name}: shape {list(split.shape)} instead of {list(whole.shape)}")
        return True
    if not whole.numel():
        return False
    found = differences(whole, split)
    worst = found.argmax().item()
    largest = whole.abs().double().nan_to_num(0, 0, 0).max().item()
    wrong = not found.max().item() <= 1e-9 * largest
    print(f"{name}: {'WRONG' if wrong else 'right'}; most at {place_of(worst, whole.shape)}: "
          f"{split.flatten()[worst].item()} instead of {whole.flatten()[worst].item()}")
    return wrong
'''

JUDGING_NATIVE = '''
def is_wrong(name, whole, split, exact):
    """By the error of each to float64: the split may err some times as much as the whole does."""
    if whole.shape != split.shape:
        print(f"{name}: shape {list(split.shape)} instead of {list(whole.shape)}")
        return True
    if not whole.numel():
        return False
    own, found = differences(exact, whole).max().item(), differences(exact, split)
    worst = found.argmax().item()
    largest = exact.abs().double().nan_to_num(0, 0, 0).max().item()
    rounding = torch.finfo(whole.dtype).eps * largest if whole.is_floating_point() else 0
    wrong = not found.max().item() <= 4 * own + rounding
    print(f"{name}: {'WRONG' if wrong else 'right'}; most at {place_of(worst, whole.shape)}: "
          f"{split.flatten()[worst].item()} instead of {exact.flatten()[worst].item()} "
          f"(the whole errs by {own:.3g})")
    return wrong
'''

MAIN = """
def main():
    asked, claimed = {asked!r}, {claimed!r}
    wide = DTYPE is not None
    try:
        whole = observed(run_whole, asked, claimed, wide)
        exact = whole if wide else observed(run_whole, asked, claimed, True)
    except Exception as error:
        print(f"the operator itself fails, unsplit: {{type(error).__name__}}: {{error}}")
        return 3
    try:
        split = observed(run_split, asked, claimed, wide)
    except Exception as error:
        print(f"the ranks fail where the whole does not: {{type(error).__name__}}: {{error}}")
        print("the fault is there")
        return 1
    print(f"loss on one device:   {{loss(whole)!r}}")
    print(f"loss on {{RANKS}} devices:   {{loss(split)!r}}")
    wrong = [is_wrong(name, value, split[name], exact[name]) for name, value in whole.items()]
    print("the fault is there" if any(wrong) else "no fault is seen")
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())"""


# --- The text of a script that shows a failure: the operator whole, and split with every step -----

# Nothing of paritas is in it. What each rank is given, and how the results become one, stands there
# line by line, so that a reader sees the rule that is wrong.

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """One failure, with all that a script tells of it and does.

    Attributes:
        operator: as the graph names it.
        call: the operator and its arguments.
        recipe: how it was split.
        ranks: over how many ranks.
        heading: what the script says of itself, line by line.
        written: arguments that the operator writes to.
        native: in the dtypes of the call; otherwise in float64, where rounding excuses nothing.
        stored: name of the file that holds the arguments; empty if they are drawn.
        seed: of what is drawn.
        imports: modules of yours that bring operators.
    """

    operator: str
    call: OperatorCall
    recipe: Recipe
    ranks: int
    heading: tuple[str, ...]
    written: tuple[Place, ...] = ()
    native: bool = False
    stored: str = ""
    seed: int = 0
    imports: tuple[str, ...] = ()

    @property
    def values(self) -> dict[Place, Any]:
        """Arguments by position and by name."""
        return dict([*enumerate(self.call.args), *self.call.kwargs.items()])


def script_text(facts: Facts) -> str:
    """The whole script.

    Raises:
        NoScriptError: an argument, the function or the rule cannot be written so.
    """
    lines, module = function_text(facts.operator, facts.call.function, facts.imports)
    needs = ["", f"It imports {module}: run it where that can be found."] if module else []
    heading = "\n".join((*facts.heading, *needs)).replace("\\", "\\\\").replace('"""', "'''")
    path = ['sys.path.insert(0, "")'] if module else []
    parts = [
        f'"""{heading}\n"""',
        "",
        *(["import json", "import struct"] if facts.stored else []),
        "import sys",
        *(["from pathlib import Path"] if facts.stored else []),
        "",
        "import torch",
        "",
        *path,
        *lines,
        "",
        f"RANKS = {facts.ranks}",
        f"DTYPE = {_dtype_words(facts)}",
        *(LOADER.format(name=facts.stored).splitlines() if facts.stored else []),
        "",
        "",
        *_write_arguments(facts),
        "",
        "",
        *_write_ranks(facts),
        "",
        "",
        *_write_together(facts),
        BODY,
        JUDGING_NATIVE if facts.native else JUDGING,
        MAIN.format(
            asked=_places_with_gradient(facts), claimed=_places_with_claimed_gradient(facts)
        ),
    ]
    return "\n".join(parts) + "\n"


def _dtype_words(facts: Facts) -> str:
    return "None  # as the arguments are" if facts.native else "torch.float64"


# --- what the operator is given -------------------------------------------------------------------


def _write_arguments(facts: Facts) -> Iterator[str]:
    yield "def arguments(wide):"
    yield '    """What the operator is given, by position and by name."""'
    if facts.stored:
        yield "    stored = load()"
    else:
        yield f"    generator = torch.Generator().manual_seed({facts.seed})"
    yield "    given = {}"
    seen: dict[int, str] = {}
    for place, value in facts.values.items():
        yield f"    given[{place!r}] = {_argument_text(facts, value, place, seen)}"
    yield "    return {place: lifted(value, wide) for place, value in given.items()}"
    yield ""
    yield ""
    yield "def lifted(value, wide):"
    yield "    if isinstance(value, (list, tuple)):"
    yield "        return type(value)(lifted(item, wide) for item in value)"
    yield "    if isinstance(value, torch.dtype):"
    yield "        return WIDE.get(value, value) if wide else value"
    yield "    if not isinstance(value, torch.Tensor) or not wide:"
    yield "        return value"
    yield "    return value.to(WIDE.get(value.dtype, value.dtype))"
    yield ""
    yield ""
    yield "WIDE = {"
    for narrow, wide in _WIDE.items():
        yield f"    {narrow}: {wide},"
    yield "}"


def _argument_text(facts: Facts, value: Any, place: Place, seen: dict[int, str]) -> str:
    if not tensors_in(value):
        return literal(value)
    return _tensor_text(facts, value, name_of(place), f"given[{place!r}]", seen)


def _tensor_text(facts: Facts, value: Any, name: str, here: str, seen: dict[int, str]) -> str:
    if isinstance(value, list | tuple):
        items = [
            _tensor_text(facts, item, f"{name}[{at}]", "", seen) for at, item in enumerate(value)
        ]
        inside = ", ".join(items)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)"
    if not isinstance(value, torch.Tensor):
        return literal(value)
    if id(value) in seen:  # the same tensor twice
        return f"{seen[id(value)]}.clone()"
    if here:
        seen[id(value)] = here
    if facts.stored:
        return taken_back(f"stored[{name!r}]", value.dtype)
    return drawn(value, value.dtype)


def _places_with_gradient(facts: Facts) -> tuple[Place, ...]:
    """Arguments of which a gradient is asked."""
    return tuple(
        place
        for place, value in facts.values.items()
        if place not in facts.call.without_gradient
        and any(one.is_floating_point() or one.is_complex() for one in tensors_in(value))
    )


def _places_with_claimed_gradient(facts: Facts) -> tuple[Place, ...]:
    """Of these, those whose gradient each rank claims to have already."""
    found = []
    for place in _places_with_gradient(facts):
        placement = facts.recipe.placement(place)
        if isinstance(placement, Replicate) and not placement.summed:
            found.append(place)
    return tuple(found)


# --- what each rank is given ----------------------------------------------------------------------


def _write_ranks(facts: Facts) -> Iterator[str]:
    yield "def rank_arguments(given):"
    yield '    """What each of the ranks is given."""'
    yield "    ranks = [dict(given) for _ in range(RANKS)]"
    for place, placement in facts.recipe.inputs:
        value = facts.values[place]
        if not tensors_in(value) or placement in (Replicate(), Replicate(own=True)):
            continue
        yield f"    # {name_of(place)}: {_placement_words(placement)}"
        for rank in range(facts.ranks):
            part = _part_text(value, placement, f"given[{place!r}]", rank, facts.ranks)
            yield f"    ranks[{rank}][{place!r}] = {part}"
    yield from _write_numbers(facts)
    yield "    return ranks"


def _write_numbers(facts: Facts) -> Iterator[str]:
    """Arguments that go with the split, as each rank has them."""
    if facts.recipe.exchanges:
        raise NoScriptError("ranks that exchange something are not written into scripts")
    places = [place for place, _ in facts.recipe.numbers]
    if not places:
        return
    # Drawn terms of partial arguments are of no interest here.
    each = split_values(facts.values, facts.recipe, facts.ranks, Terms(facts.seed, lifted=False))
    for place in places:
        yield f"    # {name_of(place)} goes with the split"
        for rank, mine in enumerate(each):
            yield f"    ranks[{rank}][{place!r}] = {literal(mine[place])}"


def _placement_words(placement: Any) -> str:
    match placement:
        case Shard(dim=dim, unit=1, halo=(0, 0)):
            return f"split along dimension {dim}"
        case Shard(dim=dim, unit=unit, halo=halo):
            return f"split along dimension {dim}, in units of {unit}, with a halo of {halo}"
        case Replicate():
            return "whole on each rank, whose gradient is claimed to be the whole's"
        case Once():
            return "one rank has it, the others zeros"
        case _:
            return f"each rank has a term of its {placement.reduction}"


def _part_text(value: Any, placement: Any, path: str, rank: int, ranks: int) -> str:
    if isinstance(value, list | tuple):
        items = [
            _part_text(one, placement, f"{path}[{at}]", rank, ranks) for at, one in enumerate(value)
        ]
        inside = ", ".join(items)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
    if not isinstance(value, torch.Tensor):
        return path
    match placement:
        case Shard(dim=dim, unit=unit, halo=(before, after)):
            axis = dim % max(value.dim(), 1)
            size = value.shape[axis]
            begin, end = bounds(size, unit, ranks, path)[rank]
            begin, end = max(0, begin - before), min(size, end + after)
            return f"{path}.narrow({axis}, {begin}, {end - begin})"
        case Replicate():
            return f"weighted({path}, {_rank_weights(ranks)[rank]})"
        case Once():
            return path if rank == 0 else f"torch.zeros_like({path})"
        case Partial(reduction="sum" | "avg"):
            by = 1 if placement.reduction == "sum" else ranks
            return f"{path} * {_rank_weights(ranks)[rank] * by}"
    raise NoScriptError(f"terms of a {placement.reduction} are not written into scripts")


def _rank_weights(ranks: int) -> list[float]:
    """Unlike one another, of both signs; their sum is 1."""
    rest = [-0.5 if rank % 2 else 0.25 for rank in range(1, ranks)]
    return [1 - sum(rest), *rest]


# --- how the results become one -------------------------------------------------------------------


def _write_together(facts: Facts) -> Iterator[str]:
    yield "def together(results, written, full):"
    yield '    """What the results of the ranks are, put together as the rule says."""'
    yield f"    if any(len(result) != {len(facts.recipe.outputs)} for result in results):"
    told = f"the rule tells of {len(facts.recipe.outputs)} results"
    yield f'        raise ValueError("{told}, a rank gives " + str(len(results[0])))'
    yield "    found = {}"
    for at, combine in enumerate(facts.recipe.outputs):
        parts = f"[result[{at}] for result in results]"
        yield f"    found['output[{at}]'] = {_combine_text(combine, parts)}"
    for place in facts.written:
        rule = _written_rule(facts.recipe.placement(place))
        if rule is not None:
            parts = f"[mine[{place!r}] for mine in written]"
            written = name_of(place) + " after the call"
            yield f"    found[{written!r}] = {_combine_text(rule, parts)}"
    yield "    return found"
    yield ""
    yield ""
    yield f"WEIGHTS = {_rank_weights(facts.ranks)}  # their sum is 1"
    yield f"WRITTEN = {facts.written!r}"


def _combine_text(combine: Role, parts: str) -> str:
    match combine:
        case Shard(dim=dim):
            return f"torch.cat({parts}, dim={dim})"
        case Partial(reduction="sum"):
            return f"torch.stack({parts}).sum(dim=0)"
        case Partial(reduction="avg"):
            return f"torch.stack({parts}).mean(dim=0)"
        case Partial(reduction="product"):
            return f"torch.stack({parts}).prod(dim=0)"
        case Partial(reduction=reduction):
            return f"torch.stack({parts}).a{reduction}(dim=0)"
        case _:
            return f"same({parts}, full)"


def _written_rule(placement: Any) -> Role | None:
    match placement:
        case Shard(dim=dim, halo=(0, 0)):
            return Shard(dim)
        case Replicate(own=False):
            return Replicate()
    return None
