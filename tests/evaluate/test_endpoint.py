"""A served model is measured as the same model here; what a server lacks is said in one line."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.small_gate import SMALL
from support.tiny_models import Variant, build_folder
from support.toy_server import toy_server
from trivet.cli import main
from trivet.config import EndpointConfig, MemoryConfig, ModelConfig, ServerConfig
from trivet.errors import ConfigError, EndpointError
from trivet.evaluate import Evaluation, Finding, Verdict, endpoint, evaluate_model, gating, ledger
from trivet.evaluate.checks import identity, long_context
from trivet.evaluate.endpoint import EndpointSubject
from trivet.evaluate.next_step import next_step, recipe_of
from trivet.evaluate.report import write_gate
from trivet.evaluate.results import UNKNOWN, CheckResult, Kind
from trivet.evaluate.scoring import Window, score_tokens
from trivet.evaluate.subject import LocalSubject, Prompt
from trivet.gateway import LocalServer
from trivet.loader import load_model

SHAPE = Variant(
    hidden=96, heads=3, kv_heads=1, head_dim=32, ffn=160, theta=1e5, tied=True, positions=512
)
QUICK: dict[str, Any] = {"context": 64, "max_tokens": 100}
Answers = dict[str, Callable[[dict[str, Any]], tuple[int, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("served") / "model", SHAPE)


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[dict[str, str]]:
    """The same model behind two URLs, in two formats."""
    with contextlib.ExitStack() as stack:
        found = {}
        for weights in ("bf16", "w8a8"):
            model = ModelConfig(model=str(folder), weights=weights, threads=1)
            config = ServerConfig(model=model, memory=MemoryConfig(kv_bytes=8 << 20), port=0)
            found[weights] = stack.enter_context(LocalServer(config)).url
        yield found


@pytest.fixture
def served(urls: dict[str, str]) -> Iterator[EndpointSubject]:
    with contextlib.closing(EndpointSubject(EndpointConfig(model=urls["bf16"]))) as subject:
        yield subject


def _local(folder: Path) -> LocalSubject:
    return LocalSubject(load_model(ModelConfig(model=str(folder), weights="bf16", threads=1)), 512)


def _nothing(_count: int) -> None:
    pass


def test_scores_and_texts_are_those_of_the_model_here(
    folder: Path, served: EndpointSubject
) -> None:
    local = _local(folder)
    assert (served.weights, served.kv, served.max_tokens) == ("bf16", "bf16", 510)
    items = [
        [(Prompt("the quick"), " brown fox"), (Prompt("the quick"), " dog")],
        [(Prompt("Tell me more.", is_chat=True), "the fox")],
        *([(Prompt("the lazy dog " * n), " jumps")] for n in range(1, 21)),
    ]
    here, there = (subject.score(items, _nothing) for subject in (local, served))
    assert [len(item) for item in there] == [len(item) for item in items]
    for own, other in zip(itertools.chain(*here), itertools.chain(*there), strict=True):
        assert other.logprob == pytest.approx(own.logprob, abs=1e-4)
        assert (other.num_tokens, other.is_greedy) == (own.num_tokens, own.is_greedy)
    prompts = [Prompt("the quick"), Prompt("Tell me more.", is_chat=True)]
    [one, chat], [same, own_chat] = (
        subject.generate(prompts, 12, (), _nothing) for subject in (served, local)
    )
    assert (one.text, chat.text) == (same.text, own_chat.text)
    assert len(one.tokens) == len(same.tokens)
    stop = same.text[3:5]
    [cut], [own_cut] = (
        subject.generate(prompts[:1], 12, ("no such", "\0", "\1", "\2", stop), _nothing)
        for subject in (served, local)
    )
    assert (cut.text, cut.is_complete) == (own_cut.text, True)


def test_windows_are_read_as_here(folder: Path, served: EndpointSubject) -> None:
    local = _local(folder)
    assert served.encode("") == local.encode("")
    ids = local.encode("the quick brown fox jumps over the lazy dog " * 30)[:201]
    assert served.encode("the quick brown fox jumps over the lazy dog " * 30)[:201] == ids
    window = Window(ids[:200], ids[51:201])
    here, there = (
        np.concatenate([rows.nll for rows in subject.read(window)]) for subject in (local, served)
    )
    np.testing.assert_allclose(there, here, atol=1e-4)
    figures = score_tokens(served, served, [window])
    assert figures.kl is None
    assert figures.agreed.all()
    assert len(figures.nll) == 150
    with pytest.raises(ConfigError, match="up to 510"):
        list(served.read(Window(ids * 3, ids)))


def test_an_endpoint_is_measured_without_a_gate(folder: Path, urls: dict[str, str]) -> None:
    configs = [ModelConfig(model=str(folder), weights=w, threads=1) for w in ("w8a8", "bf16")]
    here = evaluate_model(*configs, **QUICK).as_json()
    there = evaluate_model(
        EndpointConfig(model=urls["w8a8"] + "/v1/"), EndpointConfig(model=urls["bf16"]), **QUICK
    ).as_json()
    assert there.keys() == here.keys()
    for own, other in zip(here["corpora"], there["corpora"], strict=True):
        for name in ("perplexity", "baseline_perplexity", "top1_agreement"):
            assert other[name] == pytest.approx(own[name], rel=1e-4), name
        assert (other["tokens"], other["mean_kl"]) == (own["tokens"], None)
    assert there["weights"] == "w8a8+hadamard64"
    alone = evaluate_model(EndpointConfig(model=urls["bf16"]), **QUICK).report.overall
    assert alone.perplexity == pytest.approx(here["overall"]["baseline_perplexity"], rel=1e-4)
    assert alone.baseline_perplexity is None


@pytest.fixture(scope="module")
def gated(
    urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Evaluation, Path]:
    """A gate over two endpoints, and its ledger."""
    path = tmp_path_factory.mktemp("gate") / "gates.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gating.SIZES, "fast", SMALL)
        found = evaluate_model(
            EndpointConfig(model=urls["w8a8"]),
            EndpointConfig(model=urls["bf16"]),
            gate="fast",
            ledger_path=path,
            **QUICK,
        )
    return found, path


def test_a_gate_names_what_cannot_run_over_an_endpoint(
    gated: tuple[Evaluation, Path], tmp_path: Path
) -> None:
    evaluation, path = gated
    assert evaluation.gate is not None
    assert evaluation.gate.verdict is not Verdict.PASS
    found = json.loads(write_gate(evaluation, tmp_path).read_text())
    checks = {check["name"]: check for check in found["checks"]}
    for name in ("weights", "mean KL"):
        assert checks[name]["finding"] == "not run"
    ran = ("identity", "top-1", "perplexity:pydoc-topics", "repetition", "side by side")
    for name in ran:
        assert checks[name]["finding"] in ("pass", "reject", "undecided", "not applicable"), name
    assert checks["identity"]["finding"] == "pass"
    assert checks["identity"]["metrics"]["not_compared"] == ["context"]
    assert found["overall"]["mean_kl"] is None
    assert found["overall"]["delta_ppl"] is not None
    assert found["hashes"]["model"]["identity"].startswith("http://")
    assert found["hashes"]["model"]["numerics_id"] != found["hashes"]["baseline"]["numerics_id"]
    [entry] = ledger.read(path)
    assert entry.variables == {"weights": "w8a8+hadamard64"}
    assert entry.model == evaluation.model


def test_a_context_too_short_for_a_long_text_is_named(served: EndpointSubject) -> None:
    ids = list(range(3, 600))
    short = LimitedSubject(served, 300)
    found = long_context.check(short, served, ids, 1024, 0)
    assert found.finding is Finding.NOT_RUN
    assert "the candidate's context has 300 tokens, 510 are needed" in found.reason
    found = long_context.check(served, LimitedSubject(served, 100), ids, 1024, 0)
    assert "100 tokens of text and context, at least 256" in found.reason


def test_other_tokenizers_are_named(urls: dict[str, str], served: EndpointSubject) -> None:
    with toy_server() as other:
        config = EndpointConfig(model=other.url)
        with contextlib.closing(EndpointSubject(config)) as toy:
            found = identity.check(toy, served)
        with pytest.raises(ConfigError, match=r"same tokenizer.*token ids of texts"):
            evaluate_model(config, EndpointConfig(model=urls["bf16"]), **QUICK)
    assert found.finding is Finding.REJECT
    assert "token ids of texts" in found.reason
    assert "end tokens" in found.reason


def test_without_a_told_format_the_next_step_is_plain() -> None:
    rejected = [CheckResult("perplexity", "p", Kind.MODEL, Finding.REJECT, "why")]
    step, line = next_step(Verdict.REJECT, rejected, recipe_of(UNKNOWN, UNKNOWN, None))
    assert step == "bits"
    assert "more bits" in line


# -- servers that lack something ------------------------------------------------------------------


@contextlib.contextmanager
def _stub(answers: Answers) -> Iterator[str]:
    """A server with these answers by path; anything else is 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length) or b"{}")
            told = answers.get(self.path)
            status, answer = (404, {"detail": "Not Found"}) if told is None else told(body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_words: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _choices(logprobs: Any) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    return lambda body: (200, {"choices": [{"index": 0, "text": "x", "logprobs": logprobs}]})


WHOLE: Answers = {
    "/v1/models": lambda _: (200, {"data": [{"id": "m", "max_model_len": 100}]}),
    "/tokenize": lambda body: (
        (200, {"tokens": [1, 2, 3]}) if "prompt" in body else (400, {"error": {"message": "no"}})
    ),
    "/v1/completions": _choices(
        {"token_logprobs": [None, -1.0, -2.0, -0.5], "top_logprobs": [None, *[{"a": -0.5}] * 3]}
    ),
}
GENERATED_ONLY = {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "tokens": ["a"]}


def test_a_whole_stub_is_accepted_and_a_busy_one_is_asked_again() -> None:
    turns = iter([503, 429])

    def busy(body: dict[str, Any]) -> tuple[int, Any]:
        status = next(turns, 200)
        return (status, {}) if status != 200 else WHOLE["/v1/completions"](body)

    with (
        _stub({**WHOLE, "/v1/completions": busy}) as url,
        contextlib.closing(EndpointSubject(EndpointConfig(model=url))) as subject,
    ):
        assert (subject.weights, subject.max_tokens) == (UNKNOWN, 98)
        assert subject.end_tokens is None
        assert subject.encode_chat([{"role": "user", "content": "Hi"}]) is None
        assert subject.fingerprint is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"/v1/completions": _choices(GENERATED_ONLY)}, "no log-probabilities of the prompt"),
        ({"/v1/completions": _choices(None)}, "no log-probabilities of the prompt"),
        ({"/v1/completions": lambda _: (200, {"choices": []})}, "0 choices for 1 prompts"),
        ({"/v1/completions": lambda _: (200, {"odd": 1})}, "another form than OpenAI's"),
        ({"/v1/completions": lambda _: (200, b"[1]")}, "something else than a JSON object"),
        (
            {
                "/v1/completions": _choices(
                    {"token_logprobs": [-1.0] * 9, "top_logprobs": [None] * 9}
                )
            },
            "9 log-probabilities for 3 tokens",
        ),
        (
            {
                "/v1/completions": _choices(
                    {"token_logprobs": [None] * 4, "top_logprobs": [None] * 4}
                )
            },
            "no numbers",
        ),
        (
            {"/v1/completions": lambda _: (401, {"error": {"message": "invalid API key"}})},
            "answers 401: invalid API key",
        ),
        (
            {"/tokenize": lambda _: (404, {"detail": "Not Found"})},
            "/tokenize answers 404: Not Found",
        ),
        ({"/v1/models": lambda _: (200, {"data": [{"id": "m"}]})}, "max_model_len"),
        ({"/v1/models": lambda _: (200, b"[" * 200_000)}, "something else than a JSON object"),
        (
            {"/tokenize": lambda _: (200, {"tokens": [float("inf")]})},
            "another form than OpenAI's: OverflowError",
        ),
        (
            {
                "/v1/completions": _choices(
                    {
                        "token_logprobs": [None, *[10**400] * 3],
                        "top_logprobs": [None, *[{"a": 10**400}] * 3],
                    }
                )
            },
            "another form than OpenAI's: OverflowError",
        ),
        (
            {"/v1/models": lambda _: (500, {"detail": "a\n\0" * 5000})},
            r"answers 500: a\\n\\x00",
        ),
        (
            {"/v1/models": lambda _: (200, {"data": [{"id": "a"}, {"id": "b"}]})},
            "serves the models a, b; name one",
        ),
    ],
)
def test_what_a_server_lacks_is_said_in_one_line(changed: Answers, reason: str) -> None:
    with _stub({**WHOLE, **changed}) as url:
        with pytest.raises(EndpointError, match=reason) as caught:
            EndpointSubject(EndpointConfig(model=url))
        assert str(caught.value).startswith(url)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("path", ["GET /v1/models", "POST /tokenize"])
