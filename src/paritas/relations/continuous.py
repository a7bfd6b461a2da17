"""Continuous batching: requests that join and leave one running batch = each request alone.

transformers runs the batch in a thread of its own. Its calls of the model are handed over to the
thread of the check: precision, watchers and gradient mode belong to a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.dynamo import original_of
from paritas.errors import in_one_line
from paritas.relations.generation import NEW_TOKENS, PROMPT, Generation, generation_of
from paritas.relations.relation import (
    Case,
    CheckedModel,
    DoesNotApply,
    NotPromised,
    Relation,
    RelationFamily,
)
from paritas.relations.token_models import KEYS_AND_VALUES
from paritas.relations.training import training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.execution.subjects import Inputs

_ENTRY = "continuous_batching_context_manager"
_PAGE = 4  # tokens; the smallest that transformers takes, so that a prompt has more than one
_PAGES = 64
# Fewer tokens in a batch than two prompts have: one of them is run in chunks, beside a request that
# decodes already.
_BATCH_TOKENS = PROMPT + 2
_REQUESTS = 2  # at once: a third one joins when one of them is done
_WAIT = 0.05  # seconds until the threads look for each other again
_STOP = 60.0  # seconds in which the thread must have stopped
_LONGEST_REASON = 160


# --- Calling a model from another thread ----------------------------------------------------------


@dataclasses.dataclass
class _Call:
    """A call of the model that waits for its result."""

    kwargs: dict[str, Any]
    result: Future[Any]


class _Counter:
    """Calls of a model, made by one thread and served by another."""

    def __init__(self) -> None:
        self._calls: queue.Queue[_Call] = queue.Queue()
        self._is_closed = False

    def ask(self, **kwargs: Any) -> Any:
        """Wait until the other thread has made the call."""
        if self._is_closed:
            raise RuntimeError("the check has ended")
        _finish_queued_work()
        call = _Call(kwargs, Future())
        self._calls.put(call)
        return call.result.result()

    def serve(self, forward: Callable[..., Any]) -> None:
        """Make the next call, if there is one.

        Raises:
            Exception: what the call raised; the other thread gets it too.
        """
        try:
            call = self._calls.get(timeout=_WAIT)
        except queue.Empty:
            return
        try:
            output = forward(**call.kwargs)
            _finish_queued_work()
            call.result.set_result(output)
        except Exception as error:
            call.result.set_exception(error)
            raise

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait().result.set_exception(RuntimeError("the check has ended"))


def _finish_queued_work() -> None:
    """Let nothing be left to do on an accelerator: the two threads queue work on two streams."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextlib.contextmanager
def _served(model: Any, counter: _Counter) -> Iterator[Callable[..., Any]]:
    """Send calls of the model to the counter; what a call does, for the one who serves."""
    own = vars(model).get("forward")
    forward = model.forward
    model.forward = counter.ask
    try:
        yield forward
    finally:
        counter.close()
        del model.forward
        if own is not None:
            model.forward = own


