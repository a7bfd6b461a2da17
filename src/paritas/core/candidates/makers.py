"""Build reference and candidate: `torch.compile`, `torch.export`, AOTInductor, ONNX Runtime."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import importlib.util
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export.passes import move_to_device_pass

from paritas.core.candidates.loading import (
    call,
    is_named,
    make,
    model_and_inputs,
    resolve,
)
from paritas.core.errors import UsageError, chain_of_causes, in_one_line
from paritas.core.execution.compilation import Candidate
from paritas.core.execution.isolation import ProgramState, copy_inputs
from paritas.core.execution.saved_state import Copier
from paritas.core.execution.subjects import (
    ForeignProgram,
    Inputs,
    LiftedProgram,
    input_sets,
    usable_device,
)
from paritas.core.importing import look_here
from paritas.core.numerics.contents import leaves, map_leaves, replace_leaves
from paritas.core.precision.widening import lift_captured
from paritas.core.targets import build_target, is_target
from paritas.core.torch_private.global_state import quietly
from paritas.core.torch_private.inductor import compiled_package
from paritas.core.torch_private.operators import default_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from paritas.core.candidates.loading import BuildOptions, CandidateOptions


# --- A reference, its inputs and a candidate ------------------------------------------------------

SEED = 0


def build_reference(
    factory: str, options: BuildOptions, *, model_alone: bool = False
) -> tuple[Any, Any]:
    """The model and its inputs, moved to where and in what they are to run.

    With `model_alone`, a factory may return a model without inputs.
    """
    model, inputs = call_user(
        factory, options.inputs, SEED, train=options.train, model_alone=model_alone
    )
    if isinstance(model, torch.nn.Module):
        model.train(options.train)
    return move_target(model, inputs, options.device, options.dtype)


def move_target(model: Any, inputs: Any, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """A model and its inputs on a device and in a dtype; None leaves them where and as they are.

    Raises:
        UsageError: the device cannot be used here.
    """
    to_device = None if device is None else usable_device(device)
    to_dtype = None if dtype is None else getattr(torch, dtype)
    if isinstance(model, torch.nn.Module):
        model = model.to(device=to_device, dtype=to_dtype)
    return model, map_leaves(inputs, lambda leaf: _move_leaf(leaf, to_device, to_dtype))


def build_or_load(target: str, options: BuildOptions) -> tuple[Any, Any]:
    """As `build_reference`; a `.pt2` program is loaded with its example inputs."""
    if not target.endswith(".pt2"):
        return build_reference(target, options)
    try:
        program = torch.export.load(Path(target))
    except Exception as error:
        raise UsageError(f"{target!r} cannot be read: {in_one_line(error)}") from error
    if program.example_inputs is None:
        raise UsageError(
            f"{target!r} has no example inputs: export it with them, or name a factory that "
            "returns (model, inputs)"
        )
    device = usable_device(options.device or "cpu")
    program = move_to_device_pass(program, device)
    args, kwargs = map_leaves(program.example_inputs, lambda leaf: _move_leaf(leaf, device, None))
    return program.module(), Inputs(args, kwargs)


def call_user(
    factory: str,
    inputs_spec: str | None,
    seed: int,
    *,
    train: bool = False,
    model_alone: bool = False,
) -> tuple[Any, Any]:
    """The model and its inputs as the user's functions make them, under a seed."""
    make_inputs = None if inputs_spec is None else resolve(inputs_spec, "--inputs")
    torch.manual_seed(seed)
    model_alone = model_alone or make_inputs is not None
    model, inputs = _call_factory(factory, model_alone=model_alone, train=train)
    if make_inputs is not None and inputs_spec is not None:
        inputs = call(make_inputs, inputs_spec, "--inputs")
    return model, inputs


def _call_factory(factory: str, *, model_alone: bool, train: bool) -> tuple[Any, Any]:
    if is_target(factory):
        return build_target(factory, train=train, model_alone=model_alone)
    product = call(resolve(factory, "FACTORY"), factory, "FACTORY")
    return model_and_inputs(product, factory, model_alone=model_alone)


