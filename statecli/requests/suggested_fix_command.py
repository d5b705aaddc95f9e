"""Command line of `statecli fix` that writes the fixes shown in a report."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.commands.fix.fix_text import read_fix
from statecli.commands.fix.run import find_editable_file
from statecli.core.errors import UsageError
from statecli.core.finding import Severity
from statecli.core.model_state import Kind, ModelState
from statecli.core.quoting import quote_for_shell
from statecli.live.spec import ModelSpec, split_class_options
from statecli.report import Report
from statecli.requests.options import InspectOptions, VerifyOptions


def add_fix_command(
    report: Report, state: ModelState, spec: ModelSpec, options: InspectOptions | VerifyOptions
) -> Report:
    """Return the report with the command that writes its fixes, if `statecli fix` can write any fix."""
    names = {finding.fqn for finding in report.findings if finding.severity is not Severity.NOTE}
    fixes = {row.fix for row in state.tensors if row.fqn in names and row.kind is Kind.UNREGISTERED and row.fix}
    if not any(read_fix(fix).is_editable() for fix in fixes):
        return report
    try:
        find_editable_file(spec)
    except UsageError:
        return report
    return replace(report, fix_command=" ".join(map(quote_for_shell, _list_words(options))))


def _list_words(options: InspectOptions | VerifyOptions) -> list[str]:
    """Return the words of the `statecli fix` command, with options that decide how the model is built and called."""
    model, class_options = split_class_options(options.target)
    words = ["statecli", "fix", model]
    for flag, values in (
        ("--config-json", [class_options.config_json]),
        ("--init-device", [options.init_device]),
        ("--input", options.input),
        ("--input-from", [options.input_from]),
    ):
        for value in values:
            words += [flag, value] if value else []
    return [*words, "--write"]
