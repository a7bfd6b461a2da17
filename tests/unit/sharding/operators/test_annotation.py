"""Annotations: parsing, what can be split in a call, and the recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Divided, Range, Recipe
from paritas.core.results.items import Once, Partial, Replicate, Shard
from paritas.sharding.operators.annotation import Annotation, Option

LINEAR = "* k+, n k+, n : !k -> * n"


def call(*args: Any, name: str = "torch.an.operator", **kwargs: Any) -> OperatorCall:
    """A call in which a tuple stands for a tensor of that shape."""

    def made(value: Any) -> Any:
        if isinstance(value, tuple):
            return torch.zeros(value)
        return [made(item) for item in value] if isinstance(value, list) else value

    return OperatorCall(
        torch.add, tuple(map(made, args)), {key: made(each) for key, each in kwargs.items()}, name
    )


def recipes(text: str, what: OperatorCall) -> dict[str, Recipe]:
    """The recipe of each identifier that can be split."""
    annotation = Annotation.parse(text)
    found = [annotation.recipe(what, option) for option in annotation.options(what)]
    return {recipe.words.rpartition(" ")[2]: recipe for recipe in found}


def refusal(text: str, what: OperatorCall, **option: int) -> str:
    with pytest.raises(UsageError) as caught:
        Annotation.parse(text).recipe(what, Option.of(option))
    return str(caught.value)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("m k+,n k+->m n", "m k+, n k+ -> m n"),
        ("  *   k+ , n k+sum -> * n", "* k+, n k+ -> * n"),
        ("a b+prod -> a", "a b+product -> a"),
        ("l h^ :/m, m n -> l n", "l h^ : /m, m n -> l n"),
        ("x, ?:/ -> x", "x, / -> x"),
        ("( h d^ ) 64^ -> h d 64", "(h d^) 64 -> h d 64"),
        ("b l~1:1 c~0:2 -> b l c", "b l~1 c~0:2 -> b l c"),
        ("a b+, bias = a : ! -> a : b+max", "a b+, bias=a : ! -> a : b+max"),
        ("*, n+ e -> * e; start : stop = n, size [ 0 ] = e", None),
        ("-> n ; size=n", "-> n ; size=n"),
        ("n c, c:@n -> n c;group = ranks( n )", "n c, c : @n -> n c ; group=ranks(n)"),
        ("n h, ? -> n h ; 1=ranks(n h)", "n h, ? -> n h ; 1=ranks(n h)"),
        ("ranks -> ranks ; size=ranks", "ranks -> ranks ; size=ranks"),
    ],
)
def test_an_annotation_has_one_spelling(text: str, spelled: str | None) -> None:
    annotation = Annotation.parse(text)
    assert annotation.text == (spelled or "*, n+ e -> * e ; start:stop=n, size[0]=e")
    assert Annotation.parse(annotation.text) == annotation
    assert Annotation.parse(text) is annotation


@pytest.mark.parametrize(
    ("text", "why", "under"),
    [
        ("m k+, n k -> m n", "`k` here, but `k+` before", "k -> m"),
        ("a b", "`->` is missing", ""),
        ("a, -> b", "the dimensions of an input are missing", "-> b"),
        ("a -> ", "the dimensions of an output are missing", ""),
        ("a+n -> 1", "`+n` is not a reduction", "+n"),
        ("a + -> 1", "there is a space before the suffix: write `a+`", "+ ->"),
        ("a -> *", "`*` must also be in an input", "*"),
        ("* b * -> *", "only one `*`", "* ->"),
        ("(a b -> c", "not a digit first), got `->`", "-> c"),
        ("(a b)+ -> c", "brackets cannot have a suffix", "+ ->"),
        ("() -> c", "the brackets are empty", "() ->"),
        ("64+ -> 1", "a number is never split", "64+"),
        ("2k -> 1", "got `2k`", "2k"),
        ("a $ -> a", "unexpected character `$`", "$"),
        ("a~ -> a", "`~` is not a halo", "~ ->"),
        ("a -> a~1", "only a named dimension of an input can have a halo", "~1"),
        ("a -> x=a", "an output has no name", "x=a"),
        ("a -> a b+", "`b+` here, but not in any input", "b+"),
        ("a : b, b -> a", "`b` is not a mark of an input", "b, b"),
        ("a : !a -> a", "this input has the dimension `a` itself", "!a"),
        ("a : /z -> a", "no tensor has a dimension `z`", "/z"),
        ("a : -> a", "nothing after the colon", "-> a"),
        ("a : /b /b, b -> a", "there are two marks for a split by `b`", "/b, b"),
        ("a -> a ; size[x]=a", "write the position of the item", "x]"),
        ("a -> a ; groups=g", "no tensor has a dimension `g`", "g"),
        ("a -> a ; group=ranks(n)", "no tensor has a dimension `n`", "n)"),
        ("a -> a ; group=ranks()", "the dimension is missing: write `process_group=ranks(n)`", ")"),
        ("a -> a ; group=ranks(a", "got the end", ""),
        ("a b, b : @b -> a b", "this input has the dimension `b` itself", "@b"),
        ("a -> a -> a", "unexpected `->`", "-> a"),
        ("a, x=a, x=a -> a", "there are two inputs named `x`", "x=a ->"),
        ("x=a, b -> a", "positional inputs must come before keyword inputs", "b ->"),
        ("a ? -> a", "separate tensors with a comma", "? ->"),
    ],
)
def test_a_fault_is_shown_with_a_caret_under_it(text: str, why: str, under: str) -> None:
    with pytest.raises(UsageError) as caught:
        Annotation.parse(text)
    message, shown, caret = str(caught.value).split("\n")
    assert why in message
    assert shown == f"  {text.strip()}"
    at = len(shown) if not under else shown.rindex(under)
    assert caret == " " * at + "^"


def test_an_annotation_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(UsageError, match="got None"):
        Annotation.parse(None)  # type: ignore[arg-type]


_NAMES = st.sampled_from(["a", "b", "c", "k2", "_"])
_FACTOR = st.one_of(_NAMES.map(lambda name: name if name == "_" else f"{name}+max"), st.just("64"))
_DIM = st.one_of(
    _FACTOR,
    st.lists(_FACTOR.filter(lambda f: f != "_"), min_size=2, max_size=3).map(
        lambda factors: f"({' '.join(factors)})"
    ),
)
_SHAPE = st.one_of(st.just("?"), st.just("/"), st.lists(_DIM, min_size=1, max_size=3).map(" ".join))


@settings(max_examples=40)
@given(st.lists(_SHAPE, max_size=3), st.lists(_SHAPE, min_size=1, max_size=2), st.booleans())
def test_what_is_written_is_read_again(
    inputs: list[str], outputs: list[str], with_rest: bool
) -> None:
    outputs = [text.replace("+max", "").replace("/", "?") for text in outputs]
    inputs = [*inputs, "* z"] if with_rest else [*inputs, "z"]
    annotation = Annotation.parse(f"{', '.join(inputs)} -> {', '.join(outputs)} ; n[1]=z")
    assert Annotation.parse(str(annotation)) == annotation


# --- options --------------------------------------------------------------------------------------


def test_an_option_is_read_from_a_configuration() -> None:
    assert Option.of({"idx": 0, "dim": 1}) == Option(0, 1)
    assert Option.of({"idx": 0, "dim": 1, "num": 4}) == Option(0, 1, 4)


@pytest.mark.parametrize(
    ("mapping", "why"),
    [
        ({"idx": 0}, "has no key `dim`"),
        ({"idx": 0, "dim": 1, "axis": 2}, "has the unknown key 'axis'"),
        ({"idx": 0, "dim": -1}, "`dim` must be an integer of 0 or more, got -1"),
        ({"idx": 0, "dim": "v"}, "`dim` must be an integer of 0 or more, got 'v'"),
        ({"idx": True, "dim": 0}, "`idx` must be an integer of 0 or more, got True"),
        ({"idx": 0, "dim": 0, "num": 0}, "`num` must be an integer of 1 or more, got 0"),
    ],
)
def test_an_invalid_option_is_refused(mapping: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError) as caught:
        Option.of(mapping)
    assert why in str(caught.value)


def test_each_identifier_is_an_option_where_it_occurs_first() -> None:
    annotation = Annotation.parse(LINEAR)
    what = call((2, 8, 16), (32, 16), (32,))
    assert annotation.options(what) == [Option(0, 0), Option(0, 1), Option(0, 2), Option(1, 0)]


def test_an_option_may_name_an_output() -> None:
    annotation = Annotation.parse(LINEAR)
    what = call((2, 8, 16), (32, 16), (32,), name="torch.nn.functional.linear")
    recipe = annotation.recipe(what, Option(3, 2))
    assert recipe == annotation.recipe(what, Option(1, 0))
    assert recipe.words == "linear: * k+, n k+, n : !k -> * n, split by n"


@settings(max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_every_option_gives_a_recipe_of_dimensions_that_are_there(
    batch: list[int], k: int, n: int
) -> None:
    what = call((*batch, 2 * k), (n, 2 * k), (n,))
    shapes = [tuple(tensor.shape) for tensor in what.args]
    for recipe in recipes("* (k+ 2), n (k+ 2), n : !k -> * n", what).values():
        placements = [placement for _, placement in recipe.inputs]
        for shape, placement in zip(shapes, placements, strict=True):
            if isinstance(placement, Shard):
                assert shape[placement.dim] % placement.unit == 0
                assert shape[placement.dim] // placement.unit > 1
        assert any(isinstance(placement, Shard) for placement in placements)


# --- recipes --------------------------------------------------------------------------------------


def test_a_linear_layer_splits_rows_columns_and_what_is_summed() -> None:
    found = recipes(LINEAR, call((2, 8, 16), (32, 16), (32,)))
    assert found["*1"].inputs == ((0, Shard(1)), (1, Replicate()), (2, Replicate()))
    assert found["*1"].outputs == (Shard(1),)
    assert found["k"].inputs == ((0, Shard(2)), (1, Shard(1)), (2, Once()))
    assert found["k"].outputs == (Partial("sum"),)
    assert found["n"].inputs == ((0, Replicate()), (1, Shard(0)), (2, Shard(0)))
    assert found["n"].outputs == (Shard(2),)


def test_a_bias_that_counts_once_in_sums_is_whole_elsewhere() -> None:
    found = recipes("m k+, n k+, n : ! -> m n", call((4, 6), (8, 6), (8,)))
    assert found["k"].placement(2) == Once()
    assert found["m"].placement(2) == Replicate()


def test_a_bias_that_is_none_or_given_by_keyword_is_understood() -> None:
    text = "m k+, n k+, bias=n : !k -> m n"
    given = recipes(text, call((4, 6), (8, 6), bias=(8,)))
    assert given["k"].placement("bias") == Once()
    assert given["n"].placement("bias") == Shard(0)
    for none in (call((4, 6), (8, 6), bias=None), call((4, 6), (8, 6))):
        assert [place for place, _ in recipes(text, none)["k"].inputs] == [0, 1]


@pytest.mark.parametrize("reduction", ["avg", "max", "min", "product"])
def test_reductions_other_than_sums_can_be_written(reduction: str) -> None:
    found = recipes(f"a b+{reduction} -> a", call((4, 6)))
    assert found["b"].outputs == (Partial(reduction),)  # type: ignore[arg-type]
    assert found["a"].outputs == (Shard(0),)


def test_an_output_can_be_reduced_in_its_own_way() -> None:
    found = recipes("a b+min -> a, a : b+max, a : b", call((4, 6)))
    assert found["b"].outputs == (Partial("min"), Partial("max"), Replicate())


def test_a_mark_after_the_colon_keeps_a_gradient_from_being_reduced() -> None:
    found = recipes("l h^ : /m, m h^, / -> l m", call((4, 6), (8, 6), (3,)))
    assert found["m"].inputs == (
        (0, Replicate(summed=False)),
        (1, Shard(0)),
        (2, Replicate(summed=False)),
    )
    assert found["l"].inputs == ((0, Shard(0)), (1, Replicate()), (2, Replicate(summed=False)))


def test_hidden_dimensions_are_split_by_their_first_factor_in_units_of_the_rest() -> None:
    found = recipes("b (h d) -> b h d", call((2, 12), h=3))
    assert found.keys() == {"b", "h"}
    assert found["h"].inputs == ((0, Shard(1, unit=4)),)
    assert found["h"].outputs == (Shard(1),)
    assert found["h"].numbers == (("h", Divided()),)


def test_factors_are_found_from_other_dimensions_and_leading_ones_are_passed_over() -> None:
    what = call((4, 12), (6, 2))
    assert recipes("n (g c), o c -> n (g o)", what)["g"].placement(0) == Shard(1, unit=2)
    ones = recipes("(x h d), h -> x h d", call((12,), (3,), x=1))
    assert ones["h"].placement(0) == Shard(0, unit=4)


def test_numbers_that_go_with_a_split_are_named_after_the_semicolon() -> None:
    grouped = recipes(
        "n (g c^) l^, (g o^) c^ k^ -> n (g o^) m ; groups=g",
        call((2, 8, 9), (6, 4, 3), groups=2),
    )
    assert grouped["g"].inputs == ((0, Shard(1, unit=4)), (1, Shard(0, unit=3)))
    assert grouped["g"].numbers == (("groups", Divided()),)
    viewed = recipes("(b s) h, ? -> b s h ; 1[0]=b, 1[1]=s", call((6, 4), [3, 2, -1]))
    assert viewed["b"].numbers == ((1, Divided(0)),)
    free = recipes("(b s) h -> b s h ; size[0]=b, size[1]=s", call((6, 4), size=[-1, 2, 4]))
    assert free["b"].numbers == ()
    product = recipes("b h d -> b (h d) ; size[1]=(h d)", call((2, 3, 4), size=[2, 12]))
    assert product["h"].numbers == (("size", Divided(1)),)


def test_the_range_of_a_part_is_passed_on() -> None:
    found = recipes("*, n+ e -> * e ; start:stop=n", call((1, 9), (50, 6), start=0, stop=50))
    assert found["n"].inputs == ((0, Replicate()), (1, Shard(0)))
    assert found["n"].numbers == (("start", Range(1, "begin")), ("stop", Range(1, "end")))
    assert found["e"].numbers == ()


def test_a_halo_belongs_to_the_part() -> None:
    found = recipes("b l~0:2 -> b l", call((2, 9)))
    assert found["l"].inputs == ((0, Shard(1, halo=(0, 2))),)


def test_broadcast_dimensions_are_the_same_on_all_ranks() -> None:
    found = recipes("*, *, * -> *", call((1, 1, 9, 8), (1, 12, 9, 8), (8,)))
    assert found.keys() == {"*1", "*2", "*3"}
    assert found["*1"].inputs == ((0, Replicate()), (1, Shard(1)), (2, Replicate()))
    assert found["*3"].inputs == ((0, Shard(3)), (1, Shard(3)), (2, Shard(0)))
    assert recipes("*, * -> *", call((4, 3), 2.0))["*0"].inputs == ((0, Shard(0)),)


def test_a_list_of_tensors_is_split_as_one() -> None:
    found = recipes("_ b -> _ b", call([(2, 4), (3, 4)]))
    assert found["b"].inputs == ((0, Shard(1)),)
    assert found.keys() == {"b"}


def test_a_single_number_is_written_as_one() -> None:
    found = recipes("*+, 1 -> 1", call((4, 3), ()))
    assert found["*0"].outputs == (Partial("sum"),)
    assert found["*0"].inputs == ((0, Shard(0)), (1, Replicate()))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "option", "why"),
    [
        ("a b^ -> a b", {"idx": 0, "dim": 1}, "b is frozen by `^`"),
        ("a 6 -> a 6", {"idx": 0, "dim": 1}, "dimension 1 of argument 0 has the fixed length 6"),
        ("? -> ?", {"idx": 0, "dim": 1}, "argument 0 is not a tensor, or one that is never split"),
        ("a (2 c) -> a c", {"idx": 0, "dim": 1}, "has the fixed length 2"),
        ("a (b 2) -> b a", {"idx": 0, "dim": 1, "num": 4}, "b has length 3, too short for 4 ranks"),
        ("a b -> (a b)", {"idx": 0, "dim": 1}, "b is not the first factor of `(a b)`"),
        ("a b -> b b a", {"idx": 0, "dim": 1}, "b occurs twice in `b b a`"),
        ("a b -> a c", {"idx": 1, "dim": 1}, "no input has c, and no argument depends on it"),
        (
            "a b -> a ; n=b",
            {"idx": 0, "dim": 1},
            "argument n depends on b, but the call does not give it",
        ),
        ("a b -> a", {"idx": 0, "dim": 2}, "argument 0 has 2 dimensions, counted from 0"),
        (
            "a b -> a",
            {"idx": 2, "dim": 0},
            "there are 1 inputs and 1 outputs, so idx must be 0 to 1",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(
    text: str, option: dict[str, int], why: str
) -> None:
    message = refusal(text, call((4, 6), name="torch.op"), **option)
    assert message.startswith(f"idx {option['idx']}, dim {option['dim']} of op cannot be split by")
    assert why in message


def test_a_length_of_one_cannot_be_split() -> None:
    assert "a has length 1" in refusal("a b -> a b", call((1, 6)), idx=0, dim=0)


def test_a_number_that_the_ranks_would_share_unevenly_is_refused() -> None:
    what = call((2, 3, 4), size=[2, 12])
    message = refusal("b h d -> b (h d) ; size[1]=(h d)", what, idx=0, dim=1, num=2)
    assert "argument size is 12 and depends on h, but 2 ranks do not divide 3" in message


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("a b -> a", call((4,)), "argument 0 has 1 dimensions (4,), `a b` has 2"),
        ("* a b -> a", call((4,)), "argument 0 has 1 dimensions (4,), `* a b` has 2 or more"),
        (
            "m k, n k -> m n",
            call((4, 6), (8, 5)),
            "dimension 1 of argument 1 is 5, not 6 as `k` (k is 6 by dimension 1 of argument 0)",
        ),
        ("a 5 -> a", call((4, 6)), "dimension 1 of argument 0 is 6, not 5 as `5`"),
        ("(h 4) -> h", call((6,)), "dimension 0 of argument 0 is 6, not a multiple of 4"),
        ("(h d) -> h d", call((6,)), "the lengths of h and d are unknown"),
        ("h -> h", call((6,), h=4), "(h is 4 by argument `h`)"),
        ("a -> a", call((4,), (4,)), "1 inputs for 2 arguments: argument 1 is a tensor"),
        ("a, a -> a", call((4,)), "2 inputs for 1 positional arguments"),
        ("a -> a", call((4,), bias=(4,)), "argument `bias` is a tensor: add `bias=`"),
        ("a, b -> a", call((4,), "sum"), "argument 1 is str 'sum', not a tensor `b`"),
        ("b -> b", call([(1,), (4,)]), "is a list in which only some tensors have length 1 at `b`"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_the_position(
    text: str, what: OperatorCall, why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Annotation.parse(text).check(what)
    assert str(caught.value).startswith(f"`{text}` does not fit this call of operator: ")
    assert why in str(caught.value)
