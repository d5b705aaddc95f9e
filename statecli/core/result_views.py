"""Views of a result for Python: text, notebook, JSON document, data frame.

The types of results are in packages below the report and the renderers, so the views are imported by name on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


class ResultViews:
    """Base class of results: `print(result)`, a cell of a notebook, `result.to_dict()`, `result.to_pandas()`."""

    __slots__ = ()

    def __str__(self) -> str:
        """Table as the command prints it, without colour, suggested commands and exit status.

        For a Lock, the text of the lock file.
        """
        return str(_import_views().format_text(self))

    def _repr_html_(self) -> str:
        """HTML of the page that `-f html` writes, without charts, for a notebook."""
        return str(_import_views().format_html(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of the command (`-f json`) as a dict. For a Lock, return the lock file."""
        document: dict[str, Any] = _import_views().to_dict(self)
        return document

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with the columns of `-f csv`: a row for each tensor, or for each finding of an Audit.

        The rows of a Diff include identical tensors. Raises MissingDependency if pandas is not installed.
        """
        return _import_views().to_pandas(self)


def _import_views() -> Any:
    return import_module("statecli.api.rendered_results")
