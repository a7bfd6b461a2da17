"""`--format` and `--format-file`: results for the system that runs the command, beside the text."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from paritas.reporting.annotations import Account

__all__ = ["FORMATS", "TEXT", "Format", "format_options", "subject_file"]

# Those of `paritas.reporting.formats`, and the text that every command prints.
FORMATS = ("text", "github", "sarif", "junit")
_DOCUMENTS = frozenset({"sarif", "junit"})


@dataclasses.dataclass(frozen=True)
class Format:
    """What was asked for.

    Attributes:
        name: of `FORMATS`.
        file: where it goes; stdout if there is none.
    """

    name: str = "text"
    file: Path | None = None

    @property
    def takes_stdout(self) -> bool:
        """Whether a document goes to stdout, so that the text has to go to stderr."""
        return self.name in _DOCUMENTS and self.file is None

    def check(self) -> None:
        """Refuse, before the work, what could not be written after it."""
        if self.file is None:
            return
        if self.name == "text":
            documents = ", ".join(FORMATS[1:])
            raise click.UsageError(
                f"--format-file {str(self.file)!r} is for what --format writes: {documents}"
            )
        from paritas.reporting.json_file import check_writable

        check_writable(self.file)

    def write(self, make: Callable[[], Account], *, err: bool = False) -> None:
        """Write it; call this before the text is printed, whose last line is the verdict.

        Args:
            make: gives what was found; not called where only text was asked for.
            err: the text goes to stderr, so lines beside it do, too.
        """
        if self.name == "text":
            return
        from paritas.reporting.formats import WRITERS

        document = WRITERS[self.name](make())
        if self.file is not None:
            from paritas.reporting.json_file import write_whole

            write_whole(self.file, document.removesuffix("\n").encode())
        else:
            click.echo(document, nl=False, err=err)


# Nothing besides what is printed anyway.
TEXT = Format()


def format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the two options, handed to it as `form`, a `Format`."""

    @click.option(
        "--format",
        "format_name",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        help="Besides the text: annotations for GitHub, or a SARIF or JUnit document, which goes "
        "to stdout, and the text to stderr.",
    )
    @click.option(
        "--format-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Write what --format asks for to this file.",
    )
    @functools.wraps(command)
    def settled(*args: Any, format_name: str, format_file: Path | None, **given: Any) -> Any:
        form = Format(format_name, format_file)
        form.check()
        return command(*args, form=form, **given)

    return settled


def subject_file(spec: str) -> str:
    """The file of a script, or of the module of `package.module:name`, if it is in the repository.

    An operator's name may also have a dot for the colon.

    Of a module that was imported: nothing is imported here.
    """
    import sys

    from paritas.reporting.annotations import in_repository

    name = spec.partition(":")[0]
    while name not in sys.modules and "." in name and not name.endswith(".py"):
        name = name.rpartition(".")[0]
    return in_repository(getattr(sys.modules.get(name), "__file__", None) or spec)
