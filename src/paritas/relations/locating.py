"""Where two ways of running a model part: the first wrong module, and the first wrong token.

Both ways run once more in float64 with hooks on every module. A way may call the model many times,
on a few tokens or rows each; the values of a module are put together at their places in the whole,
and then compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch

from paritas.numerics import criterion
from paritas.numerics.automatic import LIFTED_SLACK_SCALED
from paritas.numerics.criterion import UNIT_F64, Noise
from paritas.relations.relation import Piece, current_piece
from paritas.results.findings import Origin, OriginKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

# One value of a module: its path, which of its calls within one call of the model, and which of its
# inputs or outputs.
Key = tuple[str, int, str]


@dataclasses.dataclass
class _Canvas:
    """A value of the whole batch and sequence, and which of its places are known."""

    value: Tensor
    known: Tensor


class ModuleLog(contextlib.AbstractContextManager["ModuleLog"]):
    """Records the inputs and outputs of all modules, at their places in the whole.

    Attributes:
        values: in the order in which the modules finished.
    """

    def __init__(
        self, model: nn.Module, size: tuple[int, int], like: ModuleLog | None = None
    ) -> None:
        """Record nothing yet.

        Args:
            model: the model whose modules are watched.
            size: the batch and the number of tokens of the whole.
            like: the log of the plain way, which shows the axes of each value.
        """
        self.model = model
        self.axes: dict[Key, int] = {} if like is None else like.axes
        self._learns = like is None
        self.size = size
        self.values: dict[Key, _Canvas] = {}
        self._handles: list[RemovableHandle] = []
        self._calls: dict[str, int] = {}
        self._pending: dict[str, list[tuple[str, Tensor]]] = {}

    def __enter__(self) -> Self:
        """Add the hooks."""
        for path, module in self.model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                module.register_forward_hook(self._after(path)),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not path:
                self._calls.clear()
            named = [*enumerate(args), *kwargs.items()]
            self._pending[path] = [
                (f"in {name}/{nth}", leaf.detach().clone())
                for name, value in named
                for nth, leaf in enumerate(_floats(value))
            ]

        return hook

    def _after(self, path: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            nth = self._calls.get(path, 0)
            self._calls[path] = nth + 1
            found = [*self._pending.pop(path, []), *enumerate(_floats(output))]
            for name, leaf in found:
                key = (path, nth, name if isinstance(name, str) else f"out {name}")
                self._place(key, leaf.detach(), current_piece())

        return hook

    def _place(self, key: Key, value: Tensor, piece: Piece) -> None:
        whole = torch.zeros(self.size, dtype=torch.int64)[piece.rows][:, piece.tokens]
        size = (whole.shape[0], whole.shape[1])
        if self._learns and key not in self.axes:
            self.axes[key] = _token_axis(value, size)
        aligned = _aligned(value, size, piece.own, self.axes.get(key, UNKNOWN))
        if aligned is None or not whole.numel():
            return
        canvas = self.values.get(key)
        if canvas is None:
            shape = (*self.size, *aligned.shape[2:])
            canvas = _Canvas(
                torch.zeros(shape, dtype=aligned.dtype, device=aligned.device),
                torch.zeros(self.size, dtype=torch.bool, device=aligned.device),
            )
            self.values[key] = canvas
        if canvas.value.shape[2:] != aligned.shape[2:]:
            self.values.pop(key)
            return
        rows = piece.rows if isinstance(piece.rows, slice) else piece.rows.to(aligned.device)
        part, known = canvas.value[rows], canvas.known[rows]
        part[:, piece.tokens] = aligned.to(part.dtype)
        known[:, piece.tokens] = True
        canvas.value[rows], canvas.known[rows] = part, known


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a value of a module."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _floats(one)


# The first axis may hold batch and tokens together; the axis may be unknown.
TOGETHER, UNKNOWN = 0, -1


def _token_axis(value: Tensor, size: tuple[int, int]) -> int:
    """The axis of the tokens, in a call on the whole."""
    rows, tokens = size
    for axis in (1, 2):
        if value.dim() > axis and value.shape[0] in {1, rows} and value.shape[axis] == tokens:
            return axis
    return TOGETHER if value.dim() and value.shape[0] == rows * tokens else UNKNOWN


def _aligned(value: Tensor, size: tuple[int, int], own: Any, axis: int) -> Tensor | None:
    """The value with batch and tokens as its first axes; None if it does not have both."""
    rows, tokens = size
    if axis == UNKNOWN:
        return None
    if axis == TOGETHER:
        if not value.dim() or not rows or value.shape[0] % rows:
            return None
        moved = value.reshape(rows, -1, *value.shape[1:])
    else:
        if value.dim() <= axis or value.shape[0] not in {1, rows}:
            return None
        moved = value.movedim(axis, 1)
        moved = moved.expand(rows, *moved.shape[1:])
    if isinstance(own, torch.Tensor):
        own = own.to(value.device)
        if int(own.max()) >= moved.shape[1]:
            return None
        return moved[torch.arange(rows, device=value.device)[:, None], own]
    moved = moved[:, own]
    return moved if moved.shape[1] == tokens else None


def first_wrong(
    expected: ModuleLog, native: ModuleLog, actual: ModuleLog, unit: float
) -> Origin | None:
    """The first module whose output is wrong although its inputs are right; None if none is wrong.

    Args:
        expected: the values of the plain way in float64.
        native: the same in the dtype of the run, which shows how much the values round.
        actual: the values of the other way in float64.
        unit: unit roundoff of the native run.
    """
    wrong = {
        key
        for key in expected.values
        if key in actual.values and _differs(key, expected, native, actual, unit)
    }
    suspects = dict.fromkeys((key[0], key[1]) for key in expected.values if key in wrong)
    for path, nth in suspects:
        kinds = {key[2].partition(" ")[0] for key in wrong if key[:2] == (path, nth)}
        if kinds == {"out"}:
            return _origin(expected.model, path)
    outputs = [key for key in expected.values if key in wrong and key[2].startswith("out")]
    return _origin(expected.model, outputs[0][0]) if outputs else None


def _origin(model: nn.Module, path: str) -> Origin:
    module = model.get_submodule(path)
    return Origin(kind=OriginKind.MODULE, name=path, operator=type(module).__name__)


def _differs(
    key: Key, expected: ModuleLog, native: ModuleLog, actual: ModuleLog, unit: float
) -> bool:
    ours, theirs = expected.values[key], actual.values[key]
    if ours.value.shape != theirs.value.shape:
        return False
    both = ours.known & theirs.known
    if not bool(both.any()):
        return False
    left, right = ours.value[both].double(), theirs.value[both].double()
    plain = native.values.get(key)
    own_error = 0.0
    if plain is not None and plain.value.shape == ours.value.shape:
        own_error = criterion.rms_difference(plain.value[both], left) * UNIT_F64 / unit
    noise = Noise(unit=UNIT_F64, own_error=own_error, factor=LIFTED_SLACK_SCALED)
    finite = torch.isfinite(left) == torch.isfinite(right)
    return not (criterion.score(right, left, noise).score.passed and bool(finite.all()))


def first_wrong_token(
    expected: Tensor, native: Tensor, actual: Tensor, unit: float
) -> tuple[int, int] | None:
    """The row and the token of the earliest wrong value, both in float64; None if there is none."""
    own_error = criterion.rms_difference(native, expected) * UNIT_F64 / unit
    scale = criterion.rms(expected)
    limit = criterion.MAX_Z * LIFTED_SLACK_SCALED * (own_error + UNIT_F64 * scale)
    error = (expected.double() - actual.double()).abs().nan_to_num(torch.inf)
    wrong = error.reshape(*error.shape[:2], -1).amax(dim=2) > limit
    tokens = wrong.any(dim=0).nonzero()
    if not len(tokens):
        return None
    token = int(tokens[0])
    return int(wrong[:, token].nonzero()[0]), token
