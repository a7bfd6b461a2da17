"""Python processes that begin with torch imported: forked from a server, not started anew.

The workers of xdist are the first of them, and share the server with what they start.

To import torch, Dynamo and Inductor takes a process 6 seconds, and many tests need a process of
their own: for what is said to a terminal, for signals, for ranks, for the end of the interpreter.
Where the import itself is what a test is about, it starts `sys.executable`; so does every test on
a machine with an accelerator.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import forkserver, reduction, util
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LIMIT_S = 600
# Tells the workers of xdist where the server is that they were forked from.
SERVER = "PARITAS_TESTS_SERVER"
PRELOADED = "processes_preloaded"
# Where Linux shows them.
ACCELERATORS = ("nvidia*", "kfd", "davinci*", "dri/render*", "dxg", "accel/*")
# Whether scripts that paritas writes are run here, in the test that runs now.
run_scripts_forked = True
_SERVER = multiprocessing.get_context("forkserver")


class Forked:
    """As `subprocess.Popen` with pipes and text, as far as the tests use it."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> None:
        _start_server()
        ends = [os.pipe(), os.pipe()]
        given = (arguments, environment, folder, [_End(write) for _, write in ends])
        self._process = _SERVER.Process(target=_begin, args=given)
        self._process.start()
        for _, write in ends:
            os.close(write)
        self.stdout: TextIO
        self.stderr: TextIO
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read, _ in ends)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what is left of its output, and its errors."""
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        ending = threading.Timer(LIMIT_S, self.kill)
        reading.start()
        ending.start()
        output = self.stdout.read()
        reading.join()
        self._process.join()
        ending.cancel()
        ending.join()
        self.stdout.close()
        self.stderr.close()
        return output, errors[0]


def start(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Forked | subprocess.Popen[str]:
    """Start python.

    Args:
        arguments: those of `python`: a script, `-m module` or `-c code`, and what follows.
        environment: added to the environment of the tests.
    """
    words = [str(argument) for argument in arguments]
    whole = {**os.environ, **(environment or {})}
    if not _can_fork():
        paths = os.pathsep.join([whole.get("PYTHONPATH", ""), *sys.path])
        return subprocess.Popen(
            [sys.executable, *words],
            env={**whole, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    return Forked(words, whole, str(cwd or Path.cwd()))


def run(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run python to its end, as `subprocess.run` does."""
    process = start(*arguments, environment=environment, cwd=cwd)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def run_ranks(
    *arguments: str | Path, world_size: int = 2, cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a process for each rank, as a launcher does: the first that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    ranks = [
        start(*arguments, environment={**common, "RANK": str(rank)}, cwd=cwd)
        for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as pool:
        told = {pool.submit(rank.communicate): rank for rank in ranks}
        for ended in as_completed(told):
            if told[ended].returncode:
                for other, rank in told.items():
                    if not other.done():
                        rank.send_signal(signal.SIGTERM)
    return [
        subprocess.CompletedProcess(arguments, rank.returncode, *words.result())
        for words, rank in told.items()
    ]


def launching(folder: Path) -> dict[str, str]:
    """The environment in which torchrun starts its ranks with `run` in place of python."""
    if not _can_fork():
        return {}
    _start_server()
    program = folder / "forked-python"
    code = "import processes; processes.be_python()"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    program.chmod(0o755)
    return {
        SERVER: forkserver._forkserver._forkserver_address or "",
        "PYTHON_EXEC": str(program),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def be_python() -> NoReturn:
    """Run what `python` would with these arguments, and end with its exit code.

    It ends a little later, when a launcher already ends the other ranks: it waits nevertheless.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver._forkserver._forkserver_alive_fd = os.dup(0)  # the server is nobody's child here
    done = run(*(word for word in sys.argv[1:] if word != "-u"))
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


class ForkedServer:
    """As `subprocess.Popen`, as far as a server of candidates uses it: forked, not started."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: object) -> None:
        _start_server()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        given = (command[1:-1], environment, _End(pass_fds[0]))
        self._process = _SERVER.Process(target=_be_server, args=given)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join(LIMIT_S)
        return self._process.exitcode


class ForkedWorker:
    """As `subprocess.Popen` with binary pipes, as far as execnet uses it: `python -u -c code`."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        _start_server()
        (read, to_worker), (from_worker, write) = os.pipe(), os.pipe()
        environment = {**os.environ, SERVER: forkserver._forkserver._forkserver_address or ""}
        given = (command[-1], environment, str(Path.cwd()), [_End(read), _End(write)])
        self._process = _SERVER.Process(target=_be_worker, args=given)
        self._process.start()
        os.close(read)
        os.close(write)
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")

    def wait(self) -> int | None:
        self._process.join(LIMIT_S)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def context() -> multiprocessing.context.BaseContext:
    """Of `multiprocessing`, for processes that are not started from here."""
    if not _can_fork():
        return multiprocessing.get_context("spawn")
    _start_server()
    return _SERVER


@functools.cache
def _can_fork() -> bool:
    """With an accelerator, torch refuses to work in a process that was forked."""
    if os.environ.get(SERVER):
        return True
    import torch

    return not torch.accelerator.is_available()


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Let workers of xdist that are started here be forked, from a server that they share.

    Torch is not imported here to ask it for accelerators: this process runs no test.
    """
    devices = [one for name in ACCELERATORS for one in Path("/dev").glob(name)]
    if sys.platform != "linux" or devices:
        yield
        return
    start = subprocess.Popen

    def fork(command: Sequence[str], **how: object) -> object:
        is_worker = command[0] == sys.executable and command[-2] == "-c"
        return (ForkedWorker if is_worker else start)(command, **how)

    subprocess.Popen = fork
    try:
        yield
    finally:
        subprocess.Popen = start


@functools.cache
def _start_server() -> None:
    server = forkserver._forkserver
    # Since Python 3.14, a server asks for a key that only the process knows that started it.
    if os.environ.get(SERVER) and not hasattr(server, "_forkserver_authkey"):
        server._forkserver_address = os.environ[SERVER]
        server.ensure_running = lambda: None
        return
    _SERVER.set_forkserver_preload([PRELOADED])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the tests' own; it has no other way
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@functools.cache
def build_kernels_together() -> None:
    """Let all C++ kernels of a graph be built by one call of the compiler, as in a lifted run.

    From here on, in this thread and in the processes that are forked from it.
    """
    from paritas.core.torch_private import compile_time, kernel_units

    kernel_units._asked.set(kernel_units._install())
    compile_time._asked.set(compile_time._install())


def make_folder() -> None:
    """Make the folder of the server's socket: its name is limited, and a test may move TMPDIR.

    Called by pytest alone. The server imports this module too, and would make a folder of its own.
    """
    util.get_temp_dir()


def stop_server() -> None:
    """Wait for its end, so that its time is counted with that of the tests."""
    forkserver._forkserver._stop()


class _End:
    """An end of a pipe, handed over with the process that starts.

    A `DupFd` that is made before would start a thread here, and with a second thread paritas does
    not fork its ranks.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple:
        return _End.opened, (reduction.DupFd(self.number),)

    @staticmethod
    def opened(end: object) -> int:
        return end.detach()


# --- in the forked process ------------------------------------------------------------------------


def _begin(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, ends: Sequence[int]
) -> NoReturn:
    """Be the process that `python` with these arguments would be, and end as it would."""
    assert PRELOADED in sys.modules, "a server says nothing of what it could not import"
    for target, end in enumerate(ends, 1):
        os.dup2(end, target)
        os.close(end)
    # As python makes them: to close one leaves its descriptor open.
    how = {"mode": "w", "encoding": "utf-8", "buffering": 1, "closefd": False}
    sys.stdout = sys.__stdout__ = open(1, **how)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, **how)  # noqa: SIM115
    _take_over(environment, folder)
    code = _ended(lambda: _run(arguments))
    # As the interpreter does it, in its order.
    code = _ended(threading._shutdown) or code
    code = _ended(atexit._run_exitfuncs) or code
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _be_worker(
    code: str, environment: Mapping[str, str], folder: str, ends: Sequence[int]
) -> NoReturn:
    for target, end in enumerate(ends):
        os.dup2(end, target)
        os.close(end)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115
    _take_over(environment, folder)
    os._exit(_ended(lambda: _run(["-c", code])))


def _take_over(environment: Mapping[str, str], folder: str) -> None:
    """Be a process with this environment in this folder, and nobody's child."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # It is no child of `multiprocessing` to those that ask: it may start processes of its own.
    multiprocessing.process._parent_process = None
    multiprocessing.current_process()._config["daemon"] = False


def _be_server(arguments: Sequence[str], environment: Mapping[str, str], end: int) -> NoReturn:
    os.setsid()
    multiprocessing.process._parent_process = None
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    os._exit(_ended(lambda: _run([*arguments, str(end)])))


def _run(arguments: Sequence[str]) -> None:
    first, *others = arguments
    if first == "-m":
        name, *others = others
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [name, *others]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    is_safe = first == "-P"
    if is_safe:
        first, *others = others
    if first == "-c":
        code, *others = others
        if not is_safe:
            sys.path.insert(0, "")
        sys.argv = ["-c", *others]
        code = compile(code, "<string>", "exec")
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *others]
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, vars(main))


def _ended(call: object) -> int:
    """The exit code that python would give it."""
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException as error:  # noqa: BLE001  (a process that was forked must end here)
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            return int(str(end.code or 0))
        return 1
    return 0
