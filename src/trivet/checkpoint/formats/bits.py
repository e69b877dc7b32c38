"""Codes of 1 to 8 bits in 32-bit words, the lowest bits first.

*Dense*: one little-endian bit stream per row, as GPTQ, AWQ and compressed-tensors since June 2026
write it. *Padded*: 32 // bits codes in each word and the rest of the word zero, as compressed-tensors
wrote 3, 5, 6 and 7 bits before. Where bits divide 32 the two are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt8 = NDArray[np.uint8]
Int32 = NDArray[np.int32]


def dense_words(count: int, bits: int) -> int:
    """Words that ``count`` codes take as one bit stream."""
    return -(-count * bits // 32)


def padded_words(count: int, bits: int) -> int:
    """Words that ``count`` codes take with 32 // bits codes in each."""
    return -(-count // (32 // bits))


def pack_dense(codes: UInt8, bits: int) -> Int32:
    """Codes uint8 [R, M], each below 2^bits, as int32 [R, dense_words(M, bits)]; the rest is zero."""
    rows, count = codes.shape
    assert not codes.size or int(codes.max()) < 1 << bits, "a code would spill into its neighbour"
    eights = -(-count // 8)
    padded = np.zeros((rows, 8 * eights), np.uint8)
    padded[:, :count] = codes
    # Eight codes are `bits` whole bytes: the low bytes of one 64-bit number.
    joined = np.zeros((rows, eights), np.uint64)
    for place in range(8):
        joined |= padded[:, place::8].astype(np.uint64) << np.uint64(bits * place)
    stream = joined.astype("<u8").view(np.uint8).reshape(rows, eights, 8)[:, :, :bits]
    words = dense_words(count, bits)
    raw = np.zeros((rows, 4 * words), np.uint8)
    flat = stream.reshape(rows, -1)[:, : 4 * words]
    raw[:, : flat.shape[1]] = flat
    return raw.view("<i4").astype(np.int32, copy=False)


def unpack_dense(words: Int32, bits: int, count: int) -> UInt8:
    """The first ``count`` codes of int32 [R, dense_words(count, bits)], uint8 [R, count]."""
    rows, width = words.shape
    assert width == dense_words(count, bits), (width, count, bits)
    eights = -(-count // 8)
    raw = np.zeros((rows, eights * bits), np.uint8)
    stream = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(rows, 4 * width)
    stream = stream[:, : eights * bits]
    raw[:, : stream.shape[1]] = stream
    wide = np.zeros((rows, eights, 8), np.uint8)
    wide[:, :, :bits] = raw.reshape(rows, eights, bits)
    joined = wide.reshape(rows, -1).view("<u8")
    codes = np.empty((rows, 8 * eights), np.uint8)
    mask = np.uint64((1 << bits) - 1)
    for place in range(8):
        codes[:, place::8] = joined >> np.uint64(bits * place) & mask
    return np.ascontiguousarray(codes[:, :count])


def pack_padded(codes: UInt8, bits: int) -> Int32:
    """Codes uint8 [R, M], each below 2^bits, as int32 [R, padded_words(M, bits)]."""
    rows, count = codes.shape
    assert not codes.size or int(codes.max()) < 1 << bits, "a code would spill into its neighbour"
    each = 32 // bits
    padded = np.zeros((rows, each * padded_words(count, bits)), np.uint8)
    padded[:, :count] = codes
    words = np.zeros((rows, padded.shape[1] // each), np.uint32)
    for place in range(each):
        words |= padded[:, place::each].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def unpack_padded(words: Int32, bits: int, count: int) -> UInt8:
    """The first ``count`` codes of int32 [R, padded_words(count, bits)], uint8 [R, count]."""
    rows, width = words.shape
    assert width == padded_words(count, bits), (width, count, bits)
    each = 32 // bits
    codes = np.empty((rows, each * width), np.uint8)
    unsigned = np.ascontiguousarray(words, np.int32).view(np.uint32)
    for place in range(each):
        codes[:, place::each] = unsigned >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return np.ascontiguousarray(codes[:, :count])
