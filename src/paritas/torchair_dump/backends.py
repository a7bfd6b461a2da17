"""The backend that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.recording.backend import record
from paritas.torchair_dump.compiler_config import CompilerConfig

if TYPE_CHECKING:
    from paritas.recording.backend import RecordingBackend

__all__ = ["get_backend", "get_npu_backend"]


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
