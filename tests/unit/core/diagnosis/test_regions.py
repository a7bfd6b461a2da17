"""The region of the wrong elements, as it is said and as it is indexed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from paritas.core.diagnosis.case import Case, Context
from paritas.core.diagnosis.region import find_region

if TYPE_CHECKING:
    from paritas.core.results.findings import Region

FOUR = "(4 % of the elements)"
HALF = "(50 % of the elements)"


def region_of(shape: tuple[int, ...], index: object, context: Context | None = None) -> Region:
    """Of a tensor that is doubled at an index."""
    right = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    candidate = right.clone()
    candidate[index] *= 2  # type: ignore[index]
    region = find_region(Case(candidate, right, context=context or Context()))
    assert region is not None
    return region


def test_a_right_tensor_has_no_region() -> None:
    right = torch.arange(12.0)
    assert find_region(Case(right.clone(), right)) is None


@pytest.mark.parametrize(
    ("shape", "index", "kind", "text"),
    [
        ((8, 100), (slice(None), slice(96, None)), "tile tail", "[:, 96:]"),
        ((2, 4, 130, 8), (..., slice(127, None), slice(None)), "slices", "[:, :, 127:, :]"),
        ((12, 40), 5, "row", "[5, :]"),
        ((20, 64), (slice(None), slice(1, None, 4)), "stride", "[:, 1::4]"),
        ((64, 20), [3, 7], "slices", "[[3, 7], :]"),
        ((64, 20), [0, 63], "border", "[[0, -1], :]"),
        ((30, 30), (slice(10, 25), 4), "slices", "[10:25, 4]"),
        ((6, 7), (3, 4), "slices", "[3, 4]"),
        ((9, 9), slice(None), "everywhere", "[...]"),
    ],
)
def test_the_text_of_a_box_selects_it(
    shape: tuple[int, ...], index: object, kind: str, text: str
) -> None:
    region = region_of(shape, index)
    assert (region.kind, region.text) == (kind, text)
    planted, selected = torch.zeros(shape), torch.zeros(shape)
    planted[index] = 1  # type: ignore[index]
    exec(f"selected{region.text} = 1", {"selected": selected})
    assert torch.equal(planted, selected)
    assert region.elements == int(planted.sum())
    assert region.share == pytest.approx(float(planted.mean()))


@pytest.mark.parametrize(
    ("shape", "index", "sentence"),
    [
        (
            (8, 100),
            (slice(None), slice(96, None)),
            f"in the last 4 of 100 columns, the tail after the last full tile of 32 {FOUR}",
        ),
        ((50, 64), 3, "in row 3 of 50 (2 % of the elements)"),
        ((40, 40), slice(1, None), "in all but the first of 40 rows (98 % of the elements)"),
        ((20, 64), (..., slice(1, None, 2)), f"in every 2nd of 64 columns, from 1 {HALF}"),
        ((4, 25, 4), (slice(None), 2), f"in index 2 of 25 along axis 1 {FOUR}"),
        ((6, 7), (3, 4), "in row 3 of 6 and column 4 of 7 (1 of 42 elements)"),
    ],
)
def test_the_sentence_is_what_a_person_would_write(
    shape: tuple[int, ...], index: object, sentence: str
) -> None:
    assert region_of(shape, index).sentence == sentence


def test_axes_are_called_by_their_names() -> None:
    context = Context(axes=("batch", "head", "token"))
    region = region_of((5, 8, 32), (slice(None), 2), context)
    assert region.sentence == "in head 2 of 8 (12 % of the elements)"


def test_a_rank_is_named_where_ranks_are_known() -> None:
    region = region_of((64, 10), slice(32, 48), Context(world={"tp": 4}))
    assert (region.kind, region.text) == ("rank", "[32:48, :]")
    assert region.sentence == (
        "in the shard of rank 2 of 4 along tp, rows 32 to 47 of 64 (25 % of the elements)"
    )


@pytest.mark.parametrize(
    ("low", "high", "kind", "words"),
    [
        (0, 0, "diagonal", "on the diagonal"),
        (1, 1, "diagonal", "one above the diagonal"),
        (1, 99, "above diagonal", "above the diagonal"),
        (0, 99, "above diagonal", "on and above the diagonal"),
        (-99, -1, "below diagonal", "below the diagonal"),
        (-1, 1, "band", "in the diagonals -1 to 1"),
    ],
)
def test_diagonals_are_told_apart(low: int, high: int, kind: str, words: str) -> None:
    where = torch.arange(24)[None, :] - torch.arange(24)[:, None]
    region = region_of((24, 24), (where >= low) & (where <= high))
    assert (region.kind, region.text) == (kind, words)


def test_a_frame_around_an_image_is_a_border() -> None:
    inner = torch.zeros(3, 20, 30, dtype=torch.bool)
    inner[:, 2:-2, 2:-2] = True
    region = region_of((3, 20, 30), ~inner)
    assert region.kind == "border"
    assert region.text == "on the border: the outermost 2 on each side of axes 1 and 2"


def test_padding_is_where_the_reference_stays_the_same() -> None:
    right = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([12, 15, 9, 17, 14, 11])
    padded = torch.arange(20) >= kept[:, None]
    right[padded] = -1.0
    region = find_region(Case(torch.where(padded, 3.0, right), right))
    assert region is not None
    assert region.kind == "padding"


def test_lost_values_here_and_there_are_nonfinite() -> None:
    draw = torch.Generator().manual_seed(0)
    right = torch.randn(20, 30, generator=draw)
    lost = torch.rand(20, 30, generator=draw) < 0.1
    region = find_region(Case(torch.where(lost, torch.nan, right), right))
    assert region is not None
    assert (region.kind, region.text) == ("nonfinite", "only where the candidate is not finite")


def test_a_row_of_lost_values_is_a_row() -> None:
    right = torch.ones(8, 30)
    candidate = right.clone()
    candidate[3] = torch.nan
    region = find_region(Case(candidate, right))
    assert region is not None
    assert region.sentence == "in row 3 of 8 (12 % of the elements, none of them finite)"


def test_zeros_hide_a_wrong_factor_and_no_more() -> None:
    right = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).relu()
    candidate = right.clone()
    candidate[:, 10:20] *= 2
    region = find_region(Case(candidate, right))
    whole = find_region(Case(right * 2, right))
    assert region is not None
    assert whole is not None
    assert region.text == "[:, 10:20]"
    assert whole.sentence.startswith("everywhere except where the reference is zero (")


def test_a_row_stands_out_from_stray_errors() -> None:
    draw = torch.Generator().manual_seed(0)
    right = torch.randn(40, 200, generator=draw)
    stray = torch.rand(40, 200, generator=draw) < 0.003
    stray[5] = torch.rand(200, generator=draw) < 0.9
    elsewhere = int(stray.sum() - stray[5].sum())
    region = find_region(Case(right + 9 * stray, right))
    assert region is not None
    assert (region.kind, region.text) == ("row", "[5, :]")
    assert region.sentence.startswith("mostly in row 5 of 40 (")
    assert f"{elsewhere} of them elsewhere" in region.sentence


def test_bounds_that_too_few_errors_show_are_said_to_be_uncertain() -> None:
    draw = torch.Generator().manual_seed(0)
    right = torch.randn(4000, 2, generator=draw)
    wrong = torch.rand(4000, 2, generator=draw) < 0.1
    wrong[1111:] = False
    region = find_region(Case(right + 9 * wrong, right))
    assert region is not None
    assert "its bounds are uncertain" in region.sentence


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64, torch.float16])
def test_every_dtype_has_regions(dtype: torch.dtype) -> None:
    right = torch.ones(16, 30).to(dtype)
    candidate = right.clone()
    candidate[:, 7] = 0
    region = find_region(Case(candidate, right))
    assert region is not None
    assert region.text == "[:, 7]"


def test_a_tensor_of_one_element_is_wrong_everywhere() -> None:
    region = find_region(Case(torch.tensor(2.0), torch.tensor(1.0)))
    assert region is not None
    assert (region.kind, region.share) == ("everywhere", 1.0)


def test_wrong_elements_among_many_equal_ones_are_all_over_the_tensor_not_everywhere() -> None:
    # Whole numbers of which many are equal by chance, in another order.
    draw = torch.Generator().manual_seed(0)
    right, candidate = (torch.randint(0, 3, (40, 50), generator=draw) for _ in range(2))
    region = find_region(Case(candidate, right))
    assert region is not None
    assert region.kind == "everywhere"
    assert region.sentence == "all over the tensor (66 % of the elements)"


def test_scattered_elements_are_not_said_to_be_without_a_pattern_that_is_then_described() -> None:
    draw = torch.Generator().manual_seed(0)
    often = torch.where(torch.arange(30) < 15, 0.05, 0.4)
    wrong = torch.rand(40, 30, generator=draw) < often
    region = region_of((40, 30), wrong)
    assert region.sentence.startswith("scattered, in some columns more than in others (")
