"""What commands share: exit codes, options, how a result is shown, the display of progress."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import RenderableType

    from paritas.reports.annotations import Account
    from paritas.results.findings import Verdict

# Of every command: 0 pass, 1 different or degraded, 2 wrong usage or bad input, and these.
UNVERIFIED, INTERRUPTED = 3, 130

DTYPES = ("float64", "float32", "bfloat16", "float16")
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="Run model and floating inputs in this."
)
inputs_option = click.option(
    "--inputs", metavar="MODULE:FUNCTION", help="Function that returns the inputs."
)
train_option = click.option(
    "--train", is_flag=True, help="Training mode; otherwise model.eval() is called."
)
strict_option = click.option("--strict", is_flag=True, help="Count unstable findings as failures.")
# Those of `paritas.dumps.opening`, which would import torch.
KINDS = click.Choice(["paritas", "msprobe", "ge", "fx", "sglang", "files"])

device_option = click.option(
    "--device", metavar="DEVICE", help="Run on this device, for example cuda."
)
# Those of `paritas.partition.recipe_checks`, which would import torch.
confirm_option = click.option(
    "--confirm",
    type=click.Choice(["gloo", "nccl"]),
    help="Check once more, on ranks that are processes; nccl needs --device cuda and a GPU for "
    "each rank.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How a model of the user's is built: the options of several commands, by their names."""

    inputs: str | None
    dtype: str | None
    train: bool
    device: str | None = None


def was_given(ctx: click.Context, name: str) -> bool:
    """Whether an option stands on the command line, whatever the settings say."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse(ctx: click.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that would be passed over, which is worse."""
    given = [f"--{name}" for name in names if was_given(ctx, name)]
    if given:
        ctx.fail(f"{', '.join(given)} {why}")


class NumberRange(click.ParamType[tuple[int, int]]):
    """One number, or a range of them, as its first and last; an empty range is a slip."""

    name = "N|A-B"

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Read it."""
        form = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value))
        first, last = (int(form[1]), int(form[2] or form[1])) if form else (1, 0)
        if first > last:
            one, many = f"a {self._thing} (3)", f"a range of {self._thing}s (2-5)"
            self.fail(f"{value!r} is neither {one} nor {many}", param, ctx)
        return first, last


class Assignment(click.ParamType[tuple[str, str]]):
    """A regular expression for names, and what is said of them.

    Both may hold the separator: the first one counts, or the last one where that is `=`, which an
    expression has in `(?=...)`, and a name seldom.
    """

    def __init__(self, form: str, separator: str, example: str) -> None:
        self.name = form
        self._separator, self._example = separator, example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Take it apart."""
        text = str(value)
        cut = text.rpartition if self._separator == "=" else text.partition
        pattern, separator, said = (part.strip() for part in cut(self._separator))
        if not pattern or not separator or not (said or self._separator == "="):
            self.fail(f"{text!r} is not {self.name}, as in {self._example!r}", param, ctx)
        return pattern, said


# --- A mesh of ranks ------------------------------------------------------------------------------


class Mesh(click.ParamType[int | dict[str, int]]):
    """A number of ranks (`4`), or the axes of a mesh by name (`dp=2,tp=2`)."""

    name = "N|AXIS=N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | dict[str, int]:
        """Read it."""
        text = str(value).strip()
        if text.isascii() and text.isdigit():
            return int(text)
        axes: dict[str, int] = {}
        for part in text.split(","):
            form = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*", part)
            if form is None:
                self.fail(
                    f"{text!r} is neither a number of ranks (4) nor axes with theirs (dp=2,tp=2)",
                    param,
                    ctx,
                )
            if form[1] in axes:
                self.fail(f"{text!r} names the axis {form[1]!r} twice", param, ctx)
            axes[form[1]] = int(form[2])
        return axes


# --- `--json` -------------------------------------------------------------------------------------

STDOUT = Path("-")