def test_a_server_that_says_nothing_is_left_soon(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endpoint, "_OPENING_S", 0.2)
    is_over = threading.Event()

    def wait(_body: dict[str, Any]) -> tuple[int, Any]:
        is_over.wait(30)
        return 500, {}

    with _stub({**WHOLE, path.split()[1]: wait}) as url, contextlib.ExitStack() as stack:
        stack.callback(is_over.set)
        begin = time.monotonic()
        assert main(["evaluate", url]) == 2
        assert time.monotonic() - begin < 10
        [line] = capsys.readouterr().err.splitlines()
    assert line == f"trivet: {url}: does not answer {path} within 0.2 s"


def test_a_server_that_takes_its_time_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_OPENING_S", 0.5)

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("prompt") == "later" or isinstance(body.get("prompt"), list):
            time.sleep(1.0)
        return WHOLE["/v1/completions" if "max_tokens" in body else "/tokenize"](body)

    with (
        _stub({**WHOLE, "/tokenize": slow, "/v1/completions": slow}) as url,
        contextlib.closing(EndpointSubject(EndpointConfig(model=url))) as subject,
    ):
        assert subject.encode("later") == [1, 2, 3]


def test_one_of_several_models_is_named_after_the_address() -> None:
    cards = [{"id": name, "max_model_len": 100} for name in ("a", "b")]
    with (
        _stub({**WHOLE, "/v1/models": lambda _: (200, {"data": cards})}) as url,
        contextlib.closing(EndpointSubject(EndpointConfig(model=f"{url}/v1#b"))) as subject,
    ):
        assert subject.model_id == "b"
        assert subject.hashes["identity"] == f"{url}#b"


