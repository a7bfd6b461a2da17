"""Why bars are missed: what the profile of each shows, next to the bar on the page.

A reason does not lower a bar. Profiles are of one run on one thread of a Neoverse N1, unless a
reason says otherwise.
"""

from __future__ import annotations

# Script, and how the name of the figure begins -> the reason.
REASONS: dict[tuple[str, str], str] = {
    ("approximations", "wrong parameters that pass"): (
        "Three pass as approximations: a seventh digit of GELU's coefficient, 0.707107 in GELU "
        "(both are `different` since) and an erf of seven digits. Eleven give equal bits on these "
        "inputs, two agree in float64. The first run of this set; it was not run again."
    ),
    ("approximations", "approximations that are called different"): (
        "Five are a rational tanh that is off by two roundings near 0, one is fixed since, the "
        "others were not looked into."
    ),
    ("confidence", "wrong kind at an operator"): (
        "Four, which were looked at after they were counted: two negated operands, one factor on a "
        "norm that was called a divisor, one NaN that another function would give as well. Since "
        "then these are `sign` or nothing. The next count needs other faults."
    ),
    ("cuda_metrics", "full statistics of a pair of"): (
        "Met until the kernels in Triton were removed (0.92 and 0.97): they were a third "
        "definition of the same figures. The operators of torch read and write each element dozens "
        "of times in float64: 80 ms for a pair of 2^28 elements, where the kernels took 0.7 to "
        "0.8 ms. A `verify` by blocks of a training step with 1.1 billion parameters took 77 s "
        "without them and 84 s with them, one run each: compilation decides."
    ),
    ("places", "shrink: at most 3 operators"): (
        "Two of 63 are left whole: positions that are too large, with which the candidate raises "
        "in another operator, and rows of a view in the backward graph of XLNet. With three "
        "earlier sets, 309 of 315 end with at most three operators; four ran out of the lab's time."
    ),
    ("inside", "caught at 5"): (
        "The error of one rounding is about 0.4 u of the values. The limit is twice the usual "
        "error and one rounding u more, 4.5 times that, and wider where values share one error. "
        "Twice the error of the reference passes by design. Not looked into case by case."
    ),
    ("inside", "caught at 10"): (
        "One case of 455, the reciprocal deviation of a batch norm in float16. Not looked into."
    ),
    ("record", "statistics, modules, demo"): (
        "50 values are recorded in a forward of 103 operator calls. Minimum, maximum, mean and "
        "norm of one of them by torch alone take 32 us where the forward takes 4.0 ms: 1.4 x, "
        "before anything is named, digested or written. At width 512 the same recording costs "
        "1.12 x."
    ),
    ("compare", "bits, equal"): (
        "A single memcmp of the C library over the same 64 MiB has 0.62 x the speed of its memcpy, "
        "where ours, which also stops at the first difference, has 0.55 x: both read two streams, "
        "memcpy reads one."
    ),
    ("partition", "one option"): (
        "The operator runs six times forward and backward: whole and on two ranks, natively and in "
        "float64. The convolutions take 0.3 to 0.5 ms each, so torch alone takes about 2 ms. The "
        "batch norm takes 0.12 ms; there it is the 335 small operator calls of splitting and "
        "joining five gradients."
    ),
    ("store", "20000 tensors of 16 KiB"): (
        "For 4000 tensors (processor time): np.save 0.73 s, ours 0.23 s, of which 0.08 s is one "
        "raw write of the same bytes and 0.05 s their digests. Five times the speed would leave "
        "5 us a tensor for its name, its checks and its line in the index, which take 27 us."
    ),
    ("growth_memory", "recording statistics, by calls"): (
        "What grows is a table of at most 4096 digests, by which equal sketches are stored once, "
        "and the header of the file that is being written: 0.8 KiB a call of four modules (1024 "
        "to 3072 calls: 4.1 to 5.8 MiB). Both are released with the file."
    ),
    ("compare_tools", "16 pairs of 32 MiB"): (
        "By hand, with mindstudio-probe 26.2.0 in an environment of its own and other work on the "
        "machine: 1.08 x (43.7 s against 47.1 s; 1.1 by processor time). All 16 pairs differ, and "
        "ours also looks for the kind of each difference: with two pairs, 15 of 17 s."
    ),
}


def reason(script: str, figure: str) -> str:
    """Why a figure misses its bar; empty if nobody has looked."""
    for (one, name), text in REASONS.items():
        if one == script and figure.startswith(name):
            return text
    return ""
