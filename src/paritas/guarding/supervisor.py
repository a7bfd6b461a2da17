"""Run another program, wait for its end, and exit with a code that was known before.

`python -I -S supervisor.py CODE PROGRAM ARGV...`, started where a script of `paritas run` replaces
itself with another program. It imports nothing of paritas.
"""

import os
import signal
import subprocess
import sys


def main(code: int, program: str, argv: list[str]) -> None:
    """Pass SIGTERM and SIGHUP on; a terminal sends Ctrl-C to both processes."""
    arrived: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        if running:
            running[0].send_signal(number)
        else:
            arrived.append(number)

    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        number = getattr(signal, name, None)
        # One that is ignored stays so; the program starts with the default for the others.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on if name != "SIGINT" else lambda *_: None)
    # As `os.execv` leaves it: open files, ignored signals.
    child = subprocess.Popen(argv, executable=program, close_fds=False, restore_signals=False)
    running.append(child)
    for number in arrived:
        child.send_signal(number)
    child.wait()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
