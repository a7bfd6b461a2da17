"""The correct programs on which guard must stay silent: all of them, by name.

There is one for each kind of graph that compilers are known to make, or to get wrong.
"""

from __future__ import annotations

from quality import guard_programs_models, guard_programs_special, guard_programs_tensors
from quality.guard_program_table import PROGRAMS, run

__all__ = ["PARTS", "PROGRAMS", "run"]

# Importing a part enters its programs into the table.
PARTS = (guard_programs_models, guard_programs_tensors, guard_programs_special)
