"""Relations of generation: `generate`, with beams, and by continuous batching."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from paritas.core import transformers_library
from paritas.core.errors import in_one_line
from paritas.core.execution.subjects import Inputs
from paritas.core.execution.token_models import (
    KEYS_AND_VALUES,
    TokenModel,
    config_parts,
    has_cache,
    pad_token,
)
from paritas.core.execution.ways import DoesNotApply, NotPromised
from paritas.core.torch_private.dynamo import original_of
from paritas.relations.caches import static_caches_refused
from paritas.relations.relation import (
    Case,
    CheckedModel,
    Relation,
    RelationFamily,
    make_relations,
    rows_of,
)
from paritas.relations.serving import PADDING, left_padding_is_promised, pads_encoder
from paritas.relations.training import training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.relations.relation import Way


NEW_TOKENS = 4
_BEAMS = 3
_CHUNK, _KIND = "prefill_chunk_size", "cache_implementation"
PROMPT = 6


# --- Greedy generation ----------------------------------------------------------------------------


class Generation:
    """Greedy generation of a few tokens after a prompt."""

    def __init__(self, tokens: TokenModel) -> None:
        self.tokens = tokens
        ids = tokens.ids(tokens.inputs)[:, :PROMPT].clone()
        start = self.start_token
        if tokens.has_encoder and start is not None:
            ids[:, 0] = start  # generation would put it in front otherwise
        self.inputs = Inputs(kwargs={**tokens.inputs.kwargs, tokens.tokens: ids})

    @property
    def start_token(self) -> int | None:
        """The token that a decoder starts with, if the configuration has one."""
        for part in config_parts(self.tokens.config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                token = getattr(part, name, None)
                if isinstance(token, int):
                    return token
        return None

    def repeat_calls(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """The plain way: the whole sequence is run again for each token."""
        ids = self.tokens.ids(inputs)
        start, row_values = ids.shape[1], []
        for _ in range(NEW_TOKENS):
            value = self.tokens.value_of(self.tokens.call(model, inputs, ids))[:, -1]
            row_values.append(value)
            ids = torch.cat([ids, value.argmax(dim=-1, keepdim=True)], dim=1)
        logits = self._as_computed(torch.stack(row_values, dim=1))
        return {"logits": logits, "tokens": ids[:, start:]}

    def _as_computed(self, logits: Tensor) -> Tensor:
        """Logits in the model's own dtype, or in float32 if it is wider.

        `generate` returns float32. In a run in float64 of a narrower model, it does not.
        """
        if self.tokens.dtype is torch.float64:
            return logits.float()
        return logits.to(self.tokens.dtype) if logits.dtype is torch.float32 else logits

    def _generate(
        self,
        model: Any,
        inputs: Inputs,
        *,
        left_padding: int = 0,
        encoder: int = 0,
        helper: Any = None,
        **how: Any,
    ) -> Any:
        """Call `generate`, perhaps with padding before the prompt or after the encoder's tokens.

        `helper` is a model that guesses tokens ahead.
        """
        tokens = self.tokens
        ids = tokens.ids(inputs)
        more: dict[str, Any] = {name: inputs.kwargs[name] for name in tokens.context}
        if left_padding:
            pad = ids.new_full((ids.shape[0], left_padding), pad_token(tokens.config))
            more["attention_mask"] = torch.cat([torch.zeros_like(pad), torch.ones_like(ids)], dim=1)
            ids = torch.cat([pad, ids], dim=1)
        elif not tokens.has_encoder and tokens.mask:
            more["attention_mask"] = torch.ones_like(ids)
        if encoder:
            source = more["input_ids"]
            pad = source.new_full((source.shape[0], encoder), pad_token(tokens.config))
            mask = torch.cat([torch.ones_like(source), torch.zeros_like(pad)], dim=1)
            more |= {"input_ids": torch.cat([source, pad], dim=1), "attention_mask": mask}
        if helper is not None:
            more["assistant_model"] = helper
        original = original_of(model)
        with _plain_defaults(original):
            return original.generate(
                **{tokens.tokens: ids}, **more, generation_config=self._settings(**how)
            )

    def call_generate(self, **how: Any) -> Way:
        """Call `generate` greedily."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            output = self._generate(model, inputs, **how)
            return {
                "logits": self._as_computed(torch.stack(output.logits, dim=1)),
                "tokens": output.sequences[:, -NEW_TOKENS:],
            }

        return way

    def call_assisted(self) -> Way:
        """Call `generate` row by row, with the model itself as the one that guesses tokens."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            original, rows = original_of(model), self.tokens.size[0]
            kwargs = [rows_of(inputs, slice(row, row + 1)) for row in range(rows)]
            generated = [
                self._generate(model, row_kwargs, helper=original, use_cache=True)
                for row_kwargs in kwargs
            ]
            # A step may have logits for several tokens, of two or of three axes.
            steps = [[logit.flatten(0, -2) for logit in output.logits] for output in generated]
            logits = torch.stack([torch.cat(step)[:NEW_TOKENS] for step in steps])
            return {
                "logits": self._as_computed(logits),
                "tokens": torch.cat(
                    [row_output.sequences[:, -NEW_TOKENS:] for row_output in generated]
                ),
            }

        return way

    @property
    def gets_cache(self) -> bool:
        """Whether `generate` makes the cache, which chunks and guesses need."""
        makes = getattr(original_of(self.tokens.model), "_supports_default_dynamic_cache", None)
        return self.tokens.cache == KEYS_AND_VALUES and (makes is None or bool(makes()))

    def can_be_assisted(self) -> bool:
        """Whether tokens that were guessed can be taken back."""
        model = original_of(self.tokens.model)
        if not self.gets_cache or getattr(model, "_is_stateful", False):
            return False
        try:
            with torch.no_grad():
                self.call_assisted()(self.tokens.model, self.inputs)
        except ValueError:  # transformers refuses by it, and its caches do
            return False
        except Exception:  # noqa: BLE001  (the case reports it)
            return True
        return True

    def search_beams(self, **how: Any) -> Way:
        """Call `generate` with beams."""

        def way(model: Any, inputs: Inputs) -> dict[str, Tensor]:
            output = self._generate(model, inputs, num_beams=_BEAMS, **how)
            return {
                "scores": output.sequences_scores,
                "tokens": output.sequences[:, -NEW_TOKENS:],
            }

        return way

    @property
    def _own_kind(self) -> str | None:
        """The kind of cache that the model generates with unless it is told otherwise."""
        generation_config = getattr(original_of(self.tokens.model), "generation_config", None)
        return (
            getattr(generation_config, _KIND, None)
            or transformers_library.own_static_kind(self.tokens.config)
            or None
        )

    def _settings(self, **how: Any) -> Any:
        start = self.start_token
        plain = {"num_beams": 1, "output_logits": True}
        beams = {"output_scores": True}
        settings = transformers_library.generation_settings(
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=pad_token(self.tokens.config),
            bos_token_id=start,
            decoder_start_token_id=start,
            return_dict_in_generate=True,
            **(beams if "num_beams" in how else plain),
        )
        how = {_KIND: self._own_kind, **how} if how.get("use_cache") else how
        for name, value in how.items():  # not every release builds every setting
            setattr(settings, name, value)
        return settings


@contextlib.contextmanager
def _plain_defaults(model: Any) -> Iterator[None]:
    """Set aside the model's own defaults, which force or forbid tokens."""
    before = model.generation_config
    model.generation_config = type(before)()
    try:
        yield
    finally:
        model.generation_config = before