def build_candidate(model: Any, inputs: Any, options: CandidateOptions) -> Callable[..., Any]:
    """The candidate of that name, what the user's function makes, or else `torch.compile`."""
    if options.candidate is not None and is_named(options.candidate):
        return make(options.candidate, model, inputs)
    if options.candidate is not None:
        return _from_function(model, options.candidate)
    backend = _find_backend(options.backend)
    requested = {
        name: getattr(options, name) for name in ("backend", "mode", "dynamic", "fullgraph")
    }
    try:
        return torch.compile(model, **{**requested, "backend": backend})
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in requested.items())
        raise UsageError(f"torch.compile({shown}) refuses: {error}") from error


def _find_backend(name: str) -> Any:
    """The name of a backend that torch knows, or the function that `module:function` names."""
    if ":" in name:
        look_here()
        return Candidate(name).resolve()
    backends = torch.compiler.list_backends(exclude_tags=())
    if name in backends:
        return name
    near = difflib.get_close_matches(name, backends, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    usual = torch.compiler.list_backends()
    others = f"and {len(backends) - len(usual)} for debugging, such as eager and aot_eager"
    raise UsageError(
        f"unknown --backend {name!r}; {hint}known are {', '.join(usual)}, {others}; or give "
        "module:function"
    )


def _from_function(model: Any, spec: str) -> Callable[..., Any]:
    """Call the user's function with a copy of the model.

    One that changes the model in place would otherwise change the reference with it, and the two
    would agree whatever it did.
    """
    function = resolve(spec, "--candidate")
    try:
        original = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"the model cannot be copied for --candidate {spec!r}: "
            f"{type(error).__name__}: {error}; call paritas.verify from Python instead"
        ) from error
    candidate: Callable[..., Any] = call(function, spec, "--candidate", original)
    if not callable(candidate) or isinstance(candidate, type):
        raise UsageError(
            f"--candidate {spec!r} returned {candidate!r:.80}, which cannot be called; "
            "return what is to be called in place of the model"
        )
    return candidate


