"""Model families as declarations: names, shapes and variants of files, mapped to a `ModelSpec`."""

from trivet.models.load import Model, open_model
from trivet.models.spec import ModelSpec, RopeSpec, rope_tables

__all__ = ["Model", "ModelSpec", "RopeSpec", "open_model", "rope_tables"]
