"""Group findings by the place to change: a source line of a model, or else the rule and the file.

A line of a model, `self.blocks = [Block() for _ in range(12)]`, leaves many tensors unregistered. Several rules report
each tensor: not moved, not saved, not trained. All these findings form a single problem. Machine formats keep the
findings of a problem; readers see a message with the consequences and a fix.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from statecli import report as report_package
from statecli.commands import verify
from statecli.core.finding import UNSAFE_GLOBAL, Consequence, Finding, Severity
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.load_rules import LOAD_HELP
from statecli.core.model_state import Kind, Oddity, Origin, TensorInfo
from statecli.core.move_rules import STALE_VIEW, UNTIED_BY_MOVE, map_tied_names
from statecli.core.registration_rules import UNREGISTERED_MODULE, UNREGISTERED_PARAMETER, UNREGISTERED_TENSOR
from statecli.core.rule import Rule
from statecli.core.run_scope import NotChecked, has_unread_tensors
from statecli.core.severity import find_worst_severity, is_trainable
from statecli.core.units import format_shape, join_names, plural
from statecli.report import Line, Page, Problem, Report, RuleText, fold, rule_texts
from statecli.targets.location import is_installed
from statecli.targets.target_result import Accepted

#: Rules about an unregistered module, parameter and tensor, which name the cause of a problem.
MODULE_RULE, PARAMETER_RULE, TENSOR_RULE = (
    UNREGISTERED_MODULE.name,
    UNREGISTERED_PARAMETER.name,
    UNREGISTERED_TENSOR.name,
)

#: An element of a container at the start of a name: `blocks[0]` of `blocks`.
_ELEMENT = compile_on_use(r"(?P<container>[^\[]*)\[(?P<key>[^\]]*)\]")
#: Rules about tied weights that a move breaks apart.
BROKEN_TIES = frozenset((STALE_VIEW.name, UNTIED_BY_MOVE.name))
#: Rules about imports of a pickle, and the rule for a file that torch.load refuses because of its imports.
_IMPORT_RULES = frozenset((UNSAFE_GLOBAL, "local-module", "unknown-global"))
_REFUSED_LOAD = "needs-weights-only-false"
_REFUSED_EFFECT = "torch.load does this only with weights_only=False; the default since torch 2.6 refuses the file"
_WORST_FIRST = tuple(sorted(Severity, key=lambda severity: -severity.rank))
#: Largest number of names of a problem in a list.
MAX_NAMES = 3


@functools.cache
def _list_tie_rules() -> frozenset[str]:
    """Return the rules about tied weights that a move breaks apart, and related rules of other checks."""
    other_proofs = (
        verify.rules.UNTIED_BY_COPY,
        verify.rules.SHARED_WITH_COPY,
        verify.rules.DEVICE_MISMATCH,
        verify.rules.SHARED_IN_SAFETENSORS,
    )
    return BROKEN_TIES | {rule.name for rule in other_proofs}


def _map_rules(plugin_rules: Sequence[Rule]) -> Mapping[str, RuleText]:
    """Return the texts of each rule by its name. Rules of plugins are included."""
    texts_by_rule = rule_texts.read_rule_texts()
    return (
        texts_by_rule | {rule.name: rule_texts.describe_rule(rule) for rule in plugin_rules}
        if plugin_rules
        else texts_by_rule
    )


def _find_heading(rule: str, rules: Mapping[str, RuleText]) -> str:
    """Return the heading for several findings of the rule, or "" if the rule has no such heading."""
    return rules[rule].heading if rule in rules else ""


def group_findings(
    findings: Iterable[Finding], rows: Sequence[TensorInfo] = (), plugin_rules: Sequence[Rule] = ()
) -> tuple[Problem, ...]:
    """Group findings into problems: the worst first, otherwise in the order of the findings.

    `rows` are the tensors of a model. Findings about unregistered tensors share a cause if one source line creates the
    tensors. `plugin_rules` are the rules of plugins.
    """
    findings = tuple(findings)
    if not findings:
        return ()
    causes: dict[str, object] = {}
    rows_by_cause: dict[object, list[TensorInfo]] = {}
    for row in rows:
        if row.kind is Kind.UNREGISTERED:
            causes[row.fqn] = row.origin or fold.split_numbers(_split_element(row.fqn)[0])[0]
            rows_by_cause.setdefault(causes[row.fqn], []).append(row)
    ties = map_tied_names((finding for finding in findings if finding.rule in BROKEN_TIES), rows)
    imports, tie_rules, rules = _map_imports(findings), _list_tie_rules(), _map_rules(plugin_rules)
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        first = ties.get(finding.fqn) if finding.rule in tie_rules else _find_same_import(finding, imports)
        row_cause = None if finding.rule in LOAD_HELP else causes.get(finding.fqn or "")
        groups.setdefault(row_cause or _get_cause(first or finding, rules), []).append(finding)
    problems = []
    for cause, group in groups.items():
        group_rows = rows_by_cause.get(cause)
        if group_rows:
            problems.append(_build_registration_problem(group, group_rows))
        elif any(finding.rule in BROKEN_TIES for finding in group):
            problems.append(_build_tie_problem(group, rules))
        elif any(finding.rule in _IMPORT_RULES for finding in group):
            problems.append(_build_import_problem(group, rules))
        else:
            problems.append(_build_problem(group, rules))
    return tuple(sorted(problems, key=lambda problem: -problem.severity.rank))


def group_accepted(
    accepted: Iterable[Accepted], rows: Sequence[TensorInfo] = (), reported: Iterable[Problem] = ()
) -> dict[str, tuple[Problem, ...]]:
    """Return the accepted problems by reason. Omit the problems in `reported`, which are accepted only in part."""
    reported_problems = {_identify(problem) for problem in reported}
    problems_by_reason = {}
    for reason, entries in group_by(accepted, lambda entry: entry.reason).items():
        problems = group_findings((entry.finding for entry in entries), rows)
        problems_by_reason[reason] = tuple(
            problem for problem in problems if _identify(problem) not in reported_problems
        )
    return {reason: problems for reason, problems in problems_by_reason.items() if problems}


def _identify(problem: Problem) -> tuple[object, ...]:
    """Return a key of a problem that stays the same if some of its findings are accepted."""
    return problem.rule, problem.message, problem.target, problem.origin


def build_accepted_notes(
    accepted: Iterable[Accepted], problems_by_reason: Mapping[str, Sequence[Problem]]
) -> Iterator[Oddity]:
    """Yield notes for each reason: the number of accepted problems, and of accepted findings in reported problems.

    `problems_by_reason` comes from `group_accepted`.
    """
    for reason, problems in problems_by_reason.items():
        names = join_names(list(dict.fromkeys(problem.rule for problem in problems)), MAX_NAMES)
        yield Oddity("accepted", f"{plural(len(problems), 'problem')} accepted ({names}): {reason}")
    covered_findings = {
        id(finding) for problems in problems_by_reason.values() for problem in problems for finding in problem.findings
    }
    remaining_entries = [entry for entry in accepted if id(entry.finding) not in covered_findings]
    for reason, entries in group_by(remaining_entries, lambda entry: entry.reason).items():
        names = join_names(list(dict.fromkeys(entry.finding.rule for entry in entries)), MAX_NAMES)
        belong = "belongs to a reported problem" if len(entries) == 1 else "belong to reported problems"
        yield Oddity(
            "accepted",
            f"{plural(len(entries), 'accepted finding')} ({names}) {belong}: {reason}",
        )


def format_severities(problems: Iterable[Problem]) -> str:
    """Format the number of problems by severity, as in `1 error, 2 warnings`. Return `clean` for an empty list."""
    counts = Counter(problem.severity for problem in problems)
    return ", ".join(plural(counts[level], level.value) for level in _WORST_FIRST if counts[level]) or "clean"


def format_counts(problems: Collection[Problem], not_checked: Iterable[NotChecked]) -> str:
    """Format the number of problems by severity. Write `no findings` instead of `clean` if tensors were not read."""
    return "no findings" if not problems and has_unread_tensors(not_checked) else format_severities(problems)


def format_result(report: Report, page: Page, exit_status: int) -> str:
    """Format the last line of a page with a verdict: `2 errors, 1 warning (1 problem accepted): exit status 1`.

    If rows or inconclusive checks are the reason for the exit status, the line repeats the verdict.
    """
    problems = report.list_problems() if report.problems is not None else ()
    if report.problems is None or exit_status == 2 or (exit_status and not problems):
        return f"{page.verdict}: exit status {exit_status}"
    accepted_text = f" ({plural(report.accepted_problems, 'problem')} accepted)" if report.accepted_problems else ""
    parts = [f"{format_counts(problems, report.not_checked)}{accepted_text}", *_count_not_checked(report.not_checked)]
    return f"{', '.join(parts)}: exit status {exit_status}"


def _count_not_checked(entries: Iterable[NotChecked]) -> list[str]:
    """Format the number of unchecked items for each noun, as in `2 files not checked`."""
    by_noun = group_by(entries, lambda entry: entry.what)
    return [
        f"{plural(sum(entry.count for entry in same_noun), noun)} not checked" for noun, same_noun in by_noun.items()
    ]


def _get_cause(finding: Finding, rules: Mapping[str, RuleText]) -> object:
    line = None if _find_heading(finding.rule, rules) else finding.origin
    return finding.rule, finding.target, finding.severity, line, finding.help


def _split_element(fqn: str) -> tuple[str, str]:
    """Return the container of a tensor, and the key in the container: `blocks` and `0` for `blocks[0].weight`."""
    element = _ELEMENT.match(fqn)
    return (element["container"], element["key"]) if element else (fqn, "")


# --- ties ------------------------------------------------------------------------------------------------------------


def _build_tie_problem(findings: Sequence[Finding], rules: Mapping[str, RuleText]) -> Problem:
    """Return the problem of broken tied weights. Findings of other checks about these weights become consequences."""
    ties = [finding for finding in findings if finding.rule in BROKEN_TIES]
    first_by_name = {finding.fqn: finding for finding in reversed(ties)}
    first = [finding for finding in ties if finding is first_by_name[finding.fqn]]
    problem = _build_problem(first, rules)
    effects = [_get_consequence(finding) for finding in findings if all(finding is not tie for tie in first)]
    return replace(
        problem,
        severity=find_worst_severity(finding.severity for finding in findings),
        findings=tuple(findings),
        effects=(*problem.effects, *_join_effects(effects)),
    )


# --- imports of a pickle ---------------------------------------------------------------------------------------------

_Imports = dict[tuple[str, str], Finding]


def _map_imports(findings: Iterable[Finding]) -> _Imports:
    """Return the first finding about each import, by the target and the imported name."""
    imports: _Imports = {}
    for finding in findings:
        if finding.rule in _IMPORT_RULES and finding.about:
            imports.setdefault((finding.target, finding.about.replace("__builtin__.", "builtins.", 1)), finding)
    return imports


def _find_same_import(finding: Finding, imports: _Imports) -> Finding | None:
    """Return the finding about the first refused import. Return None if a refused import has no finding of its own."""
    if finding.rule != _REFUSED_LOAD or not finding.about:
        return None
    reported = [imports.get((finding.target, name)) for name in finding.about.split(", ")]
    return reported[0] if all(reported) else None


def _build_import_problem(findings: Sequence[Finding], rules: Mapping[str, RuleText]) -> Problem:
    """Return the problem of an import. If torch.load refuses the import, add the refusal as a consequence."""
    imports = [finding for finding in findings if finding.rule != _REFUSED_LOAD]
    problem = _build_problem(imports, rules)
    effects = problem.effects if len(imports) == len(findings) else (*problem.effects, _REFUSED_EFFECT)
    return replace(problem, findings=tuple(findings), effects=effects)


# --- unregistered tensors --------------------------------------------------------------------------------------------


def _build_registration_problem(findings: Sequence[Finding], rows: Sequence[TensorInfo]) -> Problem:
    fixes = list(dict.fromkeys(row.fix for row in rows if row.fix))
    helps = list(dict.fromkeys(help for finding in findings if (help := finding.strip_line())))[:MAX_NAMES]
    origin = next((row.origin for row in rows if row.origin), None)
    rows_in_modules = [row for row in rows if row.within]
    rule = MODULE_RULE if rows_in_modules else PARAMETER_RULE if any(map(is_trainable, rows)) else TENSOR_RULE
    return Problem(
        rule,
        find_worst_severity(finding.severity for finding in findings),
        _describe_modules(rows) if rows_in_modules else _describe_tensors(rows),
        findings[0].target,
        tuple(findings),
        tuple(_join_effects(_list_effects(findings, rows))),
        _join_fixes(fixes or helps) or None,
        origin or UNSET,
        _read_source(origin),
    )


def _join_fixes(fixes: Sequence[str]) -> str:
    """Join the fixes to one text. If several fixes begin or end with the same line, write this line once."""
    location = _get_place(fixes[0]) if fixes else ""
    lines = "\n".join([*fixes[:1], *(fix.removeprefix(location) for fix in fixes[1:])]).split("\n")
    last = lines[-1] if lines.count(lines[-1]) > 1 and lines[-1].startswith("#") else None
    if last is not None:
        lines = [*(line for line in lines if line != last), last]
    return _strip_comment_signs("\n".join(lines))


def _strip_comment_signs(fix: str) -> str:
    """Return the fix as sentences if all of its lines are comments, because then there is nothing to paste."""
    lines = fix.split("\n")
    return "\n".join(line.removeprefix("# ") for line in lines) if all(line[:1] == "#" for line in lines) else fix


def _get_place(fix: str) -> str:
    """Return the first line of a fix if this line says where to paste the rest, or else ""."""
    first, end, _ = fix.partition("\n")
    return f"{first}\n" if end and first.startswith("#") and first.endswith(":") else ""


def _describe_modules(rows: Sequence[TensorInfo]) -> str:
    """Return `blocks: 4 modules are kept in a plain list (16 parameters, 4 other tensors)`."""
    containers = {_split_element(row.fqn) for row in rows}
    modules = {pair for pair in containers if pair[1]}
    if modules:
        kinds = list(dict.fromkeys(row.container for row in rows if row.container))
        count, names = len(modules), sorted({container for container, _ in modules})
        in_closure = all(name.endswith(".__closure__") for name in names)
        container_text = " and ".join(f"a plain {kind}" for kind in kinds) or (
            "a closure" if in_closure else "a plain container"
        )
    else:
        container_text, names = (
            "an object that is not a module",
            list(dict.fromkeys(row.within or row.fqn for row in rows)),
        )
        count = len({row.within for row in rows if row.within})
    trained_count = sum(bool(row.requires_grad) for row in rows)
    parts = [plural(trained_count, "parameter")] if trained_count else []
    if other_count := len(rows) - trained_count:
        parts.append(plural(other_count, "other tensor") if trained_count else plural(other_count, "tensor"))
    loose_count = 0 if modules else len(names) - count
    content_text = plural(count, "module") + (f" and {plural(loose_count, 'tensor')}" if loose_count else "")
    are = "is" if count + loose_count == 1 else "are"
    return f"{_fold_names(names)}: {content_text} {are} kept in {container_text} ({', '.join(parts)})"


def _describe_tensors(rows: Sequence[TensorInfo]) -> str:
    """Return `table: is a plain attribute, not registered (float32 [5,5])`."""
    names = list(dict.fromkeys(row.fqn for row in rows))
    shapes = list(dict.fromkeys(f"{row.dtype} {format_shape(row.shape)}" for row in rows))
    shape = f" ({shapes[0]})" if len(shapes) == 1 else ""
    if len(names) == 1:
        return f"{names[0]}: is a plain attribute, not registered{shape}"
    return f"{_fold_names(names)}: {len(names):,} plain attributes are not registered{shape}"


def _list_effects(findings: Sequence[Finding], rows: Sequence[TensorInfo]) -> Iterator[Consequence]:
    """Yield the consequences of the findings: the messages without the names of their tensors."""
    registration_rules = {MODULE_RULE, PARAMETER_RULE, TENSOR_RULE}
    causes = [finding for finding in findings if finding.rule in registration_rules]
    yield from (_get_consequence(finding) for finding in findings if finding.rule not in registration_rules)
    if not causes:
        return
    of_worst = [finding for finding in causes if finding.wording.consequence and finding.wording.consequence.of_worst]
    # Another tensor of the line may by chance have equal values on each rank.
    worst = max((finding.severity.rank for finding in of_worst), default=0)
    for finding in causes:
        consequence = finding.wording.consequence
        if consequence is not None and (not consequence.of_worst or finding.severity.rank == worst):
            yield consequence
    device = next((row.device for row in rows if row.device), None)
    if any(row.saved is False for row in rows):
        yield Consequence("not in state_dict()")
    if any(row.moves is False for row in rows):
        yield Consequence(f"left on {device} by .to()")
    if any(row.requires_grad for row in rows):
        yield Consequence("not in model.parameters(), so not trained")


def _join_effects(effects: Iterable[Consequence]) -> Iterator[str]:
    """Yield each consequence once. Join consequences that differ only in operators, lines of a file or layer numbers.

    Examples: `in addmm at net.py:16, 18`; `in mul, addmm at net.py:16`; `from blocks[{0..2}].mask`.
    """
    lines: dict[Consequence, dict[int, None]] = {}
    for effect in effects:
        lines.setdefault(replace(effect, lines=()), {}).update(dict.fromkeys(effect.lines))
    operators: dict[Consequence, dict[str, None]] = {}
    for effect, numbers in lines.items():
        key = replace(effect, operators=(), lines=tuple(numbers))
        operators.setdefault(key, {}).update(dict.fromkeys(effect.operators))
    texts = [replace(effect, operators=tuple(names)).message for effect, names in operators.items()]
    for line, _ in fold.fold_rows([Line((text,)) for text in texts]):
        yield line.cells[0]


def _get_consequence(finding: Finding) -> Consequence:
    return finding.wording.consequence or Consequence(_get_text(finding))


def _get_text(finding: Finding) -> str:
    """Return the message without the tensor's name and the source line, because the problem shows both once."""
    name, wording = finding.fqn, finding.wording
    if wording.name is not None:
        return wording.text if wording.name == name else finding.message
    return finding.message.removeprefix(f"{name}: ").removeprefix(f"{name} ") if name else finding.message


