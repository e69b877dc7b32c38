"""llama.cpp through its C API: batches of token ids, several sequences in one batch."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as cpp
import numpy as np
from numpy.typing import NDArray
from protocol import serve

DEFAULTS: dict[str, Any] = {
    "n_batch": 2048,
    "n_ubatch": 512,
    "flash_attn": "auto",
    "load_mode": "auto",
    "extra_buffers": True,
    "type_kv": "F16",
    "kv_unified": False,
}
_FLASH = {"auto": -1, "off": 0, "on": 1}
_LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap_mlock": 3}
_NLL_CHUNK = 256

state: dict[str, Any] = {}


class Context:
    """One llama_context for ``num_seqs`` sequences of ``context`` tokens each."""

    def __init__(self, num_seqs: int, context: int) -> None:
        settings = state["settings"]
        params = cpp.llama_context_default_params()
        params.n_ctx = -(-context // 256) * 256 * num_seqs
        params.n_seq_max = num_seqs
        # A step of a batch has a row of logits per sequence, the scoring of a text one per token.
        params.n_outputs_max_per_seq = _NLL_CHUNK
        params.n_batch = settings["n_batch"]
        params.n_ubatch = min(settings["n_ubatch"], settings["n_batch"])
        params.n_threads = params.n_threads_batch = state["threads"]
        params.flash_attn_type = _FLASH[settings["flash_attn"]]
        params.type_k = params.type_v = getattr(cpp, f"GGML_TYPE_{settings['type_kv']}")
        params.kv_unified = settings["kv_unified"]
        self._pointer = cpp.llama_init_from_model(state["model"], params)
        if not self._pointer:
            raise RuntimeError(f"no context with {settings}")
        self._capacity = settings["n_batch"]
        self._batch = cpp.llama_batch_init(self._capacity, 0, 1)
        for i in range(self._capacity):
            self._batch.n_seq_id[i] = 1

    def clear(self) -> None:
        cpp.llama_memory_clear(cpp.llama_get_memory(self._pointer), True)

    def eval(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        wanted: NDArray[np.int8],
    ) -> list[NDArray[np.float32]]:
        """Evaluate parallel int32 [n] arrays, n <= n_batch; the logits of the rows that are wanted."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        ctypes.memmove(batch.token, np.ascontiguousarray(tokens, np.int32).ctypes.data, 4 * count)
        ctypes.memmove(batch.pos, np.ascontiguousarray(positions, np.int32).ctypes.data, 4 * count)
        ctypes.memmove(batch.logits, np.ascontiguousarray(wanted, np.int8).ctypes.data, count)
        for i, sequence in enumerate(sequences.tolist()):
            batch.seq_id[i][0] = sequence
        status = cpp.llama_decode(self._pointer, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = []
        for i in np.flatnonzero(wanted).tolist():
            row = cpp.llama_get_logits_ith(self._pointer, i)
            rows.append(np.ctypeslib.as_array(row, shape=(state["vocab_size"],)))
        return rows

    def prefill(self, prompts: NDArray[np.int32]) -> list[int]:
        """Evaluate int32 [sequences, length] from position 0; the greedy token of each."""
        count, length = prompts.shape
        tokens = prompts.reshape(-1)
        positions = np.tile(np.arange(length, dtype=np.int32), count)
        sequences = np.repeat(np.arange(count, dtype=np.int32), length)
        wanted = (positions == length - 1).astype(np.int8)
        greedy: list[int] = []
        for at in range(0, len(tokens), self._capacity):
            part = slice(at, at + self._capacity)
            rows = self.eval(tokens[part], positions[part], sequences[part], wanted[part])
            greedy += [int(row.argmax()) for row in rows]
        return greedy


def load(message: dict[str, Any]) -> dict[str, Any]:
    settings = DEFAULTS | message["settings"]
    cpp.llama_backend_init()
    params = cpp.llama_model_default_params()
    params.load_mode = _LOAD_MODES[settings["load_mode"]]
    params.use_extra_bufts = settings["extra_buffers"]
    model = cpp.llama_model_load_from_file(message["path"].encode(), params)
    if not model:
        raise RuntimeError(f"{message['path']} cannot be loaded")
    vocab = cpp.llama_model_get_vocab(model)
    state.update(
        model=model,
        vocab=vocab,
        vocab_size=cpp.llama_vocab_n_tokens(vocab),
        settings=settings,
        threads=message["threads"],
        context=message["context"],
        contexts={},
    )
    return {
        "version": cpp.__version__,
        "settings": settings | {"threads": message["threads"]},
        "weight_bytes": cpp.llama_model_size(model),
        "system": cpp.llama_print_system_info().decode(),
    }


def _context(num_seqs: int, context: int) -> Context:
    """Contexts are kept, so that no run pays for touching fresh memory."""
    contexts = state["contexts"]
    if num_seqs == 1:
        context = max(context, state["context"])
    if (num_seqs, context) not in contexts:
        contexts[num_seqs, context] = Context(num_seqs, context)
    found: Context = contexts[num_seqs, context]
    found.clear()
    return found


def run(message: dict[str, Any]) -> dict[str, Any]:
    prompts = np.array(message["prompts"], np.int32)
    count, length = prompts.shape
    context = _context(count, length + message["output_tokens"])
    sequences = np.arange(count, dtype=np.int32)
    wanted = np.ones(count, np.int8)
    start = time.perf_counter()
    greedy = context.prefill(prompts)
    first = time.perf_counter() - start
    tokens = [greedy]
    for step in range(message["output_tokens"] - 1):
        positions = np.full(count, length + step, np.int32)
        rows = context.eval(np.array(greedy, np.int32), positions, sequences, wanted)
        greedy = [int(row.argmax()) for row in rows]
        tokens.append(greedy)
    total = time.perf_counter() - start
    return {"first_token_s": first, "total_s": total, "tokens": np.array(tokens).T.tolist()}


def nll(message: dict[str, Any]) -> dict[str, Any]:
    ids = np.array(message["ids"], np.int32)
    context = _context(1, len(ids))
    result: list[float] = []
    for at in range(0, len(ids) - 1, _NLL_CHUNK):
        tokens = ids[at : min(at + _NLL_CHUNK, len(ids) - 1)]
        positions = np.arange(at, at + len(tokens), dtype=np.int32)
        zeros = np.zeros(len(tokens), np.int32)
        rows = context.eval(tokens, positions, zeros, np.ones(len(tokens), np.int8))
        for row, target in zip(rows, ids[at + 1 : at + 1 + len(tokens)].tolist(), strict=True):
            logits = row.astype(np.float64)
            top = logits.max()
            result.append(float(top + np.log(np.exp(logits - top).sum()) - logits[target]))
    return {"nll": result}


def text(message: dict[str, Any]) -> dict[str, Any]:
    ids = message["ids"]
    buffer = ctypes.create_string_buffer(32 * len(ids) + 32)
    array = (cpp.llama_token * len(ids))(*ids)
    size = cpp.llama_detokenize(state["vocab"], array, len(ids), buffer, len(buffer), False, False)
    return {"text": buffer.raw[: max(size, 0)].decode(errors="replace")}


if __name__ == "__main__":
    serve({"load": load, "run": run, "text": text, "nll": nll})
