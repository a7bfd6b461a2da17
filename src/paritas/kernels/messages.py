"""What the judge orders, and what the process of a candidate answers.

An answer may be forged: it is checked against its type when it arrives. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

# The limit of a text in an answer.
LONGEST_TEXT = 600


class Encoded(msgspec.Struct, frozen=True):
    """Plain values and dense tensors as data; see `paritas.kernels.wire`.

    Attributes:
        tree: lists of a kind and what belongs to it.
        storages: the memory of the tensors.
    """

    tree: Any
    storages: list[bytes]


class SideName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a side is.

    Attributes:
        file: the file that defines it; empty if it is in `module` or is an operator.
        module: the module that defines it.
        name: the function or class; empty for the usual one.
        shown: as the user wrote it.
    """

    file: str = ""
    module: str = ""
    name: str = ""
    shown: str = ""

    @property
    def is_operator(self) -> bool:
        """Whether it is an operator of torch."""
        return not self.file and not self.module


# --- Orders ---------------------------------------------------------------------------------------


class _Order(msgspec.Struct, frozen=True, tag=True):
    pass


class Load(_Order, frozen=True, kw_only=True):
    """Import a side, as from this folder, with this search path."""

    side: SideName
    device: str
    folder: str
    temporary: str
    paths: list[str]
    is_candidate: bool


class Construct(_Order, frozen=True, kw_only=True):
    """Make what is called.

    Attributes:
        dtype: the dtype of its parameters; empty for its own.
        moves: convert it and convert it back, so that other tensors share memory.
        reads_state: answer with parameters and buffers.
    """

    init: Encoded
    seed: int
    device: str
    dtype: str = ""
    moves: bool = False
    reads_state: bool = True


class SetState(_Order, frozen=True, kw_only=True):
    """Write to parameters and buffers."""

    state: Encoded


