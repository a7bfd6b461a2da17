"""Reads an exported program, `.pt2`, as plain data: none of its code runs."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
import torch

from paritas.core.errors import UsageError
from paritas.core.torch_private.graphs import module_path
from paritas.sharding.graphs.calls import Graph, GraphCall, Kind, TensorValue, tensor_values
from paritas.sharding.graphs.exported_values import (
    DTYPES,
    KNOWN_MAJOR,
    ExportedProgramData,
    ExportedValues,
    GraphPart,
    Node,
    Symbols,
    TensorMeta,
    Unknown,
    Versioned,
    WeightPayload,
    WeightPayloads,
    decode,
)

# --- The members of a `.pt2` archive, which is not trusted ----------------------------------------

# Torch's own loader unpickles parts of such a file and evaluates expressions in it. Reading needs
# neither: the graph is JSON, and the weights are plain bytes.

_HOW = "Save it with torch.export.save(torch.export.export(model, inputs), 'model.pt2')"
_LONGEST_TEXT = 1 << 28
_NEWEST_ARCHIVE = 0


def is_zip(path: Path) -> bool:
    """Whether a file starts like a zip archive."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


class Archive:
    """A `.pt2` archive, as torch.export.save writes it; `model` is the name of its program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: zipfile.ZipFile | None = None
        try:
            with zipfile.ZipFile(path) as opened:
                members = opened.infolist()
        except zipfile.BadZipFile as error:
            raise UsageError(
                f"{path} is truncated, or not a zip archive ({error}). {_HOW}"
            ) from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
        # A complete archive starts where the file does. In a truncated one, zipfile may find an
        # inner archive.
        if members and min(member.header_offset for member in members) > 0:
            raise UsageError(f"{path} is truncated: it is not a complete zip archive. {_HOW}")
        self._root = members[0].filename.split("/")[0] if members else ""
        self._members = {
            member.filename.removeprefix(f"{self._root}/"): member for member in members
        }
        if len(self._members) != len(members):
            raise UsageError(f"{path} has two members with the same name. {_HOW}")
        self._check_format()
        self.model = self._program_name()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the archive open, so that its directory is read only once."""
        with zipfile.ZipFile(self.path) as opened:
            self._opened = opened
            try:
                yield
            finally:
                self._opened = None

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def text(self, name: str) -> bytes:
        """A member that is JSON or a short text."""
        size = self._member(name).file_size
        if size > _LONGEST_TEXT:
            raise UsageError(
                f"{self.path}: its member {name} has {size:,} bytes; {_LONGEST_TEXT:,} are allowed"
            )
        return self.read(name)

    def read(self, name: str) -> bytes:
        """The bytes of a member."""
        member = self._member(name)
        # Torch compresses nothing, so no member is longer than the file. This stops a small file
        # from filling the memory.
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UsageError(
                f"{self.path}: its member {name} is compressed or encrypted, but torch writes "
                f"neither. {_HOW}"
            )
        if member.file_size > self.path.stat().st_size:
            raise UsageError(
                f"{self.path}: its member {name} claims {member.file_size:,} bytes, more than "
                f"the whole file. {_HOW}"
            )
        try:
            if self._opened is not None:
                return self._opened.read(member)
            with zipfile.ZipFile(self.path) as opened:
                return opened.read(member)
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
            raise UsageError(
                f"{self.path}: its member {name} is damaged ({error}). {_HOW}"
            ) from None

    def _member(self, name: str) -> zipfile.ZipInfo:
        member = self._members.get(name)
        if member is None:
            raise UsageError(f"{self.path} has no member {name}. {_HOW}")
        return member

    def _check_format(self) -> None:
        if "archive_format" in self._members:
            archive_format = self.text("archive_format")
            version = self.text("archive_version") if "archive_version" in self else b"0"
            if archive_format != b"pt2" or version.strip() != b"%d" % _NEWEST_ARCHIVE:
                raise UsageError(
                    f"{self.path} is an archive of format "
                    f"{archive_format.decode('ascii', 'replace'):.20} "
                    f"{version.decode('ascii', 'replace'):.20}; paritas reads pt2 "
                    f"{_NEWEST_ARCHIVE}, which torch 2.11 to 2.13 write. {_HOW}"
                )
            return
        if "serialized_exported_program.json" in {name.split("/")[-1] for name in self._members}:
            raise UsageError(
                f"{self.path} was saved by an older torch in a layout that paritas does not read. "
                f"{_HOW} in torch 2.11 to 2.13"
            )
        if "data.pkl" in self._members:
            kind = "TorchScript program" if "constants.pkl" in self else "pickle (torch.save)"
            raise UsageError(
                f"{self.path} is a {kind}, and loading it would run the code in it. Give "
                f"module:factory, a function of yours that loads and returns it. Or: {_HOW}"
            )
        raise UsageError(f"{self.path} is a zip archive without a program. {_HOW}")

    def _program_name(self) -> str:
        names = [
            name[len("models/") : -len(".json")]
            for name in self._members
            if name.startswith("models/") and name.endswith(".json")
        ]
        if not names:
            compiled = any(name.startswith("data/aotinductor/") for name in self._members)
            what = "compiled code (AOTInductor)" if compiled else "other things"
            raise UsageError(f"{self.path} holds {what}, but no program. {_HOW}")
        if len(names) > 1:
            shown = ", ".join(sorted(names))
            raise UsageError(
                f"{self.path} holds {len(names)} programs ({shown:.200}); save each in its own file"
            )
        return names[0]


