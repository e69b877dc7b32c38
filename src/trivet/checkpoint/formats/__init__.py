"""Quantized folders in Hugging Face layout: GPTQ, AWQ, compressed-tensors and fp8, read and written.

One file per format with its encoder and decoder in plain numpy; `open_reader` finds the format of a
folder, `write` makes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.lazy import lazy_names

if TYPE_CHECKING:
    from trivet.checkpoint.formats.detect import open_reader
    from trivet.checkpoint.formats.folder import FORMATS, write
    from trivet.checkpoint.formats.fp8 import Fp8Weight
    from trivet.checkpoint.formats.grid import CodeGrid
    from trivet.checkpoint.formats.stored import FormatReader

__all__ = ["FORMATS", "CodeGrid", "FormatReader", "Fp8Weight", "open_reader", "write"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "detect": ("open_reader",),
            "folder": ("FORMATS", "write"),
            "fp8": ("Fp8Weight",),
            "grid": ("CodeGrid",),
            "stored": ("FormatReader",),
        },
    )
