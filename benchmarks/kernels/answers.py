"""What is true about a published kernel of a task, computed by hand: nothing of paritas is used.

A kernel of plain torch runs in float64, beside the task in float64. A kernel that is written for
one dtype runs in that dtype: its largest error against the task in float64 is counted in units of
the task's own, and of what the task makes of inputs and weights that are off by one rounding. On a
device, products may be rounded or cut to TF32, so a kernel with products has a second yardstick.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import sys

import torch

WRONG = 1e-6  # a relative distance in float64
FAULT = 16.0  # more times the rounding error than this is a fault, of a kernel in its own dtype
FEW_TIMES = 4.0  # where products are rounded to TF32: in the task itself, and one after another
FEW, MANY, NOISES = 5, 8, 6
MORE_THAN_ORDER = 1e-2  # what the order of a sum on a device cannot explain
FLOAT32, TF32 = 2.0**-23, 2.0**-10
PRODUCTS = re.compile(r"matmul|bmm|einsum|Linear|Conv| @ |torch\.mm|attention")


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton looks a function's module up by its name
    spec.loader.exec_module(module)
    return module


def made(home, name, init, seed=0, device="cpu"):
    torch.manual_seed(seed)
    return getattr(home, name)(*copy.deepcopy(init)).to(device)


def given(task, seed, device="cpu"):
    torch.manual_seed(seed)
    return [one.to(device) if torch.is_tensor(one) else one for one in task.get_inputs()]


def state_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def pairs_of(theirs, ours):
    """The names of parameters that are each other's, by name or by value; None if not all are."""
    own, pairs = state_of(ours), []
    for name, value in state_of(theirs).items():
        fits = [name] if name in own and own[name].shape == value.shape else []
        fits = fits or [other for other, one in own.items() if is_same(value, one)]
        if not fits:
            return None
        pairs.append((name, fits[0]))
    return pairs


def is_same(value, own):
    if own.numel() != value.numel():
        return False
    is_transpose = value.dim() == 2 and own.shape == value.T.shape and torch.equal(own, value.T)
    return is_transpose or torch.equal(own.reshape(-1), value.reshape(-1))


def set_others(theirs, ours, pairs):
    torch.manual_seed(7)
    state, own = state_of(theirs), state_of(ours)
    for name, other in pairs:
        value, fit = state[name], own[other]
        if value.is_floating_point():
            value.mul_(0.5 + torch.rand_like(value))
            is_transpose = fit.shape != value.shape and fit.shape == value.T.shape
            fit.copy_(value.T if is_transpose else value.reshape(fit.shape))


def changed_by(call, args):
    """Whether a call changes its inputs, or the result of the call before."""
    first = call(*args)
    kept = first.clone() if torch.is_tensor(first) else None
    before = copy.deepcopy(args)
    call(*args)
    other = [x + 1 if torch.is_tensor(x) and x.is_floating_point() else x for x in before]
    call(*other)
    writes = any(
        torch.is_tensor(a) and not torch.equal(a, b) for a, b in zip(args, before, strict=True)
    )
    return writes, kept is not None and not torch.equal(first, kept)


def breaches(task, kernel, init, device):
    """What the kernel writes to, and the task does not: its inputs, or earlier results."""
    theirs = changed_by(made(task, "Model", init, 42, device), given(task, 11, device))
    ours = changed_by(made(kernel, "ModelNew", init, 42, device), given(task, 11, device))
    named = zip(("inputs", "results"), ours, theirs, strict=True)
    return [what for what, mine, other in named if mine and not other]


def by_tolerance(task, kernel, init, device):
    """KernelBench's own answer: five draws, allclose with 1e-2, and with 1e-4."""
    passes = {"kernelbench": True, "kernelbench_1e-4": True}
    for seed in range(FEW):
        ours = made(kernel, "ModelNew", init, 42, device)
        theirs = made(task, "Model", init, 42, device)
        inputs = given(task, seed, device)
        expected, found = theirs(*copy.deepcopy(inputs)), ours(*copy.deepcopy(inputs))
        fits = torch.is_tensor(found) and expected.shape == found.shape
        for name, tolerance in zip(passes, (1e-2, 1e-4), strict=True):
            is_close = fits and torch.allclose(expected, found.to(expected), tolerance, tolerance)
            passes[name] &= bool(is_close)
    return passes