class Widening(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is made in float64; all dtypes are names.

    Attributes:
        dtype: the dtype of the reference.
        default: the default dtype.
        used: the floating dtypes of the reference.
        precisions: the dtype of each output by its path.
    """

    dtype: str
    default: str
    used: list[str]
    precisions: dict[str, str]


class CallConditions(msgspec.Struct, frozen=True, kw_only=True):
    """How a call differs from a plain one.

    Attributes:
        watch: note the operators, and poison what they leave uninitialised.
        profile: note the Python functions.
        pattern: the pattern of poison; None for one after the other.
        grad_mode: gradients are on, but none is asked for.
        caller: one of `paritas.kernels.calling`; empty for the judge itself.
        wide: make it in float64.
    """

    watch: bool = False
    profile: bool = False
    pattern: int | None = None
    grad_mode: bool = False
    caller: str = ""
    wide: Widening | None = None


PLAIN_CONDITIONS = CallConditions()


class Call(_Order, frozen=True, kw_only=True):
    """Make one call, and answer with everything that its caller could observe.

    Attributes:
        pattern: the pattern of poison.
        train: the mode of a module; None to leave it.
        shared: the parameters and buffers that are the reference's, too.
        attributes: the names of tensors that a call leaves in the reference.
        reuse: which memory the inputs are in; see `paritas.kernels.cases`.
        grad: compute gradients.
        cotangents: the seed of the cotangents.
    """

    inputs: Encoded
    seed: int = 0
    pattern: int = 0
    train: bool | None = None
    shared: list[str] = []
    attributes: list[str] = []
    reuse: str = ""
    grad: bool = False
    cotangents: int = 0
    conditions: CallConditions = PLAIN_CONDITIONS


class Rehearse(_Order, frozen=True, kw_only=True):
    """Make one call, and forget its result."""

    inputs: Encoded
    device: str
    train: bool | None
    grad: bool


class Measure(_Order, frozen=True, kw_only=True):
    """Time some calls.

    Attributes:
        cold: empty the caches before each.
        checked: the number of the call whose result is sent.
    """

    inputs: Encoded
    calls: int
    cold: bool
    seed: int
    checked: int


class CheckRegistrations(_Order, frozen=True, kw_only=True):
    """Run `torch.library.opcheck`."""

    inputs: Encoded


Order = Load | Construct | SetState | Call | Rehearse | Measure | CheckRegistrations


# --- Answers --------------------------------------------------------------------------------------


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The process cannot go on, whatever was ordered."""

    reason: str


class Effects(msgspec.Struct, kw_only=True, tag=True):
    """What code did beside its result.

    Attributes:
        settings: what it changed in its process, and how.
        outside: (action, what): files, processes and connections.
        pid: the process.
        files: the files of all imported modules.
        beside: the inputs beside which it wrote to memory.
        threads: how many more threads are running.
    """

    settings: dict[str, str] = {}
    outside: list[tuple[str, str]] = []
    pid: int = 0
    files: list[str] = []
    beside: list[str] = []
    threads: int = 0


class Loaded(Effects):
    """The answer to `Load`.

    Attributes:
        error: why it cannot be loaded; empty if it was.
        extensions: compiled code, and compilers of kernels, that the import has brought in.
    """

    error: str = ""
    extensions: list[str] = []


class Constructed(Effects):
    """The answer to `Construct`.

    Attributes:
        error: what the constructor raised; empty if it returned.
        state: parameters and buffers by name.
        train: the mode of a module.
    """

    error: str = ""
    state: Encoded | None = None
    train: bool | None = None


class StateSet(msgspec.Struct, frozen=True, tag=True):
    """The answer to `SetState`."""

    error: str = ""


class LeafFacts(msgspec.Struct, frozen=True):
    """What a caller sees of a tensor beside its values."""

    strides: tuple[int, ...]
    requires_grad: bool
    is_inference: bool


class CallRecord(Effects):
    """The answer to `Call`.

    Attributes:
        error: the name of the exception that it raised, and its text.
        seconds: how long it took.
        drew: whether it drew random numbers.
        written: the inputs that it wrote to, be it with the same values.
        refused: outputs that are not plain tensors, and their classes.
        kinds: the name, the family, and whether it is a tensor, of each container.
        facts: of each tensor.
        lazy: outputs that are conjugated or negated when they are read.
        in_common: outputs in memory that other processes may write to.
        aliases: (kind, name, path): an output that shares memory with an input or a parameter.
        overwritten: results of earlier calls that have changed.
        later: outputs that changed after the call had returned.
        shared: outputs in the memory of results of earlier calls.
        values: outputs, changed inputs, changed state and gradients.
        gradient_error: what computing gradients raised.
        foreign: code outside torch that it ran, seen in float64.
        narrow: the dtypes of values of its own, seen in float64.
        uncompiled: whether it compiles something, which is off in float64.
        operators: the operators that it called.
        code: (file, function): the Python functions that ran.
    """

    error: tuple[str, str] | None = None
    seconds: float = 0.0
    drew: bool = False
    written: list[str] = []
    refused: dict[str, str] = {}
    kinds: dict[str, tuple[str, str, bool]] = {}
    facts: dict[str, LeafFacts] = {}
    lazy: list[str] = []
    in_common: list[str] = []
    aliases: list[tuple[str, str, str]] = []
    overwritten: list[str] = []
    later: list[str] = []
    shared: list[str] = []
    values: Encoded | None = None
    gradient_error: tuple[str, str] | None = None
    foreign: list[str] = []
    narrow: list[str] = []
    uncompiled: bool = False
    operators: list[str] = []
    code: list[tuple[str, str]] = []


class RehearsedCall(msgspec.Struct, kw_only=True, tag=True):
    """The answer to `Rehearse`.

    Attributes:
        error: what it raised; empty if it returned.
        is_usable: whether the device still works.
        lazy: see `CallRecord`.
        written: see `CallRecord`.
    """

    error: str = ""
    is_usable: bool = True
    lazy: list[str] = []
    written: list[str] = []


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Measure`.

    Attributes:
        error: what a call raised; empty if all returned.
        times: in seconds.
        result: what the checked call returned.
    """

    error: str = ""
    times: list[float] = []
    result: Encoded | None = None


class Registrations(msgspec.Struct, frozen=True, tag=True):
    """The answer to `CheckRegistrations`: what each test says, empty if it passes."""

    results: dict[str, str] = {}
