"""Torchair's way of asking for dumps: its names and its layout, with Inductor behind them.

A script that says `import torchair` and `from msit_llm.dump import torchair_dump` runs on any
machine once both names stand for this module. Given a `CompilerConfig` of torchair itself, the same
two functions set its fields instead, and the script serves an Ascend machine.
"""

from paritas.torchair_dump.backends import get_backend, get_npu_backend
from paritas.torchair_dump.compiler_config import CompilerConfig
from paritas.torchair_dump.dump_configs import get_fx_dump_config, get_ge_dump_config

__all__ = [
    "CompilerConfig",
    "get_backend",
    "get_fx_dump_config",
    "get_ge_dump_config",
    "get_npu_backend",
]
