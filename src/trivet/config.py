"""Settings as frozen dataclasses, one per part, composed and never inherited.

Each checks itself and raises ConfigError with the field, the value and what is allowed. The formats
of weights and KV are parsed here because every package names them.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from trivet.errors import ConfigError

DEMO = "demo"  # what the demo model is called; reserved
PAGE_TOKENS = 32  # tokens of one KV page; part of the numerics contract (key blocks of 32)
SPAN_TOKENS = 256  # keys of one attention span; part of the numerics contract

_GROUPED = re.compile(r"w(4|8)a(8|16)-(?:g(16|32|64|128)|row)(?:-(zp|min))?\Z")
_FP8 = re.compile(r"fp8-(?:g(16|32|64|128)|row)\Z")
_ROWS = re.compile(
    r"w8a8(?:\+(?P<rule>hadamard64|row|static))?(?:\+outliers(?P<outliers>\d{1,3}))?\Z"
)
AUTO = "auto"  # the file's own grids; 16-bit embedding and head of a quantized model in 8 bits
STORED = "stored"  # the file's own grids, embedding and head as they are too
_WEIGHTS_ALLOWED = (
    "auto, stored, bf16, w8a8, w8a8+row, w8a8+static, w8a8[+hadamard64]+outliersM, w8a8-gN[-min],"
    " w4a8-gN[-zp|-min], w4a8-row[-zp|-min], w4a16 like w4a8, fp8-gN, fp8-row,"
    " N in 16 32 64 128, M from 1 to 256"
)
MAX_OUTLIERS = 256  # columns of an input that can be kept in bf16


class Scheme(enum.StrEnum):
    """How codes map to weights: sym s*q, zp s*(q-z), min s*q+m, fp8 s*e4m3(q)."""

    SYM = "sym"
    ZP = "zp"
    MIN = "min"
    FP8 = "fp8"


class RowRule(enum.StrEnum):
    """How activations become int8 beside whole-row int8 weights.

    hadamard64  weights and activations through a block Hadamard, then one scale per row of activations
    row         one scale per row as it comes
    static      one stored scale for every row
    """

    HADAMARD = "hadamard64"
    ROW = "row"
    STATIC = "static"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A weight format: code bits, group size along K (None: the whole row) and scheme.

    `parse` accepts the names of the command line: ``bf16``, ``w8a8``, ``w8a8-g32``, ``w8a8-g32-min``,
    ``w4a8-g32``, ``w4a8-g32-zp``, ``w4a8-g32-min``, groups 16, 32, 64, 128, and of 4 bits ``w4a8-row``
    with the same endings. ``w4a16`` in place of ``w4a8`` multiplies with bf16 activations, and so do
    ``fp8-g128`` and ``fp8-row``, whose codes are e4m3.

    Whole-row int8 has a rule for its activations: ``w8a8`` is ``w8a8+hadamard64``; ``w8a8+row`` and
    ``w8a8+static`` are the others. ``+outliersM`` takes M columns of the input out of the row (so that
    they do not set its scale) and multiplies them in bf16: ``w8a8+outliers32`` with the rule ``row``,
    ``w8a8+hadamard64+outliers32``.
    """

    bits: int
    group_size: int | None = None
    scheme: Scheme = Scheme.SYM
    activation_bits: int = 8  # of 4-bit weights: 8 or 16; of fp8 16; the others have one choice
    rule: RowRule = RowRule.HADAMARD  # of whole-row int8
    outliers: int = 0  # of whole-row int8: columns multiplied in bf16

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        if name == "bf16":
            return cls(16)
        rows = _ROWS.match(name)
        if rows:
            count = int(rows["outliers"] or 0)
            rule = rows["rule"] or (RowRule.ROW if count else RowRule.HADAMARD)
            form = cls(8, rule=RowRule(rule), outliers=count)
            has_count = rows["outliers"] is not None
            if not has_count or (1 <= count <= MAX_OUTLIERS and rule != RowRule.STATIC):
                return form
        match = _FP8.match(name)
        if match:
            return cls(8, int(match[1]) if match[1] else None, Scheme.FP8, 16)
        match = _GROUPED.match(name)
        if match:
            bits, activation_bits, group, ending = match.groups()
            form = cls(
                int(bits),
                int(group) if group else None,
                Scheme(ending) if ending else Scheme.SYM,
                int(activation_bits),
            )
            if form.bits == 4 or (group and ending != "zp" and activation_bits == "8"):
                return form
        raise ConfigError("weights", name, _WEIGHTS_ALLOWED)

    @property
    def name(self) -> str:
        if self.bits == 16:
            return "bf16"
        if self.is_row:
            ending = f"+outliers{self.outliers}" if self.outliers else ""
            is_implied = self.rule is (RowRule.ROW if self.outliers else RowRule.HADAMARD)
            return "w8a8" + ("" if is_implied else f"+{self.rule}") + ending
        group = "row" if self.group_size is None else f"g{self.group_size}"
        if self.scheme is Scheme.FP8:
            return f"fp8-{group}"
        suffix = "" if self.scheme is Scheme.SYM else f"-{self.scheme.value}"
        return f"w{self.bits}a{self.activation_bits}-{group}{suffix}"

    @property
    def is_row(self) -> bool:
        """Whether it is whole-row int8: one scale for all columns, and a rule for activations."""
        return self.bits == 8 and self.group_size is None and self.scheme is not Scheme.FP8

    @property
    def is_rotated(self) -> bool:
        """Whether the columns are rotated by the block Hadamard: whole-row int8 with that rule."""
        return self.is_row and self.rule is RowRule.HADAMARD

    @property
    def full_form(self) -> str:
        """The name with the activation rule: ``w8a8`` rotates by a 64-wide block Hadamard."""
        return "w8a8+hadamard64" if self.name == "w8a8" else self.name


