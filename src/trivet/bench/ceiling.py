"""Ceilings a speed is held against: memory bandwidth (measured) and arithmetic (nominal).

mbu = bytes that the steps must read / time / measured stream bandwidth. mfu = multiply-adds of the
prefill times two / time / nominal peak, where the peak is operations per cycle of the ISA level times
the highest clock of the processor times the threads: an orientation, not a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Operations per cycle and core (one multiply-add is two), for 16-bit and for integer weights. On
# levels without bf16 products the fp32 rate counts. Two vector units are assumed.
_OPS_PER_CYCLE = {
    "generic": (8, 8),
    "avx2": (32, 64),
    "avx512": (64, 256),
    "amx": (1024, 2048),
}


def nominal_peak_ops(isa: str, weights: str, threads: int) -> float | None:
    """Operations per second the cores could do at best; None when the clock is unknown."""
    import psutil

    frequency = psutil.cpu_freq()
    if frequency is None:
        return None
    megahertz = float(frequency.max or frequency.current or 0.0)
    level = next((name for name in sorted(_OPS_PER_CYCLE, reverse=True) if name in isa), "generic")
    ops = _OPS_PER_CYCLE[level][0 if weights == "bf16" else 1]
    return megahertz * 1e6 * ops * threads if megahertz > 0 else None


def decode_mbu(
    facts: Mapping[str, Any],
    *,
    batch: int,
    context: float,
    tpot_s: float | None,
    bandwidth: float | None,
) -> float | None:
    """Share of the stream bandwidth that decoding reached.

    context  mean number of tokens whose KV a request reads in a step
    """
    if not tpot_s or not bandwidth:
        return None
    moved = facts["step_bytes"] + batch * context * facts["kv_bytes_per_token"]
    return float(moved / tpot_s / bandwidth)


def prefill_mfu(
    facts: Mapping[str, Any], *, prefill_tok_s: float | None, peak_ops: float | None
) -> float | None:
    """Share of the nominal arithmetic peak that prefill reached, counting the matrices only."""
    if not prefill_tok_s or not peak_ops:
        return None
    return float(2 * facts["num_parameters"] * prefill_tok_s / peak_ops)
