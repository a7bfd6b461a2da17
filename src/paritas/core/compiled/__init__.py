"""The graphs of a compiled program, each judged as it runs, for `guard()` and `verify()`."""
