"""Model families as declarations: names, shapes and variants of files, mapped to a `ModelSpec`."""

from trivet.models.spec import ModelSpec, RopeSpec, rope_tables

__all__ = ["ModelSpec", "RopeSpec", "rope_tables"]
