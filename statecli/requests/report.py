"""Turn `statecli report` into `statecli inspect`, which writes the same result as an HTML page."""

from __future__ import annotations

from statecli.core.errors import UsageError, option
from statecli.requests.options import InspectOptions, ReportOptions
from statecli.targets.load import find_class_spec


def build_inspect_options(options: ReportOptions) -> InspectOptions:
    """Return the options of the inspection. A class gets no histograms, because it has only initial values.

    Raises UsageError if no output is given, because a page is for a browser and not for a terminal.
    """
    if options.output is None and options.output_format is None:
        raise UsageError(f"report writes an HTML file; add {option('--output', 'report.html')}")
    shared_options = {name: getattr(options, name) for name in ReportOptions.__struct_fields__}
    reads_values = options.stats or options.spectra
    return InspectOptions(**shared_options, distributions=reads_values and find_class_spec(options.target) is None)
