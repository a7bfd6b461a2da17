"""Call a candidate once, in its own process, and record everything a caller could observe.

The candidate may cheat. So memory that it allocates is poisoned, the addresses of its inputs vary,
its results are read twice, and whatever it changes in the process is recorded and restored. Its own
state is not restored: a kernel that counts its calls or caches a result is called on and on, as it
would be by a user. Only parameters and buffers that are the reference's, too, are set back after
each call: what else a candidate keeps must fit what it remembers elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paritas.core.errors import in_one_line
from paritas.core.execution.cotangents import draw_cotangent
from paritas.core.execution.isolation import detached_copy, is_same_leaf
from paritas.core.execution.observation import (
    OUTPUT,
    find_aliases,
    input_contents,
    input_tensors,
)
from paritas.core.execution.saved_state import ProcessState, RandomState
from paritas.core.execution.subjects import Inputs
from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.contents import Opaque, contents, detach_value, map_leaves
from paritas.core.numerics.flattening import as_plain, flatten_value
from paritas.core.numerics.metrics import bitwise_equal
from paritas.core.precision.lifting import LiftMode, is_rounding
from paritas.core.results.items import Item, ItemKind, output
from paritas.core.torch_private.global_state import taking_stance
from paritas.core.torch_private.kernels import any_attention
from paritas.core.torch_private.operators import WIDE, default_dtype
from paritas.kernels.calling import (
    COMPILED,
    REPEATED,
    CallWatch,
    MemoryBeside,
    call_often,
    called_by,
    modes_of,
    poison_free_memory,
    poisoned,
    stream_of,
)
from paritas.kernels.cases import NEW_TENSORS
from paritas.kernels.messages import CallRecord, LeafFacts, RehearsedCall
from paritas.kernels.outside import (
    Audit,
    CodeWatch,
    EscapeWatch,
    Leftovers,
    OwnCode,
    our_modules_hidden,
)
from paritas.kernels.wire import WireError, bytes_of, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import Tensor

    from paritas.kernels.messages import Call, Encoded, Rehearse

_PLAIN_CLASSES = {torch.Tensor, nn.Parameter, nn.Buffer}
_MOST_JUNK = 12
# Results of earlier calls are kept, up to this many bytes, to see whether they change.
_MOST_HELD = 64 << 20
# Bound before a candidate can replace them.
_wait_for_device = torch.accelerator.synchronize
_stream_of, _set_stream = torch.accelerator.current_stream, torch.accelerator.set_stream
_equal = torch.equal
# Variables that torch's compilers set themselves, as they build kernels.
_OF_COMPILERS = (
    "_TORCHINDUCTOR_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_",
    "KMP_DUPLICATE_LIB_OK",
    "CUDA_HOME",
)
_LONGEST_TEXT = 400


# --- One call -------------------------------------------------------------------------------------


class HeldResult:
    """A result of an earlier call, and a copy of it."""

    def __init__(self, leaf: Tensor, copy: Tensor) -> None:
        self.leaf, self.copy = leaf, copy
        # All of them are compared after each call: of most, the bytes, which is quick.
        self._bytes = None
        if leaf.layout is torch.strided and leaf.is_contiguous() and copy.is_contiguous():
            with contextlib.suppress(RuntimeError):
                self._bytes = [tensor.view(-1).view(torch.uint8) for tensor in (leaf, copy)]

    @property
    def is_changed(self) -> bool:
        """Whether it was written to since."""
        if self._bytes is not None and _equal(*self._bytes):
            return False
        return not is_same_leaf(self.copy, as_plain(self.leaf))


@dataclasses.dataclass
class Held:
    """What stays between calls: the last inputs, results, and blocks that move addresses."""

    inputs: Inputs | None = None
    versions: dict[str, int] = dataclasses.field(default_factory=dict)
    results: list[dict[str, HeldResult]] = dataclasses.field(default_factory=list)
    sizes: set[int] = dataclasses.field(default_factory=set)
    junk: list[Tensor] = dataclasses.field(default_factory=list)
    chance: random.Random = dataclasses.field(default_factory=random.Random)
    # Results of the last call in memory that another call has returned, or will.
    used_again: list[Tensor] = dataclasses.field(default_factory=list)

    def write_to_results(self, pattern: int) -> None:
        """Write to results as their caller may, where a kernel that remembers them would show."""
        for leaf in self.used_again:
            with contextlib.suppress(RuntimeError), torch.no_grad():
                poisoned(leaf, pattern)
        storages = {tensor.untyped_storage().data_ptr() for tensor in self.used_again}
        for results in self.results:
            for path, each in results.items():
                if each.leaf.untyped_storage().data_ptr() in storages:
                    results[path] = HeldResult(each.leaf, _copy_leaf(each.leaf))
        self.used_again = []


class Observer:
    """Calls one candidate again and again.

    Attributes:
        call: the candidate: a function or a module.
        device: where its inputs are made.
    """

    def __init__(
        self, call: Callable[..., Any], device: str, audit: Audit, own_code: OwnCode
    ) -> None:
        self.call, self.device = call, device
        self._own_code = own_code
        self.held = Held()
        self._audit = audit
        self._environment, self._folder = dict(os.environ), os.getcwd()  # noqa: PTH109
        self._busy_times = _BUSY_TIMES
        self._arrival: torch.Event | None = None

    @property
    def module(self) -> nn.Module | None:
        """The candidate, if it is a module."""
        return self.call if isinstance(self.call, nn.Module) else None

    def state(self) -> dict[str, Tensor]:
        """The registered parameters and buffers of the candidate by name."""
        if self.module is None:
            return {}
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def set_state(self, values: dict[str, Tensor]) -> None:
        """Write to parameters and buffers in place, as an optimizer or a checkpoint does."""
        current_state = self.state()
        with torch.no_grad():
            for name, value in values.items():
                current_state[name].copy_(value)

    def observe(self, order: Call) -> CallRecord:
        """Make one call as ordered, and return its record."""
        with self._audit.aside():
            self.held.write_to_results(order.pattern)
            inputs = self._make_inputs(order)
            before, beside = input_contents(inputs), MemoryBeside(inputs)
            versions = _versions(inputs)
            if order.train is not None and self.module is not None:
                self.module.train(order.train)
            state = {
                name: detached_copy(value)
                for name, value in self.state().items()
                if name in order.shared
            }
            flags = {name: value.requires_grad for name, value in self.state().items()}
            _seed_generator(order.seed, self.device)
            poison_free_memory(
                self.held.sizes | {t.nbytes for _, t in input_tensors(inputs)},
                self.device,
                order.pattern,
            )
        record = CallRecord()
        live: dict[str, Any] = {}
        caller, wide = order.conditions.caller, order.conditions.wide
        if caller == REPEATED:
            args, kwargs = decode(order.inputs, self.device)
            call_often(self.call, tuple(args), kwargs)
            self._put_back(state, flags)
        with (
            stream_of(caller, self.device),
            _widen_state(self, order.shared, is_wide=wide is not None),
        ):
            wide_state = {name: detached_copy(value) for name, value in self.state().items()}
            with self._audit.aside():
                self._arrive_late(inputs)
            self._run(order, inputs, record, live)
            with self._audit.aside():
                _synchronize(self.device)
                record.beside = beside.changed_inputs()
                record.written = _list_written_inputs(inputs, versions)
                if record.error is None:
                    self._note_results(order, inputs, before, wide_state, record, live)
        with self._audit.aside():
            self._put_back(state, flags)
            record.outside, record.pid = self._audit.take(), os.getpid()
        return record

    def rehearse(self, order: Rehearse) -> RehearsedCall:
        """Make one call and forget its result: what matters is that this process survives it."""
        args, kwargs = decode(order.inputs, order.device)
        if order.train is not None and self.module is not None:
            self.module.train(order.train)
        call = self.call
        if self.module is not None and order.device != self.device:
            call = copy.deepcopy(self.module).to(order.device)
        answer = RehearsedCall()
        inputs = Inputs(tuple(args), kwargs)
        versions = _versions(inputs)
        try:
            with torch.set_grad_enabled(order.grad):
                result = call(*args, **kwargs)
                answer.lazy = _lazy(flatten_value(result, OUTPUT).leaves)
                answer.written = _list_written_inputs(inputs, versions)
                if order.grad:
                    leaves = (leaf for _, leaf in contents(result, OUTPUT))
                    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
                    torch.autograd.backward(
                        differentiable,
                        [torch.ones_like(result_tensor) for result_tensor in differentiable],
                    )
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the judge makes the call itself)
            answer.error = in_one_line(error, _LONGEST_TEXT)
        try:
            _synchronize(self.device)
        except Exception as error:  # noqa: BLE001  (after that, nothing can be computed there)
            answer.error, answer.is_usable = in_one_line(error, _LONGEST_TEXT), False
        return answer

    def _make_inputs(self, order: Call) -> Inputs:
        """New tensors at other addresses, or other contents in the memory of the call before."""
        args, kwargs = decode(order.inputs, self.device)
        new = Inputs(tuple(args), kwargs)
        if order.reuse:
            old = self._in_old_memory(new, are_new_tensors=order.reuse == NEW_TENSORS)
            if old is not None:
                return old
        chance = self.held.chance
        size = chance.choice([64, 256, 1024, 4096, 20000]) + chance.randrange(64)
        self.held.junk.append(torch.empty(size, device=self.device))
        if len(self.held.junk) > _MOST_JUNK:
            self.held.junk.pop(chance.randrange(_MOST_JUNK))
        if order.conditions.wide is None:
            self.held.inputs = new
            self.held.versions = {path: tensor._version for path, tensor in input_tensors(new)}  # noqa: SLF001
        return new

    def _in_old_memory(self, new: Inputs, *, are_new_tensors: bool) -> Inputs | None:
        """The new inputs in the memory of those before; None if they do not fit there.

        As other tensors, they are what an allocator returns that reuses memory: the address is the
        old one, and nothing else is.
        """
        old = {} if self.held.inputs is None else dict(input_tensors(self.held.inputs))
        fresh = dict(input_tensors(new))
        if old.keys() != fresh.keys():
            return None
        pairs = [(old[path], fresh[path]) for path in fresh]
        if not all(a.shape == b.shape and a.dtype is b.dtype for a, b in pairs):
            return None
        for old_tensor, other in pairs:
            old_tensor.detach().copy_(other.detach())
        # Where old tensors share memory, and the new ones do not, they cannot hold all.
        if not all(
            bitwise_equal(earlier_tensor.detach(), other.detach())
            for earlier_tensor, other in pairs
        ):
            return None
        taken = {
            id(fresh[path]): _made_anew(earlier_tensor, self.held.versions[path])
            if are_new_tensors
            else earlier_tensor
            for path, earlier_tensor in old.items()
        }

        def replace_leaves(tree: Any) -> Any:
            return map_leaves(tree, lambda leaf: taken.get(id(leaf), leaf))

        self.held.inputs = Inputs(
            tuple(replace_leaves(list(new.args))), replace_leaves(dict(new.kwargs))
        )
        return self.held.inputs

    def _arrive_late(self, inputs: Inputs) -> None:
        """Let the values of the inputs arrive after the call has begun.

        On a device, work is queued, and a caller's inputs may still be on their way. A kernel on
        another stream that does not wait for them reads what was there before.
        """
        if self.device.startswith("cpu"):
            return
        storages = {
            t.untyped_storage().data_ptr(): t for _, t in input_tensors(inputs) if t.numel()
        }
        places = [bytes_of(tensor) for tensor in storages.values()]
        values = [input_bytes.clone() for input_bytes in places]
        for position in places:
            position.fill_(0xFF)  # NaN in every floating dtype
        _synchronize(self.device)
        _keep_busy(self.device, self._busy_times)
        for position, value in zip(places, values, strict=True):
            position.copy_(value)
        self._arrival = torch.Event(self.device)
        self._arrival.record()

    def _wait_longer_next_time(self) -> None:
        """If the inputs arrived before the call returned, it had time to hide what it left out."""
        if self._arrival is not None and self._arrival.query():
            self._busy_times = min(2 * self._busy_times, _MOST_BUSY_TIMES)

    def _run(self, order: Call, inputs: Inputs, record: CallRecord, live: dict[str, Any]) -> None:
        modes = _modes_of(order)
        caller = order.conditions.caller
        process, rng, leftovers = ProcessState(), RandomState.now(), Leftovers()
        threads = threading.active_count()
        stream = _current_stream(self.device)
        began = time.perf_counter()
        try:
            with contextlib.ExitStack() as stack:
                has_grad = order.grad or order.conditions.grad_mode
                stack.enter_context(torch.set_grad_enabled(has_grad))
                stack.enter_context(modes_of(caller, self.device))
                for mode in modes.values():
                    stack.enter_context(mode)
                call = called_by(caller, self.call)
                if not modes and caller != COMPILED:  # these may import something of ours
                    stack.enter_context(our_modules_hidden())
                self._audit.is_calling = True
                live[OUTPUT] = call(*inputs.args, **inputs.kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the record carries it)
            words = " ".join(str(error).split())
            record.error = type(error).__name__, words[:_LONGEST_TEXT]
        record.seconds = time.perf_counter() - began
        self._audit.is_calling = False
        leftover_settings = leftovers.put_back()
        with self._audit.aside():
            has_moved = stream is not None and _current_stream(self.device) != stream
            if stream is not None and has_moved:
                _set_stream(stream)
            self._wait_longer_next_time()
            if stream is not None and record.error is None:
                live["early"] = _copied_at_once(live[OUTPUT])
            self._note_process(process, rng, threads, record)
            if has_moved:
                record.settings["torch.accelerator.current_stream()"] = "changed"
            record.settings |= leftover_settings
            _note_modes(modes, record)
            if order.conditions.wide is not None:
                record.foreign += self._own_code.new_libraries()
                record.uncompiled = _has_compiled()

    def _note_process(
        self, process: ProcessState, rng: RandomState, threads: int, record: CallRecord
    ) -> None:
        record.settings = process.put_back() | self._own_code.put_back()
        now = RandomState.now()
        record.drew = not rng.same_torch(now)
        record.threads = max(0, threading.active_count() - threads)
        for name in sorted(os.environ.keys() | self._environment.keys()):
            before = self._environment.get(name)
            if os.environ.get(name) == before or name.startswith(_OF_COMPILERS):
                continue
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before
            record.settings[f"os.environ[{name!r}]"] = "changed"
        if os.getcwd() != self._folder:  # noqa: PTH109
            os.chdir(self._folder)
            record.settings["the current directory"] = "changed"

    def _note_results(
        self,
        order: Call,
        inputs: Inputs,
        before: dict[str, Any],
        state: dict[str, Tensor],
        record: CallRecord,
        live: dict[str, Any],
    ) -> None:
        result = live.pop(OUTPUT)
        record.refused = _unreadable(result)
        if record.refused:
            return
        if order.conditions.grad_mode:  # the reference was called without
            result = map_leaves(result, detach_value)
        flat = flatten_value(result, OUTPUT)
        copies = {path: _copy_leaf(leaf) for path, leaf in flat.leaves.items()}
        record.kinds = {
            path: (kind.name, kind.family, kind.is_tensor) for path, kind in flat.kinds.items()
        }
        record.facts = {
            path: LeafFacts(
                strides=tuple(leaf.stride()),
                requires_grad=leaf.requires_grad,
                is_inference=leaf.is_inference() and not order.conditions.caller,
            )
            for path, leaf in flat.leaves.items()
            if isinstance(leaf, torch.Tensor)
        }
        record.lazy = _lazy(flat.leaves)
        record.in_common = [path for path, leaf in flat.leaves.items() if _is_in_common(leaf)]
        record.aliases = self._aliases(inputs, flat.leaves)
        now = input_contents(inputs, copy_tensors=False)
        after = {
            path: value
            for path, value in now.items()
            if path not in before or not is_same_leaf(before[path], value)
        }
        changed = {
            name: detached_copy(value)
            for name, value in self.state().items()
            if name in order.shared and not is_same_leaf(state[name], value)
        }
        changed |= _attributes(self.call, order.attributes)
        gradients: dict[str, Any] = {}
        if order.grad:
            gradients = _gradients(flat.leaves, inputs, self.state(), order, record)
        record.overwritten = self._overwritten()
        early = live.pop("early", {})
        record.later = [
            path
            for path, leaf in flat.leaves.items()
            if isinstance(leaf, torch.Tensor)
            and not (
                is_same_leaf(copies[path], as_plain(leaf))
                and (path not in early or is_same_leaf(copies[path], early[path]))
            )
        ]
        record.values = _encode_values(copies, after, changed, gradients)
        record.shared = self._in_memory_of_earlier(flat.leaves)
        reused_paths = {*record.shared, *(path for _, _, path in self._own(record.aliases, order))}
        self.held.used_again = [flat.leaves[path].detach() for path in reused_paths]
        if order.conditions.wide is None:
            self._hold(
                {
                    path: HeldResult(leaf.detach(), copies[path])
                    for path, leaf in flat.leaves.items()
                    if isinstance(leaf, torch.Tensor) and not _shares(leaf, inputs, self.state())
                }
            )
            tensors = [
                copied_value
                for copied_value in copies.values()
                if isinstance(copied_value, torch.Tensor)
            ]
            self.held.sizes = {tensor.nbytes for tensor in tensors if tensor.nbytes}

    def _hold(self, results: dict[str, HeldResult]) -> None:
        """Keep results as a caller may; the oldest are given up if they take much memory."""
        held_results = self.held.results
        held_results.append(results)
        size = sum(
            each.copy.nbytes for call_results in held_results for each in call_results.values()
        )
        while size > _MOST_HELD and len(held_results) > 1:
            size -= sum(each.copy.nbytes for each in held_results.pop(0).values())

    def _overwritten(self) -> list[str]:
        """The results of earlier calls that have changed since; each is reported once."""
        changed: list[str] = []
        for results in self.held.results:
            for path, each in list(results.items()):
                if each.is_changed:
                    changed.append(path)
                    del results[path]
        return list(dict.fromkeys(changed))

    def _in_memory_of_earlier(self, leaves: dict[str, Any]) -> list[str]:
        """The results that are in the memory of a result that an earlier call has returned.

        That one is still held, so no allocator would return its memory again.
        """
        taken = {
            each.leaf.untyped_storage().data_ptr()
            for results in self.held.results
            for each in results.values()
            if each.leaf.layout is torch.strided and each.leaf.numel()
        }
        return [
            path
            for path, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor)
            and leaf.layout is torch.strided
            and leaf.numel()
            and leaf.untyped_storage().data_ptr() in taken
        ]

    def _aliases(self, inputs: Inputs, leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
        tensors_by_item = {
            Item(ItemKind.INPUT, path): tensor for path, tensor in input_tensors(inputs)
        }
        tensors_by_item |= {
            Item(ItemKind.STATE, name): tensor for name, tensor in self.state().items()
        }
        live = {output(path): leaf for path, leaf in leaves.items()}
        return [
            (other.kind.value, other.name, item.name)
            for other, item in find_aliases(live, tensors_by_item)
            # Results may be parts of one buffer.
            if other not in live or _overlap(live[other], live[item])
        ]

    @staticmethod
    def _own(aliases: list[tuple[str, str, str]], order: Call) -> list[tuple[str, str, str]]:
        """Those with a parameter or buffer that the reference does not have."""
        state = ItemKind.STATE.value
        return [alias for alias in aliases if alias[0] == state and alias[1] not in order.shared]

    def _put_back(self, state: dict[str, Tensor], flags: dict[str, bool]) -> None:
        with torch.no_grad():
            for name, value in self.state().items():
                if name in state and value.shape == state[name].shape:
                    if not is_same_leaf(state[name], value):
                        value.copy_(state[name])
                    value.requires_grad_(flags[name])
                    value.grad = None


def _made_anew(tensor: Tensor, version: int) -> Tensor:
    """Another tensor in the same memory that was written to as often as one that was there."""
    new = tensor.data
    while new._version < version:  # noqa: SLF001
        torch.autograd.graph.increment_version(new)
    return new.requires_grad_(tensor.requires_grad)


def _attributes(call: Any, names: list[str]) -> dict[str, Tensor]:
    """Tensors that the candidate keeps under these names, as the reference does."""
    attribute_copies: dict[str, Tensor] = {}
    for name in names:
        value = call
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, torch.Tensor) and type(value) in _PLAIN_CLASSES:
            attribute_copies[name] = detached_copy(value)
    return attribute_copies


def _modes_of(order: Call) -> dict[str, Any]:
    """The contexts of a call, the innermost last."""
    modes: dict[str, Any] = {}
    wide = order.conditions.wide
    if wide is not None:
        used = frozenset(getattr(torch, name) for name in wide.used)
        own_dtype, default = getattr(torch, wide.dtype), getattr(torch, wide.default)
        modes["stance"] = taking_stance("force_eager")
        modes["attention"] = any_attention()
        modes["default"] = default_dtype(torch.float64)
        modes["escapes"] = EscapeWatch()
        modes["lift"] = LiftMode(
            own_dtype, default, lifts=functools.partial(is_rounding, used=used)
        )
    if order.conditions.watch:
        modes["stance"] = taking_stance("force_eager")
        modes["watch"] = CallWatch(order.pattern)
    if order.conditions.profile:
        modes["code"] = CodeWatch()
    return modes


def _has_compiled() -> bool:
    """Whether torch.compile has compiled something here; in a lifted run it is off."""
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds
        return False
    from paritas.core.torch_private.dynamo import count_compiled_frames

    return count_compiled_frames() > 0


def _note_modes(modes: dict[str, Any], record: CallRecord) -> None:
    if "lift" in modes:
        record.foreign = sorted({*modes["lift"].foreign, *modes["escapes"].seen})
        record.narrow = sorted(map(dtype_name, modes["lift"].narrow))
    if "watch" in modes:
        record.operators = list(modes["watch"].names)
    if "code" in modes:
        record.code = sorted(modes["code"].seen)


def _unreadable(result: Any) -> dict[str, str]:
    """Tensors that are not plain: they may compute on access, or share memory unseen."""
    return {
        path: type(leaf).__name__
        for path, leaf in contents(result, OUTPUT)
        if isinstance(leaf, torch.Tensor) and type(leaf) not in _PLAIN_CLASSES
    }


def _is_in_common(leaf: Any) -> bool:
    """Whether other processes may write to a tensor: one of them may compute it later."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    storage = leaf.untyped_storage()
    # A file in memory has a name, too.
    return leaf.device.type == "cpu" and (storage.is_shared() or storage.filename is not None)


