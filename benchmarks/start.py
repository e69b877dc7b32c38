"""Start of `trivet serve`: exec to the ready line, the first token after it, memory beside the model.

    python benchmarks/start.py -o benchmarks/results/start.json [--model demo] [--runs 7]
    python benchmarks/start.py --source OLD/src --source src      two trees, in turns, in one run

Every run is a fresh process with the packed cache there, made by a first run that is not counted.
ready_s is from exec to the line ``ready``, read from a pipe; first_token_s from sending the first
request of the server to its first event; gateway_cpu_s and worker_cpu_s are the processor time of each
until ready. Then 32 requests of 128 tokens in and 128 out run at once, while the memory of all the
server's processes is sampled: beside_bytes is the largest sum of their PSS without the mapping of the
packed weights and without the KV arena; beside_undivided_bytes the same with pages counted whole that
unrelated processes map too (libraries). The last line of standard output is the result as JSON:
medians, and every run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pydoc_data.topics
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trivet.bench.machine import describe_machine

REQUESTS, TOKENS_IN, TOKENS_OUT = 32, 128, 128
SAMPLE_S = 0.1
ARENA_NAME = "/memfd:trivet"
CACHE_SUFFIX = ".trivet"
_TEXT = " ".join(" ".join(text.split()) for _, text in sorted(pydoc_data.topics.topics.items()))


def children(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += children(int(child))
    return found


def mappings(pid: int) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(place in its file or in memory, name, sizes in bytes) of each mapping of a process."""
    place, name, sizes = "", "", dict[str, int]()
    with Path(f"/proc/{pid}/smaps").open() as file:
        for line in file:
            head, _, rest = line.partition(" ")
            if head.endswith(":"):
                if rest.endswith("kB\n"):
                    sizes[head[:-1]] = 1024 * int(rest.split()[0])
                continue
            if sizes:
                yield place, name, sizes
            _, _, offset, _, inode, *names = line.split(maxsplit=5)
            name, sizes = (names[0].strip() if names else ""), {}
            place = f"{inode}:{offset}"
    if sizes:
        yield place, name, sizes


def memory(pid: int) -> dict[str, int]:
    """Bytes of a server's processes; see the module's docstring. Raises OSError: it has ended."""
    result: dict[str, int] = defaultdict(int)
    shared: dict[tuple[str, str], int] = {}
    for process in children(pid):
        for place, name, sizes in mappings(process):
            if name.startswith(ARENA_NAME):
                result["arena_bytes"] += sizes["Pss"]
            elif name.endswith(CACHE_SUFFIX):
                result["weights_bytes"] += sizes["Pss"]
            else:
                result["beside_bytes"] += sizes["Pss"]
                result[f"{'gateway' if process == pid else 'worker'}_bytes"] += sizes["Pss"]
                private = sizes["Private_Clean"] + sizes["Private_Dirty"]
                result["beside_undivided_bytes"] += private
                if name:
                    key = (place, name)
                    shared[key] = max(shared.get(key, 0), sizes["Rss"] - private)
    result["beside_undivided_bytes"] += sum(shared.values())
    return dict(result)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Served:
    """One `trivet serve`, from exec on. ``source`` is put before the installed package."""

    def __init__(self, model: str, source: str | None, cache: Path, words: Sequence[str]) -> None:
        path = {} if source is None else {"PYTHONPATH": str(Path(source).resolve())}
        path["TRIVET_CACHE"] = str(cache)
        script = Path(sys.executable).with_name("trivet")
        command = [str(script), "serve", model, "--port", "0", *words]
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **path}
        )
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if line.startswith("ready "):
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended:\n{''.join(lines)}")
        self.ready_s = time.perf_counter() - begin
        gateway, *workers = children(self.process.pid)
        self.gateway_cpu_s = cpu_s(gateway)
        self.worker_cpu_s = max(map(cpu_s, workers))
        self.address = line.split()[1].removeprefix("http://")

    def complete(self, prompt: str, max_tokens: int) -> float:
        """Stream one completion to its end; returns the seconds to its first event."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        begin = time.perf_counter()
        connection = http.client.HTTPConnection(self.address, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        first = response.readline()
        first_s = time.perf_counter() - begin
        assert response.status == 200, first + response.read()
        assert first.startswith(b"data: "), first
        assert response.read().rstrip().endswith(b"[DONE]")
        connection.close()
        return first_s

    def peak_memory(self) -> dict[str, int]:
        """Run the load; the sample in which memory beside the model was largest."""
        prompts = [_TEXT[4000 * i : 4000 * i + 4 * TOKENS_IN] for i in range(REQUESTS)]
        threads = [
            threading.Thread(target=self.complete, args=(prompt, TOKENS_OUT)) for prompt in prompts
        ]
        samples = [memory(self.process.pid)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(SAMPLE_S)
            samples.append(memory(self.process.pid))
        for thread in threads:
            thread.join()
        return max(samples, key=lambda sample: sample["beside_bytes"])

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate()


def run(
    model: str, source: str | None, cache: Path, words: Sequence[str], with_load: bool
) -> dict[str, Any]:
    """One start."""
    served = Served(model, source, cache, words)
    try:
        result: dict[str, Any] = {
            "ready_s": served.ready_s,
            "gateway_cpu_s": served.gateway_cpu_s,
            "worker_cpu_s": served.worker_cpu_s,
        }
        result["first_token_s"] = served.complete("The capital of France is", 8)
        result["second_first_token_s"] = served.complete("The capital of Spain is", 8)
        if with_load:
            result |= served.peak_memory()
    finally:
        served.stop()
    return result


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the smallest and largest value of each figure."""
    figures = {key: [run[key] for run in runs if key in run] for key in runs[0]}
    return {
        **{key: statistics.median(values) for key, values in figures.items()},
        "spread": {key: [min(values), max(values)] for key, values in figures.items()},
        "runs": list(runs),
    }


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--loads", type=int, default=3, help="runs that also measure memory")
    parser.add_argument("--source", action="append", help="a source tree; once for each")
    parser.add_argument("-o", "--output", type=Path, help="also write the JSON here")
    options, words = parser.parse_known_args()
    sources = options.source or [None]
    runs: dict[str | None, list[dict[str, Any]]] = {source: [] for source in sources}
    with tempfile.TemporaryDirectory() as folder:
        caches = {source: Path(folder) / str(number) for number, source in enumerate(sources)}
        for number in range(options.runs + 1):
            for source in sources:
                with_load = 0 < number <= options.loads
                result = run(options.model, source, caches[source], words, with_load)
                if number > 0:
                    runs[source].append(result)
    report: dict[str, Any] = {
        "model": options.model,
        "options": words,
        "machine": describe_machine(),
        "load_average": os.getloadavg(),
        "trees": {source or "installed": summary(done) for source, done in runs.items()},
    }
    text = json.dumps(report)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
