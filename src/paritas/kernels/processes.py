"""The processes in which candidates run, seen from the judge and from inside.

Whatever a candidate does, the judge gets an answer: a record, or how the process ended.

A nursery imports torch once and forks a process for each candidate. It holds neither a candidate
nor a reference. A candidate's process loads that candidate, makes the calls that it is ordered to
make, and sends records back. Inputs are all that it ever gets.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import msgspec

from paritas.core.execution.time_limit import OutOfTime
from paritas.kernels.forking import READY, environment, stop_nurseries
from paritas.kernels.wire import ChannelClosedError, WireError, decode, encode, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paritas.core.execution.time_limit import TimeLimit
    from paritas.kernels.forking import Nursery
    from paritas.kernels.observing import Observer
    from paritas.kernels.outside import OwnCode
    from paritas.kernels.sides import SideName


# --- Seen from the judge --------------------------------------------------------------------------

_ALONE = "from paritas.kernels.processes import run_alone; run_alone()"
_LONGEST_LOG = 2000
_GRACE_SECONDS = 5.0
# The folders of running processes.
_folders: set[str] = set()


class CandidateEnded(Exception):  # noqa: N818  (how a process ended, not an error of ours)
    """A candidate's process is gone.

    Attributes:
        how: what happened, in words.
        kind: `crashed`, `timed out`.
        log: the end of what it printed.
    """

    def __init__(self, how: str, kind: str, log: str = "") -> None:
        super().__init__(how)
        self.how, self.kind, self.log = how, kind, log


class CandidateProcess:
    """The process of one candidate, or of a reference that is timed against it.

    Attributes:
        loaded: what its import did.
    """

    def __init__(
        self,
        side: SideName,
        nursery: Nursery | None,
        *,
        device: str = "cpu",
        memory: int = 0,
        seconds: float = 60.0,
        limit: TimeLimit | None = None,
        is_candidate: bool = True,
    ) -> None:
        """Start it, and load the side in it.

        Args:
            seconds: the time limit of loading.
            limit: the time limit of everything that it is asked.

        Raises:
            CandidateEnded: the process ended meanwhile.
            OutOfTime: the time limit was reached.
        """
        self._limit = limit
        ours, theirs = socket.socketpair()
        self._channel = ours
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with it)
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
        _folders.add(self._folder.name)
        self._nursery = nursery if nursery is not None and nursery.is_usable else None
        if device.startswith("cuda"):
            memory = 0  # CUDA reserves far more addresses than it uses
        if self._nursery is not None:
            self._pid = self._nursery.start(theirs.fileno(), self._log.fileno(), memory)
            self._child = None
        else:
            self._child = _start_interpreter(theirs, self._log.fileno(), memory)
            self._pid = self._child.pid
        theirs.close()
        self.is_gone = False
        self._device = device
        order = {
            "do": "load",
            "side": msgspec.to_builtins(side),
            "device": device,
            "folder": str(Path.cwd()),
            "temporary": self._folder.name,
            "paths": [path for path in sys.path if path],
            "is_candidate": is_candidate,
        }
        try:
            self.loaded = self.ask(order, seconds)
        except (CandidateEnded, OutOfTime):
            self.close()
            raise

    def ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Give one order and wait for the answer.

        Raises:
            CandidateEnded: the process ended, hung, or sent something else.
            OutOfTime: the time limit was reached.
        """
        left = seconds if self._limit is None else self._limit.left
        try:
            self._channel.settimeout(max(min(seconds, left), 0.05))
            send(self._channel, order)
            answer = receive(self._channel)
        except TimeoutError:
            self._kill()
            if left < seconds:
                raise OutOfTime from None
            raise CandidateEnded(f"it did not return within {seconds:.3g} s", "timed out") from None
        except (ChannelClosedError, WireError) as error:
            was = str(error) if isinstance(error, WireError) else ""
            raise self._ending(was) from None
        if "broken" in answer:
            self._kill()
            how = f"its process cannot go on: {answer['broken']!s:.{_LONGEST_TEXT}}"
            raise CandidateEnded(how, "crashed", self._read_log())
        return answer

    def construct(
        self,
        init: Any,
        seed: int,
        seconds: float,
        dtype: str = "",
        *,
        moves: bool = False,
        reads_state: bool = True,
    ) -> dict[str, Any]:
        """Make what is called, and move it, if asked; return its parameters and buffers."""
        order = {
            "do": "construct",
            "init": encode(init),
            "seed": seed,
            "device": self._device,
            "dtype": [dtype] if dtype else [],
            "moves": moves,
            "reads_state": reads_state,
        }
        return self.ask(order, seconds)

    def _ending(self, was: str) -> CandidateEnded:
        with contextlib.suppress(OSError):
            self._channel.close()
        code = self._wait()
        log = self._read_log()
        if was:
            return CandidateEnded(f"it sent {was} instead of a result", "crashed", log)
        if code < 0:
            return CandidateEnded(
                f"its process was killed by {_signal_name(-code)}", "crashed", log
            )
        return CandidateEnded(f"its process ended with exit code {code}", "crashed", log)

    def _wait(self) -> int:
        """The exit code; a process that closed its channel but goes on is killed."""
        self.is_gone = True
        if not _is_ended(self._pid, _GRACE_SECONDS):
            self._kill_group()
        if self._nursery is not None:
            return self._nursery.wait(self._pid)
        return self._child.wait() if self._child is not None else 0

    def _kill(self) -> None:
        if not self.is_gone:
            self._kill_group()
            self._wait()

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)

    def _read_log(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            self._log.seek(0)
            return self._log.read().decode(errors="replace")[-_LONGEST_LOG:]
        return ""

    def close(self) -> None:
        """End it."""
        self._kill()
        with contextlib.suppress(OSError):
            self._channel.close()
        self._log.close()
        self._folder.cleanup()
        _folders.discard(self._folder.name)

    @property
    def temporary(self) -> str:
        """Its own folder for temporary files."""
        return self._folder.name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LastResort:
    """Ends this process if a block goes on long after the time limit.

    The limit reaches into most of what takes long. A function of the task, or one operator, may
    still not return.
    """

    def __init__(self, seconds: float, give_up: Callable[[], int]) -> None:
        """`give_up` reports what is known, in another thread, and returns the exit code."""
        self._give_up = give_up
        self._settled = threading.Lock()
        self._timer = threading.Timer(seconds + _GRACE_SECONDS, self._end)
        self._timer.daemon = True

    def _end(self) -> None:
        if not self._settled.acquire(blocking=False):
            return
        code = 3
        try:
            code = self._give_up()
            sys.stdout.flush()
            sys.stderr.flush()
            stop_nurseries()
            for folder in list(_folders):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(code)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        if not self._settled.acquire(blocking=False):
            self._timer.join()  # it ends this process


def _start_interpreter(channel: socket.socket, log: int, memory: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _ALONE, str(channel.fileno()), str(log), str(memory)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[channel.fileno(), log],
        env=environment(),
        start_new_session=True,
    )


def _is_ended(process: int, seconds: float) -> bool:
    """Wait until a process has ended, as a zombie or entirely."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        except OSError:
            return True
        if state.split()[:1] == ["Z"]:
            return True
        time.sleep(0.005)
    return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- Seen from inside -----------------------------------------------------------------------------

_LONGEST_TEXT = 600
_MOST_WAITS = 20


def serve() -> NoReturn:
    """Be the nursery in a new interpreter: `channel module...`."""
    be_nursery(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])


def be_nursery(orders: socket.socket, preload: Sequence[str] = ()) -> NoReturn:
    """Fork a process for each channel that is sent, and report how it ended."""
    _die_with_parent()
    import torch

    import paritas.kernels.observing
    import paritas.kernels.sides  # noqa: F401
    from paritas.kernels.outside import OwnCode

    for name in preload:
        importlib.import_module(name)
    torch.set_num_threads(1)
    import gc

    gc.collect()
    gc.freeze()
    others = _other_threads()
    own_code = OwnCode()
    _send_line(orders, f"it has threads: {', '.join(others)}" if others else READY)
    _adopt_orphans()
    running: set[int] = set()
    while True:
        message, ends, _, _ = socket.recv_fds(orders, 4096, 2)
        words = message.decode().split()
        if not words:
            os._exit(0)
        if words[0] == "start":
            process = _fork(orders, ends, int(words[1]), own_code)
            running.add(process)
            _send_line(orders, str(process))
            for end in ends:
                os.close(end)
        elif words[0] == "wait":
            _, status = os.waitpid(int(words[1]), 0)
            running.discard(int(words[1]))
            _end_survivors(running)
            _send_line(orders, str(os.waitstatus_to_exitcode(status)))


def _end_survivors(running: set[int]) -> None:
    """End the processes that candidates have left behind: they are this one's children now."""
    for _ in range(_MOST_WAITS):
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        except OSError:
            return
        left = {int(one) for one in children.split()} - running
        if not left:
            return
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _other_threads() -> list[str]:
    """The names of the threads beside this one: what holds a lock in one of them is never freed.

    A thread that is about to end is waited for.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return ["unknown, since there is no /proc/self/task"]
    own = threading.get_native_id()
    names: list[str] = []
    for _ in range(_MOST_WAITS):
        names = [_name_of(task) for task in tasks.iterdir() if task.name != str(own)]
        if not names:
            break
        time.sleep(0.05)
    return names


def _name_of(task: Path) -> str:
    for thread in threading.enumerate():
        if str(thread.native_id) == task.name:
            return thread.name
    try:
        return (task / "comm").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "one that has ended"


def _send_line(channel: socket.socket, line: str) -> None:
    channel.sendall(f"{line}\n".encode("ascii", "replace"))


def _fork(orders: socket.socket, ends: list[int], memory: int, own_code: OwnCode) -> int:
    import torch

    process = os.fork()
    if process:
        return process
    try:
        orders.close()
        # Torch makes its pool anew here; two threads of a candidate would race for it.
        torch.set_num_threads(1)
        be_candidate(socket.socket(fileno=ends[0]), ends[1], memory, own_code)
    finally:
        os._exit(70)


def run_alone() -> NoReturn:
    """Be a candidate's process in a new interpreter: `channel log memory`."""
    import paritas.kernels.observing  # noqa: F401  (its names are taken note of, too)
    from paritas.kernels.outside import OwnCode

    channel, log, memory = map(int, sys.argv[1:4])
    be_candidate(socket.socket(fileno=channel), log, memory, OwnCode())


def be_candidate(channel: socket.socket, log: int, memory: int, own_code: OwnCode) -> NoReturn:
    """Be the process of one candidate until the channel is closed."""
    _die_with_parent()
    with contextlib.suppress(OSError):  # it is the leader of a session already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for target in (1, 2):
        os.dup2(log, target)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["python"]
    faulthandler.enable(file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory)
    with contextlib.suppress(ChannelClosedError):
        _Process(channel, own_code).work()
    os._exit(0)


def _limit_memory(more: int) -> None:
    """Let this process allocate `more` bytes than it has; 0 for no limit."""
    if not more:
        return
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class _Process:
    """Follows the orders of the judge."""

    def __init__(self, channel: socket.socket, own_code: OwnCode) -> None:
        from paritas.kernels.outside import Audit

        self._channel = channel
        self._side: Any = None
        self._device = "cpu"
        self._observers: list[Observer] = []
        self._audit = Audit()
        self._own_code = own_code

    def work(self) -> None:
        while True:
            order = receive(self._channel)
            action = getattr(self, f"_do_{order['do']}")
            try:
                answer = action(order)
            except Exception as error:
                # A device that was broken by a call breaks whatever comes next.
                send(self._channel, {"broken": _in_words(error)})
                raise
            send(self._channel, answer)

    def _do_load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Import the candidate; what its import changes in the process is reported."""
        from paritas.core.errors import UsageError
        from paritas.core.execution.saved_state import ProcessState
        from paritas.kernels.outside import Leftovers, our_modules_hidden
        from paritas.kernels.sides import SideName, load_side

        sys.path[:] = order["paths"]
        os.chdir(order["folder"])
        tempfile.tempdir = os.environ["TMPDIR"] = order["temporary"]
        self._device = order["device"]
        before, left, libraries = ProcessState(), Leftovers(), set(sys.modules)
        error = None
        try:
            name = msgspec.convert(order["side"], SideName)
            self._audit.own_file = name.file or _file_of(name.module)
            hidden = our_modules_hidden() if order["is_candidate"] else contextlib.nullcontext()
            with hidden:
                self._side = load_side(name, is_candidate=order["is_candidate"])
        except UsageError as raised:
            error = str(raised)[:_LONGEST_TEXT]
        settings = left.put_back() | before.put_back() | self._own_code.put_back()
        return {
            "error": error,
            "settings": settings,
            "outside": self._audit.take(),
            "pid": os.getpid(),
            "files": _files_of_modules(),
            "extensions": _extensions(set(sys.modules) - libraries, self._side),
        }

    def _do_construct(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make what is called, and return its parameters and buffers."""
        from paritas.core.errors import in_one_line
        from paritas.core.execution.saved_state import ProcessState
        from paritas.kernels.observing import Observer
        from paritas.kernels.outside import our_modules_hidden

        before = ProcessState()
        args, kwargs = decode(order["init"], None)
        try:
            with our_modules_hidden():
                made = self._side.construct(tuple(args), kwargs, order["seed"])
            if order["device"] != "cpu" and self._side.is_module_class:
                made = made.to(order["device"])
            for name in order["dtype"]:
                import torch

                made = made.to(getattr(torch, name))
            if order["moves"] and self._side.is_module_class:
                _move(made)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (it becomes a finding)
            return {"error": in_one_line(error, _LONGEST_TEXT), "settings": before.put_back()}
        observer = Observer(made, self._device, self._audit, self._own_code)
        self._observers = [*self._observers[-1:], observer]
        return {
            "error": None,
            "settings": before.put_back(),
            "state": encode(dict(observer.state()) if order["reads_state"] else {}),
            "train": None if observer.module is None else observer.module.training,
            "outside": self._audit.take(),
        }

    def _do_state(self, order: dict[str, Any]) -> dict[str, Any]:
        from paritas.core.errors import in_one_line

        try:
            self._observers[-1].set_state(decode(order["state"], self._device))
        except Exception as error:  # noqa: BLE001  (it becomes a finding)
            return {"error": in_one_line(error, _LONGEST_TEXT)}
        return {"error": None}

    def _do_call(self, order: dict[str, Any]) -> dict[str, Any]:
        return self._observers[-1].observe(order)

    def _do_rehearse(self, order: dict[str, Any]) -> dict[str, Any]:
        return self._observers[-1].rehearse(order)

    def _do_time(self, order: dict[str, Any]) -> dict[str, Any]:
        from paritas.kernels.calling import measure

        return measure(self._observers[-1], order)

    def _do_opcheck(self, order: dict[str, Any]) -> dict[str, Any]:
        from paritas.kernels.sides import check_registrations

        return check_registrations(self._side.target, decode(order["inputs"], self._device))


def _in_words(error: Exception) -> str:
    from paritas.core.errors import in_one_line

    return in_one_line(error, _LONGEST_TEXT)


def _move(module: Any) -> None:
    """Convert a module and convert it back: nothing changes, except which tensors share memory."""

    def state() -> dict[str, Any]:
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    from paritas.core.execution.computable import is_number

    dtypes = {name: value.dtype for name, value in state().items()}
    # As `module.double()`, which cannot convert float4.
    module._apply(  # noqa: SLF001
        lambda one: one.double() if is_number(one.dtype) else one.clone()
    )
    for name, value in state().items():
        value.data = value.data.to(dtypes.get(name, value.dtype))


def _file_of(module: str) -> str:
    """The file of a module that is not imported yet; empty if it is not found."""
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return ""
    return str(spec.origin) if spec is not None and spec.has_location else ""


def _files_of_modules() -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted({str(file) for file in files if file})


_KERNEL_COMPILERS = {"triton", "cupy", "numba", "cutlass", "tilelang", "ctypes", "cffi"}


def _extensions(names: set[str], side: Any) -> list[str]:
    """Compiled code, or a compiler of kernels, that the import has brought in."""
    # A compiler that was imported before shows in what the candidate's module imports from it.
    values = list(vars(side.home).values()) if getattr(side, "home", None) is not None else []
    used = [getattr(one, "__module__", None) or getattr(one, "__name__", "") for one in values]
    used += [type(one).__module__ for one in values]
    found = {str(name).partition(".")[0] for name in [*names, *used]}
    known = found & _KERNEL_COMPILERS
    for name in names:
        file = str(getattr(sys.modules.get(name), "__file__", None) or "")
        if file.endswith(".so") and "site-packages" not in file and "lib-dynload" not in file:
            known.add(name)
    return sorted(known)


def _die_with_parent() -> None:
    """End this process when its parent is killed."""
    _control_process(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _adopt_orphans() -> None:
    """Be the parent of the processes whose parents end, if they descend from this one."""
    _control_process(36, 1)  # PR_SET_CHILD_SUBREAPER


def _control_process(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)
