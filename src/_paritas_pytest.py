"""The pytest entry point of paritas.

pytest imports every installed plugin before it looks at a single test, in every project of that
environment. This module therefore stands outside the package, and imports nothing but the standard
library until a test asks: a run that never checks parity pays neither for paritas nor for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register what the plugin adds to pytest's vocabulary."""
    config.addinivalue_line(
        "markers", "parity: the test checks a candidate program against its reference"
    )
