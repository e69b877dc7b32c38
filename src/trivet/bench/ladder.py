"""The ladder: technique after technique, one variable at a time, with quality beside speed.

Every rung changes one thing of the configuration accepted so far and is measured against it and
against the baseline in turns within the same minutes: the configurations stay alive in processes of
their own and run the same workload round by round, job by job. A rung enters the recipe only when
the gate finds no loss of quality and the rounds agree that it pays (`trivet.bench.gain`). Its figures,
those of the configuration it is held against and its gain all come from the same rounds; figures of two
rungs do not, and are for reading.

The workload of one round is one request of prose, one of code, and a batch; its gain is the ratio of
the wall times for the same work. Speculation runs the same workload; chunked prefill has a load of its
own, chats with long prompts arriving, and its gain is the ratio of the 99th percentile of the time
between two tokens of a chat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet.bench.gain import LEAST_GAIN, LEAST_KV_GAIN, LEAST_ROUNDS, describe_gain, judge_gain
from trivet.bench.machine import describe_machine
from trivet.bench.measure import MixedLoad
from trivet.bench.process import EngineProcess
from trivet.bench.prompts import NaturalText
from trivet.bench.provenance import describe_build
from trivet.bench.rung import CHAT_GAP, FIGURES, RUNGS, Ladder, LadderOptions, Rung, Setting
from trivet.bench.session import BatchJob
from trivet.bench.workload import (
    Round,
    Workload,
    calibrate,
    draft_details,
    fit_workload,
    time_ratios,
)
from trivet.config import DEMO, KVFormat, ModelConfig, WeightFormat
from trivet.errors import ConfigError
from trivet.evaluate import (
    Corpus,
    EncodedCorpus,
    GateOptions,
    GateResult,
    Quality,
    QualityReport,
    Verdict,
    encode_corpora,
    judge_corpora,
    load_corpora,
    measure_quality,
    new_scorer,
)
from trivet.loader import LoadedModel, Progress, load_model
from trivet.recipe import Recipe

PREFILL_CHUNK = 128
SEED = 0
_CORPORA_SHARE = 0.25  # of the budget goes to reading corpora, ...
_CHECKS_SHARE = {"fast": 0.0, "full": 0.35}  # ... and to all other checks of the gate
_LEAST_TOKENS, _MOST_TOKENS = 128, 4096  # scored of each corpus when the budget decides
_PASSES_OF_A_PAIR = 2.0  # what comparing a model with the baseline costs, in passes of one model
_PLANNED_SHARE = 0.92  # the rest is for starts that take longer than expected
_MOST_ROUNDS = 5
_MOST_SETTINGS = 3  # run in turns in one round: baseline, accepted, new
# Of a round, against the baseline's: others are faster, starts come on top.
_COST_OF_A_SETTING = 0.8
_LEAST_MIXED_S, _MOST_MIXED_S = 4.0, 12.0  # of one run of the mixed load
_LOSSY = ("w8a8", "w4", "int8-kv")  # rungs that change what the model computes

Advance = Callable[[str, float], None]


def climb(
    options: LadderOptions,
    *,
    loading: Progress | None = None,
    progress: Advance | None = None,
    on_rung: Callable[[Rung], None] | None = None,
) -> Ladder:
    """Measure the rungs in order.

    progress  called with (what is done now, share of the whole so far)
    on_rung   called with each rung as soon as it is measured
    Raises ConfigError, CheckpointError, EngineError.
    """
    with _Climb(options, loading, progress or (lambda _label, _share: None)) as climb_:
        return climb_.run(on_rung or (lambda _rung: None))


class _Climb:
    """The state of one ladder: processes alive, the setting accepted so far, the clock."""

    def __init__(self, options: LadderOptions, loading: Progress | None, advance: Advance) -> None:
        self._options = options
        self._loading = loading
        self._report = advance
        self._stack = contextlib.ExitStack()
        self._processes: dict[tuple[str, str], EngineProcess] = {}
        self._formats: dict[str, _Weights] = {}
        self._warm: set[Setting] = set()
        self._encoded: list[EncodedCorpus] = []
        self._texts: list[Corpus] = []
        self._gate_options: GateOptions | None = None  # of a full gate
        self._quality_s = 0.0  # what the quality of one lossy rung is expected to take
        self._base_model: LoadedModel | None = None
        self._base = Setting("bf16")
        self._current = self._base
        self._current_quality: QualityReport | None = None
        self._current_quality_verdict: str | None = None
        self._started = 0.0
        self._prefill_tok_s = 0.0  # of the accepted setting
        self._names = [name for name in RUNGS if name == "bf16" or name in options.rungs]
        self._done = 0

    def __enter__(self) -> _Climb:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, on_rung: Callable[[Rung], None]) -> Ladder:
        options = self._options
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._formats = self._pack()
        self._started = time.monotonic()
        self._advance("baseline")
        process = self._process(self._base)
        assert self._base_model is not None
        self._text = NaturalText(self._base_model.tokenizer)
        self._speeds = calibrate(process, self._text)
        self._workload = self._make_workload(process)
        self._prepare_corpora()
        rungs: list[Rung] = []
        for name in self._names:
            self._advance(name)
            begin = time.monotonic()
            has_time = name == "bf16" or self._has_time(name)
            rung = self._measure(name) if has_time else self._left_out(name)
            rung.details["seconds"] = time.monotonic() - begin
            rungs.append(rung)
            self._done += 1
            on_rung(rung)
        self._advance("done")
        machine = describe_machine()
        corpora = [
            {
                "corpus": encoded.corpus.name,
                "source": encoded.corpus.source,
                "sha256": encoded.corpus.sha256,
                "tokens": encoded.num_tokens,
            }
            for encoded in self._encoded
        ]
        run = {
            "date": date,
            **describe_build(),
            "seed": SEED,
            "gate": options.gate,
            "budget_s": options.budget_s,
            "threads": process.facts["threads"],
            "rungs": list(self._names),
            "rounds": {rung.name: rung.rounds for rung in rungs},
        }
        recipe = self._make_recipe(rungs, run, machine, corpora)
        return Ladder(
            model=options.model,
            rungs=rungs,
            recipe=recipe,
            run=run,
            machine=machine,
            corpora=corpora,
            workload=self._workload.describe(),
            seconds=time.monotonic() - self._started,
        )

    def _pack(self) -> dict[str, _Weights]:
        """Make the packed caches; returns what each rung of weights runs."""
        formats: dict[str, _Weights] = {}
        for name in self._names:
            if name == "bf16":
                self._base_model = self._load("bf16")
                formats[name] = _Weights.of(self._base_model)
            elif name == "w8a8":
                formats[name] = _Weights.of(self._load("w8a8"))
            elif name == "w4":
                formats[name] = self._pack_w4()
        return formats

    def _pack_w4(self) -> _Weights:
        """The file's own 4-bit grid by its name, so that a recipe says what ran; else 4 bits made here.

        Where no single name gives what the file holds (types are mixed), it stays ``auto``.
        """
        own = self._load("auto")
        if not own.weights_form.startswith("w4"):
            return _Weights.of(self._load("w4a8-g32"))
        with contextlib.suppress(ConfigError):
            named = self._load(WeightFormat.parse(own.weights_form).name)
            if named.runner.numerics_id == own.runner.numerics_id:
                return dataclasses.replace(_Weights.of(named), is_own=True)
        return dataclasses.replace(_Weights.of(own), is_own=True)

    def _load(self, weights: str) -> LoadedModel:
        return load_model(self._config(Setting(weights)), self._loading)

    def _config(self, setting: Setting) -> ModelConfig:
        return ModelConfig(
            model=self._options.model,
            weights=setting.weights,
            kv=KVFormat.parse(setting.kv),
            threads=self._options.threads,
        )

    def _process(self, setting: Setting) -> EngineProcess:
        key = (setting.weights, setting.kv)
        if key not in self._processes:
            process = EngineProcess(self._config(setting))
            self._processes[key] = self._stack.enter_context(process)
        return self._processes[key]

    def _prune(self) -> None:
        """End the processes that no later rung compares with."""
        keep = {(s.weights, s.kv) for s in (self._base, self._current)}
        for key in [key for key in self._processes if key not in keep]:
            self._processes.pop(key).close()
            self._warm = {s for s in self._warm if (s.weights, s.kv) != key}

    def _make_workload(self, process: EngineProcess) -> Workload:
        """The largest workload of which the budget holds LEAST_ROUNDS rounds for every rung."""
        planned = _PLANNED_SHARE * self._options.budget_s
        if self._options.gate != "off":
            planned *= 1 - _CORPORA_SHARE - _CHECKS_SHARE[self._options.gate]
        settings = sum(self._num_settings(name) for name in self._names)
        allowed = planned / (LEAST_ROUNDS * settings * _COST_OF_A_SETTING)
        return fit_workload(self._text, self._speeds, process.facts["max_positions"], allowed)

    def _prepare_corpora(self) -> None:
        if self._options.gate == "off":
            return
        assert self._base_model is not None
        self._texts = corpora = load_corpora(self._options.corpora)
        context = self._context

        def encode(max_tokens: int) -> list[EncodedCorpus]:
            assert self._base_model is not None
            return encode_corpora(
                self._base_model.tokenizer,
                corpora,
                max_tokens=max_tokens,
                context=context,
                stride=context,
            )

        num_lossy = sum(name in _LOSSY for name in self._names)
        if self._options.gate == "full":
            checks_s = _CHECKS_SHARE["full"] * self._options.budget_s / max(1, num_lossy)
            self._gate_options = GateOptions(size="full", budget_s=checks_s, seed=SEED)
        max_tokens = self._options.max_tokens
        if max_tokens is None:
            least = min(_LEAST_TOKENS, context)
            sample = encode(least)
            base = new_scorer(self._base_model, context)
            begin = time.monotonic()
            measure_quality({"sample": base}, sample)
            token_s = (time.monotonic() - begin) / sum(one.num_tokens for one in sample)
            # Every rung but the first reads every token with two models and compares their logits.
            passes = 1 + _PASSES_OF_A_PAIR * num_lossy
            room = _CORPORA_SHARE * self._options.budget_s / (passes * len(corpora) * token_s)
            max_tokens = int(min(_MOST_TOKENS, max(least, room)))
            if max_tokens > context:
                max_tokens -= max_tokens % context
        self._encoded = encode(max_tokens)

    def _has_time(self, name: str) -> bool:
        """Whether a rung can begin: what reads corpora for long must end within the budget."""
        expected = self._quality_s if self._encoded and name in _LOSSY else 0.0
        return time.monotonic() + expected <= self._started + self._options.budget_s

    def _left_out(self, name: str) -> Rung:
        """A rung without figures, undecided."""
        setting, change = self._propose(name)
        weights = self._weights_of(setting)
        rung = Rung(name, change, weights.form, weights.is_exact, setting.kv, setting.draft)
        rung.gain_verdict = Verdict.UNDECIDED.value
        rung.quality_verdict = Verdict.UNDECIDED.value if self._encoded else None
        rung.reason = "undecided: not measured, the budget is spent"
        return rung

    def _measure(self, name: str) -> Rung:
        if name == "chunked-prefill":
            return self._measure_chunks()
        setting, change = self._propose(name)
        weights = self._weights_of(setting)
        rung = Rung(name, change, weights.form, weights.is_exact, setting.kv, setting.draft)
        begin = time.monotonic()
        reasons = self._judge_quality(rung, setting)
        took = rung.details["quality_seconds"] = time.monotonic() - begin
        if name == "bf16":
            self._quality_s = _PASSES_OF_A_PAIR * took
            if self._gate_options is not None:
                self._quality_s += self._gate_options.budget_s or 0.0
        self._measure_speed(rung, setting)
        self._decide(rung, reasons)
        if rung.in_recipe:
            self._current = setting
            if rung.ttft_s:
                single = self._workload.singles[0]
                self._prefill_tok_s = len(single.prompts[0]) / rung.ttft_s
        self._prune()
        return rung

    def _propose(self, name: str) -> tuple[Setting, str]:
        """The setting of a rung: the one accepted so far with one thing changed."""
        current = self._current
        if name == "bf16":
            return self._base, "baseline"
        if name == "int8-kv":
            return dataclasses.replace(current, kv="int8"), f"KV {current.kv} to int8"
        if name == "ngram":
            return dataclasses.replace(current, draft="ngram"), "n-gram speculation on"
        if name == "chunked-prefill":
            change = f"chunked prefill off to {PREFILL_CHUNK} rows"
            return dataclasses.replace(current, chunk=PREFILL_CHUNK), change
        weights = self._formats[name]
        before = self._weights_of(current).form
        own = " (the file's own grid, exact)" if weights.is_own and weights.is_exact else ""
        change = f"weights {before} to {weights.form}{own}"
        return dataclasses.replace(current, weights=weights.name), change

    def _weights_of(self, setting: Setting) -> _Weights:
        return next(w for w in self._formats.values() if w.name == setting.weights)

    @property
    def _context(self) -> int:
        assert self._base_model is not None
        return min(1024, self._base_model.runner.max_positions)

    def _judge_quality(self, rung: Rung, setting: Setting) -> list[str]:
        """Measure quality and enter it with its verdict; returns the gate's reasons.

        Speculation and chunks change no token: they keep what the accepted configuration has.
        """
        if not self._encoded:
            return []
        if rung.name not in ("bf16", *_LOSSY):
            rung.quality = self._current_quality
            rung.quality_verdict = self._current_quality_verdict
            return []
        rung.quality = self._measure_quality(rung.name, setting)
        gates = [judge_corpora(rung.quality)]
        if rung.name in _LOSSY and self._gate_options is not None:
            gates.append(self._run_gate(rung, setting, self._gate_options))
        for verdict in (Verdict.REJECT, Verdict.UNDECIDED, Verdict.PASS):
            reasons = [line for gate in gates if gate.verdict is verdict for line in gate.reasons]
            if reasons:
                rung.quality_verdict = verdict.value
                return reasons
        raise AssertionError("a gate gives reasons")

    def _measure_quality(self, name: str, setting: Setting) -> QualityReport:
        assert self._base_model is not None
        context = max(len(w.input_ids) for e in self._encoded for w in e.windows)
        base = new_scorer(self._base_model, context)
        if name == "bf16":
            report = measure_quality({name: base}, self._encoded)[name]
            return QualityReport(
                [_as_own_baseline(quality) for quality in report.corpora],
                _as_own_baseline(report.overall),
            )
        candidate = new_scorer(load_model(self._config(setting), self._loading), context)
        return measure_quality({name: candidate}, self._encoded, base)[name]

    def _run_gate(self, rung: Rung, setting: Setting, options: GateOptions) -> GateResult:
        """All checks of the gate, against the baseline."""
        from trivet.evaluate.gating import run_gate
        from trivet.evaluate.subject import LocalSubject

        assert self._base_model is not None
        candidate = load_model(self._config(setting), self._loading)
        report = run_gate(
            LocalSubject(candidate),
            LocalSubject(self._base_model),
            self._texts,
            options,
            context=self._context,
            stride=self._context,
        )
        rung.details["gate"] = {
            "votes": report.result.metrics["votes"],
            "checks": [check.as_json() for check in report.checks],
        }
        return report.result

    def _measure_speed(self, rung: Rung, setting: Setting) -> None:
        """Run the workload in turns on baseline, accepted setting and candidate."""
        competitors = list(dict.fromkeys([self._base, self._current, setting]))
        process = self._process(setting)
        rung.weight_bytes = process.facts["weight_bytes"]
        rung.kv_bytes_per_token = process.facts["kv_bytes_per_token"]
        rung.start_s = process.start_s
        for competitor in competitors:
            if competitor not in self._warm:
                job = self._job(self._workload.batch, competitor)
                self._process(competitor).call("warm_up", job=job)
                self._warm.add(competitor)
        until = self._slice_end()
        rounds: list[dict[Setting, Round]] = []
        while len(rounds) < _MOST_ROUNDS:
            begin = time.monotonic()
            shift = len(rounds) % len(competitors)
            rounds.append(self._round(competitors[shift:] + competitors[:shift]))
            if self._is_over(len(rounds), time.monotonic() - begin, until):
                break
        own = [one[setting] for one in rounds]
        for name in FIGURES:
            values = [value for r in own if (value := getattr(r, name)) is not None]
            if values:
                setattr(rung, name, statistics.median(values))
                rung.spread[name] = [min(values), max(values)]
        rung.peak_rss_bytes = max(one.peak_rss_bytes for one in own)
        rung.rounds = len(rounds)
        if setting != self._base:
            rung.before = self._figures(rounds, self._current)
            rung.baseline = self._figures(rounds, self._base)
            rung.set_gain(time_ratios(rounds, self._current, setting))
            rung.set_total(time_ratios(rounds, self._base, setting))
        if setting.draft != "off":
            plain = [one[self._current] for one in rounds]
            rung.details["identical"] = all(
                a.token_ids == b.token_ids for a, b in zip(plain, own, strict=True)
            )
            rung.details |= draft_details(own)
        if rung.name == "int8-kv":
            before = self._process(self._current).facts["kv_bytes_per_token"]
            rung.details["kv_memory_gain"] = before / process.facts["kv_bytes_per_token"]

    def _is_over(self, num_rounds: int, round_s: float, until: float) -> bool:
        """Whether another round does not fit: into the slice, or, for the first few, the budget."""
        if num_rounds < LEAST_ROUNDS:
            until = self._started + self._options.budget_s
        return time.monotonic() + round_s > until

    def _figures(self, rounds: Sequence[dict[Setting, Round]], setting: Setting) -> dict[str, Any]:
        """What a setting reached in these rounds: medians, and what it is."""
        figures: dict[str, Any] = {
            "weights": self._weights_of(setting).form,
            "kv": setting.kv,
            "draft": setting.draft,
        }
        for name in FIGURES:
            values = [getattr(one[setting], name) for one in rounds]
            known = [value for value in values if value is not None]
            figures[name] = statistics.median(known) if known else None
        return figures

    def _job(self, job: BatchJob, setting: Setting) -> dict[str, Any]:
        return dataclasses.asdict(
            dataclasses.replace(
                job, draft=setting.draft, max_prefill_chunk=setting.chunk, seed=SEED
            )
        )

    def _round(self, order: Sequence[Setting]) -> dict[Setting, Round]:
        """Every job of the workload by every setting in turn, so that a disturbance hits them alike."""
        jobs = [*self._workload.singles, self._workload.batch]
        results: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in order}
        for job in jobs:
            for setting in order:
                process = self._process(setting)
                results[setting].append(process.call("batch", job=self._job(job, setting)))
        return {setting: Round(found[:-1], found[-1]) for setting, found in results.items()}

    def _measure_chunks(self) -> Rung:
        """Chunked prefill off and on under the mixed load, in turns, on the accepted setting."""
        setting = self._current
        weights = self._weights_of(setting)
        chunked, change = self._propose("chunked-prefill")
        rung = Rung(
            "chunked-prefill",
            change,
            weights.form,
            weights.is_exact,
            setting.kv,
            setting.draft,
            gain_of=CHAT_GAP,
        )
        self._judge_quality(rung, setting)
        process = self._process(setting)
        room = process.facts["max_positions"]
        until = self._slice_end()
        left = max(until - time.monotonic(), 0.0)
        duration = min(_MOST_MIXED_S, max(_LEAST_MIXED_S, left / (2 * (LEAST_ROUNDS + 0.5))))
        # Long prompts keep the engine busy for about a third of the time.
        every_s = duration / 4
        affordable = int(every_s / 3 * self._prefill_tok_s)
        long_tokens = max(1, min(1024, room - 8, max(2 * PREFILL_CHUNK, affordable)))
        chat_tokens = max(1, min(32, room - 32))
        load = MixedLoad(
            streams=3,
            long_every_s=every_s,
            duration_s=duration,
            chat_output_tokens=max(1, min(32, room - chat_tokens)),
        )
        chats = self._text.prompts(16, chat_tokens, salt=2)
        longs = self._text.prompts(8, long_tokens, salt=3)
        short = dataclasses.replace(load, duration_s=0.5, long_every_s=0.5)
        self._run_mixed(setting, short, chats, longs, None)  # touches the pages that both will use
        rounds: list[dict[str, dict[str, Any]]] = []
        while len(rounds) < _MOST_ROUNDS:
            begin = time.monotonic()
            one: dict[str, dict[str, Any]] = {}
            for label, chunk in (("off", None), ("on", PREFILL_CHUNK))[
                :: 1 - 2 * (len(rounds) % 2)
            ]:
                one[label] = self._run_mixed(setting, load, chats, longs, chunk)
            rounds.append(one)
            if self._is_over(len(rounds), time.monotonic() - begin, until):
                break
        on = [one["on"] for one in rounds]
        rung.peak_rss_bytes = max(one["peak_rss_bytes"] for one in on)
        rung.weight_bytes = process.facts["weight_bytes"]
        rung.kv_bytes_per_token = process.facts["kv_bytes_per_token"]
        rung.rounds = len(rounds)
        ratios = [
            one["off"]["chat_gap_p99_s"] / one["on"]["chat_gap_p99_s"]
            for one in rounds
            if one["off"]["chat_gap_p99_s"] and one["on"]["chat_gap_p99_s"]
        ]
        if ratios:
            rung.set_gain(ratios)
        names = ("ttft_s", "tpot_s", "chat_gap_p99_s", "long_ttft_s", "out_tok_s")
        for label in ("off", "on"):
            rung.details[label] = {
                name: _median_of([one[label] for one in rounds], name) for name in names
            }
        off_figures, on_figures = rung.details["off"], rung.details["on"]
        rung.ttft_s, rung.tpot_s = on_figures["ttft_s"], on_figures["tpot_s"]
        rung.out_tok_s = on_figures["out_tok_s"]
        rung.before = {
            "weights": weights.form,
            "kv": setting.kv,
            "draft": setting.draft,
            **{name: off_figures.get(name) for name in FIGURES},
        }
        rung.details["load"] = dataclasses.asdict(load) | {
            "chat_prompt_tokens": chat_tokens,
            "long_prompt_tokens": long_tokens,
        }
        self._decide(rung, [])
        if rung.in_recipe:
            self._current = chunked
        return rung

    def _run_mixed(
        self,
        setting: Setting,
        load: MixedLoad,
        chats: list[list[int]],
        longs: list[list[int]],
        chunk: int | None,
    ) -> dict[str, Any]:
        result: dict[str, Any] = self._process(setting).call(
            "mixed",
            load=dataclasses.asdict(load),
            chats=chats,
            longs=longs,
            max_prefill_chunk=chunk,
            draft=setting.draft,
        )
        return result

    def _decide(self, rung: Rung, reasons: Sequence[str]) -> None:
        """Whether the rung enters the recipe, and why."""
        decide(rung, reasons)
        if rung.in_recipe:
            self._current_quality = rung.quality
            self._current_quality_verdict = rung.quality_verdict

    def _num_settings(self, name: str) -> int:
        """How many settings a round of a rung runs at most: what its time is in proportion to."""
        if name == "chunked-prefill":
            return 2
        return min(_MOST_SETTINGS, 1 + self._names.index(name))

    def _slice_end(self) -> float:
        """When this rung should be done: its share of what is left, less the quality of later rungs."""
        now = time.monotonic()
        left = self._started + _PLANNED_SHARE * self._options.budget_s - now
        name, *later = self._names[self._done :]
        if self._encoded:
            left -= self._quality_s * sum(one in _LOSSY for one in later)
        own = self._num_settings(name)
        return now + max(0.0, left) * own / (own + sum(map(self._num_settings, later)))

    def _advance(self, label: str) -> None:
        self._report(label, self._done / len(self._names))

    def _make_recipe(
        self,
        rungs: Sequence[Rung],
        run: dict[str, Any],
        machine: dict[str, Any],
        corpora: list[dict[str, Any]],
    ) -> Recipe:
        model = self._options.model
        path = Path(model).expanduser()
        if model != DEMO and path.exists():
            model = str(path.resolve())  # the recipe is used from any folder
        setting = self._current
        weights = self._weights_of(setting)
        outcomes = {rung.name: rung.outcome for rung in rungs}
        chunks = outcomes.get("chunked-prefill", "undecided")  # which keeps the default of verbs
        evidence = {
            "run": run | {"weights": weights.form, "numerics_id": weights.numerics_id},
            "machine": {key: value for key, value in machine.items() if value is not None},
            "corpora": corpora,
            "rungs": [_evidence(rung) for rung in rungs],
        }
        return Recipe(
            model=model,
            weights=setting.weights if setting.weights == "auto" else weights.form,
            kv=setting.kv,
            draft=setting.draft if "ngram" in self._names else None,
            draft_tokens=BatchJob.draft_tokens if setting.draft != "off" else None,
            max_prefill_chunk={"yes": setting.chunk, "no": 0}.get(chunks),
            evidence=evidence,
        )


def decide(rung: Rung, reasons: Sequence[str]) -> None:
    """Enter the verdict on the gain, and whether the rung is in the recipe and why.

    reasons  of the gate, where it does not pass
    """
    if rung.name == "bf16":
        rung.in_recipe, rung.reason = True, "the baseline"
        return
    is_for_memory = rung.name == "int8-kv"
    if is_for_memory:
        verdict, reason = judge_gain(rung.ratios, LEAST_KV_GAIN)
    else:
        verdict, reason = judge_gain(rung.ratios, LEAST_GAIN, 1.0)
    if rung.details.get("identical") is False:
        verdict, reason = Verdict.REJECT, "the text differs from the one without speculation"
    rung.gain_verdict = verdict.value
    if verdict is Verdict.PASS and is_for_memory:
        smaller = rung.details["kv_memory_gain"]
        reason = f"KV takes x{smaller:.2f} less memory; speed {describe_gain(rung.ratios)}"
    if rung.quality_verdict not in (None, Verdict.PASS.value):
        reason = "; ".join(reasons)
    rung.in_recipe = verdict is Verdict.PASS and rung.quality_verdict in (None, verdict.value)
    rung.reason = reason if rung.outcome != "undecided" else f"undecided: {reason}"


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights that a rung runs.

    name    as `ModelConfig` takes it     form    the full form that runs
    is_own  the file's own grid           is_exact  every weight is held exactly as the file has it
    """

    name: str
    form: str
    is_exact: bool
    numerics_id: str
    is_own: bool = False

    @classmethod
    def of(cls, model: LoadedModel) -> _Weights:
        is_exact = all(tensor.exact for tensor in model.packed.report)
        return cls(model.config.weights, model.weights_form, is_exact, model.runner.numerics_id)


def _as_own_baseline(quality: Quality) -> Quality:
    return dataclasses.replace(
        quality, baseline_perplexity=quality.perplexity, mean_kl=0.0, top1_agreement=1.0
    )


def _median_of(results: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [one[name] for one in results if one[name] is not None]
    return statistics.median(known) if known else None


def _evidence(rung: Rung) -> dict[str, Any]:
    """A rung in the recipe file, without what is unknown."""
    overall = rung.quality.overall if rung.quality is not None else None
    fields = {
        "name": rung.name,
        "change": rung.change,
        "weights": rung.weights,
        "in_recipe": rung.in_recipe,
        "verdict": rung.verdict,
        "reason": rung.reason,
        "gain_of": rung.gain_of if rung.ratios else None,
        "gain_over_previous": rung.gain_over_previous,
        "gain_over_baseline": rung.gain_over_baseline,
        "ratios": rung.ratios or None,
        "rounds": rung.rounds,
        "out_tok_s": rung.out_tok_s,
        "delta_ppl": overall.delta_ppl if overall is not None else None,
        "mean_kl": overall.mean_kl if overall is not None else None,
    }
    return {name: value for name, value in fields.items() if value is not None}