def _move_leaf(leaf: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """An input where the model is: floating ones in its dtype, others only on its device."""
    if not isinstance(leaf, torch.Tensor) or (device is None and dtype is None):
        return leaf
    cast = dtype if leaf.is_floating_point() else None
    moved = leaf.detach().to(device=device, dtype=cast)
    return moved.requires_grad_(leaf.requires_grad)


# --- A model captured as a program of tensors -----------------------------------------------------

# Other runtimes take and return lists of tensors. The structure of the model's arguments and
# results, and values that are not tensors, are stored here and restored around the tensors.

_LONGEST_ERROR, _LONGEST_OUTER_ERROR = 300, 80
_COLOUR = re.compile(r"\x1b\[\d+m")


class _Slot:
    """The place of a tensor in the model's result."""


@dataclasses.dataclass(frozen=True)
class CapturedCall:
    """One captured call of a model.

    Attributes:
        program: takes the tensors of the arguments in order, returns those of the result.
        tensors: the arguments it was captured with.
        shape_of_result: the model's result with a `_Slot` for every tensor.
        is_lifted: it computes in float64, whatever the model's dtype.
        leaks: what could not be lifted, in words.
    """

    program: ExportedProgram
    tensors: tuple[Tensor, ...]
    shape_of_result: Any
    is_lifted: bool = False
    leaks: frozenset[str] = frozenset()

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The model's result, with these tensors in its slots."""
        slots = sum(isinstance(leaf, _Slot) for _, leaf in leaves(self.shape_of_result))
        if slots != len(tensors):
            raise RuntimeError(
                f"the runtime returned {len(tensors)} tensors, but the model returns {slots}"
            )
        remaining_tensors = iter(tensors)
        values = [
            next(remaining_tensors) if isinstance(leaf, _Slot) else leaf
            for _, leaf in leaves(self.shape_of_result)
        ]
        return replace_leaves(self.shape_of_result, values)


class _FlatModel(torch.nn.Module):
    """A model that takes and returns only tensors."""

    def __init__(self, model: nn.Module, inputs: Inputs, visited: list[Any]) -> None:
        super().__init__()
        self.model = model
        self._tree = [Inputs(tuple(inputs.args), dict(inputs.kwargs))]
        self._seen = visited

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Assemble the arguments, call the model, flatten its result."""
        remaining_tensors = iter(tensors)
        tree = [list(self._tree[0].args), self._tree[0].kwargs]
        values = [
            next(remaining_tensors) if isinstance(leaf, torch.Tensor) else leaf
            for _, leaf in leaves(tree)
        ]

        def mark(leaf: Any) -> Any:
            return _Slot() if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = replace_leaves(tree, values)
        result = self.model(*args, **kwargs)
        self._seen[:] = [map_leaves(result, mark)]
        return tuple(leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor))


def capture_call(model: nn.Module, inputs: Inputs) -> CapturedCall:
    """Capture a model with the shapes of these inputs, for inference.

    Raises:
        UsageError: `torch.export` fails.
    """
    visited: list[Any] = []
    flat = _FlatModel(model, inputs, visited)
    fresh = _separate_tensors(flat_tensors(copy_inputs(inputs)))
    try:
        with quietly(), torch.no_grad():
            program = torch.export.export(flat, fresh)
    except Exception as error:
        raise UsageError(f"torch.export failed: {describe_error(error)}") from error
    return CapturedCall(program, fresh, visited[0])


def capture_lifted_call(
    model: nn.Module, state: ProgramState, inputs: Inputs, used: frozenset[torch.dtype]
) -> CapturedCall:
    """Capture the same in float64: state, inputs, defaults, and casts that only round.

    `state` is the model's state at the native capture: later changes of the model are not part of
    the candidate.
    """
    wide = copy_inputs(inputs, widen=True)
    with state.swap_tensors(state.widen_state()), default_dtype(torch.float64):
        first = capture_call(model, wide)
        with quietly(), torch.no_grad():
            # Again, for dtypes that follow from the widened casts.
            program, leaks = lift_captured(first.program, first.tensors, used)
    return dataclasses.replace(first, program=program, is_lifted=True, leaks=leaks)


def flat_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors of the arguments, in the order of a captured program's arguments."""
    input_leaves = [*leaves(list(inputs.args)), *leaves(inputs.kwargs)]
    return tuple(leaf for _, leaf in input_leaves if isinstance(leaf, torch.Tensor))


def _separate_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, each as an object of its own: they are the inputs of a program for any values.

    Of a tensor that is passed twice, a captured program would use one input only.
    """
    used_ids: set[int] = set()
    separate: list[Tensor] = []
    for tensor in tensors:
        is_used = id(tensor) in used_ids
        used_ids.add(id(tensor))
        separate.append(Copier().copy_tensor(tensor) if is_used else tensor)
    return tuple(separate)


def check_model(model: Any, name: str) -> None:
    """Raise `UsageError` unless it is an `nn.Module`, which `torch.export` needs."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"candidate {name!r} uses torch.export, which takes an nn.Module, not "
            f"{type(model).__name__}; call the function in the forward of a module"
        )


def describe_error(error: BaseException) -> str:
    """The type and text of an exception and of its root cause, in one line."""

    def describe(raised: BaseException, longest: int) -> str:
        text = " ".join(_COLOUR.sub("", str(raised)).split())
        return f"{type(raised).__name__}: {text[:longest]}{' ...' if len(text) > longest else ''}"

    cause = chain_of_causes(error)[-1]
    inner = describe(cause, _LONGEST_ERROR)
    if cause is error:
        return inner
    return f"{describe(error, _LONGEST_OUTER_ERROR)}; the cause is {inner}"


# --- torch.export ---------------------------------------------------------------------------------

# The exported module has the model's parameters under their own names, so everything can be
# compared: gradients, state, aliases.


def export(model: nn.Module, inputs: Any) -> nn.Module:
    """The module of `torch.export.export`.

    Args:
        model: the reference, an `nn.Module`. It is not changed.
        inputs: one set of inputs, as for `paritas.verify`; shapes are static.

    Raises:
        UsageError: the model cannot be exported.
    """
    with quietly():
        return _export_model(model, inputs, "export").module()


def export_decomposed(model: nn.Module, inputs: Any) -> nn.Module:
    """The same after `run_decompositions()`: core ATen operators, as backends get them."""
    program = _export_model(model, inputs, "export-decomposed")
    try:
        with quietly():
            module: nn.Module = program.run_decompositions().module()
            return module
    except Exception as error:
        raise UsageError(f"run_decompositions() failed: {describe_error(error)}") from error


