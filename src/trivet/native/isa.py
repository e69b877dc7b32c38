"""Which instruction-set level runs, and why not a higher one.

The level is chosen once per model: the highest the CPU and the system allow, or the one that the
environment variable TRIVET_ISA names. Every level gives the same bits.
"""

from __future__ import annotations

import dataclasses
import os

from trivet.errors import ConfigError
from trivet.native import _core

ISA_VARIABLE = "TRIVET_ISA"


@dataclasses.dataclass(frozen=True)
class IsaReport:
    """The active level, whether TRIVET_ISA forced it, and why each other level cannot run here.

    ``levels`` are all levels, lowest first; ``refused`` maps those that cannot run to the reason.
    """

    active: str
    forced: bool
    levels: tuple[str, ...]
    refused: dict[str, str]

    @property
    def usable(self) -> tuple[str, ...]:
        """The levels that can run here, lowest first."""
        return tuple(level for level in self.levels if level not in self.refused)


def isa_report(isa: str | None = None) -> IsaReport:
    """The level to use: ``isa`` when given, else TRIVET_ISA, else the highest usable one.

    Raises ConfigError when the level asked for does not exist or cannot run here.
    """
    levels = _core.isa_levels()
    refused = {name: reason for name, reason in levels if reason}
    names = tuple(name for name, _ in levels)
    usable = [name for name in names if name not in refused]
    field, wanted = (
        ("isa", isa) if isa is not None else (ISA_VARIABLE, os.environ.get(ISA_VARIABLE))
    )
    if wanted is None:
        return IsaReport(usable[-1], False, names, refused)
    if wanted in refused:
        raise ConfigError(field, wanted, f"{', '.join(usable)}; {refused[wanted]}")
    if wanted not in usable:
        raise ConfigError(field, wanted, ", ".join(usable))
    return IsaReport(wanted, True, names, refused)
