"""Model files: resolving names, reading Hugging Face folders and GGUF, tokenizers, packed cache."""

from trivet.checkpoint.gguf import GGUFCheckpoint
from trivet.checkpoint.huggingface import HuggingFaceCheckpoint
from trivet.checkpoint.resolve import resolve_model
from trivet.checkpoint.source import Checkpoint, ModelSource, SourceTensor, TensorInfo
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
        return GGUFCheckpoint(source.path)
    return HuggingFaceCheckpoint(source.path)
