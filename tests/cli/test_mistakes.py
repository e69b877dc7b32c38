"""A user's mistake is one line on standard error and exit code 2, never a traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from trivet import __version__, sizing
from trivet.cli import app, main
from trivet.cli.app import VERBS, run
from trivet.cli.hints import _HINTS
from trivet.cli.serve import _note_workers
from trivet.sizing import CpuLimit

CLI = Path(__file__).parents[2] / "src" / "trivet" / "cli"

QUANTIZE = ["quantize", "MODEL", "-o", "q", "--group-size", "32"]
MISTAKES = [
    (["generate", "MODEL"], "exactly one of --prompt"),
    (["generate", "MODEL", "--prompt", "a", "--chat", "b"], "exactly one of --prompt"),
    (["generate", "MODEL", "--prompt", "a", "--temperature", "-1"], "temperature"),
    (["generate", "MODEL", "--prompt", "a", "--max-tokens", "x"], "--max-tokens"),
    (["generate", "MODEL", "--prompt", "a", "--weights", "w3"], "weights: 'w3' is not allowed"),
    (["generate", "MODEL", "--prompt", "a", "--kv", "fp4"], "kv: 'fp4' is not allowed"),
    (["generate", "MODEL", "--prompt", "a", "--draft", "oracle"], "draft"),
    (["generate", "MODEL", "--prompt", "a", "--threads", "0"], "threads: 0 is not allowed"),
    (["generate", "MODEL", "--prompt", ""], "empty"),
    (["generate", "MODEL", "--prompt", "a", "--logprobs", "3"], "--logprobs together with --json"),
    (["generate", "MODEL", "--prompt", "dog " * 600], "context"),
    (["generate", "MODEL", "--prompt", "a", "--max-model-len", "100000"], "max_model_len"),
    (["generate", "MODEL", "--prompt", "a", "--kv-bytes", "1"], "kv_bytes"),
    (["generate", "MODEL", "--prompt-file", "absent.txt"], "absent.txt"),
    (["generate", "MODEL", "--prompt-file", "latin1.txt"], "latin1.txt: is not UTF-8 text"),
    (["generate", "MODEL", "--prompt-file", "PIPE"], "pipe.jsonl: is a pipe"),
    (["generate", "MODEL", "--prompt-file", "/dev/zero"], "/dev/zero: is a device"),
    (["generate", "MODEL", "--prompt-file", "-"], r"standard input: b'\xe9' is not allowed"),
    (["chat", "MODEL"], r"standard input: b'\xe9' is not allowed; allowed: UTF-8"),
    (["serve", "MODEL", "--max-prefill-chunk", "-1"], "an integer from 0 (whole prompts) to 65536"),
    (["serve", "MODEL", "--max-waiting", "9" * 30], f"an integer from 0 to {(1 << 62) - 1}"),
    (["serve", "MODEL", "--max-num-seqs", "9" * 30], "max_num_seqs"),
    (["serve", "MODEL", "--kv-bytes", "9" * 30], "kv_bytes"),
    (["serve", "MODEL", "--max-model-len", "9" * 30], "max_model_len"),
    (["serve", "MODEL", "--draft-tokens", "9" * 30], "draft_tokens"),
    (["serve", "MODEL", "--host", ""], "host: '' is not allowed"),
    (["serve", "MODEL", "--host", "\udcff"], "allowed: UTF-8"),
    (["serve", "MODEL", "--api-key", "\udcff"], "api_key: 'a key' is not allowed; allowed: UTF-8"),
    (["serve", "MODEL", "--served-model-name", "\udcff"], "allowed: UTF-8"),
    (["generate", "absent-model", "--prompt", "a"], "absent-model"),
    (["generate", "absent.toml", "--prompt", "a"], "absent.toml"),
    (["generate"], "MODEL"),
    (["info", "absent-model"], "absent-model"),
    (["info", "of-gguf"], "give the file in it: model.gguf"),
    (["info", "--fresh"], "fresh"),
    (["info", "--weights", "w8a8"], "--weights together with MODEL"),
    (["info", "--kv-bytes", "5"], "--kv-bytes together with MODEL"),
    (["info", "--threads", "0"], "threads: 0 is not allowed"),
    (["info", "--roofline", "--threads", "5000"], "threads: 5000 is not allowed"),
    (["evaluate", "MODEL", "--gate", "soft"], "gate: 'soft' is not allowed; allowed: fast, full"),
    (["evaluate", "MODEL", "--gate", "fast", "--seed", "-1"], "seed: -1 is not allowed"),
    (["evaluate", "MODEL", "--sensitivity", "--gate", "fast"], "nothing with --sensitivity"),
    (["evaluate", "MODEL", "--sensitivity", "-o", "out"], "nothing with --sensitivity"),
    (["evaluate", "MODEL", "--gate", "fast", "-o", "latin1.txt"], "latin1.txt: cannot be written"),
    (["evaluate", "MODEL", "--gate", "fast", "--ledger", "latin1.txt/x"], "cannot be written"),
    (["evaluate", "MODEL", "--tasks", "folder"], "tasks"),
    (["evaluate", "MODEL", "--gate", "fast", "--ledger", "PIPE"], "pipe.jsonl: is a pipe"),
    (["evaluate", "MODEL", "--gate", "fast", "--ledger", "/dev/null"], "/dev/null: is a device"),
    (["evaluate", "MODEL", "--corpus", "PIPE"], "pipe.jsonl: is a pipe"),
    (["evaluate", "MODEL", "--corpus", "/dev/zero"], "/dev/zero: is a device"),
    (
        ["evaluate", "absent", "--baseline", "absent", "--gate", "fast", "--tasks", "with-pipe"],
        "pipe.jsonl: is a pipe",
    ),
    (["evaluate", "MODEL", "--max-model-len", "513"], "max_model_len: 513 is not allowed"),
    (["evaluate", "MODEL", "--max-model-len", "64", "--context", "65"], "context: 65"),
    (["quantize", "MODEL", "-o", "."], "output: '.' is not allowed"),
    (["quantize", "MODEL", "-o", "q", "--threads", "0"], "threads: 0 is not allowed"),
    (["quantize", "MODEL", "-o", "q", "--seed", "-1"], "seed: -1 is not allowed"),
    (["quantize", "MODEL", "-o", "q", "--samples", "0"], "samples: 0 is not allowed"),
    (["quantize", "MODEL", "-o", "q", "--window", "1"], "window: 1 is not allowed"),
    (["quantize", "MODEL", "-o", "q", "--general-share", "1.5"], "general_share: 1.5"),
    (["quantize", "MODEL", "-o", "q", "--general-share", "nan"], "general_share: nan"),
    ([*QUANTIZE, "--traffic", "absent.jsonl"], "absent.jsonl: cannot be read"),
    ([*QUANTIZE, "--traffic", "PIPE"], "pipe.jsonl: is a pipe"),
    ([*QUANTIZE, "--traffic", "/dev/zero"], "/dev/zero: is a device"),
    ([*QUANTIZE, "--traffic", "."], ".: is a folder"),
    ([*QUANTIZE, "--traffic", "latin1.txt"], "latin1.txt: is not UTF-8 text"),
    ([*QUANTIZE, "--traffic", "bad.jsonl"], "bad.jsonl:2: is not valid JSON"),
    ([*QUANTIZE, "--traffic", "short.txt"], "allowed: a file with texts of 8 tokens"),
    ([*QUANTIZE, "--traffic", "absent.jsonl", "--dry-run"], "absent.jsonl: cannot be read"),
    (
        ["quantize", "MODEL", "-o", "q", "--auto", "--traffic", "absent.jsonl"],
        "absent.jsonl: cannot be read",
    ),
    (
        ["quantize", "MODEL", "-o", "q", "--method", "kquant", "--traffic", "PIPE"],
        "pipe.jsonl: is a pipe",
    ),
    (["quantize", "MODEL", "-o", "q", "--method", "smoothquant", "--bits", "4"], "bits: 4"),
    (["quantize", "MODEL", "-o", "q", "--method", "fp8", "--group-size", "32"], "group_size: '32'"),
    (["quantize", "MODEL", "-o", "q", "--method", "kquant", "--bits", "8"], "with a GGUF type"),
    (["quantize", "MODEL", "-o", "q", "--fp8", "block"], "nothing without --method fp8"),
    (["quantize", "MODEL", "-o", "q", "--method", "rtn", "--act-order", "none"], "act_order"),
    (["quantize", "MODEL", "-o", "q", "--method", "rtn", "--traffic", "t"], "reads no texts"),
    (["quantize", "MODEL", "-o", "q", "--auto", "--bits", "4"], "nothing with --auto"),
    (
        [
            "quantize",
            "MODEL",
            "-o",
            "q",
            "--group-size",
            "32",
            "--format",
            "gptq",
            "--keep",
            "down_proj=fp8-channel",
        ],
        "format: 'gptq' is not allowed",
    ),
    (["evaluate", "MODEL", "--task", "arc"], "task"),
    (["evaluate", "MODEL", "--corpus", "absent.txt"], "absent.txt"),
    (["evaluate", "MODEL", "--context", "100000"], "context"),
    (["evaluate", "MODEL", "--stride", "0"], "stride"),
    (["evaluate", "MODEL", "--max-tokens", "0"], "max_tokens"),
    (["serve", "MODEL", "--api-key", ""], "api_key"),
    (["serve", "MODEL", "--served-model-name", ""], "served_model_name"),
    (["serve", "MODEL", "--drain-timeout", "nan"], "drain_timeout"),
    (["serve", "MODEL", "--request-timeout", "0"], "request_timeout"),
    (["serve", "MODEL", "--request-timeout", "nan"], "request_timeout"),
    (["bench", "engine", "MODEL", "--batch", "0"], "batch"),
    (["bench", "engine", "MODEL", "--rows", "1,a"], "rows"),
    (["bench", "engine", "MODEL", "--draft", "suffix"], "draft"),
    (["bench", "engine", "MODEL", "--draft-tokens", "many"], "draft_tokens"),
    (["bench", "engine", "MODEL", "--prompts", "absent.jsonl", "--repeat", "1"], "absent.jsonl"),
    (["bench", "engine", "MODEL", "--prompts", "PIPE", "--repeat", "1"], "pipe.jsonl: is a pipe"),
    (["bench", "nothing"], "nothing"),
    (["bench"], "Missing command: engine"),
    (["ladder", "MODEL"], "--out"),
    (["ladder", "MODEL", "-o", "OUT", "--rungs", "w9"], "rungs: 'w9' is not allowed"),
    (["ladder", "MODEL", "-o", "OUT", "--gate", "soft"], "gate"),
    (["ladder", "MODEL", "-o", "OUT", "--budget", "0"], "budget"),
    (["serve", "MODEL", "--port", "70000"], "port"),
    (["serve", "MODEL", "--workers", "prefill:1"], "workers"),
    (["serve", "absent-model", "--port", "0"], "absent-model"),
    (["serve", "MODEL", "--memory-utilization", "2"], "memory_utilization"),
    (["fly"], "fly"),
]


@pytest.mark.parametrize(("words", "part"), MISTAKES, ids=[" ".join(w)[:60] for w, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_2(
    words: list[str],
    part: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin1.txt").write_bytes(b"caf\xe9")
    Path("of-gguf").mkdir()
    Path("of-gguf", "model.gguf").touch()
    Path("with-pipe").mkdir()
    os.mkfifo("with-pipe/pipe.jsonl")
    Path("bad.jsonl").write_text('{"prompt": "the quick brown fox jumps over"}\n{"prompt"\n')
    Path("short.txt").write_text("hi")
    # As Python opens it where the locale is C: bytes that are no UTF-8 become lone surrogates.
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)
    names = {"MODEL": str(tiny_model), "OUT": str(tmp_path / "out"), "PIPE": "with-pipe/pipe.jsonl"}
    assert main([names.get(word, word) for word in words]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("trivet: ")
    assert part in line
    assert "Traceback" not in line
    assert captured.out == ""


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--tensor-parallel-size", "--threads"),
        ("--quantization", "--weights"),
        ("--gpu-memory-utilization", "--memory-utilization"),
        ("--speculative-config", "--draft"),
        ("--enable-chunked-prefill", "--max-prefill-chunk"),
        ("--dtype", "--weights bf16"),
        ("--trust-remote-code", "never runs"),
    ],
)
def test_a_flag_of_another_engine_gets_the_right_one(
    flag: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo", flag]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert flag in line
    assert hint in line


@pytest.mark.parametrize(
    ("words", "meant"), [(["serv"], "'serve'"), (["bench", "engin", "demo"], "'engine'")]
)
def test_a_misspelt_verb_gets_a_suggestion(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("trivet: No such command")
    assert meant in line


def test_a_hint_needs_a_flag_that_the_verb_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--seed", "3"]) == 2
    assert "The seed belongs to a request" in capsys.readouterr().err
    assert main(["generate", "demo", "--seed"]) == 2
    assert "The seed belongs to a request" not in capsys.readouterr().err


def test_a_misspelt_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--max-token", "3"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--max-tokens" in line


def test_damaged_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "model.gguf"
    garbage.write_bytes(b"GGUF" + b"\xff" * 64)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    text = tmp_path / "text.txt"
    text.write_text("hello")
    for path in (garbage, folder, text):
        assert main(["info", str(path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert path.name in line


def test_standard_output_may_be_closed(tiny_model: Path) -> None:
    words = ["generate", str(tiny_model), "--prompt", "a", "--max-tokens", "2"]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "trivet", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_standard_output_may_end_early() -> None:
    for words in (["--help"], ["info"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "trivet", *words]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, ""), words


def test_an_interrupt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trivet.sizing.machine_memory", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "trivet: interrupted\n"


def test_help_says_defaults_and_what_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*words: str) -> str:
        assert main([*words, "--help"]) == 0
        return " ".join(capsys.readouterr().out.split())

    serve = help_of("serve")
    assert "Usage: trivet serve [OPTIONS] MODEL" in serve
    assert "Arguments: MODEL Folder in Hugging Face layout" in serve
    assert "the word demo. [required]" in serve
    assert "--port P Port; 0 picks a free one. [default: 8000]" in serve
    assert "--draft D Speculation: off or ngram. [default: off]" in serve
    assert "--draft-tokens, --num-speculative-tokens K Most draft tokens" in serve
    assert "[env var: TRIVET_API_KEY]" in serve
    assert "begin alike. [default: prefix-cache]" in serve
    assert "--json One JSON object as the last line of standard output. --help" in serve
    assert "Usage: trivet info [OPTIONS] [MODEL]" in help_of("info")
    assert "-o, --out OUT Folder for the report and the recipe. [required]" in help_of("ladder")
    assert main(["--help"]) == 0
    assert tuple(re.findall(r"^  ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)) == VERBS


def test_the_program_itself(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trivet", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    begin = time.monotonic()
    version = run("--version")
    assert time.monotonic() - begin < 5
    assert (version.returncode, version.stdout.strip()) == (0, f"trivet {__version__}")
    for words in ([], ["--help"], ["generate", "--help"], ["bench", "engine", "--help"]):
        helped = run(*words)
        assert helped.returncode == 0
        assert "Usage: trivet" in helped.stdout
    wrong = run("info", "absent")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1


def test_version_imports_nothing_heavy() -> None:
    code = (
        "import sys; from trivet.cli import main; main(['--version']); "
        "assert not {'numpy', 'click', 'rich'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    heavy = {
        "numpy", "matplotlib", "tokenizers", "starlette", "uvicorn", "rich", "jinja2", "torch",
        "typer", "pydantic",
    }  # fmt: skip
    code = (
        f"import sys; from trivet.cli import main; main({words!r}); "
        f"found = {heavy!r} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_a_closed_standard_input_is_one_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for command in (["chat", str(tiny_model)], ["generate", str(tiny_model), "--prompt-file", "-"]):
        assert main(command) == 2
        assert "standard input" in capsys.readouterr().err


def test_threads_that_cannot_be_started_are_one_line(tiny_model: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); "
    words = ["generate", str(tiny_model), "--prompt", "a", "--threads", "1024"]
    code = f"{limit}from trivet.cli import main; raise SystemExit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "threads: 1024 is not allowed" in done.stderr


def _commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command of the program, with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, *path, name)
        else:
            yield (*path, name), command


def test_threads_above_the_cpus_are_noted_by_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "cpu_limit", lambda *_: CpuLimit(3, "the cgroup's quota of 2.5"))
    seen = []
    for words, command in _commands(app._program):
        if not any("--threads" in param.opts for param in command.params):
            continue
        seen.append(words)
        for threads, expected in (("4", 1), ("3", 0)):
            code = run([*words, "--threads", threads, "nowhere/none.gguf"])
            assert code == 2, words  # there is no such model
            lines = capsys.readouterr().err.splitlines()
            noted = [line for line in lines if line.startswith("note: --threads")]
            assert len(noted) == expected, (words, lines)
            for line in noted:
                assert "--threads 4: more than the 3 CPUs" in line
                assert "(the cgroup's quota of 2.5)" in line
    assert {("serve",), ("generate",), ("chat",), ("bench", "engine")} <= set(seen)
    assert {("info",), ("quantize",), ("evaluate",), ("ladder",)} <= set(seen)


def test_threads_of_all_workers_above_the_cpus_are_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "cpu_limit", lambda *_: CpuLimit(3, "its affinity"))
    cases: dict[tuple[str, int | None], str] = {
        ("mixed:2", 2): "--workers mixed:2 with 2 threads each: more than the 3 CPUs",
        ("mixed:4", None): "--workers mixed:4 with 1 thread each: more than the 3 CPUs",
        ("mixed:2", 1): "",
        ("mixed:3", None): "",
        ("mixed:1", None): "",
        ("mixed:2", 4): "",  # --threads itself is noted
    }
    for (workers, threads), expected in cases.items():
        _note_workers(workers, threads)
        shown = capsys.readouterr().err
        assert expected in shown
        assert bool(shown) == bool(expected), (workers, threads)


def test_a_hint_names_options_that_exist() -> None:
    source = "".join(path.read_text() for path in (CLI / "options.py", CLI / "serve.py"))
    source += (CLI / "generate.py").read_text()
    for flag, hint in _HINTS.items():
        for option in re.findall(r"--[a-z][a-z-]*", hint):
            assert f'"{option}"' in source, (flag, option)
