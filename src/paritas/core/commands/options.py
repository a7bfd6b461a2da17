"""Shared by the commands: exit codes, options, output of results, progress display."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paritas.core.placement.meshes import read_axis
from paritas.core.results.rank_backends import BACKEND_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import RenderableType

    from paritas.core.reporting.annotations import Account
    from paritas.core.results.findings import Verdict
    from paritas.core.results.report import Report

# Besides 0 pass, 1 different or degraded, 2 wrong usage or bad input.
UNVERIFIED, INTERRUPTED = 3, 130

DTYPES = ("float64", "float32", "bfloat16", "float16")
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="Run the model and floating inputs in this dtype."
)
inputs_option = click.option(
    "--inputs", metavar="MODULE:FUNCTION", help="Function that returns the inputs."
)
train_option = click.option(
    "--train", is_flag=True, help="Use training mode; by default model.eval() is called."
)
strict_option = click.option("--strict", is_flag=True, help="Count unstable findings as failures.")
# Copied from `paritas.formats.dumps.opening`, which imports torch.
KINDS = click.Choice(["paritas", "msprobe", "ge", "fx", "sglang", "files"])

device_option = click.option(
    "--device", metavar="DEVICE", help="Run on this device, for example cuda."
)
backend_option = click.option(
    "--backend",
    default="inductor",
    show_default=True,
    metavar="NAME|MODULE:FUNCTION",
    help="The backend of torch.compile.",
)


def setup_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--setup` to a command, which gets the names of modules to import."""
    return click.option("--setup", multiple=True, metavar="MODULE", help=text)


by_option = click.option(
    "--by",
    type=click.Choice(["whole", "blocks"]),
    help="Check the whole model in float64, or its blocks (layers) one by one, which needs little "
    "memory. Default: the whole, and blocks where memory is not enough.",
)
blocks_option = click.option(
    "--blocks",
    multiple=True,
    metavar="GLOB",
    help="The blocks of --by blocks, for example 'layers.*'; repeat it for several. Default: the "
    "repeated modules of the model.",
)
confirm_option = click.option(
    "--confirm",
    type=click.Choice(BACKEND_NAMES),
    help="Check again with one process per rank; nccl needs --device cuda and one GPU per rank.",
)


