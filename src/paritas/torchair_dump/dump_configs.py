"""The two functions that ask a compiler's configuration for a dump."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paritas.dumps.folders import TIME
from paritas.dumps.msit_layout import is_of_tree
from paritas.errors import UsageError
from paritas.recording.fusion import load_switch
from paritas.recording.options import rank_and_world
from paritas.recording.selection import Selection
from paritas.torchair_dump.compiler_config import CompilerConfig

__all__ = ["get_fx_dump_config", "get_ge_dump_config"]

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
    steps, layers = _steps(dump_token), _layers(dump_layer)
    switch = _switch(fusion_switch_file, is_ours=isinstance(config, CompilerConfig))
    if isinstance(config, CompilerConfig) and config.debug.data_dump.type:
        raise UsageError(_BOTH.format(config.debug.data_dump.path))
    folder = _folder(dump_path, GE_FOLDER)
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
    return _configured(config, wanted, folder)


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
    folder = _folder(dump_path, FX_FOLDER)
    wanted: dict[str, Any] = {"debug.data_dump.type": "npy"}
    option = _path_option(config, "debug.data_dump")
    if _has(config, option):
        wanted[option] = folder
    return _configured(config, wanted, folder)


# Torchair runs the graph node by node in that case, and its other dump stays empty.
_BOTH = (
    "this configuration asks already for a dump into {}: one run is either fused or goes node by "
    "node, so take a configuration of its own for each"
)


def _configured(config: Any, wanted: dict[str, Any], folder: str) -> Any:
    """Set all options or none, and have the folder there: torchair refuses one that is not."""
    missing = [option for option in wanted if not _has(config, option)]
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


def _has(config: Any, option: str) -> bool:
    missing = object()
    found = functools.reduce(
        lambda group, name: getattr(group, name, missing), option.split("."), config
    )
    return found is not missing


def _path_option(config: Any, group: str) -> str:
    """Torchair has renamed it to and fro."""
    return f"{group}._path" if _has(config, f"{group}._path") else f"{group}.path"


def _folder(dump_path: Any, name: str) -> str:
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


def _steps(dump_token: Any) -> str:
    """Steps as torchair writes them: `1|2|5`."""
    if dump_token is None:
        return ""
    try:
        return Selection.of(steps=dump_token).describe()["steps"]
    except UsageError as error:
        raise UsageError(f"dump_token: {error}") from error


def _layers(dump_layer: Any) -> str:
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


def _switch(file: Any, *, is_ours: bool) -> str:
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