def _export_model(model: Any, inputs: Any, name: str) -> ExportedProgram:
    check_model(model, name)
    sets = input_sets(inputs)
    if len(sets) > 1:
        raise UsageError(
            f"candidate {name!r} takes one set of inputs, got {len(sets)}; verify them one at a "
            "time"
        )
    fresh = copy_inputs(sets[0])
    try:
        with quietly():
            return torch.export.export(model, fresh.args, fresh.kwargs)
    except Exception as error:
        raise UsageError(f"torch.export failed: {describe_error(error)}") from error


# --- A model as a program of another runtime ------------------------------------------------------

if TYPE_CHECKING:
    Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclasses.dataclass(frozen=True)
class BuiltRuntime:
    """A function that runs a captured call, and its parts that may not compute in float64."""

    run: Run
    leaks: frozenset[str] = frozenset()


def foreign_program(
    name: str, model: nn.Module, inputs: Any, build: Callable[[CapturedCall], BuiltRuntime]
) -> ForeignProgram:
    """A candidate for which `build` makes a program from each captured call of the model.

    Args:
        name: of the runtime.
        model: it is captured, but not changed.
        inputs: as for `paritas.verify`: one program is built for each set.
        build: makes a runtime from a captured call.

    Raises:
        UsageError: the model cannot be captured, or `build` fails.
    """
    check_model(model, name)
    sets = input_sets(inputs)
    state = ProgramState({"": model})
    native = _RuntimePrograms(
        name,
        [
            _build_program(name, capture_call(model, input_set), build, input_set)
            for input_set in sets
        ],
    )

    def lift(used: frozenset[torch.dtype]) -> LiftedProgram:
        programs = [
            _build_program(
                name, capture_lifted_call(model, state, input_set, used), build, input_set
            )
            for input_set in sets
        ]
        leaks = frozenset[str]().union(*(program.leaks for program in programs))
        return LiftedProgram(_RuntimePrograms(name, programs), leaks)

    return ForeignProgram(name, native, lift)


@dataclasses.dataclass(frozen=True)
class _RuntimeProgram:
    """The runtime of one captured call, and the key of its arguments."""

    capture: CapturedCall
    built: BuiltRuntime
    key: tuple[Any, ...]

    @property
    def leaks(self) -> frozenset[str]:
        """Of the capture and of the runtime."""
        return self.capture.leaks | self.built.leaks


class _RuntimePrograms:
    """The programs of all sets of inputs; a call finds its program by its arguments."""

    def __init__(self, name: str, programs: list[_RuntimeProgram]) -> None:
        self.name = name
        self.programs = {program.key: program for program in programs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        program = self.programs.get(_input_key(inputs))
        if program is None:
            shown = ", ".join(f"{t.dtype}{list(t.shape)}" for t in flat_tensors(inputs))
            raise UsageError(
                f"{self.name} was not built for the inputs {shown}; give every set of inputs when "
                "you make the candidate"
            )
        with torch.no_grad():
            flat_results = program.built.run(flat_tensors(inputs))
        return program.capture.result(flat_results)


def _build_program(
    name: str, captured: CapturedCall, build: Callable[[CapturedCall], BuiltRuntime], inputs: Inputs
) -> _RuntimeProgram:
    try:
        # As in the capture: gradient mode determines the form of attention.
        with torch.no_grad():
            built = build(captured)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name} cannot take the model: {describe_error(error)}") from error
    return _RuntimeProgram(captured, built, _input_key(inputs))


def _input_key(inputs: Inputs) -> tuple[Any, ...]:
    """Shapes and values other than tensors; not dtypes, which a lifted run widens."""
    input_leaves = [*leaves(list(inputs.args)), *leaves(inputs.kwargs)]
    return tuple(
        (path, tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else repr(leaf))
        for path, leaf in input_leaves
    )


# --- AOTInductor ----------------------------------------------------------------------------------

AOT_INDUCTOR = "aot_inductor"


def aot_inductor(model: nn.Module, inputs: Any) -> ForeignProgram:
    """Export a model, compile it to a package of machine code, and load it.

    Args:
        model: the reference, an `nn.Module`. It is not changed.
        inputs: as for `paritas.verify`; shapes are static.

    Raises:
        UsageError: the model cannot be exported or compiled.
    """
    return foreign_program(AOT_INDUCTOR, model, inputs, _build_package)


