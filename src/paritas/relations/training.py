"""Relations of training: the ways in which a training loop runs a model, against the plain one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paritas.core import transformers_library
from paritas.core.errors import in_one_line
from paritas.core.execution.token_models import MATRIX, TokenModel, as_named, has_cache
from paritas.core.execution.ways import DoesNotApply, NotPromised
from paritas.core.numerics.contents import leaves
from paritas.core.torch_private.dynamo import original_of, undo_compile
from paritas.core.torch_private.operators import default_dtype
from paritas.relations.relation import (
    Case,
    CheckedModel,
    Relation,
    RelationFamily,
    batch_of,
    make_relations,
    makes_way,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.execution.subjects import Inputs
    from paritas.relations.relation import Way

STEPS = 2
RATE = 1e-2
# Capturable and compiled optimizers compute 1 - beta**step in float32, which loses three digits for
# the usual 0.999. For these it is exact, so that the forms must agree.
BETAS = (0.75, 0.875)
_LONGEST_REASON = 160
_IGNORED = -100  # labels with this value do not count, in torch and in transformers
_ITEMS = "num_items_in_batch"
# What transformers has called the arguments of its losses since 4.46.
_LOSS_ARGUMENTS = ("TransformersKwargs", "KwargsForCausalLM", "LossKwargs", "loss_kwargs")
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class Lesson:
    """A loss of the model on its inputs, and on some of their rows.

    With labels, the loss is the model's own: the mean over the tokens that count. Without, it is
    the sum of the squares of all outputs.

    Attributes:
        inputs: the inputs of the ways.
        rows: the size of the batch.
        labelled: whether the loss is the model's own.
        crash: what the model raised on labels of the form that its logits have; None if nothing.
    """

    def __init__(self, checked: CheckedModel) -> None:
        """Find the loss; the model is called once.

        Raises:
            DoesNotApply: the model has no parameters to train, or no batch.
        """
        self.model = original_of(checked.model)
        if not isinstance(self.model, nn.Module) or not any(
            parameter.requires_grad for parameter in self.model.parameters()
        ):
            raise DoesNotApply("it has no parameters that require grad")
        self.tokens: TokenModel | None = None
        with contextlib.suppress(DoesNotApply):
            self.tokens = checked.tokens
        self.inputs = checked.inputs if self.tokens is None else self.tokens.inputs
        self.rows = batch_of(self.inputs)
        self.crash: Exception | None = None
        self.labelled = self._has_labels()

    def _has_labels(self) -> bool:
        if self.tokens is None or "labels" not in self.tokens.takes:
            return False
        tokens = self.tokens
        try:
            with torch.no_grad():
                labels, ids = self.labels(tokens.inputs), tokens.ids(tokens.inputs)
                output = tokens.call(self.model, tokens.inputs, ids, labels=labels)
        except Exception as error:  # noqa: BLE001  (the outputs are trained; see `crash`)
            self.crash = error if self._takes_tokens_as_labels() else None
            return False
        loss = as_named(output).get("loss")
        return isinstance(loss, torch.Tensor) and loss.dim() == 0

    def _takes_tokens_as_labels(self) -> bool:
        """Whether tokens are labels of the right form: each has a class among the logits."""
        tokens = self.tokens
        if tokens is None or tokens.value != "logits":
            return False
        with torch.no_grad():
            logits = tokens.whole(self.model, tokens.inputs)[tokens.value]
        return logits.dim() > MATRIX and logits.shape[-1] > int(tokens.ids(tokens.inputs).max())

    @property
    def takes_count(self) -> bool:
        """Whether the number of tokens of all micro-batches is given to the model's loss.

        The trainer of transformers gives it to every model that says so (`accepts_loss_kwargs`) or
        whose `forward` has **kwargs, and then does not divide the loss itself.
        """
        parameters = inspect.signature(self.model.forward).parameters.values()
        if transformers_library.is_from_library(self.model):
            model_answer = getattr(self.model, "accepts_loss_kwargs", None)
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            return bool(model_answer) if model_answer is not None else takes_any
        named = any(parameter.name == _ITEMS for parameter in parameters)
        # Others may hand the arguments of the loss on by **kwargs, and say so.
        handed = any(
            parameter.kind is parameter.VAR_KEYWORD
            and any(word in f"{parameter.name} {parameter.annotation}" for word in _LOSS_ARGUMENTS)
            for parameter in parameters
        )
        return named or handed

    def labels(self, inputs: Inputs) -> Tensor:
        """The tokens themselves; in every second row, the last ones do not count."""
        labels = checked_tokens(self).ids(inputs).clone()
        labels[1::2, labels.shape[1] // 2 :] = _IGNORED
        return labels

    @property
    def shifts_labels(self) -> bool:
        """Whether labels are those of the next tokens: then the first ones do not count."""
        tokens = checked_tokens(self)
        labels, ids = self.labels(tokens.inputs), tokens.ids(tokens.inputs)
        without = labels.clone()
        without[:, 0] = _IGNORED
        with torch.no_grad(), training(self.model, on=False):
            outputs = [
                tokens.call(self.model, tokens.inputs, ids, labels=label_ids)
                for label_ids in (labels, without)
            ]
        full_loss, rest = (as_named(output)["loss"] for output in outputs)
        return bool(full_loss == rest)

    def count(self, inputs: Inputs) -> Tensor:
        """The number of tokens that count."""
        labels = self.labels(inputs)
        labels = labels[:, 1:] if self.shifts_labels else labels
        return (labels != _IGNORED).sum()

    def loss(self, model: Any, inputs: Inputs, rows: Any = slice(None), **more: Any) -> Tensor:
        """The loss of some rows."""
        if self.tokens is not None and self.labelled:
            labels = self.labels(inputs)[rows]
            ids = self.tokens.ids(inputs)[rows]
            output = self.tokens.call(model, inputs, ids, rows=rows, labels=labels, **more)
            loss_value: Tensor = as_named(output)["loss"]
            return loss_value
        if self.tokens is not None:
            output = self.tokens.call(model, inputs, self.tokens.ids(inputs)[rows], rows=rows)
            return self.tokens.value_of(output).square().sum()
        some = rows_of(inputs, rows)
        output = model(*some.args, **some.kwargs)
        parts = [leaf for _, leaf in leaves(output) if _is_trained(leaf)]
        if not parts:
            raise DoesNotApply("none of its outputs can be differentiated")
        return torch.stack([part.square().sum() for part in parts]).sum()

    def case(
        self, expected: Way, actual: Way, label: str = "", *, draws_alike: bool = False
    ) -> Case:
        """A case in training mode."""
        return Case(expected, actual, label, self.inputs, trains=True, draws_alike=draws_alike)

    def gradients(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """The plain way: the gradients of the loss of the whole batch."""
        with training(model):
            return gradients(model, self.loss(model, inputs))


def checked_tokens(lesson: Lesson) -> TokenModel:
    """The model as one on tokens, which a model with labels is."""
    if lesson.tokens is None:
        raise DoesNotApply("its inputs are not tokens")
    return lesson.tokens


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_complex()


def _find_trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in original_of(model).named_parameters()
        if parameter.requires_grad
    }


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradients of a loss, by the names of the parameters; zeros for unused ones."""
    named = _find_trained_parameters(model)
    parameter_gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), parameter_gradients, strict=True)
    }


