"""Other right ways to compute a model, in plain torch: what its noise is, without paritas.

Each way is a context manager. Under it a model or a traced graph, forward and backward, computes
the same function with other roundings. Eager is one right program among many: in some of a hundred
gradients it happens to be accurate. The noise of an item is the largest error of all ways.
"""

from __future__ import annotations

import math

import torch
from benchmarks.zoo import truth
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251  (other kernels)

aten = torch.ops.aten
_NARROW = {torch.bfloat16, torch.float16, torch.float32}
# A product or sum is added term by term, unless that takes more than so many additions.
_MOST_ADDITIONS = 200_000_000
# It has at least so many parts then.
_LEAST_PARTS = 256


class Reversed(TorchDispatchMode):
    """Products and sums in reverse order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in {aten.mm.default, aten.bmm.default}:
            return func(args[0].flip(-1).contiguous(), args[1].flip(-2).contiguous())
        if func is aten.addmm.default:
            left, right = args[1].flip(1).contiguous(), args[2].flip(0).contiguous()
            return func(args[0], left, right, *args[3:], **kwargs)
        if func in {aten.sum.dim_IntList, aten.mean.dim} and args[1]:
            return func(args[0].flip(args[1]), *args[1:], **kwargs)
        return func(*args, **kwargs)


class InParts(TorchDispatchMode):
    """Products and convolutions in four parts, added in float32, and sums term by term."""

    def parts(self, results, terms):
        """The number of parts of so many results of so many terms."""
        return min(4, terms)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], torch.Tensor) and args[0].dtype in _NARROW):
            return func(*args, **kwargs)
        if func in {aten.mm.default, aten.bmm.default}:
            return self._product(*args).to(args[0].dtype)
        if func is aten.addmm.default and not kwargs:
            return (self._product(*args[1:]) + args[0].float()).to(args[1].dtype)
        if func is aten.sum.dim_IntList and args[1]:
            return _term_by_term(args[0], args[1], len(args) > 2 and args[2], kwargs.get("dtype"))
        if func is aten.convolution.default and _is_plain(args[1], *args[6:]):
            return self._convolve(*args[:6])
        if func is aten.convolution_backward.default and _is_plain(args[2], *args[7:10]):
            return self._convolve_backward(*args[:7], args[10])
        return func(*args, **kwargs)

    def _convolve(self, x, weight, bias, stride, padding, dilation):
        steps = {"stride": stride, "padding": padding, "dilation": dilation}
        columns = functional.unfold(x.float(), weight.shape[2:], **steps)
        shape = aten.convolution(
            x.to("meta"), weight.to("meta"), None, stride, padding, dilation, False, [0, 0], 1
        ).shape
        result = self._product(weight.flatten(1), columns).reshape(shape)
        result = result if bias is None else result + bias.float()[:, None, None]
        return result.to(x.dtype)

    def _convolve_backward(self, grad, x, weight, _, stride, padding, dilation, wanted):
        steps = {"stride": stride, "padding": padding, "dilation": dilation}
        size, found = weight.shape[2:], [None, None, None]
        rows = grad.flatten(2)
        if wanted[0]:
            columns = self._product(weight.flatten(1).mT, rows)
            found[0] = functional.fold(columns, x.shape[2:], size, **steps).to(x.dtype)
        if wanted[1]:
            columns = functional.unfold(x.float(), size, **steps).transpose(0, 1).flatten(1)
            total = self._product(rows.transpose(0, 1).flatten(1), columns.mT)
            found[1] = total.reshape(weight.shape).to(x.dtype)
        if wanted[2]:
            found[2] = _term_by_term(rows, [0, 2], False, None)
        return tuple(found)

    def _product(self, left, right):
        shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        results = math.prod(shape) * left.shape[-2] * right.shape[-1]
        parts = self.parts(results, left.shape[-1])
        pairs = zip(left.float().chunk(parts, -1), right.float().chunk(parts, -2), strict=True)
        return _added(a @ b if a.shape[-1] > 1 else a * b for a, b in pairs)


def _is_plain(weight, transposed, _, groups):
    """Whether it is a convolution of images, neither transposed nor in groups."""
    return weight.dim() == 4 and not transposed and groups == 1


class TermByTerm(InParts):
    """Products and sums one term after the other, in float32."""

    def parts(self, results, terms):
        """One for each term, as a loop of one thread adds them."""
        return _terms(results, terms)


def _terms(results, terms):
    """All terms, or as many parts as can be added in time."""
    return min(terms, max(_LEAST_PARTS, _MOST_ADDITIONS // max(1, results)))


def _added(parts):
    first, *others = parts
    total = first.clone()
    for other in others:
        total += other
    return total


def _term_by_term(value, dims, is_kept, dtype):
    dims = [dim % value.dim() for dim in dims]
    rest = [dim for dim in range(value.dim()) if dim not in dims]
    shape = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
    rows = value.float().permute(*dims, *rest).flatten(0, len(dims) - 1)
    total = _added(part.sum(0) for part in rows.chunk(_terms(rows[0].numel(), len(rows))))
    return (total.reshape(shape) if is_kept else total).to(dtype or value.dtype)


class Decomposed(TorchDispatchMode):
    """The operators that Inductor makes of these, run eagerly."""

    def __init__(self):
        super().__init__()
        from torch._inductor.decomposition import select_decomp_table  # noqa: TID251

        self.rules = select_decomp_table()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        rule = self.rules.get(func)
        found = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found


WAYS = {
    "reversed": Reversed, "in parts": InParts, "term by term": TermByTerm,
    "decomposed": Decomposed,
    # Convolutions and products of torch itself, not those of oneDNN.
    "without oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
}  # fmt: skip


def under(way, run):
    """`run`, in that way."""

    def call(*args, **kwargs):
        with WAYS[way]():
            return run(*args, **kwargs)

    return call


def noise(observe, exact, eager, least):
    """Item -> the largest relative error of eager and of all ways, and the ways that could not be.

    `observe(way)` gives what the model computes in that way.
    """
    found = {
        name: max(least, truth.relative_error(eager[name], true))
        for name, true in exact.items()
        if name in eager
    }
    failed = []
    for way in WAYS:
        try:
            seen = observe(way)
            errors = {name: truth.relative_error(seen[name], exact[name]) for name in found}
        except Exception as error:  # noqa: BLE001 - not every operator has every form
            failed.append(f"{way}: {type(error).__name__}: {error!s:.80}")
            continue
        found = {name: max(own, errors[name]) for name, own in found.items()}
    return found, failed