class KVFormat(enum.StrEnum):
    """Format of the KV pages. All but bf16 have one fp32 scale per token and head for K and for V.

    fp8 is e4m3. int4 rotates K (and the query) by a block Hadamard. ``+first`` keeps the first token of
    a request, on which attention leans most, in bf16.
    """

    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"
    INT8_FIRST = "int8+first"
    FP8_FIRST = "fp8+first"
    INT4_FIRST = "int4+first"

    @property
    def codes(self) -> str:
        """``bf16``, ``int8``, ``fp8`` or ``int4``."""
        return self.value.removesuffix("+first")

    @property
    def code_bits(self) -> int:
        return {"bf16": 16, "int8": 8, "fp8": 8, "int4": 4}[self.codes]

    @property
    def keeps_first(self) -> bool:
        """Whether the first token stays in bf16 beside its page."""
        return self.value.endswith("+first")

    @property
    def rotates_k(self) -> bool:
        return self.codes == "int4"

    @classmethod
    def parse(cls, name: str) -> KVFormat:
        try:
            return cls(name)
        except ValueError:
            raise ConfigError("kv", name, ", ".join(cls)) from None


_MAX_INTEGER = (1 << 62) - 1  # what a frame to a worker can carry, with room for sums


def _check_integer(
    field: str, value: object, low: int, high: int | None = None, *, low_means: str = ""
) -> None:
    top = _MAX_INTEGER if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= top:
        is_bounded = high is not None or (isinstance(value, int) and value > top)
        allowed = f"from {low}{low_means} to {top}" if is_bounded else f">= {low}"
        raise ConfigError(field, value, f"an integer {allowed}")


def _check_limits(config: EngineConfig | ServerConfig) -> None:
    """The limits that a server is given and its engines keep."""
    _check_integer("max_num_seqs", config.max_num_seqs, 1, 4096)
    _check_integer("max_step_tokens", config.max_step_tokens, 1, 65536)
    if config.max_prefill_chunk is not None:
        whole = " (whole prompts)"
        _check_integer("max_prefill_chunk", config.max_prefill_chunk, 0, 65536, low_means=whole)
    _check_integer("max_waiting", config.max_waiting, 0)
    _check_integer("draft_tokens", config.draft_tokens, 1, 32)


