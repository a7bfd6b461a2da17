"""Pure functions on two tensors or trees: metrics, noise, checkers, findings, verdicts; no I/O."""
