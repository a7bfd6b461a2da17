"""Models of Hugging Face's transformers by class: `hf:LlamaForCausalLM`, small and with inputs."""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import itertools
import types
import typing
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paritas.core import transformers_library
from paritas.core.errors import UsageError, in_one_line
from paritas.core.execution.subjects import Inputs
from paritas.core.targets import configurations, parse_target, turn_off_chance
from paritas.core.targets.configurations import parts_of
from paritas.core.targets.drawing import Drawing
from paritas.core.targets.hugging_face_classes import model_class
from paritas.core.targets.repairs import names_in_error, repair_changes, repair_inputs
from paritas.core.time_limit import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    _Built = tuple[torch.nn.Module, Inputs | None]


# --- The models -----------------------------------------------------------------------------------

# The class's default configuration is made small (`configurations`), the model is built with
# random weights, its inputs are drawn for its signature (`drawing`), and the model is called
# once. If that fails, other ways are tried: other layouts of inputs, other proportions, single
# settings unchanged.

MOST_PARAMETERS = 5_000_000
_TOO_MANY_PARAMETERS = 60_000_000  # larger models are not built
_MOST_ATTEMPTS = 24
_MOST_SECONDS = 30  # of the processor; a busy machine does not change what is found
_MOST_REPAIRS = 6
_MOST_SECONDS_FOR_INPUTS = 6  # with all modalities; then with fewer
_STAGES = ("configuration", "model", "inputs", "call")


def build_model(
    factory: str, *, model_alone: bool = False
) -> tuple[torch.nn.Module, Inputs | None]:
    """Build a small model of a class, and inputs for it.

    Args:
        factory: `hf:Class`, with settings of its configuration after `?`.
        model_alone: build the model without inputs, and do not call it.

    Returns:
        The model and its inputs; None for the inputs if `model_alone`.

    Raises:
        UsageError: transformers is missing, there is no such class or setting, or the class cannot
            be built small; the message says why and what to pass instead.
    """
    library = transformers_library.import_transformers()
    _, name, user_settings = parse_target(factory)
    cls = model_class(library, name.removeprefix(f"{transformers_library.LIBRARY}."), factory)
    usual = _usual_config(library, cls, factory)
    _check_settings(type(usual), usual, user_settings, factory)
    if _is_decoder_by_name(cls, usual) and "is_decoder" not in user_settings:
        # Its configuration's default is an encoder, whose tokens see later ones.
        with contextlib.suppress(UsageError):
            search = _Search(cls, usual, user_settings, factory, model_alone=model_alone)
            search.always = {"is_decoder": True}
            return search.run()
    return _Search(cls, usual, user_settings, factory, model_alone=model_alone).run()


def _is_decoder_by_name(cls: Any, usual: Any) -> bool:
    """Whether a class predicts next tokens, but its default configuration is an encoder's."""
    is_named = cls.__name__.endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead"))
    is_encoder = getattr(usual, "is_decoder", None) is False
    return is_named and is_encoder and not getattr(usual, "is_encoder_decoder", False)


# --- The default configuration of a class ---------------------------------------------------------

# Configurations that are composed of others have no defaults.
_COMPOSED = {
    "vision-encoder-decoder": ("from_encoder_decoder_configs", "ViTConfig", "GPT2Config"),
    "speech-encoder-decoder": ("from_encoder_decoder_configs", "Wav2Vec2Config", "GPT2Config"),
    "encoder-decoder": ("from_encoder_decoder_configs", "BertConfig", "BertConfig"),
    "vision-text-dual-encoder": ("from_vision_text_configs", "ViTConfig", "BertConfig"),
    "rag": ("from_question_encoder_generator_configs", "DPRConfig", "BartConfig"),
}


def _usual_config(library: ModuleType, cls: Any, factory: str) -> Any:
    config = cls.config_class
    if isinstance(config, types.UnionType):
        config = typing.get_args(config)[0]
    composed = _COMPOSED.get(getattr(config, "model_type", ""))
    try:
        if composed is not None:
            make, *parts = composed
            return getattr(config, make)(*(getattr(library, part)() for part in parts))
        return _with_parts(config())
    except Exception as error:
        raise UsageError(
            f"{factory!r}: {config.__name__} cannot be made without settings: "
            f"{in_one_line(error)}; build the model in your own function and name it as "
            "module:function"
        ) from error