def options_as(struct: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the parameters that a struct has as one argument, `options`.

    Write it directly above the function, below its options. Other parameters are passed as usual.

    Args:
        struct: a dataclass, each of whose fields is named as a parameter or has a default.
    """
    names = {field.name for field in dataclasses.fields(struct)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(*args: Any, **values: Any) -> Any:
            options = struct(**{name: values.pop(name) for name in names & values.keys()})
            return command(*args, options=options, **values)

        return call

    return decorate


def was_given(ctx: click.Context, name: str) -> bool:
    """Whether an option was given on the command line, not by a settings file."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse(ctx: click.Context, names: Iterable[str], why: str) -> None:
    """Fail if one of these options was given, instead of ignoring it."""
    given_options = [f"--{name}" for name in names if was_given(ctx, name)]
    if given_options:
        ctx.fail(f"{', '.join(given_options)} {why}")


class NumberRange(click.ParamType[tuple[int, int]]):
    """A number or a range, as its first and last number; an empty range is an error."""

    name = "N|A-B"

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Parse it."""
        from paritas.core.results.wording import read_span

        first, last = read_span(str(value)) or (1, 0)
        if first > last:
            single_number, many = f"a {self._thing} (3)", f"a range of {self._thing}s (2-5)"
            self.fail(f"{value!r} is neither {single_number} nor {many}", param, ctx)
        return first, last


class Assignment(click.ParamType[tuple[str, str]]):
    """A regular expression for names, and what applies to the names that match.

    Either part may contain the separator. The first one separates; the last one if it is `=`,
    which regular expressions contain in `(?=...)` and names rarely contain.
    """

    def __init__(self, form: str, separator: str, example: str) -> None:
        self.name = form
        self._separator, self._example = separator, example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split it."""
        text = str(value)
        cut = text.rpartition if self._separator == "=" else text.partition
        pattern, separator, rest = (part.strip() for part in cut(self._separator))
        if not pattern or not separator or not (rest or self._separator == "="):
            self.fail(
                f"{text!r} does not have the form {self.name}, as in {self._example!r}", param, ctx
            )
        return pattern, rest


# --- A mesh of ranks ------------------------------------------------------------------------------


class Mesh(click.ParamType[int | dict[str, int]]):
    """A number of ranks (`4`), or the axes of a mesh by name (`dp=2,tp=2`)."""

    name = "N|AXIS=N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | dict[str, int]:
        """Parse it."""
        text = str(value).strip()
        if text.isascii() and text.isdigit():
            return int(text)
        axes: dict[str, int] = {}
        for part in text.split(","):
            axis = read_axis(part)
            if axis is None:
                self.fail(
                    f"{text!r} is neither a number of ranks (4) nor a list of axes (dp=2,tp=2)",
                    param,
                    ctx,
                )
            if axis[0] in axes:
                self.fail(f"{text!r} names the axis {axis[0]!r} twice", param, ctx)
            axes[axis[0]] = axis[1]
        return axes


# --- `--json` -------------------------------------------------------------------------------------

STDOUT = Path("-")


def json_option(
    text: str = "Write the verdict with all its findings to this file.",
    *,
    or_stdout: bool = True,
    first_rank_only: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--json` to a command, which gets `json_path` after a check that it is writable.

    Args:
        text: the help.
        or_stdout: whether `-` is stdout, which the text then leaves for stderr; refused otherwise.
        first_rank_only: under torchrun, only rank 0 writes the file.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--json",
            "json_path",
            metavar="FILE",
            type=click.Path(path_type=Path, allow_dash=True),
            help=text if "- is" in text or not or_stdout else f"{text} - is stdout.",
        )
        @functools.wraps(command)
        def checked(*args: Any, json_path: Path | None, **options: Any) -> Any:
            if json_path == STDOUT and not or_stdout:
                raise click.UsageError("--json - needs a file instead: the script uses stdout")
            writes = not first_rank_only or os.environ.get("RANK", "0") == "0"
            if json_path is not None and json_path != STDOUT and writes:
                from paritas.core.reporting.files import check_writable

                check_writable(json_path)
            return command(*args, json_path=json_path, **options)

        return checked

    return decorate


def json_takes_stdout() -> bool:
    """Whether `--json -` was given to the running command; its text then goes to stderr."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.params.get("json_path") == STDOUT


def write_json(path: Path | None, encode: Callable[[], bytes]) -> None:
    """Write the JSON if `--json` was given."""
    if path == STDOUT:
        click.echo(encode())
    elif path is not None:
        from paritas.core.reporting.files import write_whole

        write_whole(path, encode())


def html_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--html` to a command, which gets `html_path` after a check that it is writable."""

    @click.option(
        "--html",
        "html_path",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Write the report as an HTML page to this file.",
    )
    @functools.wraps(command)
    def checked(*args: Any, html_path: Path | None, **options: Any) -> Any:
        if html_path is not None:
            from paritas.core.reporting.files import check_writable

            check_writable(html_path)
        return command(*args, html_path=html_path, **options)

    return checked


# --- `--format` and `--format-file` ---------------------------------------------------------------

# The writers of `paritas.core.reporting.annotations`, and the text that every command prints.
FORMATS = ("text", "github", "sarif", "junit")
_DOCUMENT_FORMATS = frozenset({"sarif", "junit"})


@dataclasses.dataclass(frozen=True)
class OutputFormat:
    """`--format` and `--format-file`; without a file, the output goes to stdout."""

    name: str = "text"
    file: Path | None = None

    @property
    def takes_stdout(self) -> bool:
        """Whether a document goes to stdout; the text then goes to stderr."""
        return self.name in _DOCUMENT_FORMATS and self.file is None

    def check(self) -> None:
        """Fail now if the file could not be written later."""
        if self.takes_stdout and json_takes_stdout():
            raise click.UsageError(
                f"--json - and --format {self.name} both write to stdout: add --format-file FILE"
            )
        if self.file is None:
            return
        if self.name == "text":
            documents = ", ".join(FORMATS[1:])
            raise click.UsageError(
                f"--format-file {str(self.file)!r} needs a --format other than text: {documents}"
            )
        from paritas.core.reporting.files import check_writable

        check_writable(self.file)

    def write(self, make: Callable[[], Account], *, err: bool = False) -> None:
        """Write the output. Call this before printing the text, which ends with the verdict.

        Args:
            make: returns the results; not called if only text is wanted.
            err: write lines to stderr, where the text goes too.
        """
        if self.name == "text":
            return
        from paritas.core.reporting.annotations import WRITERS

        document = WRITERS[self.name](make())
        if self.file is not None:
            from paritas.core.reporting.files import write_whole

            write_whole(self.file, document.removesuffix("\n").encode())
        else:
            click.echo(document, nl=False, err=err)


def format_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the two options to a command, which gets `form`, an `OutputFormat`."""

    @click.option(
        "--format",
        "format_name",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        help="Besides the text, write GitHub annotations or a SARIF or JUnit document. A document "
        "goes to stdout, and the text to stderr.",
    )
    @click.option(
        "--format-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Write the output of --format to this file.",
    )
    @functools.wraps(command)
    def with_format(*args: Any, format_name: str, format_file: Path | None, **options: Any) -> Any:
        form = OutputFormat(format_name, format_file)
        form.check()
        return command(*args, form=form, **options)

    return with_format


def subject_source(spec: str) -> tuple[str, int]:
    """The file in the repository where `package.module:name` is defined, and the line.

    It may also be a script, whose first line counts. The name of an operator may have a dot in
    place of the colon. Without a file in the repository: ("", 1).
    """
    import inspect
    import sys

    from paritas.core.reporting.annotations import in_repository

    name, _, attribute = spec.partition(":")
    while name not in sys.modules and "." in name and not name.endswith(".py"):
        name, _, last = name.rpartition(".")
        attribute = f"{last}.{attribute}" if attribute else last
    module = sys.modules.get(name)
    try:
        subject: Any = module
        for part in filter(None, attribute.split(".")):
            subject = getattr(subject, part)
        subject = inspect.unwrap(subject)
        file, line = in_repository(inspect.getfile(subject)), inspect.findsource(subject)[1] + 1
    except (AttributeError, OSError, TypeError, ValueError):  # no such name, or made by C or a call
        file, line = "", 1
    if file and attribute:
        return file, line
    return in_repository(getattr(module, "__file__", None) or spec), 1


def with_shrink_command(verdict: Verdict, arguments: list[str]) -> Verdict:
    """The verdict with the command that shrinks what is wrong; unchanged if nothing is.

    The command names the node where it starts: the other process need not look for it again.
    """
    import shlex

    import msgspec

    from paritas.core.results.findings import OriginKind

    if verdict.exit_code != 1 or not arguments:
        return verdict
    target, *others = arguments
    origins = (finding.origin for finding in verdict.failures if finding.origin is not None)
    nodes = (origin.name for origin in origins if origin.kind is OriginKind.NODE)
    node = next((name for name in nodes if name.isidentifier()), "")  # others are in no graph
    node_options = ["--at", node] if node else []
    command = shlex.join(["paritas", "shrink", target, *node_options, *others])
    return msgspec.structs.replace(verdict, shrink_command=command)


# --- A result on the terminal ---------------------------------------------------------------------


def emit(
    form: OutputFormat,
    account: Callable[[], Account],
    shown: RenderableType,
    *,
    soft_wrap: bool = False,
) -> None:
    """Write the output of `--format`, then print the text, which ends with the verdict."""
    form.write(account, err=json_takes_stdout())
    print_report(shown, stderr=form.takes_stdout, soft_wrap=soft_wrap)


def emit_verdict(
    verdict: Verdict,
    form: OutputFormat,
    command: str,
    subject: str,
    shown: RenderableType | None = None,
    *,
    written: str | None = None,
) -> None:
    """Write and print a verdict.

    Args:
        shown: replaces the usual report.
        written: what a failure without a line is put down to; by default the subject.
    """
    from paritas.core.reporting.annotations import verdict_account
    from paritas.core.reporting.terminal import verdict_report

    file, line = subject_source(written or subject)
    if not file:
        file, line = subject_source(subject)
    emit(
        form,
        lambda: verdict_account(verdict, command=command, subject=subject, file=file, line=line),
        verdict_report(verdict) if shown is None else shown,
    )


def emit_model_report(
    report: Report,
    command: str,
    target: str,
    form: OutputFormat,
    *,
    shown: RenderableType,
    json_path: Path | None,
    html_path: Path | None,
) -> None:
    """Write and print a report about one model."""
    from paritas.core.reporting.annotations import report_account
    from paritas.core.reporting.files import write_whole
    from paritas.core.reporting.pages import verdict_page

    write_json(json_path, report.to_json)
    if html_path is not None:
        name = "" if json_path is None else json_path.name
        page = verdict_page(report.verdict, target or command, report.headline, name)
        write_whole(html_path, page.encode())
    file, line = subject_source(target)
    emit(
        form,
        lambda: report_account(report, command=command, subject=target, file=file, line=line),
        shown,
    )


def print_report(shown: RenderableType, *, stderr: bool = False, soft_wrap: bool = False) -> None:
    """Print a report; long lines are folded, never cropped.

    Args:
        shown: the report.
        stderr: leave stdout to a document; `--json -` does so, too.
        soft_wrap: leave folding to the terminal.
    """
    from rich.console import Console

    from paritas.core.reporting.terminal import Printable

    console = Console(highlight=False, stderr=stderr or json_takes_stdout())
    console.print(Printable(shown), crop=False, soft_wrap=soft_wrap)


# --- Progress, on stderr --------------------------------------------------------------------------


@contextlib.contextmanager
def progress(*, quiet: bool = False, forks: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a step; the display is removed at the end.

    Args:
        quiet: show nothing.
        forks: the work forks this process if it has one thread. A log then has a line only when
            a step begins.
    """
    if quiet:
        yield lambda _: None
        return
    from rich.console import Console

    from paritas.core.results.progress import LogLines, ProgressBar, bar_display

    console = Console(stderr=True)
    if not console.is_interactive:
        lines = LogLines(lambda words: click.echo(words, err=True))
        with contextlib.nullcontext() if forks else lines.on_time():
            yield lines
        return
    with bar_display(console) as display:
        yield ProgressBar(display)


def tell_result(line: str) -> None:
    """Print a result at once: a run that is killed later has said what it knew."""
    click.echo(line, err=True)
