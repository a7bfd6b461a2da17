"""The kinds of faults that are planted: what each does to one operator call.

The list follows what goes wrong in practice, in compilers, kernels and parallel plans. Its numbers
are fixed: results of different runs are compared by them.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One kind of fault.

    Attributes:
        number: 1 to 42, for good.
        name: how a site and a report call it.
        text: what it does, for people.
        family: arithmetic, contraction, indexing, precision, state, ranks or special.
    """

    number: int
    name: str
    text: str
    family: str


_ARITHMETIC = [
    Mutation(1, "mul_to_add", "adds where it should multiply", "arithmetic"),
    Mutation(2, "add_to_sub", "subtracts where it should add", "arithmetic"),
    Mutation(3, "sub_to_add", "adds where it should subtract", "arithmetic"),
    Mutation(4, "dropped_addend", "leaves out a bias or a residual", "arithmetic"),
    Mutation(5, "doubled_addend", "adds one addend twice", "arithmetic"),
    Mutation(6, "scaled_by_percent", "a result is 1 % too large", "arithmetic"),
    Mutation(7, "scaled_by_permille", "a result is 0.1 % too large", "arithmetic"),
    Mutation(8, "missing_scale", "leaves out a constant factor", "arithmetic"),
    Mutation(9, "dropped_epsilon", "leaves out the epsilon of a denominator", "arithmetic"),
    Mutation(10, "larger_epsilon", "an epsilon is two or ten times too large", "arithmetic"),
    Mutation(11, "wrong_dim", "a softmax or reduction runs along another axis", "arithmetic"),
    Mutation(12, "mean_over_one_less", "a mean is divided by n - 1", "arithmetic"),
    Mutation(13, "wrong_correction", "a variance is unbiased, or no longer is", "arithmetic"),
    Mutation(14, "rsqrt_to_sqrt", "multiplies by a root it should divide by", "arithmetic"),
    Mutation(15, "wrong_activation", "applies another activation", "arithmetic"),
    Mutation(16, "dropped_activation", "leaves out an activation", "arithmetic"),
    Mutation(17, "other_gelu", "takes gelu's tanh form for the exact one", "arithmetic"),
]
_CONTRACTION = [
    Mutation(18, "transposed_operand", "a square operand is transposed", "contraction"),
    Mutation(19, "short_contraction", "the last term of a sum is left out", "contraction"),
    Mutation(25, "flipped_kernel", "a convolution's kernel is mirrored", "contraction"),
    Mutation(26, "max_to_average", "pools by the mean, not the maximum", "contraction"),
]
_INDEXING = [
    Mutation(20, "zero_row", "one row of a result is zero", "indexing"),
    Mutation(21, "stale_column", "the last column holds the one before", "indexing"),
    Mutation(22, "shifted_mask", "a causal mask is one place off", "indexing"),
    Mutation(23, "shifted_slice", "a slice begins one place off", "indexing"),
    Mutation(24, "swapped_operands", "two joined tensors change places", "indexing"),
]
_PRECISION = [
    Mutation(27, "internal_downcast", "computes in a narrower dtype inside", "precision"),
    Mutation(31, "output_dtype", "gives an output in another dtype", "precision"),
]
_STATE = [
    Mutation(28, "stale_buffer", "a buffer keeps its old value", "state"),
    Mutation(29, "dropped_write", "a write in place is left out", "state"),
    Mutation(30, "aliased_output", "an output is put into an input's memory", "state"),
]
_RANKS = [
    Mutation(32, "dropped_all_reduce", "only one rank's share of a sum is seen", "ranks"),
    Mutation(33, "double_all_reduce", "a sum over ranks is taken twice", "ranks"),
    Mutation(34, "wrong_shard", "two ranks hold each other's shard", "ranks"),
    Mutation(35, "bias_on_every_rank", "a bias is added on both of two ranks", "ranks"),
    Mutation(36, "unreduced_gradient", "a gradient is one rank's, or scaled by 1/2", "ranks"),
    Mutation(37, "permuted_chunks", "two ranks' chunks of a result are swapped", "ranks"),
    Mutation(38, "equal_masks", "two ranks draw the same dropout mask", "ranks"),
    Mutation(39, "mean_of_means", "a mean over ranks with unequal shares", "ranks"),
    Mutation(40, "untied_gradient", "a shared weight's gradient misses one use", "ranks"),
]
_SPECIAL = [
    Mutation(41, "saturated_integer", "an integer stops at its limit, not wraps", "special"),
    Mutation(42, "swallowed_nan", "a comparison lets a NaN disappear", "special"),
]

MUTATIONS: dict[str, Mutation] = {
    kind.name: kind
    for kind in sorted(
        [*_ARITHMETIC, *_CONTRACTION, *_INDEXING, *_PRECISION, *_STATE, *_RANKS, *_SPECIAL],
        key=lambda kind: kind.number,
    )
}
