from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.execution.subjects import Inputs, VerifyConfig, input_sets
from paritas.core.numerics.checkers import AllCloseValueChecker, AutomaticValueChecker

X = torch.ones(2)

# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[X, 1], (X, 1)])
def test_a_list_or_tuple_is_one_set_of_positional_inputs(given):
    (one,) = input_sets(given)
    assert one.args[0] is X
    assert one.args[1] == 1
    assert one.kwargs == {}


def test_named_inputs_are_one_set():
    inputs = Inputs(args=[X], kwargs={"scale": 2})
    assert input_sets(inputs) == [inputs]
    assert isinstance(inputs.args, tuple)


def test_a_list_of_inputs_is_several_sets():
    sets = [Inputs((X,)), Inputs((X, X))]
    assert [len(one.args) for one in input_sets(sets)] == [1, 2]


def test_inputs_without_arguments_are_for_models_without_arguments():
    (one,) = input_sets(Inputs())
    assert one.args == ()
    assert one.kwargs == {}


def test_sets_do_not_share_their_keywords():
    first, second = Inputs(), Inputs()
    first.kwargs["x"] = 1
    assert second.kwargs == {}


@pytest.mark.parametrize(("given", "named"), [(X, "Tensor"), (None, "NoneType"), (3, "int")])
def test_a_bare_value_is_told_to_be_wrapped(given, named):
    with pytest.raises(UsageError) as caught:
        input_sets(given)
    assert str(caught.value) == (
        "inputs must be a list or tuple of positional inputs, a dict of keyword arguments, "
        f"Inputs(args, kwargs), or a list of Inputs, not {named}; for one tensor x, pass [x]"
    )


@pytest.mark.parametrize("given", [[], ()])
def test_no_inputs_at_all_are_refused(given):
    with pytest.raises(UsageError) as caught:
        input_sets(given)
    assert str(caught.value) == (
        f"inputs is empty: {given!r}; pass [x, ...], or Inputs() to call both sides without "
        "arguments"
    )


def test_a_mixture_of_sets_and_values_is_refused():
    with pytest.raises(UsageError) as caught:
        input_sets([Inputs((X,)), X])
    assert str(caught.value) == (
        "inputs mixes Inputs(...) with bare values; wrap every set in Inputs"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"args": X}, "args must be a list or tuple of arguments, not Tensor"),
        ({"args": "text"}, "args must be a list or tuple of arguments, not str"),
        ({"kwargs": [("x", X)]}, "kwargs must be a dict, not list"),
        ({"kwargs": None}, "kwargs must be a dict, not NoneType"),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(fields, message):
    with pytest.raises(UsageError) as caught:
        Inputs(**fields)
    assert str(caught.value) == message


# --- configuration --------------------------------------------------------------------------------

FLAGS = [f.name for f in dataclasses.fields(VerifyConfig) if f.type == "bool"]


def test_everything_is_compared_unless_told_otherwise():
    config = VerifyConfig()
    loose = {"verify_strides", "verify_device", "strict", "match_by_order"}
    assert {name for name in FLAGS if not getattr(config, name)} == loose
    assert config.verify_gradients is None
    assert config.checkers == (AutomaticValueChecker(),)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_a_flag_is_true_or_false_and_nothing_like_it(name, value):
    with pytest.raises(UsageError) as caught:
        VerifyConfig(**{name: value})
    assert str(caught.value) == f"{name} must be True or False, not {value!r}"


def test_gradients_may_be_left_to_paritas():
    for value in (None, True, False):
        assert VerifyConfig(verify_gradients=value).verify_gradients is value
    with pytest.raises(UsageError, match="verify_gradients must be True or False, not 'auto'"):
        VerifyConfig(verify_gradients="auto")


@pytest.mark.parametrize("many", [list, tuple])
def test_several_checkers_keep_their_order(many):
    checkers = [AllCloseValueChecker(rtol=1e-3), AutomaticValueChecker()]
    assert VerifyConfig(value_checker=many(checkers)).checkers == tuple(checkers)


def test_a_user_s_own_checker_is_welcome():
    class Mine:
        def check(self, reference, candidate, evidence=None):
            return None

    mine = Mine()
    assert VerifyConfig(value_checker=mine).checkers == (mine,)