def generation_of(checked: CheckedModel) -> Generation:
    """Generation with this model; raises unless it promises it."""
    tokens = checked.tokens
    model = original_of(tokens.model)
    can = getattr(model, "can_generate", None)
    if not callable(can) or not hasattr(model, "generate"):
        raise DoesNotApply("it has no generate()")
    if not can():
        raise DoesNotApply("its class cannot generate")
    for name in ("generate", "_sample"):  # which greedy generation calls
        if transformers_library.overrides_generation(model, name):
            raise NotPromised(f"its class has a {name}() of its own")
    tokens.require_causal()
    if tokens.value != "logits":
        raise DoesNotApply("it returns no logits for each token")
    run = Generation(tokens)
    if tokens.has_encoder and run.start_token is None:
        raise DoesNotApply("its configuration has no token that a decoder starts with")
    return run


def _generate_cases(checked: CheckedModel) -> Iterator[Case]:
    run = generation_of(checked)
    tokens = run.tokens

    def case(label: str, **how: Any) -> Case:
        return Case(run.repeat_calls, run.call_generate(**how), label, run.inputs)

    yield case("with a cache", use_cache=True)
    yield case("without a cache", use_cache=False)
    pads_left = not tokens.has_encoder and tokens.mask and left_padding_is_promised(tokens)
    if pads_left:
        yield case("left padded", left=PADDING, use_cache=True)
        if (
            run.gets_cache
            and has_cache(tokens)
            and transformers_library.has_generation_setting(_CHUNK)
        ):
            yield case("left padded, prompt in chunks", left=PADDING, use_cache=True, **{_CHUNK: 2})
    if pads_encoder(tokens):
        yield case("the encoder right padded", encoder=PADDING, use_cache=True)
    if run.can_be_assisted():
        yield Case(run.repeat_calls, run.call_assisted(), "assisted by itself", run.inputs)
    if static_caches_refused(tokens):
        return
    static = {
        "use_cache": True,
        _KIND: transformers_library.own_static_kind(tokens.config) or "static",
    }
    yield case("static cache", **static)
    if pads_left:
        yield case("static cache, left padded", left=PADDING, **static)


