"""The pool of KV pages and its ledger (invariant I4). Pure bookkeeping: ids, never bytes.

Every page is in exactly one of four states:

    free        nobody needs its contents
    referenced  at least one live request reads it (a full page may be shared, a partial one never)
    leased      no request reads it, but a transfer still does
    cached      nobody reads it, its contents are kept for the prefix cache, least recently used first

Allocation takes free pages first and then evicts cached ones. The prefix cache says which pages are
worth keeping (`keep`) and is told when one is taken away (`on_evict`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from trivet.config import PAGE_TOKENS


def pages_needed(num_tokens: int) -> int:
    """Pages that hold the KV of ``num_tokens`` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class PagePool:
    """Hands out pages ``0 .. num_pages-1`` and knows the state of each.

    on_evict  called with the page id when a cached page is taken for other contents
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._leases = [0] * num_pages
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_leased = 0

    @property
    def num_free(self) -> int:
        """Pages without contents."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages kept for the prefix cache that no request reads."""
        return len(self._cached)

    @property
    def num_leased(self) -> int:
        """Pages only a transfer reads."""
        return self._num_leased

    @property
    def num_referenced(self) -> int:
        """Pages live requests read."""
        return self.num_pages - len(self._free) - len(self._cached) - self._num_leased

    @property
    def num_available(self) -> int:
        """Pages `allocate` could hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def ref_count(self, page: int) -> int:
        """How many live requests read ``page``."""
        return self._refs[page]

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` pages with one reference each, or none at all when there are too few."""
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._kept.discard(page)
            if self.on_evict is not None:
                self.on_evict(page)
        self._refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page whose contents are full and valid."""
        if self._refs[page] == 0:
            if self._leases[page]:
                self._num_leased -= 1
            else:
                assert page in self._cached, f"page {page} is free and cannot be shared"
                del self._cached[page]
        self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page; deeper pages of a prefix become evictable first."""
        for page in reversed(pages):
            count = self._refs[page] - 1
            assert count >= 0, f"page {page} was released more often than taken"
            self._refs[page] = count
            if count == 0:
                self._settle(page)

    def lease(self, page: int) -> None:
        """Hold a referenced or leased page for a transfer, beyond the life of its requests."""
        assert self._refs[page] or self._leases[page], f"page {page} has no contents to lease"
        self._leases[page] += 1

    def end_lease(self, page: int) -> None:
        """Drop one lease."""
        assert self._leases[page] > 0, f"page {page} is not leased"
        self._leases[page] -= 1
        if self._leases[page] == 0 and self._refs[page] == 0:
            self._num_leased -= 1
            self._settle(page)

    def _settle(self, page: int) -> None:
        """Put a page nobody references where it belongs: leased, cached or free."""
        if self._leases[page]:
            self._num_leased += 1
        elif page in self._kept:
            self._cached[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep the contents of a referenced page after its last release."""
        assert self._refs[page] > 0, f"page {page} is not referenced"
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """Undo `keep`: the page is free once nobody reads it."""
        self._kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the ledger balances, given the page lists of all live requests."""
        held: Counter[int] = Counter()
        for pages in holders:
            assert len(set(pages)) == len(pages), "a request holds one page twice"
            held.update(pages)
        referenced = {page for page, refs in enumerate(self._refs) if refs}
        for page in referenced | held.keys():
            seen, refs = held[page], self._refs[page]
            assert seen == refs, f"page {page}: {refs} references on the books, {seen} held"
        leased = {page for page, leases in enumerate(self._leases) if leases} - referenced
        assert len(leased) == self._num_leased, "the count of leased pages is wrong"
        assert self._cached.keys() <= self._kept, "a page is cached for nobody"
        states = Counter([*self._free, *self._cached, *referenced, *leased])
        wrong = {page: states[page] for page in range(self.num_pages) if states[page] != 1}
        assert not wrong, f"pages in more or less than one state: {wrong}"
