"""Model files: resolving names, reading Hugging Face folders and GGUF, tokenizers, packed cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.lazy import lazy_names

if TYPE_CHECKING:
    from trivet.checkpoint.gguf import GGUFCheckpoint
    from trivet.checkpoint.huggingface import HuggingFaceCheckpoint
    from trivet.checkpoint.resolve import ModelSource, resolve_model
    from trivet.checkpoint.source import Checkpoint, SourceTensor, TensorInfo
    from trivet.checkpoint.tokenizer import Detokenizer, Tokenizer, TokenizerData

__all__ = [
    "Checkpoint",
    "Detokenizer",
    "GGUFCheckpoint",
    "HuggingFaceCheckpoint",
    "ModelSource",
    "SourceTensor",
    "TensorInfo",
    "Tokenizer",
    "TokenizerData",
    "open_checkpoint",
    "resolve_model",
]


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Open a resolved model for reading. Raises CheckpointError."""
    if source.kind == "gguf":
        from trivet.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path)
    from trivet.checkpoint.huggingface import HuggingFaceCheckpoint

    return HuggingFaceCheckpoint(source.path)


if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "gguf": ("GGUFCheckpoint",),
            "huggingface": ("HuggingFaceCheckpoint",),
            "resolve": ("ModelSource", "resolve_model"),
            "source": ("Checkpoint", "SourceTensor", "TensorInfo"),
            "tokenizer": ("Detokenizer", "Tokenizer", "TokenizerData"),
        },
    )