# --- The weights in a `.pt2` archive: plain bytes with a description ------------------------------


def read_state(
    archive: Archive, model_to_graph_names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The parameters, buffers and constants that the archive holds as plain tensors.

    Args:
        model_to_graph_names: name in the graph by name in the model.
    """
    try:
        with archive.kept_open():
            _check_byte_order(archive)
            return _read_folders(archive, model_to_graph_names)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{archive.path} changed while it was read: {error}") from None


def _read_folders(archive: Archive, graph_names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for folder in ("weights", "constants"):
        name = f"data/{folder}/{archive.model}_{folder}_config.json"
        if name not in archive:
            continue
        payloads = decode(archive.text(name), WeightPayloads, f"{archive.path}: {name}").config
        read: dict[str, bytearray] = {}  # tied weights share their bytes
        for key, payload in payloads.items():
            if key not in graph_names:
                continue
            tensor = _read_weight(archive, f"data/{folder}/{payload.path_name}", payload, read)
            if tensor is not None:
                tensors[graph_names[key]] = tensor
    return tensors


def _read_weight(
    archive: Archive, member: str, payload: WeightPayload, read: dict[str, bytearray]
) -> torch.Tensor | None:
    meta = payload.tensor_meta
    if meta is None:
        return None  # an object that only its own code can create
    if payload.use_pickle:
        return _unpickle_tensor(archive.read(member))
    if member not in read:
        read[member] = bytearray(archive.read(member))
    try:
        return _make_strided_tensor(read[member], meta)
    except (Unknown, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"{archive.path}: the bytes of {member} do not match their description ({error})"
        ) from None


def _make_strided_tensor(raw: bytearray, meta: TensorMeta) -> torch.Tensor:
    symbols = Symbols({})
    dtype = DTYPES[meta.dtype]
    shape = [symbols.size(size) for size in meta.sizes]
    stride = [symbols.size(stride_size) for stride_size in meta.strides]
    offset = symbols.size(meta.storage_offset)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if (last + 1) * dtype.itemsize > len(raw):
        raise ValueError(f"{len(raw)} bytes are too few for {shape}")
    usable = len(raw) // dtype.itemsize * dtype.itemsize
    flat = torch.frombuffer(raw, dtype=torch.uint8)[:usable].view(dtype)
    return flat.as_strided(shape, stride, offset)


def _unpickle_tensor(raw: bytes) -> torch.Tensor | None:
    """A tensor of its own class, if torch can load it without running code from the file."""
    try:
        loaded = torch.load(io.BytesIO(raw), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return None
    return loaded if type(loaded) in {torch.Tensor, torch.nn.Parameter} else None


def _check_byte_order(archive: Archive) -> None:
    byte_order = (
        archive.text("byteorder").decode("ascii", "replace") if "byteorder" in archive else ""
    )
    if byte_order and byte_order != sys.byteorder:
        raise UsageError(
            f"{archive.path} was written on a {byte_order!r:.20}-endian machine, but this one is "
            f"{sys.byteorder}-endian; save it again here"
        )


# --- The user's source line and module of a node --------------------------------------------------

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
# Frames of torch: installed, named without their folder, or generated.
_TORCH_FRAME = re.compile(
    r"^<eval_with_key>|(^|(site|dist)-packages[/\\])torch[/\\]"
    r"|[/\\]torch[/\\](nn|_dynamo|functional|fx|_higher_order_ops|utils|export|_export|_ops)\b"
)
_LONGEST_LINE = 300


@functools.lru_cache(maxsize=1024)
def source_of(trace: str) -> tuple[str, str]:
    """The file and line, and its text, of the innermost frame of the user, or else of torch.

    Only the last folder of the path is kept: the rest describes the machine of the export.
    """
    lines = trace.splitlines()
    best, users = ("", ""), False
    for position, text in enumerate(lines):
        match = _FRAME.search(text)
        if match is None or (users and _TORCH_FRAME.search(match["file"])):
            continue
        users = users or not _TORCH_FRAME.search(match["file"])
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        code = "" if _FRAME.search(code) else code[:_LONGEST_LINE]
        best = (f"{_short_path(match['file'])}:{match['line']}", code)
    return best


@functools.lru_cache(maxsize=1024)
def module_of_stack(stack: str) -> str:
    """The path of the innermost module, from `key,path,type;key,path,type`."""
    parts = stack.rsplit(";", maxsplit=1)[-1].split(",", 2)
    if len(parts) < 2 or parts[0].startswith("_empty_nn_module_stack"):  # noqa: PLR2004
        return ""
    return module_path(parts[1])


def _short_path(file: str) -> str:
    path = PureWindowsPath(file) if "\\" in file else PurePosixPath(file)
    return "/".join(part.strip("/\\") for part in path.parts[-2:] if part.strip("/\\"))


# --- The program ----------------------------------------------------------------------------------

UNPACKS = "unpacks a tuple"
HIGHER_ORDER = "a higher-order operator; the calls inside its graphs are listed after it"
_BRACKET = "only switches gradients on or off for the calls after it"
_NO_TENSOR = "returns no tensor"
_SIZES = "computes sizes, not tensors"
_ASSUMES = "checks an assumption and computes nothing"

_ASSERTION = re.compile(r"aten\.(_assert|_functional_assert|sym_constrain|_functional_sym)\w*\..*")
_OF_SIZES = re.compile(
    r"(aten\.sym_|operator\.|torch\.sym_|math\.|torch\.Tensor\.(size|dim|numel|stride)|getattr).*"
)
_GRAD_BRACKET = "higher_order.wrap_with_set_grad_enabled"
# What reading a description of an unexpected form may raise.
_MISREAD = (LookupError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)
_POSITIONAL = 1
_LONGEST_NAME = 200

# By kind of input specification: the key of the name in the model, and the kind of value.
_SPECIFIED: dict[str, tuple[str, Kind]] = {
    "parameter": ("parameter_name", "parameter"),
    "buffer": ("buffer_name", "buffer"),
    "tensor_constant": ("tensor_constant_name", "constant"),
}


def read_exported(path: Path) -> Graph:
    """Read the graph of a `.pt2` file."""
    archive = Archive(path)
    member = f"models/{archive.model}.json"
    where = f"{path}: {member}"
    text = archive.text(member)
    _check_version(decode(text, Versioned, where), path)
    program = decode(text, ExportedProgramData, where)
    symbols = Symbols(program.range_constraints)
    part = program.graph_module.graph
    values = ExportedValues(part, symbols)
    try:
        names = _specify(program, values)
        inputs = [
            input_spec["as_tensor"]["name"]
            for input_spec in part.inputs
            if "as_tensor" in input_spec
        ]
        values_by_name = {name: values.tensor(name) for name in inputs}
        calls: list[GraphCall] = []
        _read_part(part, values, symbols, calls)
    except (Unknown, *_MISREAD) as error:
        raise UsageError(f"{where} cannot be read: {error!s:.200}") from None
    version = program.schema_version
    origin_note = (
        f"exported by torch {program.torch_version:.40}, schema {version.major}.{version.minor}"
    )
    return Graph(
        name=path.name,
        kind="torch.export",
        calls=tuple(calls),
        values=values_by_name,
        state=lambda: read_state(archive, names),
        notes=(origin_note, *symbols.notes()),
        outputs=_list_returned_names(program),
        names={graph_name: model for model, graph_name in names.items()},
    )


def _list_returned_names(program: ExportedProgramData) -> tuple[str, ...]:
    output_names = []
    for specified in program.graph_module.signature.output_specs:
        ((kind, about),) = specified.items()
        if kind in {"user_output", "loss_output"} and "as_tensor" in about["arg"]:
            output_names.append(about["arg"]["as_tensor"]["name"])
        elif kind == "loss_output" and "name" in about["arg"]:
            output_names.append(about["arg"]["name"])
    return tuple(output_names)


def idle_reason(operator: str, outputs: tuple[TensorValue, ...]) -> str:
    """Why there is nothing to check for an operator; empty if there is something."""
    if _ASSERTION.fullmatch(operator):
        return _ASSUMES
    if outputs:
        return ""
    return _SIZES if _OF_SIZES.fullmatch(operator) else _NO_TENSOR


def computes_no_tensor(operator: str) -> bool:
    """Whether the name alone says so: it checks an assumption or computes sizes."""
    return bool(_ASSERTION.fullmatch(operator) or _OF_SIZES.fullmatch(operator))


def _check_version(versioned: Versioned, path: Path) -> None:
    version = versioned.schema_version
    if version.major == KNOWN_MAJOR:
        return
    age = "an older" if version.major < KNOWN_MAJOR else "a newer"
    raise UsageError(
        f"{path} is from {age} version: torch {versioned.torch_version:.40} wrote it in schema "
        f"{version.major}.{version.minor}, but paritas reads schema {KNOWN_MAJOR}. Export it again "
        "with torch 2.11 to 2.13"
    )


def _specify(program: ExportedProgramData, values: ExportedValues) -> dict[str, str]:
    """Set the kinds of the inputs; returns the name in the graph by name in the model."""
    names: dict[str, str] = {}
    for specified in program.graph_module.signature.input_specs:
        ((kind, about),) = specified.items()
        if kind in _SPECIFIED:
            key, what = _SPECIFIED[kind]
            name = about["arg"]["name"]
            values.kinds[name] = what
            names[about[key]] = name
        elif kind == "user_input" and "as_tensor" in about["arg"]:
            values.kinds[about["arg"]["as_tensor"]["name"]] = "input"
        elif kind == "constant_input":
            ((_, value),) = about["value"].items()
            values.plain[about["name"]] = value
    return names


def _read_part(
    part: GraphPart, values: ExportedValues, symbols: Symbols, calls: list[GraphCall]
) -> None:
    """Add the calls of a graph, and of the graphs inside it, in order."""
    for node in part.nodes:
        call, results = _read_node(node, values, len(calls))
        calls.append(call)
        for subgraph_argument in [
            node_input.arg["as_graph"] for node_input in node.inputs if "as_graph" in node_input.arg
        ]:
            inner = msgspec.convert(subgraph_argument["graph"], GraphPart)
            within = ExportedValues(inner, symbols, f"{call.name}.{subgraph_argument['name']}.")
            if call.operator == _GRAD_BRACKET:
                _bind_outer_tensors(call, inner, within)
            _read_part(inner, within, symbols, calls)
        # For a higher-order operator the archive says whether one tensor is a 1-tuple.
        in_tuple = node.is_hop_single_tensor_return is False
        calls.extend(_unpacking_calls(call, results, len(calls), in_tuple=in_tuple))


def _bind_outer_tensors(call: GraphCall, inner: GraphPart, within: ExportedValues) -> None:
    """Let the graph inside a grad-mode bracket use the tensors around it."""
    for inner_specs, tensors in (
        (inner.inputs, call.tensors()),
        (inner.outputs, iter(call.outputs)),
    ):
        for tensor_spec, tensor in zip(
            (x for x in inner_specs if "as_tensor" in x), tensors, strict=False
        ):
            within.bind(tensor_spec["as_tensor"]["name"], tensor)


def _read_node(node: Node, values: ExportedValues, position: int) -> tuple[GraphCall, list[Any]]:
    """A call, and its results in their original structure: tensors, lists of them, numbers."""
    operator = _operator_name(node.target)
    bracket = operator == _GRAD_BRACKET
    obstacle = HIGHER_ORDER if operator.startswith("higher_order.") and not bracket else ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for node_input in node.inputs:
        try:
            value = values.argument(node_input.arg)
        except Unknown as error:
            if "as_graph" not in node_input.arg:
                obstacle = obstacle or f"{error}, which paritas cannot read"
            value = None
        if node_input.kind is None:
            obstacle = (
                obstacle or f"the archive does not say how it receives {node_input.name!r:.40}"
            )
        if node_input.kind == _POSITIONAL:
            args.append(value)
        else:
            kwargs[node_input.name] = value
    results: list[Any] = []
    for output in node.outputs:
        try:
            results.append(values.argument(output))
        except Unknown as error:
            obstacle = obstacle or f"{error}, which paritas cannot read"
    outputs = tuple(tensor_values(results))
    idle = _BRACKET if bracket else idle_reason(operator, outputs)
    name = f"{values.prefix}{node.name or _name_of(node, position)}"
    source, code = source_of(node.metadata.get("stack_trace", ""))
    module = module_of_stack(node.metadata.get("nn_module_stack", ""))
    call = GraphCall(
        position=position,
        name=name[:_LONGEST_NAME],
        operator=operator,
        args=tuple(args),
        kwargs=kwargs,
        outputs=outputs,
        source=source,
        code=code,
        module=module,
        idle="" if obstacle and outputs else idle,
        obstacle=obstacle if outputs or not idle else "",
    )
    return call, results


def _unpacking_calls(
    call: GraphCall, node_results: list[Any], position: int, *, in_tuple: bool
) -> list[GraphCall]:
    """The calls that unpack a result: the archive omits them, but names their results."""
    results = (
        node_results[0]
        if len(node_results) == 1 and isinstance(node_results[0], list)
        else node_results
    )
    if results is node_results and len(node_results) < 2 and not in_tuple:  # noqa: PLR2004
        return []
    graph_calls: list[GraphCall] = []
    for index, element in enumerate(results):
        if isinstance(element, TensorValue) and f"{call.name}_unused_" not in element.name:
            part = GraphCall(
                position=position + len(graph_calls),
                name=element.name,
                operator="operator.getitem",
                args=(tuple(results), index),
                outputs=(element,),
                source=call.source,
                code=call.code,
                module=call.module,
                idle=UNPACKS,
            )
            graph_calls.append(part)
    return graph_calls


def _operator_name(target: str) -> str:
    name = target.removeprefix("torch.ops.")[:_LONGEST_NAME]
    return name.removeprefix("_") if name.startswith("_operator.") else name


def _name_of(node: Node, position: int) -> str:
    """The name of an unnamed node: that of its result, if it has one."""
    for output in node.outputs:
        output_argument: Mapping[str, Any] = next(iter(output.values()), {})
        if isinstance(output_argument, Mapping) and (
            "name" in output_argument or "as_name" in output_argument
        ):
            return str(output_argument.get("name") or output_argument.get("as_name"))
    return f"{_operator_name(node.target).split('.')[-2:][0]}_{position}"
