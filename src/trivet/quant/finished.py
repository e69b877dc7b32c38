"""A finished layer and its file: what a run that was stopped finds when it goes on."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trivet import files
from trivet.checkpoint.formats import CodeGrid, Fp8Weight
from trivet.checkpoint.source import bf16_to_float
from trivet.errors import CheckpointError
from trivet.quant.grid import Float32, dequantize
from trivet.quant.observe import LayerWeights
from trivet.quant.proof import LinearProof

VERSION = 5  # of what a layer file holds and of the numbers that make it
Result = CodeGrid | Fp8Weight | NDArray[np.uint16]  # uint16: bf16 bits of a linear that is kept


@dataclasses.dataclass
class FinishedLayer:
    """One finished layer: linears by role, folded norms and biases, one proof per linear."""

    results: dict[str, Result]
    norms: dict[str, Float32]
    biases: dict[str, Float32]
    proofs: list[LinearProof]
    notes: dict[str, Any]

    def weights(self) -> LayerWeights:
        """The layer as it will be read, in float32."""
        matrices = {role: values_of(result) for role, result in self.results.items()}
        return LayerWeights(
            matrices, dict(self.biases), self.norms["attn_norm"], self.norms["mlp_norm"]
        )

    def to_bytes(self) -> bytes:
        arrays: dict[str, NDArray[Any]] = {f"norm.{n}": v for n, v in self.norms.items()}
        arrays |= {f"bias.{n}": v for n, v in self.biases.items()}
        kinds: dict[str, Any] = {}
        for role, result in self.results.items():
            if isinstance(result, CodeGrid):
                kinds[role] = ["grid", result.bits, result.group_size]
                for part in ("codes", "scales", "zeros", "group_index"):
                    if getattr(result, part) is not None:
                        arrays[f"{role}.{part}"] = getattr(result, part)
            elif isinstance(result, Fp8Weight):
                kinds[role] = ["fp8", list(result.block), result.granularity]
                arrays |= {f"{role}.codes": result.codes, f"{role}.scales": result.scales}
            else:
                kinds[role] = ["bf16"]
                arrays[f"{role}.codes"] = result
        text = json.dumps(
            {"kinds": kinds, "proofs": [p.as_json() for p in self.proofs], "notes": self.notes}
        )
        arrays["json"] = np.frombuffer(text.encode(), np.uint8)
        buffer = io.BytesIO()
        save: Callable[..., None] = np.savez  # its type takes no mapping of arrays
        save(buffer, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_file(cls, path: Path) -> FinishedLayer:
        """Raises ValueError, KeyError or OSError: the file is not one of ours, whole."""
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays.pop("json").tobytes())
        results: dict[str, Result] = {}
        for role, kind in facts["kinds"].items():
            codes, scales = arrays[f"{role}.codes"], arrays.get(f"{role}.scales")
            if kind[0] == "grid":
                assert scales is not None
                zeros, index = arrays.get(f"{role}.zeros"), arrays.get(f"{role}.group_index")
                results[role] = CodeGrid(kind[1], kind[2], codes, scales, zeros, index)
            elif kind[0] == "fp8":
                assert scales is not None
                results[role] = Fp8Weight(codes, scales, (kind[1][0], kind[1][1]), kind[2])
            else:
                results[role] = codes
        parts = {
            prefix: {n.partition(".")[2]: v for n, v in arrays.items() if n.startswith(prefix)}
            for prefix in ("norm.", "bias.")
        }
        proofs = [LinearProof.from_json(p) for p in facts["proofs"]]
        return cls(results, parts["norm."], parts["bias."], proofs, facts["notes"])


def values_of(result: Result) -> Float32:
    """The float32 values that a result will be read as."""
    if isinstance(result, CodeGrid):
        return dequantize(result)
    if isinstance(result, Fp8Weight):
        return result.values()
    return bf16_to_float(result)


def read_finished(path: Path) -> FinishedLayer | None:
    if not path.exists():
        return None
    try:
        return FinishedLayer.from_file(path)
    except (OSError, ValueError, KeyError, TypeError, AssertionError, EOFError, zipfile.BadZipFile):
        return None


def write_durably(path: Path, data: str | bytes) -> None:
    try:
        files.write(path, data)
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None
