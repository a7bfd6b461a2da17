"""The process of a candidate, seen from inside: load it, call it, and answer with records.

A server imports torch once and forks a process for each candidate. It holds neither a candidate
nor a reference.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.computable import is_number
from paritas.core.execution.saved_state import ProcessState
from paritas.core.workers.channel import ChannelClosedError
from paritas.kernels.calling import measure
from paritas.kernels.messages import (
    LONGEST_TEXT,
    Broken,
    Call,
    CheckRegistrations,
    Construct,
    Constructed,
    Load,
    Loaded,
    Measure,
    Order,
    Registrations,
    Rehearse,
    SetState,
    StateSet,
)
from paritas.kernels.observing import Observer
from paritas.kernels.outside import Audit, Leftovers, OwnCode, our_modules_hidden
from paritas.kernels.sides import check_registrations, load_side
from paritas.kernels.wire import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.core.workers.channel import Channel

# The exit code of a process that cannot go on.
_RAISED = 70


def prepare_candidates(settings: bytes, *, forks: bool) -> Callable[[Channel], None]:
    """Import what candidates need; returns what the process of one does.

    Args:
        settings: the modules that a server imports for all of them.
        forks: whether this is a server.
    """
    if forks:
        for name in msgspec.json.decode(settings, type=list[str]):
            importlib.import_module(name)
        torch.set_num_threads(1)
    own_code = OwnCode()

    def work(channel: Channel) -> None:
        if forks:
            # Torch makes its pool anew here; two threads of a candidate would race for it.
            torch.set_num_threads(1)
        try:
            _Candidate(own_code).follow(channel)
        except ChannelClosedError:
            raise
        except BaseException:  # noqa: BLE001  (what the candidate printed is not followed by ours)
            os._exit(_RAISED)

    return work


class _Candidate:
    """Follows the orders of the judge."""

    def __init__(self, own_code: OwnCode) -> None:
        self._side: Any = None
        self._device = "cpu"
        self._observers: list[Observer] = []
        self._audit = Audit()
        self._own_code = own_code

    def follow(self, channel: Channel) -> None:
        while True:
            order: Any = channel.receive(Order)  # type: ignore[arg-type]
            try:
                answer = self._do(order)
            except Exception as error:
                # A device that was broken by a call breaks whatever comes next.
                channel.send(Broken(in_one_line(error, LONGEST_TEXT)))
                raise
            channel.send(answer)

    def _do(self, order: Order) -> msgspec.Struct:
        match order:
            case Load():
                return self._load(order)
            case Construct():
                return self._construct(order)
            case SetState():
                return self._set_state(order)
            case Call():
                return self._observers[-1].observe(order)
            case Rehearse():
                return self._observers[-1].rehearse(order)
            case Measure():
                return measure(self._observers[-1], order)
            case CheckRegistrations():
                inputs = decode(order.inputs, self._device)
                return Registrations(check_registrations(self._side.target, inputs))

    def _load(self, order: Load) -> Loaded:
        """Import the candidate; what its import changes in the process is reported."""
        sys.path[:] = order.paths
        os.chdir(order.folder)
        tempfile.tempdir = os.environ["TMPDIR"] = order.temporary
        self._device = order.device
        before, leftovers, libraries = ProcessState(), Leftovers(), set(sys.modules)
        error = ""
        try:
            self._audit.own_file = order.side.file or _file_of(order.side.module)
            hidden = our_modules_hidden() if order.is_candidate else contextlib.nullcontext()
            with hidden:
                self._side = load_side(order.side, is_candidate=order.is_candidate)
        except UsageError as raised:
            error = str(raised)[:LONGEST_TEXT]
        settings = leftovers.put_back() | before.put_back() | self._own_code.put_back()
        return Loaded(
            error=error,
            settings=settings,
            outside=self._audit.take(),
            pid=os.getpid(),
            files=_files_of_modules(),
            extensions=_extensions(set(sys.modules) - libraries, self._side),
        )

    def _construct(self, order: Construct) -> Constructed:
        """Make what is called, and answer with its parameters and buffers."""
        before = ProcessState()
        args, kwargs = decode(order.init, None)
        try:
            with our_modules_hidden():
                call = self._side.construct(tuple(args), kwargs, order.seed)
            if order.device != "cpu" and self._side.is_module_class:
                call = call.to(order.device)
            if order.dtype:
                call = call.to(getattr(torch, order.dtype))
            if order.moves and self._side.is_module_class:
                _move(call)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (it becomes a finding)
            return Constructed(error=in_one_line(error, LONGEST_TEXT), settings=before.put_back())
        observer = Observer(call, self._device, self._audit, self._own_code)
        self._observers = [*self._observers[-1:], observer]
        return Constructed(
            settings=before.put_back(),
            state=encode(dict(observer.state()) if order.reads_state else {}),
            train=None if observer.module is None else bool(observer.module.training),
            outside=self._audit.take(),
        )

    def _set_state(self, order: SetState) -> StateSet:
        try:
            self._observers[-1].set_state(decode(order.state, self._device))
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            return StateSet(in_one_line(error, LONGEST_TEXT))
        return StateSet()


def _move(module: Any) -> None:
    """Convert a module and convert it back: nothing changes, except which tensors share memory."""

    def state() -> dict[str, Any]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    dtypes = {name: value.dtype for name, value in state().items()}
    # As `module.double()`, which cannot convert float4.
    module._apply(  # noqa: SLF001
        lambda tensor: tensor.double() if is_number(tensor.dtype) else tensor.clone()
    )
    for name, value in state().items():
        value.data = value.data.to(dtypes.get(name, value.dtype))


def _file_of(module: str) -> str:
    """The file of a module that is not imported yet; empty if it is not found."""
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return ""
    return str(spec.origin) if spec is not None and spec.has_location else ""


def _files_of_modules() -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({str(file) for file in files if file})


_KERNEL_COMPILERS = {"triton", "cupy", "numba", "cutlass", "tilelang", "ctypes", "cffi"}


def _extensions(names: set[str], side: Any) -> list[str]:
    """Compiled code, or a compiler of kernels, that the import has brought in."""
    # A compiler that was imported before shows in what the candidate's module imports from it.
    values = list(vars(side.home).values()) if getattr(side, "home", None) is not None else []
    used = [
        getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in values
    ]
    used += [type(value).__module__ for value in values]
    package_names = {str(name).partition(".")[0] for name in [*names, *used]}
    kernel_compilers = package_names & _KERNEL_COMPILERS
    for name in names:
        file = str(getattr(sys.modules.get(name), "__file__", None) or "")
        if file.endswith(".so") and "site-packages" not in file and "lib-dynload" not in file:
            kernel_compilers.add(name)
    return sorted(kernel_compilers)