def _versions(inputs: Inputs) -> dict[str, int]:
    """How often each input was written to; torch does not count it for inference tensors."""
    tensors = (
        (path, tensor) for path, tensor in input_tensors(inputs) if not tensor.is_inference()
    )
    return {path: tensor._version for path, tensor in tensors}  # noqa: SLF001


def _list_written_inputs(inputs: Inputs, versions: dict[str, int]) -> list[str]:
    """The inputs that were written to since, be it with the same values."""
    now = _versions(inputs)
    return [path for path, version in versions.items() if now.get(path) != version]


def _lazy(leaves: dict[str, Any]) -> list[str]:
    """The tensors whose memory holds something else: their values are conjugated or negated."""
    return [
        path
        for path, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg())
    ]


# Of larger tensors, only the ranges of their memory are compared.
_MOST_PLACES = 1 << 20


def _overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors in one storage have an element in common."""
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return True
    if not left.numel() or not right.numel():
        return False
    (first, last), (start, end) = _range(left), _range(right)
    if last < start or end < first or left.element_size() != right.element_size():
        return not (last < start or end < first)
    if left.numel() + right.numel() > _MOST_PLACES:
        return True
    return bool(torch.isin(_places(left), _places(right)).any())


def _range(tensor: Tensor) -> tuple[int, int]:
    """The first and the last byte of a tensor in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum((count - 1) * step for count, step in steps)
    return first * size, last * size + size - 1