def _fold_names(names: Sequence[str]) -> str:
    return join_names(fold.fold_names(names), MAX_NAMES)


def _read_source(origin: Origin | None) -> str:
    return report_package.source_lines.read_statement(origin) if origin is not None else ""


# --- everything else -------------------------------------------------------------------------------------------------


def _build_problem(findings: Sequence[Finding], rules: Mapping[str, RuleText]) -> Problem:
    first = findings[0]
    origin = first.origin or None
    if origin is not None and (is_installed(origin) or any(finding.origin != first.origin for finding in findings)):
        origin = None
    problem = Problem(
        first.rule,
        first.severity,
        first.message,
        first.target,
        tuple(findings),
        (),
        first.strip_line() or None,
        origin or UNSET,
        _read_source(origin),
    )
    if len(findings) == 1:
        return problem
    texts = dict.fromkeys(map(_get_text, findings))
    names = list(dict.fromkeys(finding.fqn for finding in findings if finding.fqn))
    if len(texts) == 1 and names:
        text = next(iter(texts))
        if len(names) > 1:
            text = f"each {text}" if _FIRST_VERB.match(text) else text.replace("this tensor", "these tensors")
        return replace(problem, message=f"{_fold_names(names)}: {text}")
    has_heading = bool(_find_heading(first.rule, rules))
    messages = [finding.wording.short_message if has_heading else finding.message for finding in findings]
    folded_messages = list(fold.fold_messages([Line((message,)) for message in messages]))
    return replace(
        problem,
        message=_describe_group(first, names, rules) or _summarize(first.rule, len(findings), rules),
        effects=tuple(line.cells[0] for line, _ in folded_messages),
        effect_counts=tuple(len(positions) for _, positions in folded_messages),
    )


#: Verbs at the start of the text about a tensor.
_FIRST_VERB = compile_on_use(r"(?:does|gets|has|is|keeps|lacks|needs|requires|shares|stays|still points)\b")


def _describe_group(first: Finding, names: Sequence[str], rules: Mapping[str, RuleText]) -> str | None:
    """Return `3 keys of net.py:Net are missing`, or None if the rule has no text about several names."""
    template = _find_heading(first.rule, rules)
    if not template or len(names) < 2:
        return None
    owner = first.wording.owner
    return None if owner is None and template.count("{}") > 1 else template.format(f"{len(names):,}", owner)


def _summarize(rule: str, count: int, rules: Mapping[str, RuleText]) -> str:
    """Return the rule's summary as the heading of several findings."""
    text = (rules[rule].summary if rule in rules else rule).removesuffix(".")
    return f"{text[:1].lower()}{text[1:]} ({count:,} findings)"
