"""The ladder: technique after technique, one variable at a time, with quality beside speed.

Every rung changes one thing of the configuration accepted so far and is measured against it and
against the baseline in turns within the same minutes: the configurations stay alive in processes of
their own and run the same workload round by round. A rung enters the recipe only when perplexity rises
by at most 0.5 on every corpus and it gains what it is there for.

The workload of one round is one request of prose, one of code, and a batch; its gain is the ratio of
the wall times for the same work. Speculation runs the same workload; chunked prefill has a load of its
own, chats with long prompts arriving, and its gain is the ratio of the 99th percentile of the time
between two tokens of a chat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trivet.bench.machine import describe_machine
from trivet.bench.measure import MixedLoad
from trivet.bench.process import EngineProcess
from trivet.bench.prompts import NaturalText
from trivet.bench.rung import RUNGS, Ladder, LadderOptions, Rung, Setting
from trivet.bench.session import BatchJob
from trivet.config import DEMO, ModelConfig
from trivet.evaluate import (
    EncodedCorpus,
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
_QUALITY_SHARE = 0.35  # of the budget goes to quality
_LEAST_TOKENS, _MOST_TOKENS = 128, 4096  # scored of each corpus when the budget decides
_PASSES_OF_A_PAIR = 2.0  # what comparing a model with the baseline costs, in passes of one model
_PLANNED_SHARE = 0.92  # the rest is for starts that take longer than expected
_MIN_ROUNDS, _MAX_ROUNDS = 2, 5
_LEAST_MIXED_S = 4.0  # of one run of the mixed load
_MIN_GAIN = 1.02  # and more than half of the rounds above 1
_MIN_KV_GAIN = 0.95  # int8 KV is there for memory: it may cost this much speed
_SIZES = ((256, 64, 8, 128, 48), (192, 48, 4, 96, 32), (96, 24, 4, 48, 16), (32, 12, 2, 24, 8))

Advance = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of one round: single requests one after the other, then a batch."""

    singles: list[BatchJob]
    batch: BatchJob

    def describe(self) -> dict[str, Any]:
        single = self.singles[0]
        return {
            "single_prompt_tokens": len(single.prompts[0]),
            "single_output_tokens": single.output_tokens,
            "batch": self.batch.batch,
            "batch_prompt_tokens": len(self.batch.prompts[0]),
            "batch_output_tokens": self.batch.output_tokens,
        }


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
        self._formats: dict[str, tuple[str, str, bool]] = {}
        self._encoded: list[EncodedCorpus] = []
        self._base_model: LoadedModel | None = None
        self._base = Setting("bf16")
        self._current = self._base
        self._current_quality: QualityReport | None = None
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
        self._formats = self._pack()
        self._started = time.monotonic()
        self._advance("baseline")
        process = self._process(self._base)
        assert self._base_model is not None
        self._text = NaturalText(self._base_model.tokenizer)
        self._speeds = _calibrate(process, self._text)
        self._workload = self._make_workload(process)
        self._prepare_corpora()
        rungs: list[Rung] = []
        for name in self._names:
            self._advance(name)
            begin = time.monotonic()
            rung = self._measure(name)
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
        recipe = self._make_recipe(rungs, machine, corpora)
        return Ladder(
            model=options.model,
            rungs=rungs,
            recipe=recipe,
            machine=machine,
            corpora=corpora,
            workload=self._workload.describe(),
            seconds=time.monotonic() - self._started,
        )

    def _pack(self) -> dict[str, tuple[str, str, bool]]:
        """Make the packed caches; returns rung -> (weights setting, full form, is exact)."""
        formats: dict[str, tuple[str, str, bool]] = {}
        for name in self._names:
            if name == "bf16":
                self._base_model = self._load("bf16")
                formats[name] = ("bf16", *_form(self._base_model))
            elif name == "w8a8":
                formats[name] = ("w8a8", *_form(self._load("w8a8")))
            elif name == "w4":
                own = self._load("auto")
                form, is_exact = _form(own)
                if form.startswith("w4"):
                    formats[name] = ("auto", form, is_exact)
                else:
                    formats[name] = ("w4a8-g32", *_form(self._load("w4a8-g32")))
        return formats

    def _load(self, weights: str) -> LoadedModel:
        return load_model(self._config(Setting(weights)), self._loading)

    def _config(self, setting: Setting) -> ModelConfig:
        from trivet.config import KVFormat

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

    def _make_workload(self, process: EngineProcess) -> Workload:
        """The largest workload of which one baseline round takes at most 3 % of the budget."""
        room = process.facts["max_positions"]
        allowed = 0.03 * self._options.budget_s
        for single_in, single_out, batch, batch_in, batch_out in _SIZES:
            seconds = (2 * single_in + batch * batch_in) / self._speeds.prefill_tok_s + (
                2 * single_out + 2 * batch_out
            ) * self._speeds.tpot_s
            fits = max(single_in + single_out, batch_in + batch_out) <= room
            if fits and (seconds <= allowed or (single_in, batch) == (32, 2)):
                break
        else:
            single_in = batch_in = max(1, room // 2)
            single_out = batch_out = max(1, room - single_in)
        singles = self._text.prompts(2, single_in)
        many = self._text.prompts(batch, batch_in, salt=1)
        return Workload(
            [BatchJob(prompts=[one], batch=1, output_tokens=single_out) for one in singles],
            BatchJob(prompts=many, batch=batch, output_tokens=batch_out),
        )

    def _prepare_corpora(self) -> None:
        if self._options.gate == "off":
            return
        assert self._base_model is not None
        corpora = load_corpora(self._options.corpora)
        context = min(1024, self._base_model.runner.max_positions)

        def encode(max_tokens: int) -> list[EncodedCorpus]:
            assert self._base_model is not None
            return encode_corpora(
                self._base_model.tokenizer,
                corpora,
                max_tokens=max_tokens,
                context=context,
                stride=context,
            )

        max_tokens = self._options.max_tokens
        if max_tokens is None:
            least = min(_LEAST_TOKENS, context)
            sample = encode(least)
            base = new_scorer(self._base_model, context)
            begin = time.monotonic()
            measure_quality({"sample": base}, sample)
            token_s = (time.monotonic() - begin) / sum(one.num_tokens for one in sample)
            # Every rung but the first reads every token with two models and compares their logits.
            passes = 1 + _PASSES_OF_A_PAIR * sum(
                n in ("w8a8", "w4", "int8-kv") for n in self._names
            )
            room = _QUALITY_SHARE * self._options.budget_s / (passes * len(corpora) * token_s)
            max_tokens = int(min(_MOST_TOKENS, max(least, room)))
            if max_tokens > context:
                max_tokens -= max_tokens % context
        self._encoded = encode(max_tokens)

    def _measure(self, name: str) -> Rung:
        if name == "chunked-prefill":
            return self._measure_chunks()
        setting, change = self._propose(name)
        form, is_exact = self._form_of(setting)
        rung = Rung(name, change, form, is_exact, setting.kv, setting.draft)
        begin = time.monotonic()
        rung.quality = self._quality(setting, name)
        rung.details["quality_seconds"] = time.monotonic() - begin
        gate = None
        if rung.quality is not None:
            gate = judge_corpora(rung.quality)
            rung.verdict = gate.verdict.value
        self._measure_speed(rung, setting)
        self._decide(rung, gate.reasons if gate is not None else [])
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
        weights, form, is_exact = self._formats[name]
        before, _ = self._form_of(current)
        own = " (the file's own grid, exact)" if weights == "auto" and is_exact else ""
        return dataclasses.replace(current, weights=weights), f"weights {before} to {form}{own}"

    def _form_of(self, setting: Setting) -> tuple[str, bool]:
        for weights, form, is_exact in self._formats.values():
            if weights == setting.weights:
                return form, is_exact
        raise AssertionError(f"{setting.weights} was not packed")

    def _quality(self, setting: Setting, name: str) -> QualityReport | None:
        """Quality of a setting; speculation changes no token and keeps that of the rung before."""
        if not self._encoded:
            return None
        assert self._base_model is not None
        context = max(len(w.input_ids) for e in self._encoded for w in e.windows)
        base = new_scorer(self._base_model, context)
        if name == "bf16":
            report = measure_quality({name: base}, self._encoded)[name]
            return QualityReport(
                [_as_own_baseline(quality) for quality in report.corpora],
                _as_own_baseline(report.overall),
            )
        if name == "ngram":
            return self._current_quality
        candidate = new_scorer(load_model(self._config(setting), self._loading), context)
        return measure_quality({name: candidate}, self._encoded, base)[name]

    def _measure_speed(self, rung: Rung, setting: Setting) -> None:
        """Run the workload in turns on baseline, accepted setting and candidate."""
        competitors = list(dict.fromkeys([self._base, self._current, setting]))
        process = self._process(setting)
        rung.weight_bytes = process.facts["weight_bytes"]
        rung.kv_bytes_per_token = process.facts["kv_bytes_per_token"]
        rung.start_s = process.start_s
        for competitor in competitors:
            job = self._job(self._workload.batch, competitor)
            self._process(competitor).call("warm_up", job=job)
        until = self._slice_end()
        rounds: list[dict[Setting, _Round]] = []
        while len(rounds) < _MAX_ROUNDS:
            begin = time.monotonic()
            shift = len(rounds) % len(competitors)
            order = competitors[shift:] + competitors[:shift]
            rounds.append({competitor: self._round(competitor) for competitor in order})
            took = time.monotonic() - begin
            if len(rounds) >= _MIN_ROUNDS and time.monotonic() + took > until:
                break
        own = [one[setting] for one in rounds]
        for field in ("ttft_s", "tpot_s", "out_tok_s"):
            values = [value for r in own if (value := getattr(r, field)) is not None]
            if values:
                setattr(rung, field, statistics.median(values))
                rung.spread[field] = [min(values), max(values)]
        rung.peak_rss_bytes = max(one.peak_rss_bytes for one in own)
        rung.rounds = len(rounds)
        if setting != self._base:
            rung.set_gain(_ratios(rounds, self._current, setting))
            rung.gain_over_baseline = statistics.median(_ratios(rounds, self._base, setting))
        if setting.draft != "off":
            plain = [one[self._current] for one in rounds]
            rung.details["identical"] = all(
                a.token_ids == b.token_ids for a, b in zip(plain, own, strict=True)
            )
            rung.details |= _draft_details(own)

    def _job(self, job: BatchJob, setting: Setting) -> dict[str, Any]:
        return dataclasses.asdict(
            dataclasses.replace(job, draft=setting.draft, max_prefill_chunk=setting.chunk)
        )

    def _round(self, setting: Setting) -> _Round:
        process = self._process(setting)
        singles = [
            process.call("batch", job=self._job(job, setting)) for job in self._workload.singles
        ]
        batch = process.call("batch", job=self._job(self._workload.batch, setting))
        return _Round(singles, batch)

    def _measure_chunks(self) -> Rung:
        """Chunked prefill off and on under the mixed load, in turns, on the accepted setting."""
        setting = self._current
        form, is_exact = self._form_of(setting)
        rung = Rung(
            "chunked-prefill",
            f"chunked prefill off to {PREFILL_CHUNK} rows",
            form,
            is_exact,
            setting.kv,
            setting.draft,
            gain_metric="99th percentile of the time between two tokens of a chat",
            quality=self._current_quality,
        )
        if rung.quality is not None:
            rung.verdict = judge_corpora(rung.quality).verdict.value
        process = self._process(setting)
        room = process.facts["max_positions"]
        until = self._slice_end()
        left = max(until - time.monotonic(), 0.0)
        duration = min(12.0, max(_LEAST_MIXED_S, left / (2 * (_MIN_ROUNDS + 1))))
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
        rounds: list[dict[str, dict[str, Any]]] = []
        while len(rounds) < _MAX_ROUNDS:
            one: dict[str, dict[str, Any]] = {}
            for label, chunk in (("off", None), ("on", PREFILL_CHUNK))[
                :: 1 - 2 * (len(rounds) % 2)
            ]:
                one[label] = process.call(
                    "mixed",
                    load=dataclasses.asdict(load),
                    chats=chats,
                    longs=longs,
                    max_prefill_chunk=chunk,
                )
            rounds.append(one)
            if len(rounds) >= _MIN_ROUNDS and time.monotonic() + 2 * duration > until:
                break
        on = [one["on"] for one in rounds]
        rung.ttft_s = _median_of(on, "ttft_s")
        rung.tpot_s = _median_of(on, "tpot_s")
        rung.out_tok_s = _median_of(on, "out_tok_s")
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
        rung.details["load"] = dataclasses.asdict(load) | {
            "chat_prompt_tokens": chat_tokens,
            "long_prompt_tokens": long_tokens,
        }
        self._decide(rung, [])
        if rung.in_recipe:
            self._current = dataclasses.replace(setting, chunk=PREFILL_CHUNK)
        return rung

    def _decide(self, rung: Rung, reasons: Sequence[str]) -> None:
        """Whether the rung enters the recipe, and why."""
        gain = rung.gain_over_previous
        if rung.name == "bf16":
            rung.in_recipe, rung.reason = True, "the baseline"
        elif rung.verdict not in (None, Verdict.PASS.value):
            rung.reason = "; ".join(reasons)
        elif rung.details.get("identical") is False:
            rung.reason = "the text differs from the one without speculation"
        elif gain is None:
            rung.reason = "no gain could be measured"
        elif rung.name == "int8-kv" and gain >= _MIN_KV_GAIN:
            rung.in_recipe, rung.reason = True, "KV takes about half the memory"
        elif gain < _MIN_GAIN or 2 * sum(ratio > 1 for ratio in rung.ratios) <= len(rung.ratios):
            rung.reason = f"does not pay here: x{gain:.2f}"
        else:
            rung.in_recipe, rung.reason = True, f"x{gain:.2f}"
        if rung.in_recipe and rung.quality is not None:
            self._current_quality = rung.quality

    def _slice_end(self) -> float:
        """When this rung should be done: an equal share of what is left."""
        now = time.monotonic()
        left = self._started + _PLANNED_SHARE * self._options.budget_s - now
        later = len(self._names) - self._done - 1
        quality = _QUALITY_SHARE if self._encoded else 0.0
        return now + max(0.0, left) * (1 - quality * (later > 0)) / (later + 1)

    def _advance(self, label: str) -> None:
        self._report(label, self._done / len(self._names))

    def _make_recipe(
        self, rungs: Sequence[Rung], machine: dict[str, Any], corpora: list[dict[str, Any]]
    ) -> Recipe:
        model = self._options.model
        path = Path(model).expanduser()
        if model != DEMO and path.exists():
            model = str(path.resolve())  # the recipe is used from any folder
        setting = self._current
        evidence = {
            "machine": {key: value for key, value in machine.items() if value is not None},
            "corpora": corpora,
            "rungs": [_evidence(rung) for rung in rungs],
        }
        return Recipe(
            model=model,
            weights=setting.weights,
            kv=setting.kv,
            draft=setting.draft if "ngram" in self._names else None,
            max_prefill_chunk=(setting.chunk or 0) if "chunked-prefill" in self._names else None,
            evidence=evidence,
        )


@dataclasses.dataclass(frozen=True)
class _Round:
    """One round of one setting: the singles' results, and the batch's."""

    singles: list[dict[str, Any]]
    batch: dict[str, Any]

    @property
    def ttft_s(self) -> float:
        return statistics.fmean(single["ttft_s"] for single in self.singles)

    @property
    def tpot_s(self) -> float | None:
        known = [single["tpot_s"] for single in self.singles if single["tpot_s"] is not None]
        return statistics.fmean(known) if known else None

    @property
    def out_tok_s(self) -> float:
        return float(self.batch["out_tok_s"])

    @property
    def wall_s(self) -> float:
        return float(sum(one["wall_s"] for one in [*self.singles, self.batch]))

    @property
    def peak_rss_bytes(self) -> int:
        return max(int(one["peak_rss_bytes"]) for one in [*self.singles, self.batch])

    @property
    def token_ids(self) -> list[list[list[int]]]:
        return [one["token_ids"] for one in [*self.singles, self.batch]]


@dataclasses.dataclass(frozen=True)
class _Speeds:
    """First impression of the baseline, to size the work."""

    prefill_tok_s: float
    tpot_s: float


def _calibrate(process: EngineProcess, text: NaturalText) -> _Speeds:
    room = process.facts["max_positions"]
    num_tokens = max(1, min(64, room - 8))
    prompts = text.prompts(1, num_tokens)
    job = BatchJob(prompts=prompts, batch=1, output_tokens=max(1, min(8, room - num_tokens)))
    process.call("warm_up", job=dataclasses.asdict(job))
    run = process.call("batch", job=dataclasses.asdict(job))
    return _Speeds(run["prefill_tok_s"], run["tpot_s"] or 1 / run["prefill_tok_s"])


def _form(model: LoadedModel) -> tuple[str, bool]:
    is_exact = all(tensor.exact for tensor in model.packed.report)
    return model.weights_form, is_exact


def _as_own_baseline(quality: Quality) -> Quality:
    return dataclasses.replace(
        quality, baseline_perplexity=quality.perplexity, mean_kl=0.0, top1_agreement=1.0
    )


def _ratios(
    rounds: Sequence[dict[Setting, _Round]], before: Setting, after: Setting
) -> list[float]:
    """Wall time before over wall time after, round by round."""
    return [one[before].wall_s / one[after].wall_s for one in rounds]


def _draft_details(rounds: Sequence[_Round]) -> dict[str, Any]:
    """Acceptance over the last round's three runs (every round drafts the same)."""
    drafts = [one["draft"] for one in [*rounds[-1].singles, rounds[-1].batch]]
    drafted = sum(draft["draft_tokens"] for draft in drafts)
    accepted = sum(draft["accepted_tokens"] for draft in drafts)
    return {
        "drafter": drafts[0]["drafter"],
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "single_alpha": [draft["alpha"] for draft in drafts[:-1]],
        "batch_alpha": drafts[-1]["alpha"],
    }


def _median_of(results: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [one[name] for one in results if one[name] is not None]
    return statistics.median(known) if known else None


def _evidence(rung: Rung) -> dict[str, Any]:
    """A rung in the recipe file: what TOML can hold, without what is unknown."""
    overall = rung.quality.overall if rung.quality is not None else None
    fields = {
        "name": rung.name,
        "change": rung.change,
        "in_recipe": rung.in_recipe,
        "reason": rung.reason,
        "gain_over_previous": rung.gain_over_previous,
        "gain_over_baseline": rung.gain_over_baseline,
        "out_tok_s": rung.out_tok_s,
        "delta_ppl": overall.delta_ppl if overall is not None else None,
        "mean_kl": overall.mean_kl if overall is not None else None,
    }
    return {name: value for name, value in fields.items() if value is not None}
