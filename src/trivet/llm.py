"""`trivet.LLM`: a model in this process, from texts or token ids to texts.

The same engine and text rules as behind the server, so the same request and seed give the same token
ids. Several threads may use one LLM: their requests run together, step by step.

    with LLM("demo", weights="w8a8") as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(temperature=0.0))
        print(answer.text)
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeGuard

import msgspec

from trivet.config import EngineConfig, KVFormat, MemoryConfig, ModelConfig
from trivet.errors import ConfigError, EngineError, RequestError
from trivet.loader import LoadedModel, load_model
from trivet.request import (
    CancelledEvent,
    ErrorEvent,
    Event,
    FinishedEvent,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    StageTimes,
    TokensEvent,
)
from trivet.sizing import MemoryPlan
from trivet.text import TextStream

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_MAX_SEED = 1 << 53  # seeds drawn here survive a trip through JSON


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of one output. ``cached_tokens`` prompt tokens came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one request's life; ``tpot_s`` is None for a single token.

    ``draft_tokens`` were proposed by the drafter, ``accepted_tokens`` of them kept.
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float | None
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, times: StageTimes, output_len: int) -> Timing:
        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - times.arrived

        tpot = None
        if times.first_token is not None and times.finished is not None and output_len > 1:
            tpot = (times.finished - times.first_token) / (output_len - 1)
        return cls(
            queue_s=since_arrival(times.scheduled),
            ttft_s=since_arrival(times.first_token),
            tpot_s=tpot,
            total_s=since_arrival(times.finished),
            draft_tokens=times.draft_tokens,
            accepted_tokens=times.accepted_tokens,
        )


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """One choice of one prompt.

    token_ids        with the stop token, if one ended the text, whose text is not shown
    finish_reason    ``stop`` or ``length``
    stop_string      the stop string that ended the text, if one did
    logprobs         parallel to token_ids when asked for
    prompt_logprobs  one entry per prompt token when asked for, the first None
    seed             the seed that was used: repeat it for the same text
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    seed: int
    usage: Usage
    timing: Timing
    choice_index: int = 0
    stop_string: str | None = None
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None


