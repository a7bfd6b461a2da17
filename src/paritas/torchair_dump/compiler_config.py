"""Options under torchair's names, as far as they are served here; no other can be set."""

from __future__ import annotations

import dataclasses
import difflib
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.recording.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CompilerConfig"]


@dataclasses.dataclass(frozen=True)
class _Option:
    """What an option is at first, what it may be, and the same in words."""

    default: Any
    accepts: Callable[[Any], bool]
    accepted: str


class _Group:
    """Options that belong together, and groups of them."""

    def __init__(self, where: str, **contents: _Option | _Group) -> None:
        """`where` is how the user comes to it."""
        values = {
            name: one if isinstance(one, _Group) else one.default for name, one in contents.items()
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
        if isinstance(option, _Group):
            raise UsageError(f"{self._where}.{name} is a group: set the options in it")
        if not option.accepts(value):
            raise UsageError(f"{self._where}.{name} = {value!r}: give {option.accepted}")
        vars(self)[name] = value

    def __repr__(self) -> str:
        body = ", ".join(f"{name}={vars(self)[name]!r}" for name in self._contents)
        return f"{self._where}({body})"

    if TYPE_CHECKING:
        _where: str
        _contents: dict[str, _Option | _Group]

        def __getattr__(self, name: str) -> Any: ...


class CompilerConfig(_Group):
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
            debug=_Group(
                "config.debug",
                graph_dump=_Group(
                    "config.debug.graph_dump", type=_choice(None, "txt"), path=_text("./", "a path")
                ),
                data_dump=_Group(
                    "config.debug.data_dump", type=_choice(None, "npy"), path=_text("./", "a path")
                ),
            ),
            dump_config=_Group(
                "config.dump_config",
                enable_dump=_choice(False, True),
                dump_path=_text("./", "a path"),
                dump_mode=_choice("all", "input", "output"),
                dump_step=_Option("", _are_steps, "steps such as '1|2|5-7', ascending"),
                dump_layer=_text("", "names parted by spaces"),
                layout=_choice("msit", "ge", "ge-7.1.0"),
            ),
            fusion_config=_Group(
                "config.fusion_config",
                fusion_switch_file=_Option(
                    None, lambda value: value is None or isinstance(value, str), "a path or None"
                ),
            ),
        )


def _choice(*values: Any) -> _Option:
    def accepts(given: Any) -> bool:
        return any(type(given) is type(value) and given == value for value in values)

    return _Option(values[0], accepts, " or ".join(map(repr, values)))


def _text(default: str, accepted: str) -> _Option:
    return _Option(default, lambda value: isinstance(value, str), f"{accepted}, as text")


def _are_steps(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        Selection.of(steps=value or None)
    except UsageError:
        return False
    return True
