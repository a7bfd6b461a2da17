"""Operators of torch by name, and sample inputs for them from torch's own test database."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import types
import unittest
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from paritas.errors import UnsupportedTorchError

if TYPE_CHECKING:
    from collections.abc import Iterator


# Importing it takes seconds, so it is imported when samples are asked for.
DATABASE = "torch.testing._internal.common_methods_invocations"
_BACKWARD = re.compile(r"_backward(_data)?$")


def find_operator(name: str) -> OpOverload | OpOverloadPacket | None:
    """An operator by its name, `aten.add.Tensor` or `aten.relu`; None if there is none."""
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) not in {2, 3} or not all(part.isidentifier() for part in parts):
        return None
    found: Any = torch.ops
    for part in parts:
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return None
    if isinstance(found, OpOverloadPacket) and "default" in found.overloads():
        # That of `aten.add` adds two numbers, for TorchScript.
        takes_tensors = "Tensor" in str(found.default._schema)
        found = found.default if takes_tensors else found
    return found if isinstance(found, OpOverload | OpOverloadPacket) else None


def is_operator(value: Any) -> bool:
    """Whether a value is an operator of torch, with or without its overload."""
    return isinstance(value, OpOverload | OpOverloadPacket)


def sample_calls(
    name: str, dtype: torch.dtype, device: str = "cpu", most: int = 20
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of calls of an operator that torch's tests make, as the operator itself gets them.

    The tests call functions, not operators. Each sample is run, and the arguments of the operator
    of that name are recorded; those of a backward operator, as gradients are computed. An operator
    in place gets what the one that returns a new tensor gets.

    Raises:
        UnsupportedTorchError: torch's database of operators cannot be imported or has another form.
    """
    target = find_operator(name)
    if target is None:
        return
    target = _out_of_place(target) or target
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    base = str(packet).removeprefix("aten.")
    left = most
    for entry in _entries(base):
        if dtype not in _dtypes_of(entry, device):
            continue
        for call in _calls_of(entry, target, dtype, device):
            yield call
            left -= 1
            if not left:
                return


def _out_of_place(target: OpOverload | OpOverloadPacket) -> OpOverload | OpOverloadPacket | None:
    """The operator that returns a new tensor, for one that writes to its first argument."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not name.endswith("_") or name.endswith("__"):
        return None
    return find_operator(f"aten.{name[:-1]}{'.' if overload else ''}{overload}")


def operator_database() -> list[Any]:
    """All entries of the database of torch's tests.

    Raises:
        UnsupportedTorchError: it cannot be imported.
    """
    try:
        with warnings.catch_warnings(), _with_expecttest():
            warnings.simplefilter("ignore")
            return list(importlib.import_module(DATABASE).op_db)
    except Exception as error:
        raise UnsupportedTorchError(
            f"{DATABASE} cannot be used with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _with_expecttest() -> Iterator[None]:
    """Let the database be imported without the package `expecttest`, which its samples do not use.

    torch's tests derive their test cases from a class of it, and torch does not depend on it.
    """
    if importlib.util.find_spec("expecttest") is not None:
        yield
        return
    stand_in = types.ModuleType("expecttest")
    stand_in.__dict__.update(TestCase=unittest.TestCase, ACCEPT=False)
    sys.modules["expecttest"] = stand_in
    try:
        yield
    finally:
        del sys.modules["expecttest"]


def _entries(base: str) -> list[Any]:
    """The entries of the database that are likely to call an operator."""
    base = _BACKWARD.sub("", base)
    plain = base.strip("_")
    short = [plain, plain.rpartition("_")[0] if plain.startswith("native_") else plain]
    names = {name.lower() for name in (base, *short)}
    names |= {plain.replace(prefix, "", 1) for prefix in ("linalg_", "special_", "fft_")}

    def is_near(entry: Any) -> bool:
        own = str(entry.name).rpartition(".")[2]
        known = {own, str(getattr(entry, "aten_name", "") or ""), f"_{own}"}
        known |= {alias.name for alias in getattr(entry, "aliases", ())}
        known |= {f"_{own}", own.replace("_", "")}
        return bool(known & (names | {f"_{n}" for n in names}))

    return [entry for entry in operator_database() if is_near(entry)]


def _dtypes_of(entry: Any, device: str) -> set[torch.dtype]:
    supported: set[torch.dtype] = set(entry.supported_dtypes(torch.device(device).type))
    return supported


def _calls_of(
    entry: Any, target: Any, dtype: torch.dtype, device: str
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    from paritas._torch.operators import DispatchMode

    class Recorder(DispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            is_same = func is target or getattr(func, "overloadpacket", None) is target
            if is_same:
                self.calls.append((args, dict(kwargs or {})))
            return func(*args, **(kwargs or {}))

    is_backward = _BACKWARD.search(str(target).split(".")[1]) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in entry.sample_inputs(device, dtype, requires_grad=is_backward):
            recorder = Recorder()
            with contextlib.suppress(Exception), recorder, torch.set_grad_enabled(is_backward):
                result = entry.op(sample.input, *sample.args, **sample.kwargs)
                if is_backward:
                    result.backward(torch.randn_like(result))
            yield from recorder.calls[:1]
