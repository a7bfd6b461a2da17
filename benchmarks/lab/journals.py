"""Files of one JSON row a line, which a run adds to and the next one goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n") if line]
