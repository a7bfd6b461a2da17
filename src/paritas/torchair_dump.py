"""Torchair's way of asking for dumps: its names and its layout, with Inductor behind them.

A script that says `import torchair` and `from msit_llm.dump import torchair_dump` runs on any
machine once both names stand for this module. Given a `CompilerConfig` of torchair itself, the same
two functions set its fields instead, and the script serves an Ascend machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.compat.fusion_switch import load_switch
from paritas.compat.npy_tree import is_of_tree
from paritas.errors import UsageError
from paritas.files.folders import TIME
from paritas.recording.pipeline import rank_and_world
from paritas.recording.record import record
from paritas.recording.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """What an option is at first, what it may be, and the same in words."""

    default: Any
    accepts: Callable[[Any], bool]
    accepted: str


class _OptionGroup:
    """Options that belong together, and groups of them."""

    def __init__(self, where: str, **contents: _Option | _OptionGroup) -> None:
        """`where` is how the user comes to it."""
        values = {
            name: one if isinstance(one, _OptionGroup) else one.default
            for name, one in contents.items()
        }
        vars(self).update(_where=where, _contents=contents, **values)

    def __setattr__(self, name: str, value: Any) -> None:
        option = self._contents.get(name)
        if option is None:
            nearest = difflib.get_close_matches(
                name, self._contents, n=len(self._contents), cutoff=0
            )
            raise UsageError(
                f"{self._where}.{name} = {value!r}: there is no such option here; there is "
                f"{', '.join(nearest)}"
            )
        if isinstance(option, _OptionGroup):
            raise UsageError(f"{self._where}.{name} is a group: set the options in it")
        if not option.accepts(value):
            raise UsageError(f"{self._where}.{name} = {value!r}: give {option.accepted}")
        vars(self)[name] = value

    def __repr__(self) -> str:
        body = ", ".join(f"{name}={vars(self)[name]!r}" for name in self._contents)
        return f"{self._where}({body})"

    if TYPE_CHECKING:
        _where: str
        _contents: dict[str, _Option | _OptionGroup]

        def __getattr__(self, name: str) -> Any: ...


class CompilerConfig(_OptionGroup):
    """What `get_backend` makes a backend of; to be set by hand, or by the two dump functions.

    ::

        debug.graph_dump.type    None | 'txt'                graphs in words
        debug.graph_dump.path    text                        must be the folder of the dump
        debug.data_dump.type     None | 'npy'                record the graph node by node
        debug.data_dump.path     text                        into this folder
        dump_config.enable_dump  False | True                record the fused code
        dump_config.dump_path    text                        into this folder
        dump_config.dump_mode    'all' | 'input' | 'output'
        dump_config.dump_step    '1|2|5-7'                   all steps if empty
        dump_config.dump_layer   'Add Conv_1'                names or globs; all if empty
        dump_config.layout       'msit' | 'ge' | 'ge-7.1.0'  .npy files, or Ascend's own
        fusion_config.fusion_switch_file  None | text        what not to fuse
    """

    def __init__(self) -> None:
        """Nothing is dumped at first."""
        super().__init__(
            "config",
            debug=_OptionGroup(
                "config.debug",
                graph_dump=_OptionGroup(
                    "config.debug.graph_dump",
                    type=_make_choice(None, "txt"),
                    path=_make_text("./", "a path"),
                ),
                data_dump=_OptionGroup(
                    "config.debug.data_dump",
                    type=_make_choice(None, "npy"),
                    path=_make_text("./", "a path"),
                ),
            ),
            dump_config=_OptionGroup(
                "config.dump_config",
                enable_dump=_make_choice(False, True),
                dump_path=_make_text("./", "a path"),
                dump_mode=_make_choice("all", "input", "output"),
                dump_step=_Option("", _are_steps, "steps such as '1|2|5-7', ascending"),
                dump_layer=_make_text("", "names parted by spaces"),
                layout=_make_choice("msit", "ge", "ge-7.1.0"),
            ),
            fusion_config=_OptionGroup(
                "config.fusion_config",
                fusion_switch_file=_Option(
                    None, lambda value: value is None or isinstance(value, str), "a path or None"
                ),
            ),
        )


def _make_choice(*values: Any) -> _Option:
    def accepts(given: Any) -> bool:
        return any(type(given) is type(value) and given == value for value in values)

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


# --- Asking for a dump ----------------------------------------------------------------------------

GE_FOLDER = "msit_ge_dump"
FX_FOLDER = "msit_fx_dump"
MODES = ("input", "output", "all")
LAYOUTS = ("msit", "ge", "ge-7.1.0")


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
    """Ask for what the fused program computes, in `{dump_path}/msit_ge_dump`.

    Args:
        dump_path: each run needs one of its own; "" is the working directory.
        dump_mode: `input`, `output` or `all`.
        fusion_switch_file: JSON that turns fusion off, whole or by the names of passes.
        dump_token: steps to record, counted from 0, for example `[1, 2, 5]`; None is all.
        dump_layer: names to record, for example `["Add", "Conv_1"]`; None is all.
        compiler_config: one to add this to, ours or torchair's own; None makes a new one of ours.
        layout: `msit`, one `.npy` file a tensor; `ge`, the tree and the bin files of Ascend's graph
            engine; `ge-7.1.0`, its tree up to that release, without a folder for each rank.

    Returns:
        The configuration, with the dump asked for.
    """
    if dump_mode not in MODES:
        raise UsageError(f"dump_mode={dump_mode!r}: give one of {', '.join(MODES)}")
    if layout not in LAYOUTS:
        raise UsageError(f"layout={layout!r}: give one of {', '.join(LAYOUTS)}")
    config = CompilerConfig() if compiler_config is None else compiler_config
    if layout != "msit" and not isinstance(config, CompilerConfig):
        raise UsageError(
            f"layout={layout!r}: torchair's own configuration always writes Ascend's tree; leave "
            "layout out"
        )
    steps, layers = _parse_steps(dump_token), _parse_layers(dump_layer)
    switch = _check_switch(fusion_switch_file, is_ours=isinstance(config, CompilerConfig))
    if isinstance(config, CompilerConfig) and config.debug.data_dump.type:
        raise UsageError(_BOTH.format(config.debug.data_dump.path))
    folder = _make_path(dump_path, GE_FOLDER)
    wanted = {
        "debug.graph_dump.type": "txt",
        _path_option(config, "debug.graph_dump"): folder,
        "dump_config.enable_dump": True,
        "dump_config.dump_mode": dump_mode,
        "dump_config.dump_path": folder,
    }
    if steps:
        wanted["dump_config.dump_step"] = steps
    if layers:
        wanted["dump_config.dump_layer"] = layers
    if layout != "msit":
        wanted["dump_config.layout"] = layout
    if switch:
        wanted["fusion_config.fusion_switch_file"] = switch
    return _configure(config, wanted, folder)


def get_fx_dump_config(dump_path: str | os.PathLike[str] = "", compiler_config: Any = None) -> Any:
    """Ask for what the captured graph computes node by node, in `{dump_path}/msit_fx_dump`.

    Args:
        dump_path: each run needs one of its own; "" is the working directory. Old releases of
            torchair write to the working directory, whatever this says.
        compiler_config: one to add this to, ours or torchair's own; None makes a new one of ours.

    Returns:
        The configuration, with the dump asked for.
    """
    config = CompilerConfig() if compiler_config is None else compiler_config
    if isinstance(config, CompilerConfig) and config.dump_config.enable_dump:
        raise UsageError(_BOTH.format(config.dump_config.dump_path))
    folder = _make_path(dump_path, FX_FOLDER)
    wanted: dict[str, Any] = {"debug.data_dump.type": "npy"}
    option = _path_option(config, "debug.data_dump")
    if _has_option(config, option):
        wanted[option] = folder
    return _configure(config, wanted, folder)


# Torchair runs the graph node by node in that case, and its other dump stays empty.
_BOTH = (
    "this configuration asks already for a dump into {}: one run is either fused or goes node by "
    "node, so take a configuration of its own for each"
)


def _configure(config: Any, wanted: dict[str, Any], folder: str) -> Any:
    """Set all options or none, and have the folder there: torchair refuses one that is not."""
    missing = [option for option in wanted if not _has_option(config, option)]
    if missing:
        raise UsageError(
            f"compiler_config={config!r} has no {', '.join(missing)}: give a CompilerConfig of "
            "torchair or of paritas.torchair_dump"
        )
    _refuse_used(Path(folder))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"dump_path: {folder} cannot be made: {error.strerror}") from error
    for option, value in wanted.items():
        *groups, name = option.split(".")
        group = functools.reduce(getattr, groups, config)
        try:
            setattr(group, name, value)
        except (ValueError, TypeError, OSError) as error:
            raise UsageError(f"the configuration refuses {option} = {value!r}: {error}") from error
    return config


def _has_option(config: Any, option: str) -> bool:
    missing = object()
    found = functools.reduce(
        lambda group, name: getattr(group, name, missing), option.split("."), config
    )
    return found is not missing


def _path_option(config: Any, group: str) -> str:
    """Torchair has renamed it to and fro."""
    return f"{group}._path" if _has_option(config, f"{group}._path") else f"{group}.path"


def _make_path(dump_path: Any, name: str) -> str:
    if not isinstance(dump_path, str | os.PathLike):
        raise UsageError(f"dump_path={dump_path!r}: give a path, as text")
    # Absolute: the program may change its working directory before it is compiled.
    return str(Path(dump_path).absolute() / name)


def _refuse_used(folder: Path) -> None:
    """One run, one folder; but the other ranks of this run may have begun to write."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"dump_path: {folder} is a file; give a folder")
    rank, world_size = rank_and_world()
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if world_size > 1 and TIME.fullmatch(entry.name):
            continue  # in it ranks go by the device
        of_rank = re.search(r"rank_?(\d+)", entry.name)
        is_known = is_of_tree(entry.name) or re.fullmatch(r"rank\d+", entry.name)
        if world_size == 1 or not is_known or of_rank is None or int(of_rank[1]) == rank:
            raise UsageError(
                f"dump_path: {folder} is not empty, {entry.name!r} is in it; two runs in one "
                "folder cannot be told apart: give each a dump_path of its own"
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
            raise UsageError(f"dump_layer: {name!r} is no name of an operator or a module")
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
    # The names in it are those of Ascend's passes, which only Ascend's compiler knows.
    try:
        switch = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"fusion_switch_file: {path} cannot be read: {error}") from error
    if not isinstance(switch, dict) or not isinstance(switch.get("Switch"), dict):
        raise UsageError(
            f'fusion_switch_file: {path} holds {switch!r}; give {{"Switch": {{"GraphFusion": '
            '{"ALL": "off"}, "UBFusion": {"ALL": "off"}}}'
        )
    return str(path)