@dataclasses.dataclass(frozen=True)
class StreamDelta:
    """What one step added. The last delta has ``finish_reason`` and the whole ``output``."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    output: GenerationOutput | None = None


class _Choice:
    """One request in the engine and the output it grows into.

    finish  tells the engine that a stop string ended the request after so many output tokens
    """

    def __init__(
        self, request: Request, stream: TextStream, finish: Callable[[str, int], None]
    ) -> None:
        self.request = request
        self.output: GenerationOutput | None = None
        self.error: EngineError | None = None
        self.deltas: list[StreamDelta] = []
        self._stream = stream
        self._finish = finish
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] = []
        self._prompt_logprobs: list[Logprob | None] | None = None

    @property
    def is_done(self) -> bool:
        return self.output is not None or self.error is not None

    def handle(self, event: Event) -> None:
        """Take the next event of this request."""
        match event:
            case TokensEvent():
                self._take_tokens(event)
            case FinishedEvent():
                self._complete(event)
            case CancelledEvent():
                self.error = EngineError("the request was cancelled")
            case ErrorEvent():
                self.error = EngineError(f"{event.code}: {event.message}")

    def _take_tokens(self, event: TokensEvent) -> None:
        if self._stream.stopped:
            return
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        delta = self._stream.push(event.token_ids)
        self._token_ids += delta.token_ids
        self._text.append(delta.text)
        if event.logprobs is not None:
            self._logprobs += event.logprobs[: len(delta.token_ids)]
        if delta.is_last:
            self._finish(self.request.request_id, len(self._token_ids))
        if delta.text or delta.token_ids:
            self.deltas.append(StreamDelta(delta.text, delta.token_ids))

    def _complete(self, event: FinishedEvent) -> None:
        tail = self._stream.finish()
        self._text.append(tail)
        reason = FinishReason.STOP if self._stream.stopped else event.reason
        params = self.request.params
        self.output = GenerationOutput(
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=reason.value,
            prompt_token_ids=self.request.prompt_ids,
            seed=params.seed or 0,
            usage=Usage(len(self.request.prompt_ids), len(self._token_ids), event.cached_len),
            timing=Timing.of(event.times, len(self._token_ids)),
            choice_index=self.request.choice_index,
            stop_string=self._stream.stop_string,
            logprobs=self._logprobs if params.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs,
        )
        self.deltas.append(StreamDelta(tail, [], reason.value, self.output))


class _Turns:
    """A reentrant lock that a thread cannot take twice while another waits: no caller starves."""

    def __init__(self) -> None:
        self._next = threading.Lock()  # held by the thread that waits for its turn
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._next:
                self._turn.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._turn.release()


class LLM:
    """A model in this process.

    model               folder in Hugging Face layout, .gguf file, hub id, or ``demo``
    weights             a weight format, or ``auto``: the file's own grid
    kv                  ``bf16``, ``int8``, ``fp8``, ``int4``; all but bf16 also with ``+first``
    threads             None: the cgroup's quota and the affinity mask
    max_model_len       tokens of one request; None: the model's own context
    max_num_seqs, max_step_tokens, max_prefill_chunk   see `trivet.config.EngineConfig`; a
                        max_prefill_chunk of 0 or None prefills whole prompts
    memory_utilization  share of the memory that is left; or ``kv_bytes``
    draft, draft_tokens speculation: ``off`` or ``ngram``, and the most tokens drafted in a step
    progress            called with (what, done, total) while the model is packed for the first time

    Several threads may call one LLM: whoever waits runs the steps of all.

    Raises ConfigError: a setting is out of range or the model does not fit into memory;
    CheckpointError: the model cannot be read.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        weights: str = "auto",
        kv: str = "bf16",
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        *,
        max_step_tokens: int = 512,
        max_prefill_chunk: int | None = 256,
        memory_utilization: float = 0.9,
        kv_bytes: int | None = None,
        prefix_cache: bool = True,
        draft: str = "off",
        draft_tokens: int = 4,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        _check_callable("progress", progress)
        config = ModelConfig(
            model=os.fspath(model) if isinstance(model, os.PathLike) else model,
            weights=weights,
            kv=KVFormat.parse(kv),
            threads=threads,
            max_model_len=max_model_len,
        )
        memory = MemoryConfig(memory_utilization=memory_utilization, kv_bytes=kv_bytes)
        # Checks the limits before the model is loaded; the page count is not known yet.
        limits = EngineConfig(
            max_model_len=1 if max_model_len is None else max_model_len,
            num_pages=1,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            max_prefill_chunk=max_prefill_chunk,
            prefix_cache=prefix_cache,
            draft=draft,
            draft_tokens=draft_tokens,
        )
        self._model: LoadedModel = load_model(config, progress)
        self.plan: MemoryPlan = self._model.plan(
            memory,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            draft_tokens=draft_tokens if draft != "off" else 0,
        )
        self._arena = self._model.new_arena(self.plan.num_pages)
        engine_config = dataclasses.replace(
            limits, max_model_len=self.plan.max_model_len, num_pages=self.plan.num_pages
        )
        drafter = self._model.new_drafter(engine_config, self._arena)
        self._engine = self._model.new_engine(engine_config, self._arena, drafter)
        self._choices: dict[str, _Choice] = {}
        self._ids = itertools.count()
        self._is_closed = False
        self._lock = _Turns()  # of the engine and of what its events change

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running and give the memory back. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            for request_id in list(self._choices):
                self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step(time.monotonic())
            self._choices.clear()
            self._is_closed = True
            del self._engine, self._arena, self._model

    @property
    def kv(self) -> str:
        """The KV format."""
        return self.model.config.kv.value

    @property
    def model(self) -> LoadedModel:
        """The loaded parts: packed weights, runner, tokenizer."""
        self._check_open()
        return self._model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> list[GenerationOutput]:
        """Complete texts or token ids; blocks until all are done.

        prompts   one text, one list of token ids, or a list of either
        params    for all prompts, or one for each; None: `SamplingParams()`
        stop      stop strings; the text ends before the one that is complete first
        n         choices per prompt
        progress  called with the number of tokens just produced
        Returns n outputs per prompt, in order.
        Raises RequestError: a prompt or parameter cannot be served; ConfigError: n, progress or the
        number of params; EngineError: a request failed.
        """
        self._check_open()
        _check_callable("progress", progress)
        items = self._as_list(prompts)
        per_prompt = self._params_for(items, params)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ConfigError("n", n, "an integer >= 1")
        choices: list[_Choice] = []
        try:
            for prompt, one in zip(items, per_prompt, strict=True):
                seeded = self._seeded(one)
                ids = self._prompt_ids(prompt)
                choices += [self._add(ids, seeded, stop, index) for index in range(n)]
            while (produced := self._step(choices)) is not None:
                if progress is not None:
                    progress(produced)
        except BaseException:
            self._cancel(choices)
            raise
        return [self._take(choice) for choice in choices]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> GenerationOutput:
        """Answer a conversation: the chat template is applied to ``messages`` (role, content)."""
        [output] = self.generate([self.chat_prompt(messages)], params, stop=stop)
        return output

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, with the beginning of the answer.

        Raises RequestError: these are no messages, the model has no chat template, or the template
        refuses the messages.
        """
        _check_messages(messages)
        tokenizer = self.model.tokenizer
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> Iterator[StreamDelta]:
        """Complete one prompt and yield what each step adds; leaving the loop cancels the request.

        The request starts with the first delta asked for.
        """
        self._check_open()
        choice = self._add(self._prompt_ids(prompt), self._seeded(params), stop, 0)
        try:
            while True:
                with self._lock:
                    self._step([choice])
                    is_done = choice.is_done
                    deltas, choice.deltas = choice.deltas, []
                yield from deltas
                if is_done:
                    break
            if choice.error is not None:
                raise choice.error
        finally:
            self._cancel([choice])

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float | None]]:
        """Log-probability of every token of each prompt given the tokens before it; the first None."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        scores: list[list[float | None]] = []
        for output in self.generate(prompts, params):
            entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
            scores.append([None if entry is None else entry.logprob for entry in entries])
        return scores

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("this LLM is closed")

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str):
            return [prompts]
        if not _is_list(prompts):
            allowed = "a text, a list of token ids, or a list of texts and of lists of token ids"
            raise RequestError.refused("prompts", prompts, allowed)
        items = list(prompts)
        if items and all(isinstance(item, int) for item in items):
            return [_token_ids(items)]
        return [item if isinstance(item, str) else _token_ids(item) for item in items]

    @staticmethod
    def _params_for(
        items: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(items)
        if not _is_list(params):
            raise RequestError.refused("params", params, "SamplingParams, or a list of them")
        if len(params) != len(items):
            raise ConfigError(
                "params", len(params), f"one, or one for each of {len(items)} prompts"
            )
        return list(params)

    @staticmethod
    def _seeded(params: SamplingParams | None) -> SamplingParams:
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError.refused("params", params, "SamplingParams")
        if params.seed is not None:
            return params
        return msgspec.structs.replace(params, seed=secrets.randbelow(_MAX_SEED))

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt)
        return _token_ids(prompt)

    def _add(
        self, ids: list[int], params: SamplingParams, stop: str | Sequence[str], index: int
    ) -> _Choice:
        tokenizer = self._model.tokenizer
        request = Request(
            request_id=f"llm-{next(self._ids)}",
            prompt_ids=ids,
            params=params,
            choice_index=index,
        )
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= self._model.runner.eos_ids
        stops = [stop] if isinstance(stop, str) else stop
        if not _is_list(stops) or not all(isinstance(text, str) for text in stops):
            raise RequestError.refused("stop", stop, "a text or a list of texts")
        if "" in stops:
            raise RequestError("stop: an empty string; leave it out to have none", "stop")
        stream = TextStream(tokenizer.detokenizer(), stops, ends)
        choice = _Choice(request, stream, self._finish)
        with self._lock:
            self._check_open()
            self._engine.add(request, time.monotonic())
            self._choices[request.request_id] = choice
        return choice

    def _finish(self, request_id: str, output_len: int) -> None:
        self._engine.finish(request_id, output_len, time.monotonic())

    def _step(self, choices: Sequence[_Choice]) -> int | None:
        """Run one engine step and hand its events out to all requests, whoever added them.

        Returns the number of tokens it produced; None, and no step, when ``choices`` are done.
        """
        with self._lock:
            self._check_open()
            if all(choice.is_done for choice in choices):
                return None
            assert self._engine.has_work, "a request waits for an idle engine"
            produced = 0
            for event in self._engine.step(time.monotonic(), time.monotonic):
                choice = self._choices.get(event.request_id)
                if choice is not None:
                    choice.handle(event)
                    if isinstance(event, TokensEvent):
                        produced += len(event.token_ids)
            return produced

    def _take(self, choice: _Choice) -> GenerationOutput:
        self._choices.pop(choice.request.request_id, None)
        if choice.error is not None:
            raise choice.error
        assert choice.output is not None, "a finished request has an output"
        return choice.output

    def _cancel(self, choices: Sequence[_Choice]) -> None:
        with self._lock:
            if self._is_closed:
                return
            for choice in choices:
                self._choices.pop(choice.request.request_id, None)
                if not choice.is_done:
                    self._engine.abort(choice.request.request_id)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _check_callable(field: str, value: object) -> None:
    if value is not None and not callable(value):
        raise ConfigError(field, value, "a function")


def _check_messages(messages: object) -> None:
    allowed = "a list of at least one dict with role and content, both texts"
    if not _is_list(messages) or not messages:
        raise RequestError.refused("messages", messages, allowed)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError.refused(f"messages[{index}]", message, allowed)
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError.refused(f"messages[{index}].{key}", message.get(key), "a text")


def _token_ids(prompt: object) -> list[int]:
    if not _is_list(prompt):
        raise _no_prompt(prompt)
    for item in prompt:
        if not isinstance(item, int) or isinstance(item, bool):
            raise _no_prompt(item)
    return list(prompt)


def _no_prompt(found: object) -> RequestError:
    return RequestError(f"a prompt is a text or a list of token ids, found {found!r:.60}", "prompt")
