"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest

from support.engine_driver import Driver, assert_idle

# The same examples in every run; a search for new ones is a developer's choice, not a test's.
hypothesis.settings.register_profile("trivet", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("trivet")


@pytest.fixture
def make_driver() -> Iterator[Callable[..., Driver]]:
    """Makes drivers; at the end of the test every page of every engine must be accounted for (I4)."""
    drivers: list[Driver] = []

    def make(*args: object, **kwargs: object) -> Driver:
        driver = Driver(*args, **kwargs)  # type: ignore[arg-type]
        drivers.append(driver)
        return driver

    yield make
    for driver in drivers:
        for request_id in driver.engine.request_ids:
            driver.engine.abort(request_id)
        driver.engine.step(driver.now)
        assert_idle(driver.engine)