def _build_package(captured: CapturedCall) -> BuiltRuntime:
    # Once loaded, the code no longer needs its file.
    with tempfile.TemporaryDirectory(prefix="paritas-aot-") as folder, quietly():
        package = compiled_package(captured.program, Path(folder) / "model.pt2")

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return list(package(*tensors))

    return BuiltRuntime(run)


# --- ONNX Runtime ---------------------------------------------------------------------------------

ONNX_RUNTIME = "onnxruntime"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
# The log level of ONNX Runtime: it raises errors, and would print them as well.
_FATAL = 4
# Such as the epsilon of a layer norm or the constants of a tanh GELU.
_ATTRIBUTES = "ONNX stores attributes, and its exporter some constants, in float32"
_LONGEST_REASON = 120


def onnxruntime(model: nn.Module, inputs: Any) -> ForeignProgram:
    """Export a model to ONNX and run it with ONNX Runtime, on CUDA if the model is on CUDA.

    Args:
        model: the reference, an `nn.Module`. It is not changed.
        inputs: as for `paritas.verify`; shapes are static.

    Raises:
        UsageError: a package is missing, or the model cannot be exported.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"candidate {ONNX_RUNTIME!r} needs packages that are not installed: "
            f"{', '.join(missing)}; pip install 'paritas[onnx]'"
        )
    return foreign_program(ONNX_RUNTIME, model, inputs, _build_onnx)


def _build_onnx(captured: CapturedCall) -> BuiltRuntime:
    with quietly():
        program = torch.onnx.export(captured.program, dynamo=True, verbose=False)
    if program is None:
        raise UsageError("torch.onnx.export returned no program")
    expected, taken = len(captured.tensors), len(program.model.graph.inputs)
    if expected != taken:
        raise UsageError(f"the ONNX model takes {taken} tensors, but the model takes {expected}")
    device = next((tensor.device for tensor in captured.tensors), torch.device("cpu"))
    leaks = {_ATTRIBUTES} if captured.is_lifted else set()
    call: Callable[..., Sequence[Tensor]] = program
    try:
        program.initialize_inference_session(lambda model: _open_session(model, device))
    except Exception as error:
        if type(error).__name__ != "NotImplemented":
            raise
        text = " ".join(str(error).split()).rpartition(" : ")[2][:_LONGEST_REASON]
        if not captured.is_lifted:
            raise UsageError(
                f"{ONNX_RUNTIME} lacks an operator in this dtype: {text}; try another --dtype"
            ) from error
        leaks.add(
            f"ONNX's reference evaluator ran it, because {ONNX_RUNTIME} lacks an operator in "
            f"float64: {text}"
        )
        call = _call_evaluator(program)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # The next run may overwrite its results.
        return [value.clone().to(device) for value in call(*tensors)]

    return BuiltRuntime(run, frozenset(leaks))


def _call_evaluator(program: torch.onnx.ONNXProgram) -> Callable[..., Sequence[Tensor]]:
    """ONNX's reference evaluator; its errors say whose they are."""

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        try:
            return program.call_reference(*tensors)
        except Exception as error:
            raise RuntimeError(f"in ONNX's reference evaluator: {in_one_line(error)}") from error

    return call


def _open_session(model: str | bytes, device: torch.device) -> Any:
    runtime = importlib.import_module("onnxruntime")

    options = runtime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = torch.get_num_threads()
    expected = ["CPUExecutionProvider"]
    if device.type == "cuda":
        expected.insert(0, "CUDAExecutionProvider")
    available_providers = runtime.get_available_providers()
    lacking = [provider for provider in expected if provider not in available_providers]
    if lacking:
        raise UsageError(
            f"the model is on {device}, but onnxruntime has no {lacking[0]} (only "
            f"{', '.join(available_providers)}); install onnxruntime-gpu, or run on the CPU"
        )
    session = runtime.InferenceSession(model, sess_options=options, providers=expected)
    run = session.run_with_ort_values

    def run_silently(names: Any, values: Any, run_options: Any) -> Any:
        run_options.log_severity_level = _FATAL  # torch asks for errors
        return run(names, values, run_options)

    session.run_with_ort_values = run_silently
    return session