@pytest.mark.parametrize("wrong", ["allclose", AutomaticValueChecker, None, 1e-3, [1e-3]])
def test_what_is_no_checker_is_refused_and_shown(wrong):
    with pytest.raises(UsageError) as caught:
        VerifyConfig(value_checker=wrong)
    shown = wrong[0] if isinstance(wrong, list) else wrong
    assert str(caught.value) == (
        "value_checker must be a checker such as AutomaticValueChecker(), or a list of them, "
        f"not {shown!r}"
    )


@pytest.mark.parametrize("seed", ["0", 1.5, None, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(UsageError, match="seed"):
        VerifyConfig(seed=seed)


@pytest.mark.parametrize("seconds", ["60", None, True, -1, math.nan, math.inf])
def test_the_time_for_a_place_is_a_number_of_seconds(seconds):
    with pytest.raises(UsageError, match=r"locate_seconds must be a number of seconds, 0 to turn"):
        VerifyConfig(locate_seconds=seconds)


def test_the_time_for_a_place_may_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("PARITAS_LOCATE_SECONDS")
    assert VerifyConfig().locate_seconds == 60
    monkeypatch.setenv("PARITAS_LOCATE_SECONDS", "2.5")
    assert VerifyConfig().locate_seconds == 2.5
    assert VerifyConfig(locate_seconds=7).locate_seconds == 7
    monkeypatch.setenv("PARITAS_LOCATE_SECONDS", "soon")
    with pytest.raises(UsageError, match=r"PARITAS_LOCATE_SECONDS must be a number .* not 'soon'"):
        VerifyConfig()


def test_options_by_name_make_the_same_configuration():
    options = {"strict": True, "verify_rng": False, "seed": 3}
    assert VerifyConfig.from_options(**options) == VerifyConfig(**options)
    assert VerifyConfig.from_options() == VerifyConfig()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("verify_shapes", "verify_shape"),
        ("verify_value", "verify_values"),
        ("value_checkers", "value_checker"),
        ("verify_grads", "verify_gradients"),
        ("stric", "strict"),
        ("raise_on_mismatches", "raise_on_mismatch"),
    ],
)
def test_a_misspelt_option_is_told_the_nearest(written, meant):
    with pytest.raises(UsageError) as caught:
        VerifyConfig.from_options(**{written: True})
    assert str(caught.value) == f"unknown option {written!r}; did you mean {meant!r}?"


def test_an_option_like_no_other_is_told_all_of_them():
    with pytest.raises(UsageError) as caught:
        VerifyConfig.from_options(zzz=1)
    assert str(caught.value).startswith("unknown option 'zzz'; the options are ['enabled', ")


def test_the_value_of_an_option_is_checked_too():
    with pytest.raises(UsageError, match="strict must be True or False, not 'no'"):
        VerifyConfig.from_options(strict="no")


# --- fields assigned before use -------------------------------------------------------------------


def test_fields_are_assigned_before_use_and_checked_there():
    config = VerifyConfig()
    config.verify_dtype = False
    config.value_checker.pcc = 0.95
    assert config.as_used() == VerifyConfig(
        verify_dtype=False, value_checker=AutomaticValueChecker(pcc=0.95)
    )
    assert VerifyConfig().value_checker.pcc is None  # no configuration shares its checker
    config.verify_dtype = "no"
    with pytest.raises(UsageError, match=r"^verify_dtype must be True or False, not 'no'$"):
        config.as_used()


def test_a_configuration_in_use_is_not_changed_by_assignments():
    config = VerifyConfig()
    used = config.as_used()
    config.strict = True
    assert not used.strict


def test_dataclasses_replace_makes_another_configuration():
    config = dataclasses.replace(VerifyConfig(verify_dtype=False), verify_shape=False)
    assert (config.verify_dtype, config.verify_shape) == (False, False)
    with pytest.raises(UsageError, match="verify_size must be True or False, not 1"):
        dataclasses.replace(config, verify_size=1)


def test_a_checker_s_assigned_arguments_are_checked_before_anything_runs():
    config = VerifyConfig(value_checker=[AllCloseValueChecker()])
    config.checkers[0].rtol = -1
    with pytest.raises(UsageError, match=r"^rtol must be a number from 0 to inf, got -1$"):
        config.as_used()


@pytest.mark.parametrize("one", [VerifyConfig(), AllCloseValueChecker(), AutomaticValueChecker()])
def test_a_misspelt_field_is_not_assigned(one):
    with pytest.raises(AttributeError, match="verify_dtyp"):
        one.verify_dtyp = False
