"""Base class of the proofs: run a proof, and build its result from table cells, findings and reasons."""

from __future__ import annotations

from abc import ABC, abstractmethod

from statecli.commands.verify import check_builder
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.result import Cell, Check, Name
from statecli.core.errors import ModelError
from statecli.core.finding import Finding, Severity, Wording
from statecli.core.rule import Rule


class Proof(ABC):
    """Base class of the proofs. A proof tests a model, and fills a table with a cell for each tensor and property.

    An error of the model ends the proof. The proof is then inconclusive, unless it has already failed. Its findings and
    cells are kept.
    """

    def __init__(self, subject: ModelUnderTest, name: Name, how: str, *columns: str) -> None:
        self._subject, self._name, self._how = subject, name, how
        self._columns: dict[str, dict[str, Cell]] = {column: {} for column in columns}
        self._cells = self._columns[columns[0]]
        self._findings: list[Finding] = []
        self._reasons: list[str] = check_builder.list_unreachable_tensors(subject)

    def check(self) -> Check:
        """Run the proof and return its check. Columns without any cell are left out."""
        try:
            self._run()
        except ModelError as error:
            self._reasons.append(check_builder.get_reason(self._subject, error))
        columns = {column: cells for column, cells in self._columns.items() if cells}
        return check_builder.build_check(self._subject, self._name, self._how, columns, self._findings, self._reasons)

    def report(
        self,
        rule: Rule,
        message: str | Wording,
        fqn: str | None,
        *,
        help: check_builder.Help = None,
        severity: Severity | None = None,
    ) -> None:
        """Add a finding; see `check_builder.build_finding`."""
        self._findings.append(
            check_builder.build_finding(self._subject, rule, message, fqn, help=help, severity=severity)
        )

    @abstractmethod
    def _run(self) -> None:
        """Run the proof: fill the cells, the findings and the reasons. May raise ModelError."""