@contextlib.contextmanager
def training(model: Any, *, on: bool = True) -> Iterator[None]:
    """Set training or evaluation mode, and put back the mode of each module."""
    modes = {module: module.training for module in original_of(model).modules()}
    original_of(model).train(on)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# --- One batch, in other ways ---------------------------------------------------------------------


def _accumulate_gradients(lesson: Lesson) -> Way:
    """Row by row, adding up the gradients."""
    more = {_ITEMS: lesson.count(lesson.inputs)} if lesson.labelled else {}

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        with training(model):
            for row in range(lesson.rows):
                loss = lesson.loss(model, inputs, slice(row, row + 1), **more)
                for name, gradient in gradients(model, loss).items():
                    total[name] = total[name] + gradient if name in total else gradient
        return total

    return way


def _accumulation_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)
    _require_rows(lesson)
    if lesson.labelled and not lesson.takes_count:
        raise NotPromised(f"its loss is a mean over its own tokens: no {_ITEMS} in its signature")
    if lesson.labelled:
        halved = _halve_loss(lesson)
        # A loss that does not follow the count spoils every gradient: one value says so.
        if not _follows(lesson, *halved):
            label = f"{_ITEMS} twice as large"
            yield Case(*halved, label, lesson.inputs)
            return
    yield lesson.case(lesson.gradients, _accumulate_gradients(lesson))


