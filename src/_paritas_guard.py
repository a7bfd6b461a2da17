"""What PARITAS_GUARD starts in a program that does not import paritas.

`paritas_guard.pth` imports this when Python starts, in every program of the environment, if the
variable is set. It imports nothing, and waits for the program to import torch.
"""

import sys


class _TorchImport:
    """A module finder that finds nothing, but notices the import of torch."""

    is_waiting = True

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Begin guarding just before torch is imported."""
        if name == "torch" and self.is_waiting:
            self.is_waiting = False
            _start_guarding()


def _start_guarding() -> None:
    try:
        import paritas  # noqa: F401  (it reads the variable)
    except Exception as error:  # noqa: BLE001  (the program runs on, unguarded, and is told so)
        sys.stderr.write(
            f"paritas (PARITAS_GUARD): unverified: nothing was guarded: import paritas: {error!r}\n"
        )


sys.meta_path.insert(0, _TorchImport())