@contextlib.contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Put back what the manager of the batch changes: modes, the implementation, logging."""
    before = model.config._attn_implementation  # noqa: SLF001  (transformers has no other name)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # a request that fails is logged, and raised here
    try:
        with training(model, on=model.training):
            yield
    finally:
        logging.disable(level)
        if model.config._attn_implementation != before:  # noqa: SLF001
            model.set_attn_implementation(before)


@contextlib.contextmanager
def _updated_elsewhere(cache: Any) -> Iterator[None]:
    """Update a cache in a thread of its own: its pages are bytes, which no lifting mode may see.

    It only stores and returns what it gets, so that nothing is left to lift.
    """
    with ThreadPoolExecutor(max_workers=1) as other:
        update = cache.update
        cache.update = lambda *args, **kwargs: other.submit(update, *args, **kwargs).result()
        try:
            yield
        finally:
            del cache.update


# --- Requests -------------------------------------------------------------------------------------


class _Requests:
    """The rows of the inputs as requests of different lengths."""

    def __init__(self, run: Generation) -> None:
        self.run = run

    def prompts(self, inputs: Inputs) -> list[list[int]]:
        """The prompts; the last row's is used twice, so that there are more than run at once."""
        ids = self.run.tokens.ids(inputs)
        rows = [*ids.tolist(), ids[-1].flip(0).tolist()]
        return [row[: max(2, len(row) - place)] for place, row in enumerate(rows)]

    def alone(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """The plain way: the whole sequence of a request is run again for each token."""
        tokens = self.run.tokens
        logits, chosen = [], []
        for prompt in self.prompts(inputs):
            ids = torch.tensor([prompt], device=tokens.ids(inputs).device)
            for _ in range(NEW_TOKENS):
                value = tokens.value_of(tokens.call(model, inputs, ids))[:, -1]
                logits.append(value)
                ids = torch.cat([ids, value.argmax(dim=-1, keepdim=True)], dim=1)
            chosen.append(ids[0, -NEW_TOKENS:])
        return _stacked(logits, chosen)

    def batched(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """All requests in one running batch."""
        whole, counter = original_of(model), _Counter()
        prompts = self.prompts(inputs)
        log: dict[str, list[Tensor]] = {}
        done: dict[str, Any] = {}
        with _as_before(whole), _served(whole, counter) as forward, self._batch(whole) as batch:

            def watched(**kwargs: Any) -> Any:
                with _updated_elsewhere(kwargs["cache"]):
                    output = forward(**kwargs)
                _record(log, batch, kwargs, output)
                return output

            try:
                names = batch.add_requests(inputs=prompts, max_new_tokens=NEW_TOKENS)
                while len(done) < len(names):
                    counter.serve(watched)
                    result = batch.get_result(timeout=0)
                    if result is not None and result.is_finished():
                        _raise_if_failed(result.error)
                        done[result.request_id] = result
                    elif not batch.is_running():
                        fatal = getattr(batch.background_thread_status, "fatal_error", None)
                        raise RuntimeError(f"the thread of the batch ended: {fatal}")
            finally:
                counter.close()
        device = self.run.tokens.ids(inputs).device
        chosen = [torch.tensor(done[name].generated_tokens, device=device) for name in names]
        return _stacked([one for name in names for one in log[name]], chosen)

    def manager(self, model: Any) -> Any:
        """A manager of a batch that does not run yet."""
        return model.init_continuous_batching(**self._settings())

    def _batch(self, model: Any) -> Any:
        # Warming up would build the pages in this thread.
        return getattr(model, _ENTRY)(**self._settings(), timeout=_STOP, warmup=False)

    def _settings(self) -> dict[str, Any]:
        library = importlib.import_module("transformers")
        settings = library.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batch = importlib.import_module("transformers.generation").ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=_PAGES,
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=_REQUESTS,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        return {"generation_config": settings, "continuous_batching_config": batch}


def _record(log: dict[str, list[Tensor]], batch: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Add the logits of a step to the requests that get a new token by it."""
    requests = batch.batch_processor.inputs_and_outputs.requests_in_batch
    names = [one.state.request_id for one in requests if one.has_new_token]
    logits = output.logits[0]
    if "logits_to_keep" not in kwargs:
        logits = logits[kwargs["logits_indices"]]
    for place, name in enumerate(names):
        log.setdefault(name, []).append(logits[place].clone()[None])


def _raise_if_failed(reason: str | None) -> None:
    if reason is not None:
        raise RuntimeError(f"a request failed: {reason}")


def _stacked(logits: list[Tensor], chosen: list[Tensor]) -> dict[str, Tensor]:
    return {"logits": torch.cat(logits), "tokens": torch.stack(chosen)}


def _continuous_cases(checked: CheckedModel) -> Iterator[Case]:
    """Requests of different lengths in one running batch, against each alone."""
    run = generation_of(checked)
    tokens, model = run.tokens, original_of(run.tokens.model)
    if not hasattr(model, _ENTRY):
        raise DoesNotApply("this release of transformers has no continuous batching, or another")
    if tokens.has_encoder or tokens.context:
        raise DoesNotApply("continuous batching is for models of text alone")
    if not getattr(model, "_supports_attention_backend", False):
        raise NotPromised("its attention has no interface for it (_supports_attention_backend)")
    if tokens.cache != KEYS_AND_VALUES or getattr(model, "_is_stateful", False):
        raise NotPromised("it has a state, and the cache of a batch has keys and values")
    requests = _Requests(run)
    try:
        with _as_before(model):
            requests.manager(model)
    except (ValueError, NotImplementedError, KeyError, TypeError) as error:
        raise NotPromised(f"it is refused: {in_one_line(error, _LONGEST_REASON)}") from error
    yield Case(requests.alone, requests.batched, inputs=run.inputs)


CONTINUOUS: tuple[Relation, ...] = (
    Relation(
        name="continuous-batching",
        about="requests in one running batch = each request alone",
        family=RelationFamily.SERVING,
        cases=_continuous_cases,
    ),
)
