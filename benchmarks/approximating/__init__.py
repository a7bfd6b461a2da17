"""Programs for `bench_approximations.py`: honest approximations, and wrong parameters."""