@torch.no_grad()
def asked_of_both(task, kernel, *, plain, device="cpu", source=""):
    """KernelBench's own answer, and what is true, by what was changed."""
    init = task.get_init_inputs() if hasattr(task, "get_init_inputs") else []
    answers = by_tolerance(task, kernel, init, device)
    shown = {}
    ask = distance_in_float64 if plain else own_error
    for change in ("nothing", "weights", "evaluation") if plain else CHANGES:
        try:
            shown[change] = ask(change, task, kernel, init, device)
        except Exception as error:  # noqa: BLE001  (the row says so)
            shown[change] = f"raises {type(error).__name__}: {error}"[:160]
    try:
        shown["breaches"] = breaches(task, kernel, init, device)
    except Exception as error:  # noqa: BLE001  (the row says so)
        shown["breaches"] = f"raises {type(error).__name__}: {error}"[:160]
    return {**answers, "truth": shown, "products": bool(PRODUCTS.search(source))}


def is_wrong(row):
    """Whether a kernel computes something else, keeps old weights, or writes where it must not."""
    found = row["truth"]
    if str(found.get("weights", "")).startswith("folded") or found["breaches"]:
        return True
    return any(is_off(one, row["products"]) for one in found.values() if not isinstance(one, list))


def is_off(one, products):
    if isinstance(one, str):
        return not one.startswith("the task")
    if isinstance(one, float):
        return not one <= WRONG
    if products:
        allowed = max(FAULT * one["noise"], FEW_TIMES * one["task"], FEW_TIMES * one["tf32"])
        return not one["kernel"] <= allowed
    return not one["kernel"] <= FAULT * max(one["task"], one["noise"])


# --- Kernels of plain torch: in float64 -----------------------------------------------------------


def distance_in_float64(change, task, kernel, init, device):
    ours = made(kernel, "ModelNew", init, 42, device)
    theirs = made(task, "Model", init, 42, device)
    pairs = pairs_of(theirs, ours)
    ours, theirs = ours.double(), theirs.double()
    if change == "evaluation":
        ours.eval()
        theirs.eval()
    inputs = [wide(one) for one in given(task, 11, device)]
    if change == "weights":
        if pairs is None:
            return "folded: some parameters have no counterpart"
        if not pairs:
            return 0.0
        theirs(*copy.deepcopy(inputs))
        ours(*copy.deepcopy(inputs))
        set_others(theirs, ours, pairs)
    expected = theirs(*copy.deepcopy(inputs))
    return distance(expected, ours(*copy.deepcopy(inputs)))


def wide(value):
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def distance(left, right):
    """The relative L2 distance of two results; infinity if they cannot be compared."""
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=True)
        return max((distance(a, b) for a, b in pairs), default=0.0)
    if not torch.is_tensor(right) or left.shape != right.shape:
        return float("inf")
    left, right = left.detach().double(), right.detach().double()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return float("inf")
    here = left.isfinite()
    scale = left[here].norm().item()
    return (left - right)[here].norm().item() / (scale or 1.0)


# --- Other kernels: in their own dtype, by the size of rounding errors ----------------------------


def signed(value):
    return torch.randn_like(value)


