"""torchair's interface for dumps: its names and its layout, with Inductor behind them.

A script with `import torchair` and `from msit_llm.dump import torchair_dump` runs on any machine if
both names refer to this module. Given a `CompilerConfig` of torchair itself, the two dump functions
set its fields instead, and the script runs on an Ascend machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.core.errors import ParityWarning, UsageError
from paritas.formats.dumps.selection import Selection
from paritas.formats.files.records import TIME
from paritas.formats.foreign.fusion_switch import load_switch
from paritas.formats.foreign.npy_tree import is_of_tree
from paritas.recording.pipeline import rank_and_world
from paritas.recording.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.recording.record import RecordingBackend

__all__ = [
    "CompilerConfig",
    "get_backend",
    "get_fx_dump_config",
    "get_ge_dump_config",
    "get_npu_backend",
]


# --- Options --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Option:
    """The default of an option, the values it accepts, and these in words.

    `has_effect`: whether it means anything here; if not, it is passed over.
    """

    default: Any
    accepts: Callable[[Any], bool]
    accepted: str
    has_effect: bool = True


class _OptionGroup:
    """A group of options and other groups."""

    def __init__(self, where: str, **contents: _Option | _OptionGroup) -> None:
        """`where` is the group's path in messages."""
        values = {
            name: entry if isinstance(entry, _OptionGroup) else entry.default
            for name, entry in contents.items()
        }
        vars(self).update(_where=where, _contents=contents, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        option = self._contents.get(name)
        if option is None:
            keys = [key for key, entry in self._contents.items() if _has_effect(entry)]
            nearest = difflib.get_close_matches(name, keys, n=len(keys), cutoff=0)
            raise UsageError(
                f"{self._where}.{name} = {value!r}: there is no such option; the options are "
                f"{', '.join(nearest)}"
            )
        if isinstance(option, _OptionGroup):
            raise UsageError(f"{self._where}.{name} is a group: set the options in it")
        if not option.accepts(value):
            raise UsageError(f"{self._where}.{name} = {value!r}: give {option.accepted}")
        vars(self)[name] = value

    def __repr__(self) -> str:
        shown = [name for name, entry in self._contents.items() if _has_effect(entry)]
        body = ", ".join(f"{name}={vars(self)[name]!r}" for name in shown)
        return f"{self._where}({body})"

    def passed_over(self) -> Iterator[str]:
        """The settings that have no effect here, such as `config.mode = 'reduce-overhead'`."""
        for name, entry in self._contents.items():
            value = vars(self)[name]
            if isinstance(entry, _OptionGroup):
                yield from entry.passed_over()
            elif not entry.has_effect and value != entry.default:
                yield f"{self._where}.{name} = {value!r}"

    if TYPE_CHECKING:
        _where: str
        _contents: dict[str, _Option | _OptionGroup]

        def __getattr__(self, name: str) -> Any: ...


class _ForeignGroup(_OptionGroup):
    """A group of torchair that has no meaning here: it takes any option and group."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._contents[name] = _Option(object(), lambda _: True, "anything", has_effect=False)
        vars(self)[name] = value

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or "_where" not in vars(self):  # being copied
                raise AttributeError(name)
            group = _ForeignGroup(f"{self._where}.{name}")
            self._contents[name] = vars(self)[name] = group
            return group


def _has_effect(entry: _Option | _OptionGroup) -> bool:
    return entry.has_effect if isinstance(entry, _Option) else not isinstance(entry, _ForeignGroup)


class CompilerConfig(_OptionGroup):
    """The configuration for `get_backend`; set it directly, or with the two dump functions.

    ::

        debug.graph_dump.type    None | 'txt'                print the graphs; 'pbtxt', 'py' as txt
        debug.graph_dump.path    text                        must be the folder of the dump
        debug.data_dump.type     None | 'npy'                record the graph node by node
        debug.data_dump.path     text                        into this folder
        debug.data_dump.layout   'msit' | 'msit-7.1.0'       torchair's tree, new or old
        dump_config.enable_dump  False | True                record the fused code
        dump_config.dump_path    text                        into this folder
        dump_config.dump_mode    'all' | 'input' | 'output'
        dump_config.dump_step    '1|2|5-7'                   all steps if empty
        dump_config.dump_layer   'Add Conv_1'                names or globs; all if empty
        dump_config.layout       'msit' | 'ge' | 'ge-7.1.0'  .npy files, or Ascend's formats
        fusion_config.fusion_switch_file  None | text        what not to fuse

    The other settings of torchair are accepted and passed over, with a warning and a note in the
    dump: they are about Ascend's compiler.
    """

    def __init__(self) -> None:
        """By default, nothing is dumped."""
        super().__init__(
            "config",
            debug=_OptionGroup(
                "config.debug",
                graph_dump=_OptionGroup(
                    "config.debug.graph_dump",
                    type=_make_choice(None, "txt", "pbtxt", "py"),
                    path=_make_text("./", "a path"),
                ),
                data_dump=_OptionGroup(
                    "config.debug.data_dump",
                    type=_make_choice(None, "npy"),
                    path=_make_text("./", "a path"),
                    layout=_make_choice(*FX_LAYOUTS),
                    filter=_make_foreign(None),
                ),
                run_eagerly=_make_foreign(default=False),
                **{name: _ForeignGroup(f"config.debug.{name}") for name in _FOREIGN_DEBUG_GROUPS},
            ),
            dump_config=_OptionGroup(
                "config.dump_config",
                enable_dump=_make_choice(False, True),
                dump_path=_make_text("./", "a path"),
                dump_mode=_make_choice("all", "input", "output"),
                dump_step=_Option("", _are_steps, "steps such as '1|2|5-7', ascending"),
                dump_layer=_make_text("", "names separated by spaces"),
                layout=_make_choice("msit", "ge", "ge-7.1.0"),
                quant_dumpable=_make_foreign(default=False),
                dump_data=_make_foreign("tensor"),
            ),
            fusion_config=_OptionGroup(
                "config.fusion_config",
                fusion_switch_file=_Option(
                    None, lambda value: value is None or isinstance(value, str), "a path or None"
                ),
            ),
            mode=_make_foreign("max-autotune"),
            post_grad_custom_pre_pass=_make_foreign(None),
            post_grad_custom_post_pass=_make_foreign(None),
            **{name: _ForeignGroup(f"config.{name}") for name in _FOREIGN_GROUPS},
        )


_FOREIGN_GROUPS = (
    "aclgraph_config",
    "aoe_config",
    "experimental_config",
    "export",
    "export_config",
    "ge_config",
    "inference_config",
    "npugraphex_config",
)
_FOREIGN_DEBUG_GROUPS = ("aclgraph", "fx_summary")


def _make_foreign(default: Any) -> _Option:
    """An option of torchair that means nothing here."""
    return _Option(default, lambda _: True, "anything", has_effect=False)


def _make_choice(*values: Any) -> _Option:
    def accepts(option_value: Any) -> bool:
        return any(type(option_value) is type(value) and option_value == value for value in values)

    return _Option(values[0], accepts, " or ".join(map(repr, values)))


def _make_text(default: str, accepted: str) -> _Option:
    return _Option(default, lambda value: isinstance(value, str), f"{accepted}, as text")


def _are_steps(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        Selection.of(steps=value or None)
    except UsageError:
        return False
    return True


# --- Configuring a dump ---------------------------------------------------------------------------

GE_FOLDER = "msit_ge_dump"
FX_FOLDER = "msit_fx_dump"
MODES = ("input", "output", "all")
LAYOUTS = ("msit", "ge", "ge-7.1.0")
FX_LAYOUTS = ("msit", "msit-7.1.0")


def get_ge_dump_config(
    dump_path: str | os.PathLike[str] = "",
    dump_mode: str = "all",
    fusion_switch_file: str | os.PathLike[str] | None = None,
    dump_token: Iterable[Any] | None = None,
    dump_layer: Iterable[str] | None = None,
    compiler_config: Any = None,
    *,
    layout: str = "msit",
) -> Any:
    """Configure a dump of the fused program into `{dump_path}/msit_ge_dump`.

    Args:
        dump_path: each run needs a different one; "" is the working directory.
        dump_mode: `input`, `output` or `all`.
        fusion_switch_file: JSON that turns fusion off, all of it or by the names of passes.
        dump_token: steps to record, counted from 0, for example `[1, 2, 5]`; None records all.
        dump_layer: names to record, for example `["Add", "Conv_1"]`; None records all.
        compiler_config: the configuration to change, ours or torchair's; None makes one of ours.
        layout: `msit`, one `.npy` file per tensor; `ge`, the tree and the bin files of Ascend's
            graph engine; `ge-7.1.0`, its tree up to that release, without a folder per rank.

    Returns:
        The configuration.
    """
    if dump_mode not in MODES:
        raise UsageError(f"dump_mode={dump_mode!r}: give one of {', '.join(MODES)}")
    if layout not in LAYOUTS:
        raise UsageError(f"layout={layout!r}: give one of {', '.join(LAYOUTS)}")
    config = CompilerConfig() if compiler_config is None else compiler_config
    if layout != "msit" and not isinstance(config, CompilerConfig):
        raise UsageError(
            f"layout={layout!r}: torchair's own configuration always writes Ascend's tree; omit "
            "layout"
        )
    steps, layers = _parse_steps(dump_token), _parse_layers(dump_layer)
    switch = _check_switch(fusion_switch_file, is_ours=isinstance(config, CompilerConfig))
    if isinstance(config, CompilerConfig) and config.debug.data_dump.type:
        raise UsageError(_BOTH.format(config.debug.data_dump.path))
    folder = _make_path(dump_path, GE_FOLDER)
    dump_options = {
        "debug.graph_dump.type": "txt",
        _path_option(config, "debug.graph_dump"): folder,
        "dump_config.enable_dump": True,
        "dump_config.dump_mode": dump_mode,
        "dump_config.dump_path": folder,
    }
    if steps:
        dump_options["dump_config.dump_step"] = steps
    if layers:
        dump_options["dump_config.dump_layer"] = layers
    if layout != "msit":
        dump_options["dump_config.layout"] = layout
    if switch:
        dump_options["fusion_config.fusion_switch_file"] = switch
    return _configure(config, dump_options, folder)


def get_fx_dump_config(
    dump_path: str | os.PathLike[str] = "", compiler_config: Any = None, *, layout: str = "msit"
) -> Any:
    """Configure a dump of the captured graph, node by node, into `{dump_path}/msit_fx_dump`.

    Args:
        dump_path: each run needs a different one; "" is the working directory. Old releases of
            torchair ignore it and write to the working directory.
        compiler_config: the configuration to change, ours or torchair's; None makes one of ours.
        layout: `msit`, torchair's tree; `msit-7.1.0`, its tree up to that release, without a folder
            per rank.

    Returns:
        The configuration.
    """
    if layout not in FX_LAYOUTS:
        raise UsageError(f"layout={layout!r}: give one of {', '.join(FX_LAYOUTS)}")
    config = CompilerConfig() if compiler_config is None else compiler_config
    if layout != "msit" and not isinstance(config, CompilerConfig):
        raise UsageError(
            f"layout={layout!r}: the release of torchair decides its tree; omit layout"
        )
    if isinstance(config, CompilerConfig) and config.dump_config.enable_dump:
        raise UsageError(_BOTH.format(config.dump_config.dump_path))
    folder = _make_path(dump_path, FX_FOLDER)
    dump_options: dict[str, Any] = {"debug.data_dump.type": "npy"}
    if layout != "msit":
        dump_options["debug.data_dump.layout"] = layout
    option = _path_option(config, "debug.data_dump")
    if _has_option(config, option):
        dump_options[option] = folder
    return _configure(config, dump_options, folder)


# torchair would run the graph node by node and leave the other dump empty.
_BOTH = (
    "this configuration already has a dump into {}: a run is either fused or node by node, so use "
    "a separate configuration for each"
)


def _configure(config: Any, option_values: dict[str, Any], folder: str) -> Any:
    """Set all options or none, and create the folder: torchair refuses a missing one."""
    missing = [option for option in option_values if not _has_option(config, option)]
    if missing:
        raise UsageError(
            f"compiler_config={config!r} has no {', '.join(missing)}: give a CompilerConfig of "
            "torchair or of paritas.torchair_dump"
        )
    _refuse_used(Path(folder))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"dump_path: cannot create {folder}: {error.strerror}") from error
    for option, value in option_values.items():
        *groups, name = option.split(".")
        group = functools.reduce(getattr, groups, config)
        try:
            setattr(group, name, value)
        except (ValueError, TypeError, OSError) as error:
            raise UsageError(f"cannot set {option} = {value!r}: {error}") from error
    return config


def _has_option(config: Any, option: str) -> bool:
    missing = object()
    option_value = functools.reduce(
        lambda group, name: getattr(group, name, missing), option.split("."), config
    )
    return option_value is not missing


def _path_option(config: Any, group: str) -> str:
    """The path option, which torchair has renamed several times."""
    return f"{group}._path" if _has_option(config, f"{group}._path") else f"{group}.path"


def _make_path(dump_path: Any, name: str) -> str:
    if not isinstance(dump_path, str | os.PathLike):
        raise UsageError(f"dump_path={dump_path!r}: give a path, as text")
    # Absolute: the program may change its working directory before it is compiled.
    return str(Path(dump_path).absolute() / name)


def _refuse_used(folder: Path) -> None:
    """One run per folder; but other ranks of this run may already be writing."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"dump_path: {folder} is a file; give a folder")
    rank, world_size = rank_and_world()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if world_size > 1 and TIME.fullmatch(entry.name):
            continue  # it contains devices, not ranks
        of_rank = re.search(r"rank_?(\d+)", entry.name)
        is_known = is_of_tree(entry.name) or re.fullmatch(r"rank\d+", entry.name)
        if world_size == 1 or not is_known or of_rank is None or int(of_rank[1]) == rank:
            raise UsageError(
                f"dump_path: {folder} is not empty: it contains {entry.name!r}; give each run a "
                "dump_path of its own"
            )


def _parse_steps(dump_token: Any) -> str:
    """Steps as torchair writes them: `1|2|5`."""
    if dump_token is None:
        return ""
    try:
        return Selection.of(steps=dump_token).describe()["steps"]
    except UsageError as error:
        raise UsageError(f"dump_token: {error}") from error


def _parse_layers(dump_layer: Any) -> str:
    """Names as torchair writes them: `Add Conv_1`."""
    if dump_layer is None:
        return ""
    names = list(dump_layer) if isinstance(dump_layer, Iterable) else [dump_layer]
    if isinstance(dump_layer, str) or not names:
        raise UsageError(f'dump_layer={dump_layer!r}: give a list of names, ["Add", "Conv_1"]')
    for name in names:
        if not isinstance(name, str) or not name or re.search(r"\s", name):
            raise UsageError(f"dump_layer: {name!r} is not the name of an operator or module")
    return " ".join(names)


def _check_switch(file: Any, *, is_ours: bool) -> str:
    if file is None:
        return ""
    if not isinstance(file, str | os.PathLike):
        raise UsageError(f"fusion_switch_file={file!r}: give the path of a JSON file")
    path = Path(file).absolute()
    if is_ours:
        load_switch(path)
        return str(path)
    # It names Ascend's passes, which only Ascend's compiler knows.
    try:
        switch = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"fusion_switch_file: {path} cannot be read: {error}") from error
    if not isinstance(switch, dict) or not isinstance(switch.get("Switch"), dict):
        raise UsageError(
            f'fusion_switch_file: {path} contains {switch!r}; give {{"Switch": {{"GraphFusion": '
            '{"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'
        )
    return str(path)


