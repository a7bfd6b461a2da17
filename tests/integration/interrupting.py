"""Run commands in forked processes, stopped by Ctrl-C at the n-th call of a function of paritas.

    python -m integration.interrupting FOLDER tasks.json > endings.json

A moment counted in calls is the same on a loaded machine and on an idle one, which one counted in
seconds is not; and torch is imported once for all of them, not by each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import sys
import traceback
from pathlib import Path

import processes

LIMIT_S = 600


def endings(folder: Path, tasks: list[dict], **environment: str) -> list[dict]:
    """Have a process of its own run all tasks below a folder, and say how each ended.

    Args:
        tasks: each with `arguments` of the command line (or `script`, a file to run), `folder` to
            run in, made of a copy of `prepared`, and `moments`: how many times to stop it, at which
            random calls by `seed`; without, it runs once to its end.
    """
    given = folder / "tasks.json"
    given.write_text(json.dumps(tasks))
    done = processes.run("-m", "integration.interrupting", folder, given, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _watch(stop: int | None, report: Path) -> None:
    """Count calls of functions of paritas; at number `stop`, do as Ctrl-C does."""
    source = str(Path(sys.modules["paritas"].__file__).parent) + os.sep
    count = itertools.count(1)

    def on_event(frame: object, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(source):
            return
        number = next(count)
        if number == stop:
            sys.setprofile(None)
            report.write_text(f"{frame.f_code.co_filename[len(source) :]}:{frame.f_lineno}")
            signal.raise_signal(signal.SIGINT)
        elif stop is None:
            total[0] = number

    total = [0]
    sys.setprofile(on_event)
    if stop is None:
        _watch.total = total


def _child(task: dict, stop: int | None, said: Path, report: Path) -> int:
    """Run one command to its end; what it says goes to a file."""
    from paritas.app.cli import main

    os.chdir(task["folder"])
    sys.path.insert(0, task["folder"])
    with said.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115  (until the end)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        _watch(stop, report)
        if "script" in task:
            runpy.run_path(task["script"], run_name="__main__")
        else:
            main(task["arguments"], prog_name="paritas")
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        code = 130  # as python itself ends
    except BaseException:  # noqa: BLE001  (a process that was forked must end here)
        traceback.print_exc()
        code = 99
    finally:
        sys.setprofile(None)
        if stop is None:
            report.write_text(str(_watch.total[0]))
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _ending(task: dict, stop: int | None, work: Path) -> dict:
    """Fork, wait, and tell."""
    said, report = work / "said.txt", work / "report.txt"
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 98
        with contextlib.suppress(BaseException):
            signal.alarm(LIMIT_S)  # a deadlock ends it by a signal
            code = _child(task, stop, said, report)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    told = report.read_text() if report.exists() else ""
    return {
        "folder": task["folder"],
        "code": os.waitstatus_to_exitcode(status),
        "stop": stop,
        "at": told,
        "said": said.read_text(errors="replace"),
    }


def _endings_of(task: dict, work: Path) -> list[dict]:
    name = task["name"]

    def placed(number: int) -> dict:
        folder = work / f"{name}-{number}"
        shutil.copytree(task["prepared"], folder)
        return {**task, "folder": str(folder)}

    whole = _ending(placed(0), None, work)
    found = [{"name": name, **whole}]
    moments = task.get("moments", 0)
    if moments and whole["at"].isdigit():
        calls = range(1, int(whole["at"]) + 1)
        chosen = random.Random(task["seed"]).sample(calls, min(moments, len(calls)))
        for number, stop in enumerate(sorted(chosen), 1):
            found.append({"name": name, **_ending(placed(number), stop, work)})
    return found


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    work = Path(sys.argv[1])
    tasks = json.loads(Path(sys.argv[2]).read_text())
    json.dump([ending for task in tasks for ending in _endings_of(task, work)], sys.stdout)


if __name__ == "__main__":
    _main()