def one_hot(value):
    flat = torch.zeros_like(value).reshape(-1)
    flat[value.numel() // 2] = 1
    return flat.reshape(value.shape)


CHANGES = {
    "nothing": None,
    "signs": signed,
    "large": lambda value: 100 * signed(value),
    "far": lambda value: value + 1000,
    "tiny": lambda value: 2.0**-20 * signed(value),
    "one-hot": one_hot,
    "weights": None,
    "evaluation": None,
}


def own_error(change, task, kernel, init, device):
    """The largest errors of the kernel and of the task, and what rounding makes of the task."""
    ours = made(kernel, "ModelNew", init, 42, device)
    theirs = made(task, "Model", init, 42, device)
    pairs = pairs_of(theirs, ours)
    if change == "evaluation":
        ours.eval()
        theirs.eval()
    if change == "weights":
        if pairs is None:
            return "folded: some parameters have no counterpart"
        ours(*given(task, 11, device))
        theirs(*given(task, 11, device))
        set_others(theirs, ours, pairs)
    worst = None
    for seed in range(MANY if change == "nothing" else 2):
        inputs = given(task, 100 + seed, device)
        if CHANGES[change] is not None:
            inputs = [CHANGES[change](one) if is_float(one) else one for one in inputs]
        found = errors_of(ours, theirs, inputs, pairs or [])
        if isinstance(found, str):
            return found
        if worst is None or found["kernel"] > worst["kernel"]:
            worst = found
    return worst


def is_float(value):
    return torch.is_tensor(value) and value.is_floating_point()


def errors_of(ours, theirs, inputs, pairs):
    start = copy.deepcopy(theirs)  # some count their calls, or average what they saw
    buffers = [pair for pair in pairs if pair[0] in dict(theirs.named_buffers())]
    own = [name for _, name in buffers]

    def run(module, inputs, names=tuple(name for name, _ in buffers)):
        """What a module returns, and its buffers afterwards."""
        found = tensors(module(*inputs))
        return [*found, *(state_of(module)[name] for name in names)]

    try:
        again = run(copy.deepcopy(start), copy.deepcopy(inputs))
        narrow = run(theirs, copy.deepcopy(inputs))
    except Exception as error:  # noqa: BLE001  (then nothing is asked of the kernel)
        return f"the task raises {type(error).__name__}"
    if largest(narrow, again) > MORE_THAN_ORDER:
        return "the task draws random numbers"
    wides = [wide(one) for one in copy.deepcopy(inputs)]
    exact = run(copy.deepcopy(start).double(), wides)
    for (name, _), other in zip(buffers, own, strict=True):  # the calls before moved them
        state_of(ours)[other].copy_(state_of(start)[name].reshape(state_of(ours)[other].shape))
    found = run(ours, copy.deepcopy(inputs), own)
    errors = {"kernel": largest(exact, found, narrow), "task": largest(exact, narrow)}
    for key, changes in YARDSTICKS.items():
        runs = [run(off(start, one), [one(x) for x in wides]) for one in changes]
        errors[key] = max(largest(exact, one) for one in runs)
    return errors


def off(module, change):
    """A copy in float64 with changed parameters."""
    copied = copy.deepcopy(module).double()
    for value in copied.parameters():
        value.copy_(change(value))
    return copied


def jittered(unit):
    """Changes numbers by up to one rounding."""

    def change(value):
        return value * (1 + unit * (2 * torch.rand_like(value) - 1)) if is_float(value) else value

    return change


def truncated(value):
    """Cuts the digits off that TF32 does not have, as tensor cores do: all are too small then."""
    if not is_float(value):
        return value
    bits = value.float().view(torch.int32) & ~0x1FFF
    return bits.view(torch.float32).double()


YARDSTICKS = {
    "noise": [jittered(FLOAT32)] * NOISES,
    "tf32": [*([jittered(TF32)] * NOISES), truncated],
}


def tensors(result):
    return list(result) if isinstance(result, list | tuple) else [result]


def largest(exact, found, narrow=None):
    """The largest error in units of the root mean square of the exact values.

    With `narrow`, NaN and infinity must be where the task has them in its own dtype.
    """
    if len(found) != len(exact):
        return float("inf")
    errors = [0.0]
    for number, (value, mine) in enumerate(zip(exact, found, strict=True)):
        if not torch.is_tensor(mine) or mine.shape != value.shape:
            return float("inf")
        if not is_float(value):
            errors.append(0.0 if torch.equal(value, mine) else float("inf"))
            continue
        other, here = mine.double(), value.isfinite()
        if narrow is not None:
            here &= narrow[number].isfinite()
            if not other[here].isfinite().all():
                return float("inf")
        here &= other.isfinite()
        if here.any():
            scale = value[here].square().mean().sqrt().item() or 1.0
            error = (value - other)[here].abs().max().item()
            errors.append(error / scale)
            # One rounding of the result itself.
            errors.append(FLOAT32 / 2 * value[here].abs().max().item() / scale)
    return max(errors)