def _with_parts(config: Any) -> Any:
    """Fill optional parts: a class that takes images is tried with its vision part."""
    default_specs = getattr(type(config), "sub_configs_defaults", None) or {}
    missing = {
        name: spec for name, spec in default_specs.items() if getattr(config, name, config) is None
    }
    for name, spec in missing.items():
        with contextlib.suppress(Exception):  # it stays without this part
            part = spec.get_config_class(spec.model_type)(**spec.init_kwargs)
            config = type(config)(**{**_parts(config), name: part})
    return config


def _parts(config: Any) -> dict[str, Any]:
    return {
        name: sub_config
        for name, sub_config in vars(config).items()
        if configurations.is_config(sub_config)
    }


def _check_settings(cls: Any, usual: Any, user_settings: dict[str, Any], factory: str) -> None:
    known_settings = {*inspect.signature(cls.__init__).parameters, *vars(usual)}
    for name in user_settings:
        if name not in known_settings:
            near = difflib.get_close_matches(name, sorted(known_settings), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{factory!r}: {cls.__name__} has no setting {name!r}{hint}")


# --- Building, calling, and trying again ----------------------------------------------------------


class Failure(NamedTuple):
    """The stage in which an attempt failed, the error, and those of other inputs."""

    stage: int
    error: Exception
    others: tuple[Exception, ...] = ()

    def __str__(self) -> str:
        return f"{_STAGES[self.stage]}: {self.cause}"

    @property
    def cause(self) -> str:
        """The error in one line; for a validation error, its cause."""
        error, inner = self.error, self.error.__cause__
        if "Validation" in type(error).__name__ and isinstance(inner, Exception):
            error = inner
        return in_one_line(error)


class _Search:
    """Attempts at one class, from the smallest configuration to less changed ones."""

    def __init__(
        self,
        cls: Any,
        usual: Any,
        user_settings: dict[str, Any],
        factory: str,
        *,
        model_alone: bool,
    ) -> None:
        self.cls = cls
        self.model_alone = model_alone
        self.usual = usual
        self.asked = user_settings
        self.factory = factory
        self.always: dict[str, Any] = {}  # settings of every attempt, beside those asked for
        self.state = torch.get_rng_state()
        self.attempts = 0
        self.may_reduce = True
        self.limit = TimeLimit(_MOST_SECONDS, of_thread=True)

    def run(self) -> tuple[torch.nn.Module, Inputs | None]:
        """Return the first model that can be called.

        Raises:
            UsageError: there is none; the message describes the best attempt.
        """
        failures: list[tuple[Failure, configurations.Changes, Any]] = []
        for usual in self._owners():
            self.usual = usual
            for manner in configurations.MANNERS:
                changes = self._plan(usual, manner)
                if any(changes == before for _, before, _ in failures):
                    continue
                self.may_reduce = not manner.own_widths
                outcome = self.attempt(changes)
                if not isinstance(outcome, Failure):
                    return self.without_cache(outcome, usual)
                failures.append((outcome, changes, usual))
                if _is_final(outcome):
                    raise self.refusal(outcome)
                if self._is_for_a_part(outcome) or self.limit.is_over:
                    break
            message = str(failures[0][0].error).lower()
            if "config" not in message or self.limit.is_over:
                break
        self.may_reduce = True
        furthest, changes, self.usual = max(failures, key=lambda failure: failure[0].stage)
        outcome = self.relent(furthest, changes)
        if not isinstance(outcome, Failure):
            return outcome
        raise self.refusal(furthest)

    def _plan(self, usual: Any, manner: configurations.Manner) -> configurations.Changes:
        try:
            return configurations.plan(usual, manner)
        except Exception as error:
            raise UsageError(
                f"{self.factory!r}: {type(usual).__name__} could not be made small: "
                f"{in_one_line(error)}; build the model in your own function and name it as "
                "module:function"
            ) from error

    def _owners(self) -> list[Any]:
        """The configuration and its parts: a class may need a part instead."""
        parts = [] if self.asked else [part for path, part in parts_of(self.usual) if path]

        def likeness(part: Any) -> int:
            pairs = zip(self.cls.__name__, type(part).__name__, strict=False)
            return -sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        return [self.usual, *sorted(parts, key=likeness)]

    def _is_for_a_part(self, failure: Failure) -> bool:
        """Whether the class reads a setting that only a part of this configuration can have."""
        missing = f"'{type(self.usual).__name__}' object has no attribute"
        composed = any(path for path, _ in parts_of(self.usual))
        return composed and failure.stage == 1 and missing in str(failure.error)

    def without_cache(self, built: _Built, usual: Any) -> _Built:
        """The model without a cache, if only that lets gradients flow."""
        model, inputs = built
        with warnings.catch_warnings(), transformers_library.without_log():
            warnings.simplefilter("ignore")
            if inputs is None or self.asked or _backward_error(model, inputs) is None:
                return built
            self.may_reduce = True
            uncached = self.attempt(self._plan(usual, configurations.Manner(no_cache=True)))
            if isinstance(uncached, Failure) or uncached[1] is None:
                return built
            return built if _backward_error(uncached[0], uncached[1]) else uncached

    def attempt(self, changes: configurations.Changes) -> _Built | Failure:
        """Return the model and its inputs, or the failure."""
        with warnings.catch_warnings(), transformers_library.without_log():
            warnings.simplefilter("ignore")
            for _ in range(_MOST_REPAIRS):
                self.attempts += 1
                outcome = self._attempt(changes)
                more = (
                    self._repair_after_failure(changes, outcome)
                    if isinstance(outcome, Failure)
                    else None
                )
                if more is None:
                    break
                changes = more
            if isinstance(outcome, Failure) and _STAGES[outcome.stage] in {"inputs", "call"}:
                least = self._attempt(changes, least=True)
                return outcome if isinstance(least, Failure) else least
            return outcome

    def _repair_after_failure(
        self, changes: configurations.Changes, failure: Failure
    ) -> configurations.Changes | None:
        for error in (failure.error, *failure.others):
            if (more := repair_changes(self.usual, changes, error)) is not None:
                return more
        return None

    def _attempt(self, changes: configurations.Changes, *, least: bool = False) -> _Built | Failure:
        try:
            config = self._config(changes)
        except Exception as error:  # noqa: BLE001 - reported if no other attempt works
            return Failure(0, error)
        try:
            changes = self._smaller(changes)
            config = self._config(changes)
            torch.set_rng_state(self.state)
            model = self.cls(config).eval()
        except Exception as error:  # noqa: BLE001 - as above
            return Failure(1, error)
        inputs = None
        if not self.model_alone:
            inputs = _find_inputs(model, self.limit, least=least)
        if isinstance(inputs, Failure):
            return inputs
        torch.set_rng_state(self.state)
        fresh_model = self.cls(self._config(changes))
        if not any("drop" in name for name in self.asked):
            turn_off_chance(fresh_model)
        return fresh_model, inputs

    def _config(self, changes: configurations.Changes) -> Any:
        cls = type(self.usual)
        overrides = {**self.always, **self.asked}
        return configurations.build(cls, copy.deepcopy(self.usual), changes, overrides)

    def _count(self, changes: configurations.Changes) -> Any:
        with torch.device("meta"):
            return list(self.cls(self._config(changes)).parameters())

    def _smaller(self, changes: configurations.Changes) -> configurations.Changes:
        """Reduce sizes that have unknown names, by the shapes of the largest parameters."""
        for _ in range(8):
            try:
                parameters = self._count(changes)
            except Exception:  # noqa: BLE001 - not every class can be built on the meta device
                return changes
            total = sum(parameter.numel() for parameter in parameters)
            if total <= MOST_PARAMETERS:
                return changes
            largest = max(parameters, key=lambda parameter: parameter.numel())
            more = None
            if self.may_reduce:
                more = configurations.reduce(self._config(changes), changes, largest.shape)
            if more is None:
                if total > _TOO_MANY_PARAMETERS:
                    shape = tuple(largest.shape)
                    raise _TooLargeError(total, shape)
                return changes
            try:
                self._count(more)
            except Exception:  # noqa: BLE001 - the class does not accept it
                return changes
            changes = more
        return changes

    def relent(self, failure: Failure, changes: configurations.Changes) -> _Built | Failure:
        """Drop single changes, beginning with those that the error names."""
        dropped: set[tuple[tuple[str, ...], str]] = set()
        while self.attempts < _MOST_ATTEMPTS and not self.limit.is_over:
            options = [
                (path, name)
                for path, node in changes.items()
                for name in node
                if (path, name) not in dropped
            ]
            named = names_in_error(failure.error.__cause__ or failure.error)
            options.sort(key=lambda option: -named.get(option[1], 0))
            better = None
            for path, name in options:
                if self.attempts >= _MOST_ATTEMPTS or name not in named:
                    break
                dropped.add((path, name))
                fewer = configurations.without(changes, path, name)
                outcome = self.attempt(fewer)
                if not isinstance(outcome, Failure):
                    return outcome
                if outcome.stage >= failure.stage and str(outcome) != str(failure):
                    better = (outcome, fewer)
                    break
            if better is None:
                return failure
            failure, changes = better
        return failure

    def refusal(self, failure: Failure) -> UsageError:
        """The error for a class that cannot be built, with what to do instead."""
        name, cause = self.cls.__name__, failure.cause
        advice = "pass a function that makes its inputs with --inputs module:function"
        if isinstance(failure.error, ImportError):
            reason = f"{name} needs a package that is not installed: {cause}"
        elif _STAGES[failure.stage] == "inputs":
            reason = f"paritas cannot draw {failure.error} for {name}; {advice}"
        elif _STAGES[failure.stage] == "call":
            reason = (
                f"{name} was built small, but rejects all inputs drawn for it: {cause}; "
                f"{advice}, or "
                "set other sizes with ?name=value"
            )
        else:
            reason = (
                f"{name} does not accept this small configuration: {cause}; set other sizes with "
                "?name=value, or build it in your own function and name that as module:function"
            )
        refusal = UsageError(f"{self.factory!r}: {reason}")
        refusal.__cause__ = failure.error
        return refusal


def _is_final(failure: Failure) -> bool:
    """Whether no other configuration helps: an unknown argument, or a package that is missing."""
    return isinstance(failure.error, LookupError | ImportError) and (
        _STAGES[failure.stage] == "inputs" or isinstance(failure.error, ImportError)
    )


class _TooLargeError(Exception):
    def __init__(self, total: int, shape: tuple[int, ...]) -> None:
        super().__init__(f"{total:,} parameters, the largest of shape {shape}")


def _find_inputs(model: torch.nn.Module, limit: TimeLimit, *, least: bool) -> Any:
    """Return the first inputs that the model accepts, or the failure of the first ones drawn."""
    errors: list[Exception] = []
    drawing = Drawing(model)
    limit = limit if least else limit.shorten(_MOST_SECONDS_FOR_INPUTS)
    try:
        for drawn in drawing.attempts(least=least):
            repairing = _call_repairing(model, drawing, drawn, errors)
            if repairing is not None:
                return _pad_if_accepted(model, drawing, repairing)
            if limit.is_over:
                break
    except LookupError as error:
        return Failure(2, error)
    if not errors:
        return Failure(2, ValueError("any argument"))
    return Failure(3, errors[0], tuple(errors[1:]))


def _call_repairing(
    model: torch.nn.Module, drawing: Drawing, kwargs: dict[str, Any], errors: list[Exception]
) -> Inputs | None:
    """Return these inputs, perhaps repaired by what the model's error says; or note the errors."""
    for _ in range(_MOST_REPAIRS):
        error = _call(model, kwargs)
        if error is None:
            return Inputs(kwargs=kwargs)
        errors.append(error)
        try:
            kwargs = next(repair_inputs(drawing, kwargs, error))
        except Exception:  # noqa: BLE001 - no repair is known, or its arguments cannot be drawn
            return None
    return None


def _call(model: torch.nn.Module, kwargs: dict[str, Any]) -> Exception | None:
    try:
        with torch.no_grad():
            model_output = model(**copy.deepcopy(kwargs))
    except Exception as error:  # noqa: BLE001 - reported if no other inputs work
        return error
    return (
        None
        if next(_tensors(model_output), None) is not None
        else ValueError("its output holds no tensor")
    )


def _pad_if_accepted(model: torch.nn.Module, drawing: Drawing, inputs: Inputs) -> Inputs:
    """Pad a row and mask it, if the model accepts that and its outputs stay finite."""
    padded = drawing.pad(inputs.kwargs)
    if padded is None:
        return inputs
    try:
        with torch.no_grad():
            tensors = list(_tensors(model(**copy.deepcopy(padded))))
    except Exception:  # noqa: BLE001 - it takes no such mask
        return inputs
    finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    return Inputs(kwargs=padded) if tensors and finite else inputs


def _backward_error(model: torch.nn.Module, inputs: Inputs) -> Exception | None:
    model = copy.deepcopy(model).eval()
    try:
        tensors = [
            tensor
            for tensor in _tensors(model(**copy.deepcopy(inputs.kwargs)))
            if tensor.requires_grad
        ]
        if tensors:
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    except Exception as error:  # noqa: BLE001 - the caller tries another configuration
        return error
    return None


def _tensors(model_output: Any) -> Iterator[torch.Tensor]:
    if isinstance(model_output, torch.Tensor):
        yield model_output
    elif isinstance(model_output, dict):
        for nested_output in model_output.values():
            yield from _tensors(nested_output)
    elif isinstance(model_output, list | tuple):
        for nested_output in model_output:
            yield from _tensors(nested_output)
