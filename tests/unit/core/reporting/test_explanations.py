"""What `paritas explain` prints at 80 columns."""

from __future__ import annotations

import io
import math

import msgspec
import pytest
import torch
from rich.console import Console

from paritas.core.diagnosis.pictures import draw_picture
from paritas.core.errors import UsageError
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.reporting.explanations import choose_cause, explanation, next_steps
from paritas.core.reporting.pictures import PictureDrawing
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    Pattern,
    Region,
    Score,
    Status,
    Verdict,
)
from paritas.core.results.items import Item, ItemKind, gradient, nth_output, output
from paritas.core.results.wording import chain_words


def located():
    """A softmax whose last columns are zero."""
    reference = torch.linspace(0, 1, 2 * 4 * 40).reshape(2, 4, 40)
    candidate = reference.clone()
    candidate[..., 32:] = 0
    where = Region(
        kind="tile tail",
        text="[:, :, 32:]",
        elements=64,
        share=0.2,
        sentence="in the last 8 of 40 indices along axis 2, the tail after the last full tile of "
        "32 (20 % of the elements)",
        axes=(2,),
    )
    zeros = Pattern(
        kind="zeros",
        confidence=0.99,
        sentence="zero instead of a value",
        evidence={"explained": 1.0},
    )
    return Finding(
        item=Item(ItemKind.NODE, "softmax"),
        aspect=Aspect.VALUE,
        status=Status.DIFFERENT,
        reason="starts here: softmax gives a wrong result for correct inputs",
        dtype="float32",
        shape=(2, 4, 40),
        metrics=pair_metrics(reference, candidate),
        native=Score(max_z=3e5, max_limit=12.0, rms_z=1e4, rms_limit=2.6),
        source="model.py:18, in forward",
        origin=Origin(
            kind=OriginKind.NODE,
            name="softmax",
            operator="aten._softmax.default",
            module="layers.0.attn",
            source="model.py:18, in forward",
            code="weights = scores.softmax(-1)",
            arguments=("input: float32 [2, 4, 40]", "dim=-1"),
            chain=("softmax", "bmm", "linear"),
        ),
        diagnosis=Diagnosis(where=where, patterns=(zeros,)),
        picture=draw_picture(reference, candidate, where),
    )


def results(count):
    items = [nth_output(0), *(gradient(f"w{place}") for place in range(1, count))]
    return [
        Finding(item=item, aspect=Aspect.VALUE, status=Status.DIFFERENT, cause="node softmax")
        for item in items
    ]


def verdict_of(*findings, **fields):
    return Verdict(findings=findings, coverage=Coverage(compared=len(findings)), **fields)