def json_option(
    text: str = "Write the verdict with all its findings to this file.",
    *,
    or_stdout: bool = False,
    here_alone: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--json`, handed to it as `json_path`; whether it can be written is checked.

    Args:
        text: the help.
        or_stdout: whether `-` is stdout.
        here_alone: of ranks that torchrun started, only the first writes.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--json",
            "json_path",
            metavar="FILE",
            type=click.Path(path_type=Path, allow_dash=or_stdout),
            help=text,
        )
        @functools.wraps(command)
        def checked(*args: Any, json_path: Path | None, **given: Any) -> Any:
            if json_path == STDOUT and not or_stdout:
                json_path = Path.cwd() / STDOUT  # a file of that name
            writes = not here_alone or os.environ.get("RANK", "0") == "0"
            if json_path is not None and json_path != STDOUT and writes:
                from paritas.reports.files import check_writable

                check_writable(json_path)
            return command(*args, json_path=json_path, **given)

        return checked

    return decorate


def write_json(path: Path | None, encode: Callable[[], bytes]) -> None:
    """Write what `--json` asks for, if it was given."""
    if path == STDOUT:
        click.echo(encode())
    elif path is not None:
        from paritas.reports.files import write_whole

        write_whole(path, encode())


# --- `--format` and `--format-file` ---------------------------------------------------------------

# Those of `paritas.reports.annotations`, and the text that every command prints.
FORMATS = ("text", "github", "sarif", "junit")
_DOCUMENT_FORMATS = frozenset({"sarif", "junit"})


@dataclasses.dataclass(frozen=True)
class OutputFormat:
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
        return self.name in _DOCUMENT_FORMATS and self.file is None

    def check(self) -> None:
        """Refuse, before the work, what could not be written after it."""
        if self.file is None:
            return
        if self.name == "text":
            documents = ", ".join(FORMATS[1:])
            raise click.UsageError(
                f"--format-file {str(self.file)!r} is for what --format writes: {documents}"
            )
        from paritas.reports.files import check_writable

        check_writable(self.file)

    def write(self, make: Callable[[], Account], *, err: bool = False) -> None:
        """Write it; call this before the text is printed, whose last line is the verdict.

        Args:
            make: gives what was found; not called where only text was asked for.
            err: the text goes to stderr, so lines beside it do, too.
        """
        if self.name == "text":
            return
        from paritas.reports.annotations import WRITERS

        document = WRITERS[self.name](make())
        if self.file is not None:
            from paritas.reports.files import write_whole

            write_whole(self.file, document.removesuffix("\n").encode())
        else:
            click.echo(document, nl=False, err=err)


# Nothing besides what is printed anyway.
TEXT = OutputFormat()


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
        form = OutputFormat(format_name, format_file)
        form.check()
        return command(*args, form=form, **given)

    return settled


def subject_file(spec: str) -> str:
    """The file of a script, or of the module of `package.module:name`, if it is in the repository.

    An operator's name may also have a dot for the colon.

    Of a module that was imported: nothing is imported here.
    """
    import sys

    from paritas.reports.annotations import in_repository

    name = spec.partition(":")[0]
    while name not in sys.modules and "." in name and not name.endswith(".py"):
        name = name.rpartition(".")[0]
    return in_repository(getattr(sys.modules.get(name), "__file__", None) or spec)


# --- A result on the terminal ---------------------------------------------------------------------


def emit(
    form: OutputFormat,
    account: Callable[[], Account],
    shown: RenderableType,
    *,
    soft_wrap: bool = False,
) -> None:
    """Write what `--format` asks for, then print the text, whose last line is the verdict."""
    form.write(account)
    print_report(shown, stderr=form.takes_stdout, soft_wrap=soft_wrap)


def emit_verdict(
    verdict: Verdict,
    form: OutputFormat,
    command: str,
    subject: str,
    shown: RenderableType | None = None,
) -> None:
    """The same for a verdict on what the user named; `shown` in place of the usual report."""
    from paritas.reports.annotations import verdict_account
    from paritas.reports.terminal import verdict_report

    file = subject_file(subject)
    emit(
        form,
        lambda: verdict_account(verdict, command=command, subject=subject, file=file),
        verdict_report(verdict) if shown is None else shown,
    )


def print_report(shown: RenderableType, *, stderr: bool = False, soft_wrap: bool = False) -> None:
    """Print it; long lines are folded, never cropped."""
    from rich.console import Console

    Console(highlight=False, stderr=stderr).print(shown, crop=False, soft_wrap=soft_wrap)


# --- Progress, on stderr --------------------------------------------------------------------------


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a step; a terminal is left clean at the end."""
    if quiet:
        yield lambda _: None
        return
    from rich.console import Console

    from paritas.results.progress import LogLines, ProgressBar, bar_display

    console = Console(stderr=True)
    if not console.is_interactive:
        yield LogLines(lambda words: click.echo(words, err=True))
        return
    with bar_display(console) as display:
        yield ProgressBar(display)
