"""`trivet serve` as a process: ready line, recipe, drain; and the same tokens as in this process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from trivet.config import ModelConfig, ServerConfig
from trivet.gateway.server import settings_line
from trivet.llm import LLM
from trivet.quant import load_packed
from trivet.recipe import Recipe
from trivet.request import SamplingParams
from trivet.worker.frames import Ready

PROMPTS = ["the quick brown fox", "a model reads a prompt", "dog dog dog dog", "the"]


@contextmanager
def _served(model: Path, *words: str) -> Iterator[str]:
    """A server process on a free port; yields its address and expects a clean end on SIGTERM."""
    command = [sys.executable, "-m", "trivet", "serve", str(model), "--port", "0", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready "):
                break
        assert lines[-1].startswith("ready http://127.0.0.1:"), lines
        assert any("margin" in line for line in lines), "the memory plan comes first"
        assert lines[-2].startswith("settings "), lines
        yield lines[-1].split()[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


def _complete(url: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{url}/v1/completions", json={"return_token_ids": True, **body}, timeout=60
    )
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert isinstance(choice, dict)
    return choice


@pytest.mark.parametrize("draft", ["off", "ngram"])
def test_the_server_gives_the_tokens_of_this_process(tiny_model: Path, draft: str) -> None:
    settings = {"weights": "w8a8", "kv": "int8"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    sampled = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11}
    greedy = {"max_tokens": 24, "temperature": 0.0, "seed": 0}
    with LLM(str(tiny_model), **settings) as llm, _served(  # type: ignore[arg-type]
        tiny_model, *words, "--draft", draft, "--served-model-name", "m"
    ) as url:  # fmt: skip
        for prompt in PROMPTS:
            for fields in (greedy, sampled):
                [output] = llm.generate(prompt, SamplingParams(**fields))  # type: ignore[arg-type]
                choice = _complete(url, model="m", prompt=prompt, **fields)
                assert choice["token_ids"] == output.token_ids
                assert choice["text"] == output.text
                assert choice["finish_reason"] == output.finish_reason
        [output] = llm.generate("the dog", SamplingParams(**sampled))  # type: ignore[arg-type]
        stop = output.text[1:3]
        [output] = llm.generate("the dog", SamplingParams(**sampled), stop=stop)  # type: ignore[arg-type]
        choice = _complete(url, model="m", prompt="the dog", stop=stop, **sampled)
        assert (choice["text"], choice["token_ids"]) == (output.text, output.token_ids)
        assert choice["finish_reason"] == output.finish_reason == "stop"


def test_the_settings_in_force_are_one_line() -> None:
    config = ServerConfig(
        model=ModelConfig(model="my models/a\nb"), workers="mixed:2", draft="ngram", draft_tokens=3
    )
    ready = Ready(
        pid=1, numerics_id="n", weights="w8a8+hadamard64", kv="int8", max_model_len=512,
        vocab_size=9, num_pages=10, page_tokens=32, page_bytes=4096, max_num_seqs=4, max_waiting=3,
        threads=1, isa="avx2",
    )  # fmt: skip
    name, *words = shlex.split(settings_line(config, ready))
    assert name == "settings"
    assert dict(word.split("=", 1) for word in words) == {
        "model": "my models/a\\nb", "weights": "w8a8+hadamard64", "kv": "int8", "threads": "1",
        "isa": "avx2", "max_model_len": "512", "max_num_seqs": "4", "kv_bytes": "81920",
        "kv_tokens": "640", "workers": "mixed:2", "draft": "ngram:3",
    }  # fmt: skip


# What no start of a server needs; what only its gateway, or only its worker, needs.
NOWHERE = frozenset(
    (
        "matplotlib", "rich", "jinja2", "transformers", "torch", "huggingface_hub", "gguf",
        "safetensors", "httpx", "psutil", "trivet.bench", "trivet.evaluate", "trivet.llm",
        "trivet.speculate", "trivet.quant.pack", "trivet.cli.output", "typer", "pydantic",
    )
)  # fmt: skip
ONCE = ("numpy", "trivet.native", "trivet.quant", "click", "starlette", "tokenizers")


def test_a_start_imports_what_it_needs_and_nothing_twice(tiny_model: Path) -> None:
    load_packed(tiny_model)
    command = [sys.executable, "-m", "trivet", "serve", str(tiny_model), "--port", "0"]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # a line for each module
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready http" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate()
    imported = Counter(line.rpartition("|")[2].strip() for line in lines if "import time:" in line)
    assert imported["trivet.gateway.server"] == imported["trivet.worker.channel"] == 1
    assert not NOWHERE & imported.keys()
    assert {name: imported[name] for name in ONCE} == dict.fromkeys(ONCE, 1)


def test_a_wrong_command_line_leaves_no_worker(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "trivet", "serve", str(tiny_model), "--port", "x"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        message = process.stderr.read()  # ends when no process holds the pipe any more
        assert process.wait(timeout=60) == 2
    assert message.count("\n") == 1
    assert "--port" in message


def test_a_recipe_is_served(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    recipe = Recipe(
        model=str(tiny_model), weights="w8a8", kv="int8", draft="ngram", max_num_seqs=2,
        max_prefill_chunk=64,
    )  # fmt: skip
    path.write_text(recipe.to_toml())
    with _served(path, "--served-model-name", "tiny") as url:
        models = httpx.get(f"{url}/v1/models", timeout=60).json()
        assert models["data"][0]["id"] == "tiny"
        assert _complete(url, model="tiny", prompt="the dog", max_tokens=4)["token_ids"]
