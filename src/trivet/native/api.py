"""What the engine needs of the native core, as protocols. The C++ core, the numpy reference and the
toy runners of the engine's tests all satisfy them; the engine imports nothing else of `native`.

Shapes use R rows of a step, S segments, T page tables, L rows that need logits, V vocabulary,
H hidden width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trivet.request import Logprob, SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class KVGeometry:
    """Bytes and shape of KV. ``page_bytes`` counts all layers and heads, K and V, scales included."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_format: str  # config.KVFormat value
    page_tokens: int
    page_bytes: int


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step for all requests.

    tokens       int32 [R]
    segments     int32 [S, 4]: (first row, number of rows, absolute position of the first row,
                 page-table index); segments lie in row order and cover all rows; rows of one segment
                 are consecutive positions of one request
    page_tables  int32 [T, P]: page ids by position // PAGE_TOKENS; unused entries are -1
    logit_rows   int32 [L]: rows whose logits are wanted, ascending
    layers       half-open range of layers to run; None: all, with embedding and head
    hidden       float32 [R, H] input of the first layer run, instead of the embedding
    """

    tokens: Int32
    segments: Int32
    page_tables: Int32
    logit_rows: Int32
    layers: tuple[int, int] | None = None
    hidden: Float32 | None = None


class Taps(Protocol):
    """Sinks filled by a forward call; see `trivet.native.model.Taps`."""


class SamplerState(Protocol):
    """Native state of one request's sampler: parameters, noise key and penalty counts."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count tokens that were committed. Tokens sampled but not committed leave no trace."""


class Arena(Protocol):
    """KV pages of one machine, shared by its workers through a memory file."""

    @property
    def num_pages(self) -> int: ...
    @property
    def geometry(self) -> KVGeometry: ...


@dataclasses.dataclass(frozen=True)
class SampleResult:
    """Tokens drawn for one request in one step: 1 + accepted of them.

    token_ids   the drawn tokens; token i was drawn from logits row i of the request and equals
                draft token i for all but the last
    logprobs    parallel to token_ids, or None when not asked
    """

    token_ids: list[int]
    logprobs: list[Logprob] | None


@dataclasses.dataclass(frozen=True)
class SampleInput:
    """One request's part of a sampling call.

    first_logit  index into the step's logits (0..L-1) of the request's first row
    position     absolute position of the token drawn from that row
    draft_ids    tokens proposed for position, position+1, ...; row first_logit+i predicts
                 position+i, so there are len(draft_ids)+1 rows
    """

    state: SamplerState
    first_logit: int
    position: int
    draft_ids: Sequence[int] = ()


class ModelRunner(Protocol):
    """A model that runs whole steps. Logits stay inside until asked for."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...

    def kv_geometry(self) -> KVGeometry: ...

    def forward(self, step: StepInput, arena: Arena, taps: Taps | None = None) -> Float32 | None:
        """Run the step. Writes KV into the arena, keeps logits for the calls below.

        Returns the hidden state float32 [R, H] only when ``step.layers`` ends before the last layer.
        """

    def logits(self) -> Float32:
        """A copy of the last step's logits, float32 [L, V]."""

    def nonfinite_logits(self) -> Sequence[int]:
        """Rows of the last step's logits whose hidden state holds infinity or NaN, ascending.

        Weights that are all finite can overflow on the way; such logits mean nothing.
        """

    def new_sampler(
        self, params: SamplingParams, choice_index: int, prompt_ids: Sequence[int]
    ) -> SamplerState:
        """State for one request; ``params.seed`` must be set. Emitted ids are added by `commit`."""

    def sample(self, inputs: Sequence[SampleInput]) -> list[SampleResult]:
        """Draw tokens from the last step's logits; stops after the first draft token not drawn.

        Takes min_tokens into account (EOS and stop tokens are masked while position < prompt_len +
        min_tokens). Does not change the states.
        """

    def token_logprobs(self, first_logit: int, token_ids: Sequence[int], top: int) -> list[Logprob]:
        """Log-probabilities of token_ids[i] under logits row first_logit+i, with the ``top`` best."""