def test_the_key_is_sent() -> None:
    with toy_server(api_key="secret") as server:
        with contextlib.closing(
            EndpointSubject(EndpointConfig(model=server.url, api_key="secret"))
        ) as subject:
            assert subject.model_id == "toy"
        with pytest.raises(EndpointError, match="answers 401"):
            EndpointSubject(EndpointConfig(model=server.url))
    assert "secret" not in repr(EndpointConfig(model=server.url, api_key="secret"))


@pytest.fixture
def dead_url() -> str:
    """An address where nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["URL", "--baseline", "URL", "--gate", "fast"], "does not answer"),
        (["URL", "--baseline", "demo"], "baseline: 'demo' is not allowed; allowed: a URL"),
        (["demo", "--baseline", "URL"], "allowed: a model on this machine"),
        (["URL", "--weights", "w8a8"], "weights: 'w8a8' is not allowed"),
        (["URL", "--baseline", "URL", "--baseline-kv", "int8"], "baseline_kv: 'int8'"),
        (["URL", "--baseline", "URL", "--sensitivity"], "sensitivity"),
    ],
)
def test_mistakes_with_urls_are_one_line(
    words: list[str], reason: str, dead_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *(word.replace("URL", dead_url) for word in words)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize(
    "url",
    [
        "http://x:abc",
        "http://[::1",
        "http://\udcff",
        "http://\xff",
        "https://a..b",
        "http://a:99999",
    ],
)
def test_what_is_no_address_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", url]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "is no address of a server" in line or "does not answer" in line
    assert line.isprintable()


@pytest.mark.parametrize("key", ["\xe9", "a\nb", "\udcff"])
def test_a_key_that_no_header_holds_is_named_and_not_shown(
    key: str, dead_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", dead_url, "--api-key", key]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "api_key" in line
    assert key not in line


def test_the_command_gates_an_endpoint(
    urls: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ["evaluate", urls["w8a8"], "--baseline", urls["bf16"], "--gate", "fast", "--json"]
    words += ["--budget", "0.01", "--context", "64", "-o", str(tmp_path / "out")]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["verdict"] == "undecided"
    assert any("budget" in reason for reason in found["reasons"])
    assert [row["corpus"] for row in found["corpora"]] == ["pydoc-topics", "stdlib-source"]
    assert (tmp_path / "out" / "gate.json").is_file()
    assert (tmp_path / "state" / "trivet" / "gates.jsonl").is_file()


class LimitedSubject(EndpointSubject):
    """Another server's answers with a shorter context."""

    def __init__(self, other: EndpointSubject, max_tokens: int) -> None:
        self.__dict__.update(other.__dict__)
        self._max_tokens = max_tokens