def printed(shown, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=80, highlight=False, **options)
    console.print(shown, crop=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_a_located_fault_reads_like_this():
    verdict = verdict_of(*results(5), located())
    shown = explanation(verdict, next_steps(verdict, shrink="paritas shrink nets:make"))
    assert printed(shown) == [
        "different: the candidate computes something else; 6 findings, 6 items compared",
        "",
        "node softmax: different",
        "  starts at  model.py:18, in forward",
        "                 weights = scores.softmax(-1)",
        "  operator   aten._softmax.default(input: float32 [2, 4, 40], dim=-1)",
        "  module     layers.0.attn",
        "  from there softmax -> bmm -> linear",
        "  what       starts here: softmax gives a wrong result for correct inputs",
        "  kind       zero instead of a value (zeros, reproduces 100 % of the wrong",
        "             elements, confidence 0.99)",
        "  where      in the last 8 of 40 indices along axis 2, the tail after the last",
        "             full tile of 32 (20 % of the elements)",
        "  how far    float32[2,4,40], relative L2 0.48, worst 3e+05 times the noise",
        "             (allowed 12, native run)",
        "  worst      [1, 3, 39]: candidate 0, reference 1",
        "",
        "   reference                  candidate                  difference",
        "  |++++++++++++++++++****|   |++++++++++++++++++    |   |                  ****|",
        "  |**************########|   |**************####    |   |                  ####|",
        "  |#########%%%%%%%%%%%%%|   |#########%%%%%%%%%    |   |                  %%%%|",
        "  |%%%%%@@@@@@@@@@@@@@@@@|   |%%%%%@@@@@@@@@@@@@    |   |                  @@@@|",
        "  down: axis 1 (0 to 3), across: axis 2 (0 to 39, 1-2 per cell); slice [1, :, :]",
        "  values 0 to 1; |difference| 0 to 1, as ' .:-=+*#%@'",
        "",
        "  as a result, also 1 value: output[0]; 4 gradients, which may hide a fault of",
        "  their own: gradient of w1, gradient of w2, gradient of w3, gradient of w4",
        "",
        "what to do next",
        "  make the smallest script that shows it: paritas shrink nets:make",
    ]


def test_without_a_place_it_says_so_and_what_can_find_it():
    wrong = Finding(item=output(), aspect=Aspect.VALUE, status=Status.DIFFERENT, reason="far off")
    verdict = verdict_of(wrong, notes=("a remark",))
    assert printed(explanation(verdict, next_steps(verdict))) == [
        "different: the candidate computes something else; 1 finding, 1 item compared",
        "",
        "output: different",
        "  what far off",
        "",
        "note: a remark",
        "",
        "what to do next",
        "  it is not known where it starts: run paritas verify with a longer",
        "  --locate-seconds, or paritas run on the script that compiles the model; both",
        "  look for the first wrong operator",
        "  make the smallest script that shows it: paritas shrink package.module:factory,",
        "  or verdict.shrink() in Python",
    ]


def test_a_pass_is_one_line():
    verdict = verdict_of(Finding(item=output(), aspect=Aspect.VALUE, status=Status.IDENTICAL))
    assert printed(explanation(verdict, next_steps(verdict))) == [
        "identical: the candidate is equal bit for bit; 1 item compared"
    ]


def test_a_script_that_was_written_is_named():
    verdict = verdict_of(*results(1))
    assert next_steps(verdict, script="out/case.py") == [
        "run the script that shows it: python out/case.py"
    ]


def test_no_script_is_promised_for_a_program_that_was_not_compiled():
    assert next_steps(verdict_of(*results(1), located())) == []
    compiled = msgspec.structs.replace(
        located(), item=Item(ItemKind.NODE, "softmax", graph="graph 0")
    )
    (step,) = next_steps(verdict_of(compiled))
    assert "verdict.shrink()" in step


def test_a_long_chain_is_shortened_once():
    places = [f"layers.{number}" for number in range(30)]
    origin = Origin(kind=OriginKind.NODE, name="add", chain=(*places, "output and 2 more"))
    assert chain_words(origin) == (
        "layers.0 -> layers.1 -> layers.2 -> layers.3 -> layers.4 -> (21 more places) -> "
        "layers.26 -> layers.27 -> layers.28 -> layers.29 -> output and 2 more"
    )


def test_of_many_causes_the_first_are_explained_and_the_others_numbered():
    found = [
        Finding(item=nth_output(n), aspect=Aspect.VALUE, status=Status.DIFFERENT) for n in range(20)
    ]
    verdict = verdict_of(*found)
    lines = printed(explanation(verdict, ()))
    assert "3. output[2]: different" in lines
    assert "  4. output[3]: different (value)" in lines
    assert lines[-1] == "  and 7 more"
    (heading,) = [line for line in printed(explanation(verdict, (), "4")) if "output" in line]
    assert heading == "output[3]: different"


def test_a_finding_is_chosen_by_number_or_path():
    verdict = verdict_of(*results(3), located())
    assert choose_cause(verdict, "1").start.path == "node softmax"
    assert len(choose_cause(verdict, "node softmax").results) == 3
    assert choose_cause(verdict, "gradient of w1").start.path == "gradient of w1"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("7", "--finding '7': there is no such number; the only one is 1"),
        ("node sotfmax", "no finding has this path; did you mean 'node softmax'"),
    ],
)
def test_a_finding_that_does_not_exist_is_refused(wanted, words):
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        choose_cause(verdict_of(*results(3), located()), wanted)


def drawn(reference, candidate, **options):
    return printed(PictureDrawing(draw_picture(reference, candidate, None)), **options)


def test_nan_has_a_letter_of_its_own():
    reference = torch.arange(8.0)
    candidate = reference.clone()
    candidate[3] = math.nan
    assert drawn(reference, candidate) == [
        "reference  | .:=+#%@|",
        "candidate  | .:N+#%@|",
        "difference |   N    |",
        "across: axis 0 (0 to 7)",
        "values 0 to 7; |difference| 0 to 0, as ' .:-=+*#%@'; N: NaN or Inf (1 cell)",
    ]


def test_a_scalar_is_shown_by_its_numbers():
    assert drawn(torch.tensor(2.0), torch.tensor(3.5)) == [
        "reference 2, candidate 3.5, difference 1.5"
    ]


def test_a_large_value_fits_into_80_columns():
    torch.manual_seed(0)
    reference = torch.randn(300, 500)
    lines = drawn(reference, reference + 1)
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24


def test_colours_are_used_only_where_there_are_enough():
    reference = torch.arange(32.0).reshape(4, 8)
    options = {"force_terminal": True, "legacy_windows": False}
    coloured = drawn(reference, reference + 1, color_system="truecolor", **options)
    assert any("▀" in line for line in coloured)
    for limits in ({"color_system": "standard"}, {"color_system": "256", "no_color": True}):
        assert not any("▀" in line for line in drawn(reference, reference + 1, **options, **limits))


def test_a_located_verdict_is_explained_the_same_after_json():
    verdict = verdict_of(*results(2), located())
    read = Verdict.from_json(verdict.to_json())
    assert read == verdict
    assert printed(explanation(read, ())) == printed(explanation(verdict, ()))
    bare = msgspec.structs.replace(verdict, findings=())
    assert printed(explanation(bare, ()))[0].startswith("unverified")