def _places(tensor: Tensor) -> Tensor:
    """Where in its storage each element of a tensor is."""
    places = torch.tensor(tensor.storage_offset())
    for count, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(count) * step
    return places.flatten()


def _copied_at_once(result: Any) -> dict[str, Tensor]:
    """Copies of the results, queued on the caller's stream like any use of them, without waiting.

    A result that a kernel on another stream still computes is not there yet.
    """
    return {
        path: leaf.detach().clone()
        for path, leaf in contents(result, OUTPUT)
        if isinstance(leaf, torch.Tensor)
        and type(leaf) in _PLAIN_CLASSES
        and leaf.layout is torch.strided
    }


def _copy_leaf(leaf: Any) -> Any:
    plain = as_plain(leaf)
    return plain.clone() if isinstance(plain, torch.Tensor) else plain


def _shares(leaf: Tensor, inputs: Inputs, state: dict[str, Tensor]) -> bool:
    tensors_by_item = {Item(ItemKind.INPUT, path): tensor for path, tensor in input_tensors(inputs)}
    tensors_by_item |= {Item(ItemKind.STATE, name): tensor for name, tensor in state.items()}
    return bool(find_aliases({output(): leaf}, tensors_by_item))


def _encode_values(
    outputs: dict[str, Any], after: dict[str, Any], state: dict[str, Any], gradients: dict[str, Any]
) -> Encoded:
    """All values of a record; a value that cannot be sent is replaced by the reason."""
    tables = {"outputs": outputs, "after": after, "state": state, "gradients": gradients}
    sent: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        sent[name] = {}
        for path, value in table.items():
            try:
                encode(value if not isinstance(value, Opaque) else None)
            except WireError as error:
                sent[name][path] = {"opaque": str(error)}
            else:
                opaque = isinstance(value, Opaque)
                sent[name][path] = {"opaque": value.reason} if opaque else value
    return encode(sent)


