"""The smallest case that still fails, and a script that shows it with torch alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.execution.computable import as_computable, is_number, stored_as
from paritas.core.execution.observation import input_tensors
from paritas.core.execution.similar_inputs import as_leaf
from paritas.core.reporting.scripts import Script, ScriptValues, literal
from paritas.kernels.cases import dimension_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.kernels.cases import KernelCase
    from paritas.kernels.messages import SideName

_MOST_TRIES = 40


def smallest_failing(case: KernelCase, fails: Callable[[KernelCase], bool]) -> KernelCase:
    """Make the inputs of a failing case as small, and their values as plain, as possible.

    `fails` says whether the reference accepts a case and the candidate still fails it.
    """
    tries = 0

    def try_(smaller: KernelCase | None) -> bool:
        nonlocal tries, case
        if smaller is None or tries >= _MOST_TRIES:
            return False
        tries += 1
        if fails(smaller):
            case = smaller
            return True
        return False

    improved = True
    while improved:
        improved = False
        for group in dimension_groups(dict(input_tensors(case.inputs))):
            _, size, places = group
            for new in _smaller_sizes(size):
                if try_(_narrow_case(case, places, new)):
                    improved = True
                    break
            if improved:
                break
    for change in (torch.Tensor.sign, lambda t: t.round(), lambda t: (t * 8).round() / 8):
        if try_(_simplify_case(case, change)):
            break
    return case


def _smaller_sizes(size: int) -> Iterator[int]:
    if size > 1:
        yield from dict.fromkeys((1, size // 4, size // 2, size - 1))


def _narrow_case(
    case: KernelCase, places: frozenset[tuple[str, int]], size: int
) -> KernelCase | None:
    """The first `size` elements along some dimensions; strides stay as they are."""
    if size < 1:
        return None
    paths = {id(tensor): path for path, tensor in input_tensors(case.inputs)}

    def narrow(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            for dim in range(leaf.dim()):
                if (paths[id(leaf)], dim) in places:
                    leaf = _remember(leaf.narrow(dim, 0, size), leaf, paths)
        return leaf

    return _with(case, narrow)


def _remember(new: Tensor, old: Tensor, paths: dict[int, str]) -> Tensor:
    paths[id(new)] = paths[id(old)]
    return new


def _simplify_case(case: KernelCase, change: Callable[[Tensor], Tensor]) -> KernelCase | None:
    def simplify(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not is_number(leaf.dtype):
            return leaf
        wide = as_computable(leaf.detach())
        if not bool(torch.isfinite(wide).all()):
            return leaf
        simplified = torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
        )
        return simplified.copy_(stored_as(change(wide), leaf.dtype))

    return _with(case, simplify)


def _with(case: KernelCase, change: Callable[[Any], Any]) -> KernelCase:
    def change_leaf(leaf: Any) -> Any:
        new = change(leaf)
        is_tensor = isinstance(leaf, torch.Tensor)
        return as_leaf(new, requires_grad=leaf.requires_grad) if is_tensor else new

    return dataclasses.replace(case, inputs=case.inputs.map_leaves(change_leaf), reuse="")


# --- The script -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailingCase:
    """What a script needs.

    Attributes:
        case: the failing case.
        reference: where the reference is.
        candidate: where the candidate is.
        init: what modules are constructed with.
        state: the reference's parameters and buffers in this case.
        names: the candidate's name of a parameter -> the reference's.
        seed: of the construction.
        reason: what was found.
        gradients: whether gradients were compared, too.
    """

    case: KernelCase
    reference: SideName
    candidate: SideName
    init: tuple[tuple[Any, ...], dict[str, Any]]
    state: Mapping[str, Tensor]
    names: Mapping[str, str]
    seed: int
    reason: str
    gradients: bool = False


def case_script(failing: FailingCase) -> Script:
    """The script of a failing case.

    Raises:
        NoScriptError: an argument cannot be written as code.
    """
    case, names = failing.case, failing.names
    values = ScriptValues()
    input_texts = [
        _input_text(values, f"input {n}", argument, n)
        for n, argument in enumerate(case.inputs.args)
    ]
    named = [
        f"{literal(name)}: {_input_text(values, name, argument, 50 + n)}"
        for n, (name, argument) in enumerate(case.inputs.kwargs.items())
    ]
    weights = []
    if case.weights:
        for weight_index, (candidate_name, reference_name) in enumerate(names.items()):
            value = failing.state[reference_name].detach()
            text = _input_text(values, f"weight {candidate_name}", value, 90 + weight_index)
            weights.append(f"    {literal(candidate_name)}: {text},")
    lines = [
        "",
        _FIND,
        f"REFERENCE = {_side_text(failing.reference)}",
        f"CANDIDATE = {_side_text(failing.candidate)}",
        f"SEED = {failing.seed + case.construction}",
        f"INIT = {literal(tuple(failing.init[0]))}, {literal(failing.init[1])}",
        f"NAMES = {dict(names)!r}  # of the candidate's parameters -> the reference's",
        "",
        "",
        "def inputs():",
        *(["    stored = load()"] if values.stored else []),
        f"    return ({''.join(f'{text}, ' for text in input_texts)}), {{{', '.join(named)}}}",
        "",
        "",
        "def weights():",
        *(["    stored = load()"] if values.stored else []),
        "    return {",
        *("    " + line for line in weights),
        "    }",
        "",
        "",
        _MAKE.format(
            train=case.train,
            dtype=f"torch.{case.dtype}" if case.dtype else "None",
            device=next((str(tensor.device) for _, tensor in input_tensors(case.inputs)), "cpu"),
        ),
    ]
    heading = (
        f"{failing.candidate.shown} does not compute what {failing.reference.shown} computes.",
        "",
        f"Case: {case.name}; {case.shapes}.",
        f"Found: {failing.reason}",
    )
    return Script(
        heading=heading,
        imports=("import importlib", "import importlib.util", "from pathlib import Path"),
        values=values.stored,
        function="\n".join(lines),
        run=_RUN_WITH_GRADIENTS if failing.gradients else _RUN,
        sides=("reference", "candidate"),
    )


def _side_text(name: SideName) -> str:
    return literal((name.file, name.module, name.name))


def _input_text(values: ScriptValues, name: str, value: Any, position: int) -> str:
    if not isinstance(value, torch.Tensor):
        return literal(value)
    if value.requires_grad:
        return f"{_input_text(values, name, value.detach(), position)}.requires_grad_()"
    repeated = [n for n, step in enumerate(value.stride()) if step == 0 and value.shape[n] > 1]
    if repeated:
        single = value.detach()
        for dim in repeated:
            single = single.narrow(dim, 0, 1)
        return f"{_input_text(values, name, single, position)}.expand({tuple(value.shape)})"
    text = values.text(name, value.detach().contiguous(), position)
    if value.is_contiguous():
        return text
    strides = literal(tuple(value.stride()))
    return (
        f"torch.empty_strided({tuple(value.shape)}, {strides}, dtype={value.dtype}, "
        f"device={str(value.device)!r}).copy_({text})"
    )


_FIND = '''

def find(side, usual):
    """The function or class of a side: from a file, a module, or torch's operators."""
    file, module, name = side
    if file:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        home = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(file).parent))
        sys.modules.setdefault(spec.name, home)
        spec.loader.exec_module(home)
    elif module:
        home = importlib.import_module(module)
    else:
        home = torch.ops
        name = name.removeprefix("torch.ops.")
    for part in (name or next(one for one in usual if hasattr(home, one))).split("."):
        home = getattr(home, part)
    return home

