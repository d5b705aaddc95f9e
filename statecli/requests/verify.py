"""Run `statecli verify` with its options and return its outcome."""

from __future__ import annotations

from msgspec.structs import replace

from statecli import requests
from statecli.commands.verify import run as verify_run
from statecli.commands.verify.result import DEFAULT_PROOFS, Name, Verification
from statecli.commands.verify.run import Request
from statecli.core.errors import UsageError, option
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.proof_names import OPTION_OF_PROOF
from statecli.report import View
from statecli.report.verify import build_verify_report, list_inconclusive
from statecli.requests.accepted_findings import check_options, drop_accepted_of_checks, list_accepted
from statecli.requests.options import CUDA_PATTERN, VerifyOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome
from statecli.targets.load import find_class_spec

_DEVICE = compile_on_use(rf"meta|cpu|fake-cuda|{CUDA_PATTERN}")


def prepare(options: VerifyOptions, caller: Caller, extra: ExtraInputs) -> Request:  # noqa: ARG001 - every command has the same signature
    """Build the request from the options. Raises UsageError for contradictory options and unknown rules."""
    check_options(options)
    if options.device is not None and not _DEVICE.fullmatch(options.device):
        device = option("--device", options.device)
        raise UsageError(f"{device}: must be cuda, cuda:N, cpu, meta or fake-cuda")
    for field, proofs in group_by(OPTION_OF_PROOF, lambda proof: OPTION_OF_PROOF[proof]).items():
        value = getattr(options, field)
        if options.check and value is not None and set(proofs).isdisjoint(options.check):
            useless_option = option(f"--{field}", value if isinstance(value, str) else value.__name__)
            left_out = f"{option('--check')} leaves out {' and '.join(sorted(proof.value for proof in proofs))}"
            raise UsageError(f"{useless_option}: has no effect, because {left_out}; leave one of the two options out")
    return Request(
        target=options.target,
        checks=tuple(name for name in Name if name in options.check),
        device=options.device,
        dtype=options.dtype,
        optimizer=options.optimizer,
        input=options.input,
        inputs=options.input_from,
        init_device=options.init_device,
        selection=options.selection,
    )


def run(options: VerifyOptions, request: Request, caller: Caller, extra: ExtraInputs) -> Outcome[Verification]:
    """Run the checks; inconclusive checks are failures."""
    with caller.steps(len(request.checks or DEFAULT_PROOFS)) as step:
        if extra.model is not None:
            verification = verify_run.verify_live_model(extra.model, request, extra.inputs)
        else:
            verification = verify_run.run(request, lambda _: step(), extra.inputs)
    caller.check_states(verification.state)
    accepted_findings = list_accepted(verification.findings, verification.state, options)
    accepted = accepted_findings.accepted
    verification = drop_accepted_of_checks(verification, accepted)
    verification = replace(verification, requested=options.check, accepted=accepted)
    report = build_verify_report(verification, View(unfold=options.all, verbose=options.verbose), options.fail_on)
    if report.findings and extra.model is None and (spec := find_class_spec(options.target)) is not None:
        report = requests.suggested_fix_command.add_fix_command(report, verification.state, spec, options)
    return Outcome(
        verification,
        report,
        failures=list_inconclusive(verification, options.check),
        findings_first=True,
        reported=True,
        files=accepted_findings.files,
        warning=requests.match_accepted.describe_former_names(options) if options.ignore else None,
    )
