"""Graph checkpoints to read: real ones, real ones with a few instructions changed, written ones."""

from __future__ import annotations

import pickle
import pickletools
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

REAL = Path(__file__).parents[3] / "data" / "nnscaler"
BLOCK, GATHER = REAL / "transformer_block.ckp", REAL / "linear_relu_gather.ckp"
NORMS = REAL / "norms.ckp"


def instructions(data: bytes) -> list[tuple[str, Any, bytes]]:
    """The instructions of a pickle in order: name, argument, bytes. Frames are left out."""
    found = [(each.name, argument, at) for each, argument, at in pickletools.genops(data)]
    ends = [at for _, _, at in found[1:]] + [len(data)]
    return [
        (name, argument, data[at:end])
        for (name, argument, at), end in zip(found, ends, strict=True)
        if name != "FRAME"
    ]


def with_changes(data: bytes, changes: dict[int, bytes]) -> bytes:
    """A pickle with some instructions replaced."""
    steps = instructions(data)
    return b"".join(changes.get(place, step) for place, (_, _, step) in enumerate(steps))


def with_text(data: bytes, old: str, new: str) -> bytes:
    """A pickle with the first occurrence of a text replaced."""
    for place, (name, argument, _) in enumerate(instructions(data)):
        if name == "SHORT_BINUNICODE" and argument == old:
            return with_changes(data, {place: written_text(new)})
    raise AssertionError(f"{old!r} is not in it")


def written_text(text: str) -> bytes:
    """The instruction that pushes a text."""
    raw = text.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def written_call(path: str, *arguments: bytes) -> bytes:
    """The instructions that call something."""
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


class _Called:
    """Is written as a call; is callable, as pickle requires of what it calls."""

    def __init__(self, what: Any, arguments: tuple[Any, ...]) -> None:
        self._written = what, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._written

    def __call__(self) -> None:
        """Never called."""


class Writer:
    """Writes checkpoints: stands in for the classes of nnScaler and dill while it pickles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def kind(self, path: str) -> Any:
        """A class of this name."""
        module, _, name = path.rpartition(".")
        parts = module.split(".")
        for parent in (".".join(parts[: count + 1]) for count in range(len(parts))):
            if parent not in sys.modules:
                self._patch.setitem(sys.modules, parent, types.ModuleType(parent))
        if not hasattr(sys.modules[module], name):
            made = type(name, (), {"__module__": module, "__qualname__": name})
            self._patch.setattr(sys.modules[module], name, made, raising=False)
        return getattr(sys.modules[module], name)

    def make(self, path: str, **fields: Any) -> Any:
        """An object of that class."""
        made = self.kind(path)()
        made.__dict__.update(fields)
        return made

    def call(self, what: Any, *arguments: Any) -> Any:
        """An object that is written as a call: of a name, or of the result of another call."""
        return _Called(self.kind(what) if isinstance(what, str) else what, arguments)

    def tensor(self, name: str, shape: tuple[int, ...], number: int, **fields: Any) -> Any:
        """A tensor of float32."""
        import torch

        told = {"_is_attr": False, "_is_grad": False, "_requires_grad": True} | fields
        whole = self.make(
            "nnscaler.ir.tensor.IRFullTensor", _id=number, name=name, _shape=shape,
            _dtype=torch.float32, _is_scalar_tensor=False, **told,
        )  # fmt: skip
        return self.make(
            "nnscaler.ir.tensor.IRSubTensor", _id=number + 1000, name=name, _shape=shape,
            _full_tensor=whole,
        )  # fmt: skip

    def value(self, name: str, value: Any) -> Any:
        """A plain value that the tracer followed."""
        return self.make("nnscaler.ir.cten.IRObject", _id=0, name=name, _value=value)

    def shape_annotation(self, text: str, whole: tuple[str, ...] = ()) -> Any:
        """The dimensions of one tensor: `a (b+ c^)`."""
        dims: list[list[str]] = []
        inner: list[str] | None = None
        for word in text.replace("(", " ( ").replace(")", " ) ").split():
            if word == "(":
                inner = []
            elif word == ")":
                dims.append(inner or [])
                inner = None
            elif inner is not None:
                inner.append(word)
            else:
                dims.append([word])
        return self.make(
            "nnscaler.graph.function.dimops.ShapeAnno",
            _dims=tuple(self._dim(words) for words in dims),
            _no_grad_reduce_ids=whole,
        )

    def _dim(self, words: Any) -> Any:
        ends = [word[-1] if word[-1] in "+^" else "" for word in words]
        return self.make(
            "nnscaler.graph.function.dimops.DimAnno",
            _identifiers=tuple(
                word.removesuffix(end) for word, end in zip(words, ends, strict=True)
            ),
            _reduces=tuple(self._reduce_type(end) for end in ends),
        )

    def _reduce_type(self, end: str) -> Any:
        made = self.kind("nnscaler.graph.function.dimops.ReduceType")
        made.__qualname__ = "DimAnno.ReduceType"
        self.kind("nnscaler.graph.function.dimops.DimAnno").ReduceType = made
        return _Called(made, (end,))

    def node(self, signature: str, inputs: list[Any], outputs: list[Any], **fields: Any) -> Any:
        """A node; one with an annotation if there is one."""
        kind = fields.pop("kind", "nnscaler.ir.operator.IRFwOperation")
        return self.make(kind, **{
            "_id": 1, "name": signature.rpartition(".")[2], "signature": signature,
            "_inputs": inputs, "_outputs": outputs, "_kwargs": {}, "_mirror": None,
            "_comment": None, "_module_stack": None,
        } | fields)  # fmt: skip

    def annotated(
        self, signature: str, inputs: list[Any], outputs: list[Any], **fields: Any
    ) -> Any:
        """A node with an annotation, `inputs_as` -> `outputs_as`."""
        annotation = self.make(
            "nnscaler.graph.function.dimops.OpAnno",
            _inputs=tuple(fields.pop("inputs_as")),
            _outputs=tuple(fields.pop("outputs_as")),
        )
        return self.node(
            signature, inputs, outputs, kind="nnscaler.graph.function.dimops.IRDimops",
            **{"_anno": annotation, "_trans_rules": (), "_create_fn": (None,)} | fields,
        )  # fmt: skip

    def graph(self, nodes: list[Any], inputs: list[Any] | None = None) -> bytes:
        """The checkpoint."""
        graph = self.make(
            "nnscaler.graph.graph.IRGraph", _id=9, name="Model", _inputs=inputs or [], _nodes=nodes
        )
        return pickle.dumps(((1, 2, 3), graph), protocol=4)