'''

_MAKE = '''def make(side, usual, names):
    """What is called."""
    found = find(side, usual)
    if not isinstance(found, type):
        return found
    torch.manual_seed(SEED)
    module = found(*INIT[0], **INIT[1]).to({device!r})
    if {dtype} is not None:
        module = module.to({dtype})
    if {train} is not None:
        module.train({train})
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in weights().items():
            own[names.get(name, name)].copy_(value)
    return module
'''

_RUN_WITH_GRADIENTS = '''

def called(side, usual, weights, labels):
    """The outputs of a side, and the gradients of what requires them."""
    args, kwargs = inputs()
    call = make(side, usual, weights)
    outputs = flat(call(*args, **kwargs))
    found = {f"output {n}": one.detach() for n, one in enumerate(outputs)}
    given = [one for one in flat([args, kwargs]) if one.requires_grad]
    targets = {f"gradient of input {n}": one for n, one in enumerate(given)}
    if isinstance(call, torch.nn.Module):
        for name, one in call.named_parameters():
            if one.requires_grad:
                targets[f"gradient of {labels.get(name, name)}"] = one
    tops = [one for one in outputs if one.requires_grad]
    chance = torch.Generator().manual_seed(0)
    above = [torch.randn(one.shape, generator=chance).to(one) for one in tops]
    if tops and targets:
        each = torch.autograd.grad(tops, list(targets.values()), above, allow_unused=True)
        found |= {name: one for name, one in zip(targets, each) if one is not None}
    return found


def main():
    """Call both, differentiate both, and compare."""
    expected = called(REFERENCE, ["Model"], NAMES, {})
    try:
        found = called(CANDIDATE, ["ModelNew", "Model"], {}, NAMES)
    except Exception as error:
        print(f"the candidate raises {type(error).__name__}: {error}")
        found = {}
    return judged(expected, found, {})
'''

_RUN = '''

def main():
    """Call both, and compare."""
    with torch.no_grad():
        args, kwargs = inputs()
        expected = flat(make(REFERENCE, ["Model"], NAMES)(*args, **kwargs))
        args, kwargs = inputs()
        try:
            found = flat(make(CANDIDATE, ["ModelNew", "Model"], {})(*args, **kwargs))
        except Exception as error:
            print(f"the candidate raises {type(error).__name__}: {error}")
            found = []
    named = {f"output {n}": one for n, one in enumerate(expected)}
    return judged(named, {f"output {n}": one for n, one in enumerate(found)}, {})
'''
