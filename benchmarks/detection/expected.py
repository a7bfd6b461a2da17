"""What the pattern of a planted fault should be called, where it has a name.

At the node that goes wrong, not at the program's results: behind a softmax or a matrix nothing is
an offset any more. Some faults are two things at once (a dropped addend leaves the other one: a
copy of an input), and some have no name (a product that became a sum); those are not counted.
"""

from __future__ import annotations

_ADDEND = ("offset", "axis offset", "residual", "copy", "scale")

EXPECTED: dict[str, tuple[str, ...]] = {
    "dropped_addend": _ADDEND,
    "doubled_addend": _ADDEND,
    "scaled_by_percent": ("scale",),
    "scaled_by_permille": ("scale",),
    "missing_scale": ("scale", "copy"),
    "dropped_epsilon": ("eps", "offset", "copy", "nonfinite"),
    "larger_epsilon": ("eps", "offset"),
    "mean_over_one_less": ("off by one reduction", "scale"),
    "wrong_correction": ("off by one reduction", "scale"),
    "dropped_activation": ("copy",),
    "transposed_operand": ("swapped operands", "transpose"),
    "short_contraction": ("partial sum", "off by one reduction"),
    "zero_row": ("zeros",),
    "stale_column": ("stale", "copy", "shift", "permutation"),
    "shifted_mask": ("mask", "shift"),
    "shifted_slice": ("shift", "copy"),
    "swapped_operands": ("permutation", "swapped operands", "shift"),
    "internal_downcast": ("precision",),
    "stale_buffer": ("stale", "copy"),
    "dropped_write": ("stale", "copy"),
    "dropped_all_reduce": ("partial sum",),
    "double_all_reduce": ("doubled reduction", "scale"),
    "bias_on_every_rank": ("offset", "axis offset", "residual"),
    "unreduced_gradient": ("scale", "partial sum"),
    "permuted_chunks": ("permutation", "shift"),
    "equal_masks": ("different random stream", "permutation"),
    "untied_gradient": _ADDEND,
    "saturated_integer": ("clipped", "wrapped"),
    "swallowed_nan": ("nonfinite",),
}
