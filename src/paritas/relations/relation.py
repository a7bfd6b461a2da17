"""What a relation is: two ways of running one model that must agree; and all relations by name."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

from paritas.core.errors import UsageError
from paritas.core.execution.ways import DoesNotApply
from paritas.core.numerics.contents import leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paritas.core.execution.subjects import Inputs
    from paritas.core.execution.token_models import TokenModel


_P = ParamSpec("_P")

# One way of running a model: takes the model and the inputs, and returns values by name. The two
# ways of a relation return the same names, shapes and dtypes.
Way = Callable[[Any, Any], Mapping[str, Any]]


class RelationFamily(enum.StrEnum):
    """What a relation is about."""

    SERVING = "serving"
    TRAINING = "training"
    OWN = "own"


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison of a relation.

    Attributes:
        expected: the plain way, which defines the values. Cases that share it share its evidence.
        actual: the other way.
        label: what distinguishes it from the relation's other cases; empty if there is one.
        inputs: the inputs of both ways; None for the caller's.
        size: batch and number of tokens of the whole, if the values have these two axes.
        trains: whether the ways differentiate the model.
        draws_alike: both ways draw the same random numbers, so that dropout may be on.
        compiles: the other way gets the model compiled by `torch.compile`.
    """

    expected: Way
    actual: Way
    label: str = ""
    inputs: Inputs | None = None
    size: tuple[int, int] | None = None
    trains: bool = False
    draws_alike: bool = False
    compiles: bool = False


class CheckedModel:
    """The model and the inputs that relations are about.

    Attributes:
        model: the reference model.
        inputs: the caller's inputs.
    """

    def __init__(self, model: Any, inputs: Inputs) -> None:
        """Nothing is run until a relation asks."""
        self.model = model
        self.inputs = inputs

    @functools.cached_property
    def _tokens(self) -> TokenModel | Exception:
        """What it is, or why it is not: a model that crashes is kept apart from other models."""
        from paritas.core.execution.token_models import TokenModel

        try:
            return TokenModel(self.model, self.inputs)
        except Exception as reason:  # noqa: BLE001  (raised again for each relation)
            return reason

    @property
    def tokens(self) -> TokenModel:
        """The model as one that gives a value for each token.

        Raises:
            DoesNotApply: it is not such a model.
        """
        any_tokens = self.any_tokens
        if any_tokens.is_pooled:
            raise DoesNotApply("it returns no value for each token")
        return any_tokens

    @property
    def any_tokens(self) -> TokenModel:
        """The model as one on tokens, which may also give one value for each row.

        Raises:
            DoesNotApply: it is not such a model.
            Exception: the model raises this on the caller's own inputs.
        """
        if isinstance(self._tokens, Exception):
            raise self._tokens
        return self._tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """Two ways of running one model that must agree.

    Attributes:
        name: short, as `--only` takes it.
        about: what must agree, in one line.
        family: what it is about.
        cases: the comparisons for a model. Raises `DoesNotApply` or `NotPromised`.
        on_request: only checked if it is named: torch does not promise it.
        bitwise: equal bits are required.
    """

    name: str
    about: str
    family: RelationFamily
    cases: Callable[[CheckedModel], Iterable[Case]]
    on_request: bool = False
    bitwise: bool = False


def makes_way(run: Callable[Concatenate[Any, Inputs, _P], Mapping[str, Any]]) -> Callable[_P, Way]:
    """Turn a function of the model, its inputs and more into one that makes a way from the rest."""

    @functools.wraps(run)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> Way:
        return lambda model, inputs: run(model, inputs, *args, **kwargs)

    return make


def make_relations(
    family: RelationFamily,
    *rows: tuple[str, str, Callable[[CheckedModel], Iterable[Case]]],
    **traits: bool,
) -> tuple[Relation, ...]:
    """A relation for each name, what it is about, and its cases."""
    return tuple(
        Relation(name=name, about=about, family=family, cases=cases, **traits)
        for name, about, cases in rows
    )


# --- Rows of any inputs ---------------------------------------------------------------------------


