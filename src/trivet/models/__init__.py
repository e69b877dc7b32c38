"""Model families as declarations: names, shapes and variants of files, mapped to a `ModelSpec`."""

from typing import TYPE_CHECKING

from trivet.lazy import lazy_names

if TYPE_CHECKING:
    from trivet.models.load import Model, open_model
    from trivet.models.spec import ModelSpec, RopeSpec, rope_tables

__all__ = ["Model", "ModelSpec", "RopeSpec", "open_model", "rope_tables"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {"load": ("Model", "open_model"), "spec": ("ModelSpec", "RopeSpec", "rope_tables")},
    )