# --- The backend ----------------------------------------------------------------------------------


def get_backend(*, compiler_config: Any = None) -> RecordingBackend | str:
    """A backend for `torch.compile(backend=...)`: Inductor, recorded as configured.

    The dump is complete when the process ends, or when the backend's `close()` is called. Without
    a dump in the configuration, this is plain Inductor.
    """
    config = CompilerConfig() if compiler_config is None else compiler_config
    if not isinstance(config, CompilerConfig):
        raise UsageError(
            f"compiler_config={config!r}: not a CompilerConfig of paritas.torchair_dump; pass "
            "torchair's own to torchair.get_npu_backend"
        )
    passed_over = list(config.passed_over())
    kind = config.debug.graph_dump.type
    if kind not in (None, "txt"):
        passed_over.append(f"config.debug.graph_dump.type = {kind!r} (graphs are printed as 'txt')")
    if passed_over:
        told = f"passed over, because only Ascend's compiler has them: {', '.join(passed_over)}"
        warnings.warn(told, ParityWarning, stacklevel=2)
    backend = _make_backend(config)
    if passed_over and not isinstance(backend, str):
        backend.session.note(told)
    return backend


def _make_backend(config: CompilerConfig) -> RecordingBackend | str:
    data, dump, graphs = config.debug.data_dump, config.dump_config, config.debug.graph_dump
    switch = config.fusion_config.fusion_switch_file
    if data.type and dump.enable_dump:
        raise UsageError(
            f"{data} and {dump} are both set: a run is either fused or node by node, so use a "
            "separate configuration for each"
        )
    if graphs.type and (data.type or not dump.enable_dump):
        raise UsageError(
            f"{graphs}: graphs are printed only with a dump of fused code; also set "
            "config.dump_config.enable_dump"
        )
    if switch and not dump.enable_dump:
        raise UsageError(f"fusion_switch_file = {switch!r} only affects dumps of fused code")
    if data.type:
        return record(data.path, source="fx", layout=data.layout)
    if not dump.enable_dump:
        return "inductor"
    if graphs.type and Path(graphs.path).absolute() != Path(dump.dump_path).absolute():
        raise UsageError(f"{graphs}: its path must be that of the dump, {dump.dump_path!r}")
    return record(
        dump.dump_path,
        source="fused",
        layout=dump.layout,
        mode=dump.dump_mode,
        steps=dump.dump_step or None,
        layers=dump.dump_layer.split() or None,
        fusion_switch=switch,
    )


get_npu_backend = get_backend
