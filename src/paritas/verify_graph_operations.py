"""`python -m paritas.verify_graph_operations --graph G --outdir D` runs `paritas verify-graph`.

It has the name of nnScaler's script.
"""

from __future__ import annotations

import sys

from paritas.app.cli import main

if __name__ == "__main__":
    main(["verify-graph", *sys.argv[1:]], prog_name="python -m paritas")
