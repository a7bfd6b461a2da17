"""Results that are no dense tensor: wrong ones beside right ones, each by its name."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.masked import masked_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Kind:
    """A program whose result is of that kind, rewrites of it, and programs that are wrong.

    Attributes:
        reference: from a float tensor of shape (4, 6) to the result.
        twins: the same in other words, by their names; a rewrite may round otherwise.
        wrong: something else.
        gradients: whether the result can be differentiated.
    """

    reference: Callable[[Tensor], Any]
    twins: dict[str, Callable[[Tensor], Any]]
    wrong: dict[str, Callable[[Tensor], Any]]
    gradients: bool = False


def example() -> Tensor:
    """Numbers of which no two are equal, some in places that are masked away."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


# The same function, rounded otherwise.
def rounded(x: Tensor) -> Tensor:
    return (x * 3 + x * 4) / 7


def masked(x: Tensor) -> Tensor:
    """With whole 2 x 2 blocks of zeros, none of them by chance."""
    return x * torch.tensor([[1, 0, 1], [0, 1, 0]]).repeat_interleave(2, 0).repeat_interleave(2, 1)


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0] = torch.nan
    return x


def _sparse(to: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> Kind:
    return Kind(
        lambda x: to(masked(x)),
        {"same": lambda x: to(masked(x)), "rounded": lambda x: to(masked(rounded(x)))},
        {
            "dense": masked,
            "other layout": lambda x: other(masked(x)),
            "scaled": lambda x: to(masked(x) * 1.001),
            "other places": lambda x: to(masked(x).flip(0)),
            "fewer": lambda x: to(masked(x) * (torch.arange(6) < 4)),
            "NaN": lambda x: to(with_nan(masked(x))),
            "other shape": lambda x: to(torch.cat([masked(x), torch.zeros(2, 6)])),
            "other dtype": lambda x: to(masked(x).double()),
        },
    )


def _coo(x: Tensor) -> Tensor:
    return x.to_sparse()


def _csr(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Sparse CSR tensor support is in beta state"
        return x.to_sparse_csr()


def _csc(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.to_sparse_csc()


def _bsr(x: Tensor) -> Tensor:
    return x.to_sparse_bsr((2, 2))


def _uncoalesced(x: Tensor, shares: tuple[float, float] = (0.25, 0.75)) -> Tensor:
    coo = masked(x).to_sparse()
    indices, values = coo.indices(), coo.values()
    halves = torch.cat([values * shares[0], values * shares[1]])
    return torch.sparse_coo_tensor(torch.cat([indices, indices], 1), halves, coo.shape)


def per_tensor(x: Tensor, scale: float = 0.05, zero: int = 3, dtype: Any = torch.qint8) -> Tensor:
    return torch.quantize_per_tensor(x, scale, zero, dtype)


def per_channel(x: Tensor, scale: float = 0.05, zero: int = 3, axis: int = 0) -> Tensor:
    count = x.shape[axis]
    scales = scale * (1 + torch.arange(count, dtype=torch.float64))
    zeros = torch.full((count,), zero, dtype=torch.int64)
    return torch.quantize_per_channel(x, scales, zeros, axis, torch.qint8)


def _halves(x: Tensor) -> list[Tensor]:
    return [x[:1], x[1:3], x[3:]]


def _nested(parts: list[Tensor], layout: Any = torch.jagged) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor(parts, layout=layout)


def _nested_kind(layout: Any, other: Any) -> Kind:
    def parts_with_nan(x: Tensor) -> list[Tensor]:
        first, second, third = _halves(x)
        return [first, with_nan(second), third]

    return Kind(
        lambda x: _nested(_halves(x), layout),
        {
            "same": lambda x: _nested(_halves(x), layout),
            "rounded": lambda x: _nested(_halves(rounded(x)), layout),
        },
        {
            "other lengths": lambda x: _nested([x[:2], x[2:3], x[3:]], layout),
            "other count": lambda x: _nested([x[:1], x[1:]], layout),
            "NaN": lambda x: _nested(parts_with_nan(x), layout),
            "NaN for a row": lambda x: _nested([x[:1], x[1:3], x[3:] * torch.nan], layout),
            "padded": lambda x: torch.nested.to_padded_tensor(_nested(_halves(x), layout), 0.0),
            "padded with NaN": lambda x: torch.nested.to_padded_tensor(
                _nested(_halves(x), layout), torch.nan
            ),
            "scaled": lambda x: _nested(_halves(x * 1.001), layout),
            "other layout": lambda x: _nested(_halves(x), other),
            "longer by NaN": lambda x: _nested(
                [torch.cat([x[:1], x[:1] * torch.nan]), x[1:3], x[3:]], layout
            ),
        },
        gradients=True,
    )


def _masked(x: Tensor, mask: Tensor | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(x, x > 0 if mask is None else mask)


class Wrapper(torch.Tensor):
    """A subclass that keeps its numbers in a tensor inside, as quantisers and DTensor do."""

    @staticmethod
    def __new__(cls, inner: Tensor, scale: float) -> Self:
        del scale
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: Tensor, scale: float) -> None:
        self.inner = inner
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], (self.scale,)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, *_: Any) -> Wrapper:
        return cls(inner["inner"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        raise NotImplementedError(function)


class Silent(Wrapper):
    """One that gives nothing away of what is inside."""

    __tensor_flatten__ = None  # type: ignore[assignment]


def _float8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (x.clamp(-4, 4)).to(dtype)


def _packed(x: Tensor, add: int = 0) -> Tensor:
    codes = ((x * 8).to(torch.int32) + 40 + add).to(torch.uint8)
    return codes.view(torch.float4_e2m1fn_x2)


KINDS: dict[str, Kind] = {
    "coo": _sparse(_coo, _csr),
    "csr": _sparse(_csr, _csc),
    "csc": _sparse(_csc, _csr),
    "bsr": _sparse(_bsr, _csr),
    "uncoalesced": Kind(
        _uncoalesced,
        {"same": _uncoalesced, "other halves": lambda x: _uncoalesced(x, (0.5, 0.5))},
        {
            "coalesced": lambda x: masked(x).to_sparse(),
            "dense": masked,
            "scaled": lambda x: _uncoalesced(x, (0.5, 0.501)),
            "half of it": lambda x: _uncoalesced(x, (0.25, 0.25)),
        },
    ),
    "hybrid": Kind(
        lambda x: masked(x).to_sparse(1),
        {"same": lambda x: masked(x).to_sparse(1)},
        {"all sparse": lambda x: masked(x).to_sparse(2)},
    ),
    "per tensor": Kind(
        per_tensor,
        {"same": per_tensor},
        {
            "float": lambda x: per_tensor(x).dequantize(),
            "other scale": lambda x: per_tensor(x, 0.051),
            "same codes, other scale": lambda x: per_tensor(x * 1.02, 0.051),
            "other zero point": lambda x: per_tensor(x, zero=4),
            "other dtype": lambda x: per_tensor(x, dtype=torch.quint8),
            "per channel": per_channel,
            "codes": lambda x: per_tensor(x).int_repr(),
            "another code": lambda x: per_tensor(with_nan(x).nan_to_num(0.7)),
        },
    ),
    "per channel": Kind(
        per_channel,
        {"same": per_channel},
        {
            "float": lambda x: per_channel(x).dequantize(),
            "other scale": lambda x: per_channel(x, 0.051),
            "other zero point": lambda x: per_channel(x, zero=4),
            "other axis": lambda x: per_channel(x, axis=1),
            "per tensor": per_tensor,
        },
    ),
    "jagged": _nested_kind(torch.jagged, torch.strided),
    "nested": _nested_kind(torch.strided, torch.jagged),
    "masked": Kind(
        _masked,
        {
            "same": _masked,
            "other under the mask": lambda x: _masked(torch.where(x > 0, x, 7.0), x > 0),
        },
        {
            "other mask": lambda x: _masked(x, x > 0.5),
            "dense": lambda x: torch.where(x > 0, x, 0.0),
            "scaled": lambda x: _masked(x * 1.001),
        },
    ),
    "mkldnn": Kind(
        lambda x: x.to_mkldnn(),
        {"same": lambda x: x.to_mkldnn(), "rounded": lambda x: rounded(x).to_mkldnn()},
        {"dense": lambda x: x, "scaled": lambda x: (x * 1.001).to_mkldnn()},
    ),
    "conjugated": Kind(
        lambda x: torch.complex(x, x).conj(),
        {
            "resolved": lambda x: torch.complex(x, x).conj().resolve_conj(),
            "rounded": lambda x: torch.complex(rounded(x), -rounded(x)),
        },
        {"not conjugated": lambda x: torch.complex(x, x)},
        gradients=True,
    ),
    "negated": Kind(
        lambda x: torch.complex(x, x).conj().imag,
        {"resolved": lambda x: -x},
        {"not negated": lambda x: x},
        gradients=True,
    ),
    "meta": Kind(
        lambda x: x.to("meta"),
        {},
        {
            "numbers": lambda x: x,
            "same": lambda x: x.to("meta"),
            "shape": lambda x: x[1:].to("meta"),
        },
    ),
    "wrapper": Kind(
        lambda x: Wrapper(x * 1, 1.0),
        {"same": lambda x: Wrapper(x * 1, 1.0), "rounded": lambda x: Wrapper(rounded(x), 1.0)},
        {
            "plain": lambda x: x,
            "other inside": lambda x: Wrapper(x * 1.001, 1.0),
            "other context": lambda x: Wrapper(x * 1, 2.0),
        },
    ),
    "silent wrapper": Kind(
        lambda x: Silent(x, 1.0),
        {},
        {"other inside": lambda x: Silent(x * 2, 1.0), "same": lambda x: Silent(x, 1.0)},
    ),
    "float8": Kind(
        _float8,
        {"same": _float8},
        {
            "other format": lambda x: _float8(x, torch.float8_e5m2),
            "scaled": lambda x: _float8(x * 1.2),
            "bytes": lambda x: _float8(x).view(torch.uint8),
        },
    ),
    "scales": Kind(
        lambda x: _float8(x.abs(), torch.float8_e8m0fnu),
        {"same": lambda x: _float8(x.abs(), torch.float8_e8m0fnu)},
        {"doubled": lambda x: _float8(x.abs() * 2, torch.float8_e8m0fnu)},
    ),
    "packed": Kind(
        _packed,
        {"same": _packed},
        {"other codes": lambda x: _packed(x, 1), "bytes": lambda x: _packed(x).view(torch.uint8)},
    ),
    "uint16": Kind(
        lambda x: (x * 100).to(torch.int32).to(torch.uint16),
        {"same": lambda x: (x * 100).to(torch.int32).to(torch.uint16)},
        {
            "other": lambda x: ((x * 100).to(torch.int32) + 1).to(torch.uint16),
            "signed": lambda x: (x * 100).to(torch.int32).to(torch.int16),
        },
    ),
    "uint64": Kind(
        lambda x: torch.full((3,), 2**63 + 1, dtype=torch.uint64),
        {"same": lambda x: torch.full((3,), 2**63 + 1, dtype=torch.uint64)},
        {"other by one": lambda x: torch.full((3,), 2**63 + 2, dtype=torch.uint64)},
    ),
}
