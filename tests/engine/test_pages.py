"""The page pool: every page in one state, whatever is done with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.engine.pages import PagePool, pages_needed
from trivet.engine.prefix import PrefixCache, extend_keys, root_key


def _take(pool: PagePool, count: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_pages_needed_rounds_up(tokens: int, pages: int) -> None:
    assert pages_needed(tokens) == pages


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(4)
    held = _take(pool, 3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check([held])
    pool.release(held)
    assert pool.num_free == 4


def test_shared_page_is_free_only_after_its_last_reader() -> None:
    pool = PagePool(2)
    held = _take(pool, 1)
    pool.share(held[0])
    pool.release(held)
    pool.check([held])
    assert pool.num_referenced == 1
    pool.release(held)
    assert pool.num_free == 2


def test_kept_pages_are_evicted_least_recently_used_first() -> None:
    pool = PagePool(3)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    pages = _take(pool, 3)
    for page in pages:
        pool.keep(page)
    pool.release([pages[1]])
    pool.release([pages[0]])
    pool.release([pages[2]])
    assert (pool.num_cached, pool.num_available) == (3, 3)
    pool.share(pages[1])
    assert _take(pool, 2) == [pages[0], pages[2]]
    assert evicted == [pages[0], pages[2]]
    pool.check([[pages[0]], [pages[1]], [pages[2]]])


def test_deeper_pages_of_a_prefix_are_evicted_first() -> None:
    pool = PagePool(3)
    pages = _take(pool, 3)
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    assert _take(pool, 3) == pages[::-1]


def test_leased_page_outlives_its_request() -> None:
    pool = PagePool(2)
    held = _take(pool, 1)
    pool.lease(held[0])
    pool.release(held)
    assert (pool.num_leased, pool.num_available) == (1, 1)
    pool.check([])
    pool.end_lease(held[0])
    assert (pool.num_leased, pool.num_free) == (0, 2)


def test_leased_prefix_page_can_be_read_again() -> None:
    pool = PagePool(1)
    held = _take(pool, 1)
    pool.keep(held[0])
    pool.lease(held[0])
    pool.release(held)
    pool.share(held[0])
    assert (pool.num_leased, pool.num_referenced) == (0, 1)
    pool.end_lease(held[0])
    pool.release(held)
    assert pool.num_cached == 1


def test_releasing_too_often_is_caught() -> None:
    pool = PagePool(1)
    held = _take(pool, 1)
    pool.release(held)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(held)


def test_check_sees_a_leak_and_a_double_owner() -> None:
    pool = PagePool(2)
    held = _take(pool, 1)
    with pytest.raises(AssertionError, match="1 references on the books, 0 held"):
        pool.check([])
    with pytest.raises(AssertionError, match="1 references on the books, 2 held"):
        pool.check([held, held])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7)), max_size=60))
def test_ledger_balances_after_any_sequence(operations: list[tuple[int, int]]) -> None:
    pool = PagePool(6)
    prefix = PrefixCache(pool)
    holders: list[list[int]] = []
    leases: list[int] = []
    key = 0
    for kind, value in operations:
        if kind == 0:
            pages = pool.allocate(value)
            if pages:
                holders.append(pages)
        elif kind == 1 and holders:
            pool.release(holders.pop(value % len(holders)))
        elif kind == 2 and holders:
            page = holders[value % len(holders)][0]
            if all(page not in pages for pages in holders[1:]):
                pool.share(page)
                holders.append([page])
        elif kind == 3 and holders:
            page = holders[value % len(holders)][-1]
            if page not in prefix._key_of:
                key += 1
                prefix.register(key.to_bytes(16, "little"), page)
        elif kind == 4 and holders:
            page = holders[value % len(holders)][0]
            pool.lease(page)
            leases.append(page)
        elif kind == 5 and leases:
            pool.end_lease(leases.pop(value % len(leases)))
        elif kind == 6 and value == 0:
            prefix.reset()
        pool.check(holders)
        prefix.check()
    for pages in holders:
        pool.release(pages)
    for page in leases:
        pool.end_lease(page)
    pool.check([])
    assert pool.num_available == 6


def _keys(token_ids: list[int], salt: str = "", numerics_id: str = "n") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(numerics_id, salt), token_ids, len(token_ids) // 32)
    return keys


def test_key_stands_for_the_whole_prefix() -> None:
    tokens = list(range(96))
    changed = [7, *tokens[1:]]
    assert len(_keys(tokens)) == 3
    assert all(a != b for a, b in zip(_keys(tokens), _keys(changed), strict=True))
    assert _keys(tokens)[:2] == _keys(tokens[:64])
    assert _keys([*tokens[:64], *tokens[32:64]])[:2] == _keys(tokens)[:2]


def test_keys_of_other_tenants_and_other_numerics_differ() -> None:
    tokens = list(range(32))
    assert (
        len({_keys(tokens)[0], _keys(tokens, salt="a")[0], _keys(tokens, numerics_id="m")[0]}) == 3
    )


def test_extending_keys_step_by_step_gives_the_same_chain() -> None:
    tokens = list(range(128))
    keys: list[bytes] = []
    for num_pages in (1, 1, 3, 4):
        extend_keys(keys, root_key("n", ""), tokens, num_pages)
    assert keys == _keys(tokens)


def test_prefix_cache_finds_only_an_unbroken_prefix() -> None:
    pool = PagePool(4)
    prefix = PrefixCache(pool)
    pages = _take(pool, 3)
    keys = [bytes([i]) * 16 for i in range(3)]
    prefix.register(keys[0], pages[0])
    prefix.register(keys[2], pages[2])
    assert prefix.find(keys) == [pages[0]]
    prefix.register(keys[0], pages[1])
    assert prefix.find(keys) == [pages[0]], "the older page of equal prefixes stays"
    pool.release(pages)
    assert (pool.num_cached, pool.num_free) == (2, 2)
    prefix.reset()
    assert prefix.find(keys) == []
    assert pool.num_free == 4