def _halve_loss(lesson: Lesson) -> tuple[Way, Way]:
    """Half of the loss, and the loss for twice as many tokens."""
    count = lesson.count(lesson.inputs)

    def half(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        with training(model, on=False):
            return {"loss": lesson.loss(model, inputs) / 2}

    def of_more(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        with training(model, on=False):
            return {"loss": lesson.loss(model, inputs, **{_ITEMS: 2 * count})}

    return half, of_more


def _follows(lesson: Lesson, half: Way, of_more: Way) -> bool:
    """Whether the loss is nearer to what it should be than to what it is without a count."""
    with torch.no_grad():
        right, counted_loss = (way(lesson.model, lesson.inputs)["loss"] for way in (half, of_more))
    return bool((counted_loss - right).abs() <= (counted_loss - 2 * right).abs())


@makes_way
def _in_reverse(model: Any, inputs: Inputs, lesson: Lesson) -> dict[str, Tensor]:
    with training(model):
        rows = torch.arange(lesson.rows).flip(0)
        return gradients(model, lesson.loss(model, inputs, rows))


def _order_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)
    _require_rows(lesson)
    yield lesson.case(lesson.gradients, _in_reverse(lesson))


def _require_rows(lesson: Lesson) -> None:
    if lesson.rows == 1:
        raise DoesNotApply("the inputs have one row: pass at least 2")
    for module in lesson.model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and not isinstance(  # noqa: SLF001
            module,
            nn.modules.instancenorm._InstanceNorm,  # noqa: SLF001
        ):
            raise NotPromised(
                f"{type(module).__name__} makes rows depend on each other in training"
            )


# --- The loss -------------------------------------------------------------------------------------


def _is_of_pair(config: Any) -> bool:
    """Whether a configuration is of a class for an encoder and a decoder."""
    try:
        parameter = inspect.signature(type(config)).parameters.get("is_encoder_decoder")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is True


def _loss_cases(checked: CheckedModel) -> Iterator[Case]:
    """The model's loss, and the cross-entropy of its logits."""
    lesson = Lesson(checked)
    tokens = checked_tokens(lesson)
    if lesson.crash is not None:
        raise lesson.crash
    if not lesson.labelled:
        raise DoesNotApply("it has no loss of labels")
    if tokens.value != "logits":
        raise DoesNotApply("it returns no logits for each token")
    tokens.require_causal()
    if not has_cache(tokens) or not type(lesson.model).__name__.endswith(_HEADS):
        raise NotPromised("its class does not say that its labels are the next tokens")
    if not tokens.has_encoder and _is_of_pair(tokens.config):
        raise NotPromised("it is the decoder of a pair, whose labels may be shifted already")
    for part in tokens.configs():
        for name in ("output_router_logits", "label_smoothing", "ngram"):
            if getattr(part, name, None):
                raise NotPromised(f"its loss has other parts ({name}={getattr(part, name)!r})")

    def of_logits(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        with training(model, on=False):
            logits = tokens.whole(model, inputs)[tokens.value]
        labels = lesson.labels(inputs)
        if not tokens.has_encoder:  # a token's logits are about the next token
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {
            "loss": nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED
            )
        }

    def of_labels(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        with training(model, on=False):
            return {"loss": lesson.loss(model, inputs)}

    yield Case(of_logits, of_labels, inputs=lesson.inputs)


# --- Activation checkpointing ---------------------------------------------------------------------


@contextlib.contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    """Compute the activations of each layer again in the backward pass."""
    original = original_of(model)
    if hasattr(original, "gradient_checkpointing_enable"):
        original.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        try:
            yield
        finally:
            original.gradient_checkpointing_disable()
        return
    layers = _layers(original)
    for layer in layers:
        layer.forward = _again(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run_checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run_checkpointed


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: the elements of its lists of modules."""
    lists = [
        module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    layers = [layer for layer_list in lists for layer in layer_list if "forward" not in vars(layer)]
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in dict.fromkeys(layers) if id(layer) not in inner]


def _checkpoint_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)
    model = lesson.model
    if hasattr(model, "gradient_checkpointing_enable"):
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise NotPromised("its class does not support it (supports_gradient_checkpointing)")
    elif not _layers(model):
        raise DoesNotApply("it has no list of layers")

    def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        with training(model), _checkpointing(model):
            return gradients(model, lesson.loss(model, inputs))

    yield lesson.case(lesson.gradients, way, draws_alike=True)


# --- Steps of an optimizer ------------------------------------------------------------------------


class _Loop:
    """A short training loop: model, optimizer, scheduler and random numbers."""

    def __init__(
        self, lesson: Lesson, model: nn.Module, *, compiles: bool = False, **how: Any
    ) -> None:
        self.lesson, self.model = lesson, model
        parameters = list(_find_trained_parameters(model).values())
        self.optimizer = torch.optim.AdamW(parameters, lr=RATE, **how)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        self.step = torch.compile(self.optimizer.step) if compiles else self.optimizer.step

    def run(self, inputs: Inputs, steps: int) -> None:
        """Take some steps."""
        with training(self.model):
            for _ in range(steps):
                self.optimizer.zero_grad()
                self.lesson.loss(self.model, inputs).backward()
                self.step()
                self.scheduler.step()

    def save_state(self) -> bytes:
        """Everything that a checkpoint holds."""
        buffer = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }
        torch.save(state, buffer)
        return buffer.getvalue()

    def load(self, data: bytes) -> None:
        """Continue from a checkpoint."""
        state = torch.load(io.BytesIO(data), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])

    def result(self) -> dict[str, Tensor]:
        """The parameters and buffers as they are now."""
        original = original_of(self.model)
        named = {**dict(original.named_parameters()), **dict(original.named_buffers())}
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def _trainee(model: Any) -> Any:
    """What is trained: a copy, or a compiled model itself, since a copy would not be compiled.

    The state of a model that is trained itself is put back after the run.
    """
    return copy.deepcopy(model) if undo_compile(model) is model else model


def _fresh(model: Any) -> Any:
    """Another model of the same form: what a new process builds before it loads anything."""
    trainee = _trainee(model)
    with torch.no_grad():
        for parameter in original_of(trainee).parameters():
            parameter.mul_(0.5)
    return trainee


def _resume_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)

    def straight(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        loop = _Loop(lesson, _trainee(model))
        loop.run(inputs, 2 * STEPS)
        return loop.result()

    def resume_training(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        loop = _Loop(lesson, _trainee(model))
        loop.run(inputs, STEPS)
        data = loop.save_state()
        torch.manual_seed(1)
        second = _Loop(lesson, _fresh(model))
        second.load(data)
        second.run(inputs, STEPS)
        return second.result()

    yield lesson.case(straight, resume_training, draws_alike=True)


@makes_way
def _steps(model: Any, inputs: Inputs, /, lesson: Lesson, **how: Any) -> dict[str, Tensor]:
    """A few steps of an optimizer of some form."""
    trained = _trainee(model)
    wide = {parameter.dtype for parameter in _find_trained_parameters(trained).values()} == {
        torch.float64
    }
    # The optimizer counts its steps in float32 unless this is the default.
    with default_dtype(torch.float64) if wide else contextlib.nullcontext():
        loop = _Loop(lesson, trained, betas=BETAS, **how)
        loop.run(inputs, STEPS)
    return loop.result()


def _not_capturable(lesson: Lesson) -> str:
    """Why torch takes no capturable optimizer for the model's parameters; empty if it does."""
    parameter = nn.Parameter(
        next(iter(_find_trained_parameters(lesson.model).values())).detach().new_zeros(1)
    )
    parameter.grad = torch.zeros_like(parameter)
    try:
        torch.optim.AdamW([parameter], capturable=True).step()
    except (AssertionError, RuntimeError) as error:
        return f"no capturable optimizer: {in_one_line(error, _LONGEST_REASON)}"
    return ""


def _optimizer_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)
    plain = _steps(lesson, foreach=False, fused=False)
    yield lesson.case(plain, _steps(lesson, foreach=True), "foreach", draws_alike=True)
    yield lesson.case(plain, _steps(lesson, fused=True), "fused", draws_alike=True)
    reason = _not_capturable(lesson)
    if reason:
        raise DoesNotApply(reason)
    yield lesson.case(plain, _steps(lesson, capturable=True), "capturable", draws_alike=True)


def _compiled_optimizer_cases(checked: CheckedModel) -> Iterator[Case]:
    """Steps of the compiled optimizer; the model is not compiled."""
    lesson = Lesson(checked)
    plain = _steps(lesson, foreach=False, fused=False)
    yield lesson.case(plain, _steps(lesson, compiles=True), draws_alike=True)


def _compiled_cases(checked: CheckedModel) -> Iterator[Case]:
    """Steps of the compiled model. Rounding grows from step to step; perturbed steps show how far.

    The model itself is trained, not a copy: it is what was compiled. Its state is put back. The
    gradients after the steps are compared too: Adam hides a factor in them.
    """
    lesson = Lesson(checked)

    def steps(model: Any, inputs: Inputs) -> dict[str, Tensor]:
        loop = _Loop(lesson, model)
        loop.run(inputs, STEPS)
        loop.optimizer.zero_grad()
        trained_values = loop.result()
        with training(model):
            loss = lesson.loss(model, inputs)
            last = gradients(model, loss)
        return {
            **trained_values,
            "loss": loss.detach(),
            **{f"{name} (gradient)": gradient for name, gradient in last.items()},
        }

    case = lesson.case(steps, steps, f"{STEPS} steps")
    yield dataclasses.replace(case, compiles=True)


# --- Clipping gradients that are cut into shards --------------------------------------------------


@makes_way
def _clip_gradients(
    model: Any, inputs: Inputs, lesson: Lesson, shards: Callable[[Tensor], list[Tensor]] | None
) -> dict[str, Tensor]:
    """Clip by the norm of all gradients; each rank has one shard of each, and sums are reduced."""
    with training(model):
        named_gradients = gradients(model, lesson.loss(model, inputs))
    names, values = (
        list(named_gradients),
        [own_gradient.detach().clone() for own_gradient in named_gradients.values()],
    )
    limit = 0.5 * float(nn.utils.get_total_norm(values))
    parts = [[value] if shards is None else shards(value) for value in values]
    of_ranks = [list(rank) for rank in zip(*parts, strict=True)]
    norms = [nn.utils.get_total_norm(rank_gradients) for rank_gradients in of_ranks]
    total = torch.stack(norms).square().sum().sqrt()
    for of_rank in of_ranks:
        parameters = [nn.Parameter(rank_gradient) for rank_gradient in of_rank]
        for parameter, gradient in zip(parameters, of_rank, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grads_with_norm_(parameters, limit, total)
    clipped_gradients = [torch.cat([shard.flatten() for shard in part]) for part in parts]
    return {
        **{
            name: clipped_gradient.view_as(value)
            for name, clipped_gradient, value in zip(names, clipped_gradients, values, strict=True)
        },
        "norm": total,
    }


def _shards(ranks: int) -> Callable[[Tensor], list[Tensor]]:
    """Equal parts of the flattened tensor; the last ranks may have less, or nothing."""

    def cut(full_tensor: Tensor) -> list[Tensor]:
        flat = full_tensor.flatten()
        size = -(-flat.numel() // ranks)
        return [flat[rank * size : (rank + 1) * size] for rank in range(ranks)]

    return cut


def _clipping_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)
    plain = _clip_gradients(lesson, None)
    for ranks in (2, 3):
        yield lesson.case(plain, _clip_gradients(lesson, _shards(ranks)), f"{ranks} ranks")


# --- Saving, and switching modes ------------------------------------------------------------------


def _outputs(checked: CheckedModel) -> tuple[Way, Inputs]:
    """A call in evaluation mode, and its inputs."""
    try:
        tokens = checked.tokens
    except DoesNotApply:
        inputs = checked.inputs

        def plain(model: Any, inputs: Inputs) -> Mapping[str, Any]:
            with training(model, on=False):
                output = model(*inputs.args, **inputs.kwargs)
            return {path or "output": leaf for path, leaf in leaves(output) if _is_float(leaf)}

        return plain, inputs

    def whole(model: Any, inputs: Inputs) -> Mapping[str, Any]:
        with training(model, on=False):
            return tokens.whole(model, inputs)

    return whole, tokens.inputs


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _ties(model: nn.Module) -> Tensor:
    """For each name in the state dict, the first name of the same memory."""
    first: dict[int, int] = {}
    state = model.state_dict(keep_vars=True)
    tie_numbers = [
        first.setdefault(tensor.data_ptr(), n) for n, tensor in enumerate(state.values())
    ]
    return torch.tensor(tie_numbers)


def _round_trip_cases(checked: CheckedModel) -> Iterator[Case]:
    call, inputs = _outputs(checked)
    if not isinstance(original_of(checked.model), nn.Module):
        raise DoesNotApply("it is not a module")

    def direct(model: Any, inputs: Inputs) -> dict[str, Any]:
        return {**call(model, inputs), "tied weights": _ties(original_of(model))}

    def load_into_new(model: Any, inputs: Inputs) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(original_of(model).state_dict(), buffer)
        new = _fresh(model)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        original_of(new).load_state_dict(saved)
        return {**call(new, inputs), "tied weights": _ties(original_of(new))}

    yield Case(direct, load_into_new, "state dict", inputs=inputs)
    original = original_of(checked.model)
    if hasattr(original, "save_pretrained") and hasattr(original, "from_pretrained"):

        def from_files(model: Any, inputs: Inputs) -> dict[str, Any]:
            new = transformers_library.save_and_load(original_of(model))
            return {**call(new, inputs), "tied weights": _ties(new)}

        yield Case(direct, from_files, "save_pretrained", inputs=inputs)


def _mode_cases(checked: CheckedModel) -> Iterator[Case]:
    lesson = Lesson(checked)
    call, inputs = _outputs(checked)
    tracked = [
        name
        for name, module in lesson.model.named_modules()
        if getattr(module, "track_running_stats", False)
    ]
    if tracked:
        raise NotPromised(f"{tracked[0]} keeps running statistics in training")

    def trained_first(model: Any, inputs: Inputs) -> Mapping[str, Any]:
        with training(model), torch.enable_grad():
            lesson.loss(model, inputs).backward()
        for parameter in original_of(model).parameters():
            parameter.grad = None
        return call(model, inputs)

    yield Case(call, trained_first, inputs=inputs)


TRAINING: tuple[Relation, ...] = (
    *make_relations(
        RelationFamily.TRAINING,
        ("accumulation", "gradients of micro-batches add up to one batch's", _accumulation_cases),
        ("loss", "the loss of labels = the cross-entropy of the logits", _loss_cases),
        ("checkpointing", "activation checkpointing on = off", _checkpoint_cases),
        ("resume", "save, load, continue = continue", _resume_cases),
        ("round-trip", "a state dict saved and loaded = the model", _round_trip_cases),
        ("sample-order", "gradients do not depend on the order of samples", _order_cases),
        ("eval-after-train", "training mode leaves nothing behind in evaluation", _mode_cases),
        (
            "optimizer-forms",
            "foreach, fused and capturable optimizers = the for-loop",
            _optimizer_cases,
        ),
        ("sharded-clipping", "gradients clipped by norm in shards = as a whole", _clipping_cases),
    ),
    *make_relations(
        RelationFamily.TRAINING,
        (
            "compiled-steps",
            "training steps of the compiled model = those of the model",
            _compiled_cases,
        ),
        (
            "compiled-optimizer",
            "steps of the compiled optimizer = those of the for-loop",
            _compiled_optimizer_cases,
        ),
        on_request=True,
    ),
)
