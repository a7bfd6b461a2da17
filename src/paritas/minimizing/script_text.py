"""The parts of a standalone script that are the same in all of them: how it judges itself."""

from __future__ import annotations

__all__ = ["CHECK", "MAIN"]

# Plain torch on purpose: a bug report must not ask its reader to install anything.
CHECK = '''

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

MAIN = """

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
