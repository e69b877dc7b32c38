"""Which worker gets which request.

A policy sees how many more requests each worker takes and how many it holds, and nothing of the
requests' text. The n choices of one prompt go to one worker, where they share its prefix pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trivet.errors import RequestError


class Candidate(Protocol):
    """A worker, as far as a policy is concerned."""

    @property
    def room(self) -> int: ...
    @property
    def num_live(self) -> int: ...


def assign_least_loaded(workers: Sequence[Candidate], counts: Sequence[int]) -> list[int]:
    """A worker index for each group of ``counts[i]`` requests: the one that then holds the fewest.

    All groups or none: raises RequestError 429 when the workers that are ready lack the room now.
    """
    room = [worker.room for worker in workers]
    held = [worker.num_live for worker in workers]
    chosen: list[int] = []
    for count in counts:
        fitting = [index for index, free in enumerate(room) if free >= count]
        if not fitting:
            raise RequestError(
                "the queue is full; please retry later", status=429, code="queue_full"
            )
        best = min(fitting, key=lambda index: (held[index], index))
        room[best] -= count
        held[best] += count
        chosen.append(best)
    return chosen
