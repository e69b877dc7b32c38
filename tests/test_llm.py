"""The in-process engine: same tokens however it is asked, stop strings, errors, nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.engine_driver import assert_idle
from support.toy_model import load_toy_model
from trivet.errors import ConfigError, EngineError, RequestError
from trivet.llm import LLM, GenerationOutput, _Turns
from trivet.request import SamplingParams

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=1, ignore_eos=True)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.llm.load_model", load_toy_model)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("toy", max_model_len=256, max_num_seqs=4) as model:
        yield model
        assert_idle(model._engine)


def _one(outputs: list[GenerationOutput]) -> GenerationOutput:
    [output] = outputs
    return output


def test_text_and_ids_of_the_same_prompt_agree(llm: LLM) -> None:
    text = "hello there"
    ids = llm.model.tokenizer.encode(text)
    from_text = _one(llm.generate(text, GREEDY))
    from_ids = _one(llm.generate(ids, GREEDY))
    assert from_text.token_ids == from_ids.token_ids
    assert from_text.prompt_token_ids == ids
    assert from_text.text == llm.model.tokenizer.decode(from_text.token_ids)
    assert from_text.usage.total_tokens == len(ids) + 24
    assert from_text.finish_reason == "length"


def test_a_list_of_prompts_gives_what_each_gives_alone(llm: LLM) -> None:
    prompts = [f"prompt number {'abcdefghij'[i]}" for i in range(10)]
    together = llm.generate(prompts, GREEDY)
    alone = [_one(llm.generate(prompt, GREEDY)) for prompt in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_choices_of_one_prompt_differ_and_are_repeatable(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.5, seed=7, ignore_eos=True)
    first, again = llm.generate("abc", params, n=3), llm.generate("abc", params, n=3)
    assert [o.choice_index for o in first] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first}) == 3
    assert [o.token_ids for o in first] == [o.token_ids for o in again]


def test_a_seed_is_drawn_and_returned(llm: LLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True)
    output = _one(llm.generate("abc", params))
    seeded = SamplingParams(max_tokens=16, temperature=1.5, ignore_eos=True, seed=output.seed)
    assert _one(llm.generate("abc", seeded)).token_ids == output.token_ids


def test_stream_adds_up_to_generate(llm: LLM) -> None:
    whole = _one(llm.generate("stream me", GREEDY))
    deltas = list(llm.stream("stream me", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1].output
    assert last is not None
    assert last.text == whole.text


def test_other_calls_between_deltas_take_nothing_from_a_stream(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    [whole] = llm.generate("once upon", params)
    first, second = llm.stream("once upon", params), llm.stream("once upon", params)
    begun = [next(first), next(second)]
    llm.generate("the end", params)  # runs both to their ends
    for delta, stream in zip(begun, (first, second), strict=True):
        deltas = [delta, *stream]
        assert deltas[-1].finish_reason == whole.finish_reason
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids


def test_threads_share_an_llm(llm: LLM) -> None:
    """Requests of several threads run together, and each has the tokens that it has alone."""
    prompts = ["once upon", "a time", "the end", "of days"]
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=3, ignore_eos=True)
    expected = [output.token_ids for output in llm.generate(prompts, params)]

    def run(prompt: str) -> list[list[int]]:
        found = [llm.generate(prompt, params)[0].token_ids]
        found.append([i for delta in llm.stream(prompt, params) for i in delta.token_ids])
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            for ids, both in zip(expected, pool.map(run, prompts), strict=True):
                assert both == [ids, ids]


def test_a_thread_that_waits_gets_the_next_turn() -> None:
    turns = _Turns()
    order = []

    def take() -> None:
        with turns:
            order.append("other")

    thread = threading.Thread(target=take)
    with turns:
        with turns:
            thread.start()
        while not turns._next.locked():
            time.sleep(0.001)
    with turns:
        order.append("this")
    thread.join()
    assert order == ["other", "this"]


def test_closing_from_another_thread_ends_a_call_with_its_reason() -> None:
    model = LLM("toy", max_model_len=256)
    closer = threading.Thread(target=model.close)

    def close(_: int) -> None:
        if closer.ident is None:
            closer.start()

    with pytest.raises(EngineError, match="closed"):
        model.generate("once", SamplingParams(max_tokens=200, ignore_eos=True), progress=close)
    closer.join()


def test_leaving_a_stream_cancels_the_request(llm: LLM) -> None:
    for delta in llm.stream("stream me", GREEDY):
        assert delta.token_ids
        break
    assert _one(llm.generate("abc", GREEDY)).finish_reason == "length"


@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_a_stop_string_ends_text_and_tokens_at_the_same_place(draft: str) -> None:
    with LLM("toy", max_model_len=256, max_num_seqs=4, draft=draft) as model:
        whole = _one(model.generate("stop here", GREEDY))
        stop = whole.text[5:8]
        cut = whole.text.index(stop)
        output = _one(model.generate("stop here", GREEDY, stop=stop))
        assert output.text == whole.text[:cut]
        assert output.token_ids == whole.token_ids[: cut + len(stop)]
        assert output.usage.completion_tokens == len(output.token_ids)
        assert (output.finish_reason, output.stop_string) == ("stop", stop)
        assert_idle(model._engine)


def test_speculation_changes_no_token() -> None:
    prompts = [f"{letter}bab{letter}b" * 3 for letter in "cdefgh"]
    params = SamplingParams(max_tokens=64, temperature=0.9, seed=3, ignore_eos=True)
    with (
        LLM("toy", max_model_len=256) as plain,
        LLM("toy", max_model_len=256, draft="ngram") as fast,
    ):
        expected = [o.token_ids for o in plain.generate(prompts, params)]
        outputs = fast.generate(prompts, params)
    assert [o.token_ids for o in outputs] == expected
    assert sum(o.timing.draft_tokens for o in outputs) > 0


def test_logprobs_are_parallel_to_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, seed=0, logprobs=2, ignore_eos=True)
    output = _one(llm.generate("abc", params))
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert all(len(entry.top_ids) == 2 for entry in output.logprobs)


def test_score_gives_each_token_its_logprob(llm: LLM) -> None:
    short, long = llm.score(["abcd", "abcde"])
    assert short[0] is None
    assert len(long) == 5
    assert long[:4] == short
    assert all(value is not None and value < 0 for value in long[1:])


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)
    ids = llm.model.tokenizer.encode("user: hi\nassistant:")
    assert output.prompt_token_ids == ids
    assert output.token_ids == _one(llm.generate(ids, GREEDY)).token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ("a" * 300, GREEDY, "prompt"),
        ([[1, 2, 64]], GREEDY, "prompt"),
        ([[1, "2"]], GREEDY, "prompt"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing(
    llm: LLM, prompt: object, params: SamplingParams, field: str
) -> None:
    prompts = [prompt] if prompt == [] else prompt
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", *prompts] if isinstance(prompts, list) else prompts, params)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert _one(llm.generate("abc", GREEDY)).finish_reason == "length"


def test_an_empty_stop_string_is_refused(llm: LLM) -> None:
    for stop in ("", ["a", ""]):
        with pytest.raises(RequestError, match="stop: an empty string"):
            llm.generate("ab", stop=stop)


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="params"):
        llm.generate(["a", "b"], [GREEDY])
    outputs = llm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=1, seed=0)])
    assert [len(o.token_ids) for o in outputs] == [24, 1]


def test_bad_settings_are_refused_before_loading() -> None:
    for settings in (
        {"kv": "int3"},
        {"draft": "magic"},
        {"weights": "w2"},
        {"max_num_seqs": 0},
        {"memory_utilization": 1.5},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            LLM("toy", **settings)


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"a": 1}, {1, 2}, [None], [b"abc"], [1.0]])
def test_prompts_of_a_wrong_type_are_named(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match=r"prompts?\b.*(allowed: a text|found)"):
        llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompt"):
        next(llm.stream(prompts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        (None, "messages"),
        ([], "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (
            [{"role": "user", "content": "hi"}, {"role": "user", "content": 5}],
            "messages[1].content",
        ),
    ],
)
def test_messages_of_a_wrong_type_are_named(llm: LLM, messages: object, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages)  # type: ignore[arg-type]
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: ")
    assert "allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": {"max_tokens": 5}}, "params: {'max_tokens': 5} is not allowed; allowed: Samp"),
        ({"params": "greedy"}, "params: 'greedy' is not allowed; allowed: SamplingParams"),
        ({"params": ["greedy"]}, "params: 'greedy' is not allowed; allowed: SamplingParams"),
        ({"stop": 5}, "stop: 5 is not allowed; allowed: a text or a list of texts"),
        ({"stop": ["a", 5]}, "stop: ['a', 5] is not allowed; allowed: a text or a list of texts"),
        ({"stop": b"a"}, "stop: b'a' is not allowed; allowed: a text or a list of texts"),
        ({"n": "2"}, "n: '2' is not allowed; allowed: an integer >= 1"),
        ({"n": 1.0}, "n: 1.0 is not allowed; allowed: an integer >= 1"),
        ({"n": True}, "n: True is not allowed; allowed: an integer >= 1"),
        ({"progress": "bar"}, "progress: 'bar' is not allowed; allowed: a function"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    llm: LLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, ConfigError)) as caught:
        llm.generate("abc", **arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", None),
        ("max_tokens", True),
        ("min_tokens", [1]),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", 1.5),
        ("top_p", "1"),
        ("min_p", True),
        ("repetition_penalty", "1"),
        ("presence_penalty", {}),
        ("frequency_penalty", None),
        ("logit_bias", [1, 2]),
        ("allowed_token_ids", 5),
        ("banned_token_ids", None),
        ("stop_token_ids", "abc"),
        ("ignore_eos", 1),
        ("seed", "1"),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
    ],
)
def test_sampling_params_of_a_wrong_type_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: {value!r} is not allowed; allowed: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "model: None is not allowed; allowed: a text"),
        ({"weights": 8}, "weights: 8 is not allowed; allowed: a text"),
        ({"threads": "2"}, "threads: '2' is not allowed; allowed: an integer from 1 to 1024"),
        ({"threads": True}, "threads: True is not allowed; allowed: an integer from 1 to 1024"),
        ({"max_model_len": 64.0}, "max_model_len: 64.0 is not allowed; allowed: an integer >= 1"),
        ({"max_model_len": 0}, "max_model_len: 0 is not allowed; allowed: an integer >= 1"),
        (
            {"memory_utilization": "all"},
            "memory_utilization: 'all' is not allowed; allowed: a numb",
        ),
        ({"kv_bytes": 1e9}, "kv_bytes: 1000000000.0 is not allowed; allowed: an integer >= 1"),
        ({"prefix_cache": "no"}, "prefix_cache: 'no' is not allowed; allowed: True or False"),
        ({"draft": None}, "draft: None is not allowed; allowed: off, ngram"),
        ({"progress": 1}, "progress: 1 is not allowed; allowed: a function"),
        (
            {"max_prefill_chunk": -1},
            "max_prefill_chunk: -1 is not allowed; allowed: an integer from 0 (whole prompts)",
        ),
    ],
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": "toy", **settings})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("chunk", [0, None])
def test_no_chunk_means_whole_prompts(chunk: int | None) -> None:
    with LLM("toy", max_model_len=64, max_prefill_chunk=chunk) as model:
        assert model._engine.config.max_prefill_chunk is None


def test_a_closed_llm_says_so() -> None:
    model = LLM("toy", max_model_len=64)
    model.close()
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.generate("abc")


def test_a_stream_of_a_closed_llm_says_so() -> None:
    model = LLM("toy", max_model_len=64)
    deltas = model.stream("abc", SamplingParams(max_tokens=8, ignore_eos=True))
    next(deltas)
    model.close()
    with pytest.raises(EngineError, match="closed"):
        list(deltas)