def _check_characters(field: str, value: str | None, shown: str | None = None) -> None:
    """A text that is sent as UTF-8, and not an empty one. shown: what an error says it was."""
    if value is None:
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(field, shown or value, "UTF-8") from None
    if not value:
        raise ConfigError(field, value, "a text that is not empty")


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(field, value, "a text")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model in which form. ``weights`` is a WeightFormat name, ``auto`` or ``stored``."""

    model: str
    weights: str = AUTO
    kv: KVFormat = KVFormat.BF16
    threads: int | None = None  # None: the cgroup's quota and the affinity mask
    max_model_len: int | None = None  # None: the model's own context

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        _check_text("weights", self.weights)
        own_or_format(self.weights)
        if self.threads is not None:
            _check_integer("threads", self.threads, 1, 1024)
        if self.max_model_len is not None:
            _check_integer("max_model_len", self.max_model_len, 1)


def own_or_format(weights: str) -> WeightFormat | None:
    """The format that a name of weights asks for; None: the file's own (``auto``, ``stored``).

    Raises ConfigError: it is no name of weights.
    """
    return None if weights in (AUTO, STORED) else WeightFormat.parse(weights)


def is_url(model: str) -> bool:
    """Whether a model's name is the address of a server."""
    return model.startswith(("http://", "https://"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """A model behind a URL.

    model    address of an OpenAI-compatible server, with or without ``/v1``; ``#NAME`` at its end says
             which of its models, where there are several
    api_key  bearer key that it wants
    """

    model: str
    api_key: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not is_url(self.model):
            raise ConfigError("model", self.model, "a URL: http://HOST:PORT or https://HOST")

    @property
    def base_url(self) -> str:
        """The address that paths are put after."""
        return self.model.partition("#")[0].rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def model_name(self) -> str:
        """Which of the server's models; empty: its only one."""
        return self.model.partition("#")[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.

    max_model_len      tokens of one request, prompt and output together
    max_num_seqs       requests that run at the same time
    max_step_tokens    rows of one step (token budget)
    max_prefill_chunk  rows of one request's prefill in one step; None or 0: whole prompts (no
                       chunking), and reads as None
    max_waiting        queue length beyond which admission answers 429
    draft              ``off`` or ``ngram``
    draft_tokens       most draft tokens per request and step
    """

    max_model_len: int
    num_pages: int
    max_num_seqs: int = 32
    max_step_tokens: int = 512
    max_prefill_chunk: int | None = 256
    max_waiting: int = 1024
    prefix_cache: bool = True
    draft: str = "off"
    draft_tokens: int = 4

    def __post_init__(self) -> None:
        _check_integer("max_model_len", self.max_model_len, 1)
        _check_integer("num_pages", self.num_pages, 1)
        _check_limits(self)
        if self.max_prefill_chunk == 0:
            object.__setattr__(self, "max_prefill_chunk", None)
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError("prefix_cache", self.prefix_cache, "True or False")
        if self.draft not in ("off", "ngram"):
            raise ConfigError("draft", self.draft, "off, ngram")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How much memory KV may take: a share of what the cgroup or machine leaves, or bytes."""

    memory_utilization: float = 0.9
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        share = self.memory_utilization
        if not _is_number(share) or not 0.0 < share <= 1.0:
            raise ConfigError("memory_utilization", share, "a number above 0, up to 1")
        if self.kv_bytes is not None:
            _check_integer("kv_bytes", self.kv_bytes, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One `trivet serve`: the model, the engine limits as asked, and the HTTP side."""

    model: ModelConfig
    memory: MemoryConfig = MemoryConfig()
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    workers: str = "mixed:1"
    max_num_seqs: int = 32
    max_step_tokens: int = 512
    max_prefill_chunk: int | None = 256
    max_waiting: int = 1024
    prefix_cache: bool = True
    draft: str = "off"
    draft_tokens: int = 4
    max_body_bytes: int = 32 << 20
    cors_origins: tuple[str, ...] = ("*",)
    drain_timeout_s: float = 30.0
    request_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_integer("port", self.port, 0, 65535)
        _check_limits(self)
        _check_characters("host", self.host)
        _check_characters("api_key", self.api_key, shown="a key")  # itself it stays out of logs
        _check_characters("served_model_name", self.served_model_name)
        _check_integer("max_body_bytes", self.max_body_bytes, 1024)
        if not self.drain_timeout_s >= 0:  # refuses nan too
            raise ConfigError("drain_timeout_s", self.drain_timeout_s, ">= 0")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError("request_timeout_s", self.request_timeout_s, "above 0")
        if not re.fullmatch(r"mixed:[1-9]\d?", self.workers):
            raise ConfigError("workers", self.workers, "mixed:N with N from 1 to 99")
