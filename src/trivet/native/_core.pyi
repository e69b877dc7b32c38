"""
Native core of Trivet: kernels, the model forward, the KV arena and the sampler.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def isa_levels() -> list[tuple[str, str]]:
    """
    Every instruction-set level, lowest first, with why it cannot run here (empty: it can).
    """

def kernel_exp(level: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """exp of x into out."""

def kernel_rms_norm(level: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gain: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], eps: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """RMSNorm of rows of x into out."""

def kernel_rope(level: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], cos: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sin: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Rows of x rotated into out."""

def kernel_silu_mul(level: str, gate: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], up: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """silu(gate) * up into out."""

def kernel_store_token(kind: int, k: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], k_scale: float, v: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], v_scale: float, slot: int, is_first: bool, page: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """
    One token's K and V, passed as bytes, into a slot of a page block. is_first: at position 0.
    """

def kernel_attention_span(level: str, kind: int, q: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], group: int, valid: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], pages: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], is_first: bool, sm_scale: float, m: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], l: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], o: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """One span of attention over page blocks; writes m, l and o."""

def kernel_rotate(level: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], hadamard: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Rows of x through the block Hadamard into out."""

def kernel_kv_codes(kind: int, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Rows of x as e4m3 or 4-bit codes of a KV page, one scale each."""

def kernel_attention_merge(level: str, m2: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], l2: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], o2: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], m: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], l: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], o: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Takes a later span into m, l and o."""

def kernel_attention_finish(level: str, l: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], o: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """o / l into out."""

def gptq_panel(level: str, upper: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], left: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], places: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], inverse: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], zeros: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, middle: float, low: int, high: int, begin: int, end: int, codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], errors: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Columns [begin, end) of GPTQ's pass; changes left and writes codes and errors.
    """

def descend_panel(level: str, gram: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], inverse: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], zeros: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, middle: float, low: int, high: int, begin: int, end: int, codes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], changes: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Columns [begin, end) of a sweep of coordinate descent; changes slope and writes codes and changes.
    """

def kernel_stream(level: str, words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """The sum of the words modulo 2^64."""

def pool_loops(num_threads: int, num_loops: int, pause_s: float) -> list[float]:
    """
    Seconds of each of num_loops empty pool loops, pause_s of sleep before each.
    """

def kernel_linear(level: str, kind: int, scheme: int, scale_type: int, n: int, k: int, group: int, codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], scales: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, minima: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, zeros: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, rows: int, x_codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], x_scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, x_sums: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, block_begin: int, block_end: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], accumulate: bool) -> None:
    """
    One linear kernel over the channel blocks [block_begin, block_end); packed arrays are passed as bytes. Writes out.
    """

def kernel_quantize_bf16(level: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], codes: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Rows of x rounded to bf16 into codes."""

def kernel_group_sums(x: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], group: int, sums: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Sums of the bf16 values of each group of rows of x into sums."""

def kernel_quantize_int8(level: str, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], group: int, hadamard: int, amax: float, codes: Annotated[NDArray[numpy.int8], dict(shape=(None, None), order='C', device='cpu')], scales: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], sums: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Rows of x as int8 per group, or per rotated row when group is 0; of a range amax where that is not 0.
    """

class Arena:
    """KV pages in a shared memory file; see trivet.native.arena."""

    @staticmethod
    def create(*, num_layers: int, num_kv_heads: int, head_dim: int, kv: int, num_pages: int, num_workers: int, worker: int) -> Arena: ...

    @staticmethod
    def attach(fd: int, worker: int) -> Arena: ...

    @property
    def fd(self) -> int: ...

    @property
    def worker(self) -> int: ...

    @property
    def file_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def geometry(self) -> tuple[int, int, int, int, int, int]: ...

    def add_refs(self, pages: Sequence[int]) -> None: ...

    def drop_refs(self, pages: Sequence[int]) -> None: ...

    def clear_column(self, worker: int) -> None: ...

    def total_refs(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    def column(self, worker: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def copy_page(self, from_page: int, to_page: int) -> None: ...

    def block(self, layer: int, kv_head: int, page: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """A view of one page block; it keeps the arena mapped."""

    def progress(self, worker: int) -> tuple[int, int]: ...

def stream_rates(num_bytes: int, num_threads: int, passes: int) -> list[float]:
    """Bytes per second of reading memory, of each pass."""

class Model:
    """A model over packed weights; see trivet.native.model."""

    def __init__(self, spec: dict[str, object], weights: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], level: str, num_threads: int) -> None: ...

    def forward(self, arena: Arena, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], segments: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], page_tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], logit_rows: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], layer_begin: int, layer_end: int, hidden: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, hidden_out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None, taps: list[object]) -> None: ...

    def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) -> list[tuple[int, float, int, list[int], list[float]]]: ...

    def sample(self, inputs: Sequence[object]) -> list[tuple[list[int], list[tuple[int, float, int, list[int], list[float]]] | None]]: ...

    @property
    def num_logits(self) -> int: ...

    def nonfinite_logits(self) -> list[int]:
        """
        Rows of the last step's logits whose hidden state holds infinity or NaN.
        """

    def logits(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), writable=False)]:
        """A view of the last step's logits; the next step overwrites it."""

    def times_ns(self) -> dict[str, int]: ...

    def reset_times(self) -> None: ...

    def set_timers(self, on: bool) -> None: ...

class SamplerState:
    """
    State of one request's sampler: parameters, noise key and penalty counts. Made by trivet.native.sampling.new_sampler.
    """

    def __init__(self, *, vocab_size: int, seed: int, choice: int, prompt_ids: Sequence[int], min_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, presence_penalty: float, frequency_penalty: float, logit_bias: Sequence[tuple[int, float]], allowed_token_ids: Sequence[int] | None, banned_token_ids: Sequence[int], stop_token_ids: Sequence[int], logprobs: int | None) -> None: ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens that became part of the output."""

    @property
    def num_committed(self) -> int: ...

def sample(logits: NDArray[numpy.float32], inputs: Sequence[object], isa: str) -> list[tuple[list[int], list[tuple[int, float, int, list[int], list[float]]] | None]]:
    """
    Draw tokens for each SampleInput from logits [L, V]; see trivet.native.sampling.
    """

def token_logprobs(logits: NDArray[numpy.float32], first_logit: int, token_ids: Sequence[int], top: int, isa: str) -> list[tuple[int, float, int, list[int], list[float]]]:
    """
    Log-probability of token_ids[i] under row first_logit + i; see trivet.native.sampling.
    """
