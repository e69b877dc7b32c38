"""The pages for newcomers: what they show runs as written, what they name is there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from trivet.cli import main
from trivet.cli.app import VERBS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trivet"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def _blocks(language: str) -> list[str]:
    """The fenced blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.demo
def test_the_python_example() -> None:
    [code] = _blocks("python")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "README.md", "exec"), {})
    text = shown.getvalue()
    assert text.count("prompt_tokens=") == 2  # of two prompts
    assert text.splitlines()[-1].startswith("[None, -")  # of `LLM.score`


@pytest.mark.demo
def test_the_server_example() -> None:
    [block] = [block for block in _blocks("") if "trivet serve" in block]
    words = shlex.split(next(line for line in block.splitlines() if "serve" in line), comments=True)
    assert words[-2] == "--port"
    command = [sys.executable, "-m", *words[:-1], "0"]
    curl = shlex.split(block[block.index("curl ") :].replace("\\\n", " "))
    path = "/" + curl[1].partition("/")[2]
    name, _, value = curl[curl.index("-H") + 1].partition(": ")
    body = curl[curl.index("-d") + 1]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if line.startswith("ready "))
            url = ready.split()[1] + path
            answer = httpx.post(url, content=body, headers={name: value}, timeout=120)
        finally:
            process.terminate()
            process.communicate()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert json.loads(body)["max_tokens"] == answer.json()["usage"]["completion_tokens"]


def test_every_verb_has_a_row_whose_options_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    seen = set()
    for cell in re.findall(r"^\| (`trivet .*?) \|", README, re.MULTILINE):
        words = re.findall(r"[\w-]+", cell)
        verb = words[1:3] if words[1] == "bench" else words[1:2]
        seen.add(verb[0])
        assert main([*verb, "--help"]) == 0
        helped = capsys.readouterr().out
        for option in [word for word in words if word.startswith("-")]:
            assert re.search(rf"(?<![\w-]){option}\b", helped), cell
    assert seen == set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_targets_of_make_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets


def test_the_map_names_every_package_and_nothing_else() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("| package |")[2].partition("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    there = {
        path.name.removesuffix(".py") for path in PACKAGE.glob("[a-z]*") if path.name != "py.typed"
    }
    assert named == {name for name in there if not name.startswith("__")}
    parts = (ROOT, ROOT / "native", PACKAGE, PACKAGE / "checkpoint", PACKAGE / "quant")
    for path in re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", text):
        assert any((part / path).exists() for part in parts), path
