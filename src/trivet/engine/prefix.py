"""Prefix cache: full pages found again by a hash chain over (numerics_id, salt, tokens).

The key of page i is hash(key of page i-1, its tokens), so a key stands for the whole prefix up to and
including its page. Keys are 128-bit BLAKE2b: equal keys are taken as equal prefixes. Only full pages
are registered; they never change afterwards, so any number of requests may share one.

A lookup leaves at least the last known token to be computed, because its logits are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from trivet.config import PAGE_TOKENS
from trivet.engine.pages import PagePool


def root_key(numerics_id: str, salt: str) -> bytes:
    """Key of the empty prefix: caches of other numerics or other tenants never meet."""
    digest = hashlib.blake2b(numerics_id.encode(), digest_size=16)
    digest.update(b"\0" + salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], num_pages: int) -> None:
    """Append keys to ``keys`` until it covers the first ``num_pages`` full pages of ``token_ids``."""
    first = len(keys)
    if num_pages <= first:
        return
    tokens = np.asarray(token_ids[first * PAGE_TOKENS : num_pages * PAGE_TOKENS], np.int32)
    assert tokens.size == (num_pages - first) * PAGE_TOKENS, "a key needs a full page of tokens"
    parent = keys[-1] if keys else root
    for page_tokens in tokens.reshape(-1, PAGE_TOKENS):
        parent = hashlib.blake2b(parent + page_tokens.tobytes(), digest_size=16).digest()
        keys.append(parent)


class PrefixCache:
    """Finds pages by key. Which of them may be evicted is the pool's ledger, not kept here."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self.num_queries = 0  # tokens looked up
        self.num_hits = 0  # tokens found
        pool.on_evict = self._drop

    def __len__(self) -> int:
        return len(self._page_of)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix of ``keys``. Takes no reference, counts nothing."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def count(self, num_queried: int, num_found: int) -> None:
        """Count one admission: tokens looked up and tokens found."""
        self.num_queries += num_queried
        self.num_hits += num_found

    def register(self, key: bytes, page: int) -> None:
        """Offer a full, computed page. When the prefix is already known the older page stays."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            self._pool.keep(page)

    def reset(self) -> None:
        """Forget every page. Pages that live requests read are freed with their last reader."""
        for page in list(self._key_of):
            self._drop(page)
            self._pool.forget(page)

    def _drop(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    def check(self) -> None:
        """Assert that both directions of the index agree with the pool."""
        assert len(self._page_of) == len(self._key_of), "the prefix index is lopsided"
        for key, page in self._page_of.items():
            assert self._key_of[page] == key, f"page {page} is registered under another key"
            assert page in self._pool._kept, f"page {page} is registered but not kept"