def _gradients(
    leaves: dict[str, Any],
    inputs: Inputs,
    state: dict[str, Tensor],
    order: Call,
    record: CallRecord,
) -> dict[str, Any]:
    """The gradients of inputs and parameters that require grad, under the judge's cotangents."""
    outputs = {
        path: leaf
        for path, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    targets = {path: t for path, t in input_tensors(inputs) if t.requires_grad}
    targets |= {name: t for name, t in state.items() if t.requires_grad}
    if not outputs or not targets:
        return {}
    # Those of a float64 run are representable in the dtype of the native run.
    wide = order.conditions.wide
    named = {} if wide is None else wide.precisions
    cotangents = [
        draw_cotangent(
            output(path),
            leaf,
            order.cotangents,
            getattr(torch, named[path]) if path in named else leaf.dtype,
        )
        for path, leaf in outputs.items()
    ]
    try:
        gradients = torch.autograd.grad(
            list(outputs.values()), list(targets.values()), cotangents, allow_unused=True
        )
    except Exception as error:  # noqa: BLE001  (the record carries it)
        record.gradient_error = type(error).__name__, in_one_line(error, _LONGEST_TEXT)
        return {}
    return {
        name: None if gradient is None else _copy_leaf(gradient)
        for name, gradient in zip(targets, gradients, strict=True)
    }


@contextlib.contextmanager
def _widen_state(observer: Observer, shared: Collection[str], *, is_wide: bool) -> Iterator[None]:
    """Run with parameters and buffers in float64."""
    if not is_wide:
        yield
        return
    saved = {name: value.data for name, value in observer.state().items()}
    state = observer.state()
    wides: dict[str, Tensor] = {}
    try:
        for name, value in state.items():
            if value.dtype in WIDE:
                value.data = saved[name].to(WIDE[value.dtype])
                wides[name] = value.data.clone()
        yield
    finally:
        for name, value in state.items():
            is_kept = name in shared or name not in wides or is_same_leaf(wides[name], value.data)
            # A buffer of its own that it has written stays written.
            value.data = saved[name] if is_kept else value.data.to(saved[name].dtype)


def _seed_generator(seed: int, device: str) -> None:
    """As `torch.manual_seed`, which takes longer than a call on the CPU: it notes its stack."""
    if device.startswith("cpu"):
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _synchronize(device: str) -> None:
    if not device.startswith("cpu"):
        _wait_for_device(device)


def _current_stream(device: str) -> torch.Stream | None:
    return None if device.startswith("cpu") else _stream_of(torch.device(device))


# Some milliseconds of work, or up to 50: longer than a call takes to queue its own.
_BUSY_SIZE, _BUSY_TIMES, _MOST_BUSY_TIMES = 2048, 8, 128


def _keep_busy(device: str, times: int) -> None:
    busy_matrix = torch.ones(_BUSY_SIZE, _BUSY_SIZE, device=device)
    for _ in range(times):
        busy_matrix = busy_matrix @ busy_matrix / _BUSY_SIZE