def _beam_cases(checked: CheckedModel) -> Iterator[Case]:
    run = generation_of(checked)
    run.tokens.require_cache()
    without, cached = run.search_beams(use_cache=False), run.search_beams(use_cache=True)
    yield Case(without, cached, inputs=run.inputs)


# --- Continuous batching: requests that join and leave one running batch = each request alone -----

# transformers runs the batch in a thread of its own. Its calls of the model are handed over to the
# thread of the check: precision, watchers and gradient mode belong to a thread.

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
def _serve_calls(model: Any, counter: _Counter) -> Iterator[Callable[..., Any]]:
    """Send calls of the model to the counter; what a call does, for the one who serves."""
    own_forward = vars(model).get("forward")
    forward = model.forward
    model.forward = counter.ask
    try:
        yield forward
    finally:
        counter.close()
        del model.forward
        if own_forward is not None:
            model.forward = own_forward


@contextlib.contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Put back what the manager of the batch changes: modes, the implementation, logging."""
    before = transformers_library.attention_implementation(model.config)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # a request that fails is logged, and raised here
    try:
        with training(model, on=model.training):
            yield
    finally:
        logging.disable(level)
        if transformers_library.attention_implementation(model.config) != before:
            transformers_library.set_attention(model, before)


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
        return [row[: max(2, len(row) - row_number)] for row_number, row in enumerate(rows)]

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
        return _stack_steps(logits, chosen)

    def serve_together(self, model: Any, inputs: Inputs) -> dict[str, Tensor]:
        """All requests in one running batch."""
        original, counter = original_of(model), _Counter()
        prompts = self.prompts(inputs)
        log: dict[str, list[Tensor]] = {}
        done: dict[str, Any] = {}
        with (
            _as_before(original),
            _serve_calls(original, counter) as forward,
            self._batch(original) as batch,
        ):

            def call_and_record(**kwargs: Any) -> Any:
                with _updated_elsewhere(kwargs["cache"]):
                    output = forward(**kwargs)
                _record(log, batch, kwargs, output)
                return output

            try:
                names = batch.add_requests(inputs=prompts, max_new_tokens=NEW_TOKENS)
                while len(done) < len(names):
                    counter.serve(call_and_record)
                    result = batch.get_result(timeout=0)
                    if result is not None and result.is_finished():
                        if result.error is not None:
                            raise RuntimeError(f"a request failed: {result.error}")
                        done[result.request_id] = result
                    elif not batch.is_running():
                        fatal = getattr(batch.background_thread_status, "fatal_error", None)
                        raise RuntimeError(f"the thread of the batch ended: {fatal}")
            finally:
                counter.close()
        device = self.run.tokens.ids(inputs).device
        chosen = [torch.tensor(done[name].generated_tokens, device=device) for name in names]
        return _stack_steps([row_logits for name in names for row_logits in log[name]], chosen)

    def manager(self, model: Any) -> Any:
        """A manager of a batch that does not run yet."""
        return model.init_continuous_batching(**self._settings())

    def _batch(self, model: Any) -> Any:
        # Warming up would build the pages in this thread.
        settings = {**self._settings(), "timeout": _STOP, "warmup": False}
        return transformers_library.run_continuous_batch(model, **settings)

    def _settings(self) -> dict[str, Any]:
        settings = transformers_library.generation_settings(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batch = transformers_library.continuous_batch_settings(
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
    names = [request.state.request_id for request in requests if request.has_new_token]
    logits = output.logits[0]
    if "logits_to_keep" not in kwargs:
        logits = logits[kwargs["logits_indices"]]
    for row_number, name in enumerate(names):
        log.setdefault(name, []).append(logits[row_number].clone()[None])


def _stack_steps(logits: list[Tensor], chosen: list[Tensor]) -> dict[str, Tensor]:
    return {"logits": torch.cat(logits), "tokens": torch.stack(chosen)}


def _continuous_cases(checked: CheckedModel) -> Iterator[Case]:
    """Requests of different lengths in one running batch, against each alone."""
    run = generation_of(checked)
    tokens, model = run.tokens, original_of(run.tokens.model)
    if not transformers_library.has_continuous_batching(model):
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
    yield Case(requests.alone, requests.serve_together, inputs=run.inputs)


GENERATION: tuple[Relation, ...] = make_relations(
    RelationFamily.SERVING,
    ("greedy-generation", "generate() = the best token of repeated calls", _generate_cases),
    ("beam-search", "beam search with a cache = without a cache", _beam_cases),
    (
        "continuous-batching",
        "requests in one running batch = each request alone",
        _continuous_cases,
    ),
)