def batch_of(inputs: Inputs) -> int:
    """The number of rows that all tensors of the inputs have.

    Raises:
        DoesNotApply: they have different first axes, or there is no tensor.
    """
    sizes = {
        leaf.shape[0]
        for _, leaf in leaves([inputs.args, inputs.kwargs])
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    }
    if len(sizes) != 1:
        raise DoesNotApply("its inputs have no common batch axis")
    return int(sizes.pop())


def rows_of(inputs: Inputs, rows: Any) -> Inputs:
    """Some rows of all tensors of the inputs."""

    def select(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return inputs.map_leaves(select)


# --- Relations of the user ------------------------------------------------------------------------

_own: dict[str, Relation] = {}


def call_model(model: Any, inputs: Inputs) -> Mapping[str, Any]:
    """Call the model with its inputs; the default of what a relation expects."""
    result = model(*inputs.args, **inputs.kwargs)
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items()}
    if isinstance(result, list | tuple):
        return {f"output[{position}]": value for position, value in enumerate(result)}
    return {"output": result}


def relation(
    *,
    name: str,
    applies: Callable[[Any, Inputs], bool | str] | None = None,
    expected: Way | None = None,
    about: str = "",
) -> Callable[[Way], Way]:
    """Register a relation: the decorated function must give what `expected` gives.

    Both take the model and its `Inputs` and return values by name.

    Args:
        name: the name in reports and for `only`.
        applies: takes the model and its inputs; True if the relation applies. False or a text, the
            reason, if it does not.
        expected: the plain way; by default, calling the model with its inputs.
        about: what must agree, in one line; by default, the first line of the docstring.

    Raises:
        UsageError: the name is empty or belongs to a relation of paritas.
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"a relation needs a name, got {name!r}")
    if name in built_in():
        raise UsageError(f"paritas has a relation {name!r} already: choose another name")

    def register(actual: Way) -> Way:
        if not callable(actual):
            raise UsageError(f"@paritas.relation decorates a function, not {actual!r:.80}")

        def cases(checked: CheckedModel) -> Iterable[Case]:
            verdict = True if applies is None else applies(checked.model, checked.inputs)
            if verdict is not True:
                reason = verdict if isinstance(verdict, str) and verdict else "applies() says no"
                raise DoesNotApply(reason)
            return [Case(expected or call_model, actual)]

        doc = (actual.__doc__ or "").strip().partition("\n")[0]
        _own[name] = Relation(
            name=name, about=about or doc or name, family=RelationFamily.OWN, cases=cases
        )
        return actual

    return register


def forget_relation(name: str) -> None:
    """Remove a relation of the user."""
    _own.pop(name, None)


# --- All relations by name: those of paritas, then those that the user registered -----------------


def built_in() -> dict[str, Relation]:
    """The relations of paritas, by name."""
    from paritas.relations.attention import ATTENTION
    from paritas.relations.caches import CACHES
    from paritas.relations.generation import GENERATION
    from paritas.relations.resharding import RESHARDING
    from paritas.relations.serving import SERVING
    from paritas.relations.training import TRAINING

    families = (SERVING, CACHES, GENERATION, ATTENTION, TRAINING, RESHARDING)
    return {
        built_in_relation.name: built_in_relation
        for family in families
        for built_in_relation in family
    }


def all_relations() -> dict[str, Relation]:
    """All known relations, by name."""
    return built_in() | _own


def chosen(only: Sequence[str] | None) -> list[Relation]:
    """The relations of these names or families; without names, all but those on request.

    Raises:
        UsageError: there is none of that name.
    """
    by_name = all_relations()
    if only is None:
        return [
            named_relation for named_relation in by_name.values() if not named_relation.on_request
        ]
    selection: dict[str, Relation] = {}
    for name in only:
        fitting = {
            key: named_relation
            for key, named_relation in by_name.items()
            if key == name
            or (named_relation.family.value == name and not named_relation.on_request)
        }
        if not fitting:
            near = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"no relation {name!r}; {hint}known are {', '.join(by_name)}")
        selection |= fitting
    return list(selection.values())