# --- The backend ----------------------------------------------------------------------------------


def get_backend(*, compiler_config: Any = None) -> RecordingBackend | str:
    """What to give to `torch.compile(backend=...)`: Inductor, recorded as the configuration asks.

    The dump is complete when the process ends, or earlier by `close()` of the backend. A
    configuration that asks for no dump gives plain Inductor.
    """
    config = CompilerConfig() if compiler_config is None else compiler_config
    if not isinstance(config, CompilerConfig):
        raise UsageError(
            f"compiler_config={config!r}: this is no CompilerConfig of paritas.torchair_dump; "
            "one of torchair's own goes to torchair.get_npu_backend"
        )
    data, dump, graphs = config.debug.data_dump, config.dump_config, config.debug.graph_dump
    switch = config.fusion_config.fusion_switch_file
    if data.type and dump.enable_dump:
        raise UsageError(
            f"{data} and {dump} are both asked for: one run is either fused or goes node by node; "
            "take a configuration of its own for each"
        )
    if graphs.type and (data.type or not dump.enable_dump):
        raise UsageError(
            f"{graphs}: graphs in words are written with a dump of fused code; set "
            "config.dump_config.enable_dump too"
        )
    if switch and not dump.enable_dump:
        raise UsageError(f"fusion_switch_file = {switch!r} has an effect on fused dumps alone")
    if data.type:
        return record(data.path, source="fx", layout="msit")
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
