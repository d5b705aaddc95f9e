"""Examples and exit statuses for the help of each command.

A test runs every example (`tests/test_help.py`), so an example may use only the files of the test's fixture.
"""

from __future__ import annotations

import msgspec

from statecli.core.installed_package import install_extra


class Manual(msgspec.Struct, frozen=True):
    """Examples (the purpose of each command line) and exit statuses of a command."""

    examples: dict[str, str]
    statuses: dict[int, str]

    def list_statuses(self) -> tuple[tuple[str, str], ...]:
        """Return each exit status with its meaning, and status 130, which every command has."""
        statuses = self.statuses | {130: "The command was interrupted (Ctrl-C)."}
        return tuple((str(status), meaning) for status, meaning in sorted(statuses.items()))


_WRONG_LINE = "or the command line is wrong."

#: Manual of statecli itself.
ROOT = Manual(
    {
        "statecli inspect model.safetensors": "List the tensors of a checkpoint.",
        "statecli diff old.pt new.safetensors": "Compare two checkpoints.",
        "statecli verify net.py:Net --device fake-cuda": "Test a model class; this needs no GPU.",
        "statecli audit checkpoints/": "Check all checkpoints of a folder.",
        "statecli help audit": "Show the options of a command, with examples.",
    },
    {
        0: "Success: no differences, and no finding that reaches the severity of --fail-on.",
        1: "Differences, or a finding that reaches the severity of --fail-on.",
        2: "The command could not be completed: wrong usage, unreadable files, nothing matched, or a bug.",
        141: "The program that reads standard output ended first, as in statecli ... | head.",
    },
)

#: Manual of each group of commands.
GROUPS: dict[str, Manual] = {
    "git": Manual(
        {
            "statecli git setup": "Set up this repository.",
            "git diff": "Show the tensors that changed since the last git add.",
            "statecli git textconv model.safetensors": "Print the text that git diff compares.",
            "statecli git difftool old.pt new.pt": "Compare two versions of a file.",
        },
        {
            0: "git was set up, or the text was printed.",
            2: f"git is not installed, the current folder is not in a repository, {_WRONG_LINE}",
        },
    ),
}

#: Manual of each command in COMMANDS.
MANUALS: dict[str, Manual] = {
    "inspect": Manual(
        {
            "statecli inspect model.safetensors": "List the tensors of a checkpoint.",
            "statecli inspect train.ckpt#optimizer --stats": "List one section, with statistics of its values.",
            "statecli inspect net.py:Net --to meta": "Show which tensors do not move with the model.",
            "statecli inspect model.safetensors --model net.py:Net -f json": (
                "Take the kinds of the tensors from a model class; write JSON."
            ),
            "statecli inspect model.safetensors --top 10": "List the ten largest tensors.",
        },
        {
            0: "The target was listed, and no finding reaches the severity of --fail-on.",
            1: "A finding reaches the severity of --fail-on, such as a tensor that did not move with --to, or a pickle "
            "that calls os.system.",
            2: "The target or its values could not be read, the model could not be built, no tensor matched, "
            + _WRONG_LINE,
        },
    ),
    "report": Manual(
        {
            "statecli report model.safetensors -o report.html": "Write a report with all modules and tensors.",
            "statecli report train.ckpt --stats -o report.html": "Read the values too, and show histograms.",
            "statecli report net.py:Net -o report.html": "Write a report of a model class.",
        },
        {
            0: "The report was written, and no finding is an error.",
            1: "At least one finding is an error, such as a parameter that is not registered.",
            2: "The target or its values could not be read, the model could not be built, no tensor matched, "
            + _WRONG_LINE,
        },
    ),
    "diff": Manual(
        {
            "statecli diff old.pt new.safetensors": "Compare two checkpoints of any formats.",
            "statecli diff old.pt new.pt --rtol 1e-5 --name-status": (
                "Ignore small differences; print only a letter and the name of each changed tensor."
            ),
            "statecli diff old.pt new.pt --top 5": "Show the five tensors that changed most.",
            "statecli diff base.pt finetuned.pt --may-change 'head.*'": "Fail if a tensor outside the head changed.",
            "statecli diff model.safetensors net.py:Net": "Compare a checkpoint with a model class.",
        },
        {
            0: "Nothing differs, or the options allow all differences.",
            1: "Tensors or metadata differ. With --may-change, --must-not-change, --must-change, --cast or --adapter: "
            "a difference is not allowed, or an expected change is missing.",
            2: f"A target or tensor could not be read or compared, no tensor matched, {_WRONG_LINE}",
        },
    ),
    "verify": Manual(
        {
            "statecli verify net.py:Net --device fake-cuda": "Run the default checks without a GPU.",
            "statecli verify 'net.py:Net(hidden=8)' --check move": "Give arguments to the class; run one check.",
            "statecli verify net.py:Net --input 2x3 --dtype bfloat16": (
                "Call forward with a 2x3 tensor; cast to bfloat16."
            ),
            "statecli verify net.py:Net --input-from net.py:make_batch --optimizer adamw": (
                "Train with the inputs that make_batch returns."
            ),
        },
        {
            0: "No finding reaches the severity of --fail-on, and no check is inconclusive.",
            1: "A finding reaches the severity of --fail-on, such as a parameter that does not move with the model.",
            2: "A check is inconclusive or could not run, and no finding sets status 1; the model could not be built, "
            + _WRONG_LINE,
        },
    ),
    "fix": Manual(
        {
            "statecli fix net.py:Net": "Show the fixes as a unified diff.",
            "statecli fix net.py:Net --input 2x3": "Also fix bugs that show when forward gets a 2x3 tensor.",
            "statecli fix net.py:Net --write": "Write the fixes to net.py.",
        },
        {
            0: "No bug was found, or the fixes for all bugs were written.",
            1: "A bug is not fixed yet: the fix was shown but not written, or no fix passes verify.",
            2: "The model could not be built, its class is in an installed package, "
            f"libcst is missing ({install_extra('fix')}), " + _WRONG_LINE,
        },
    ),
    "audit": Manual(
        {
            "statecli audit checkpoints/": "Check all checkpoints of a folder.",
            "statecli audit model.safetensors --model net.py:Net": "Check that a checkpoint fits a model class.",
            "statecli audit checkpoints/ --lock statecli.lock.json": "Check that no tensor has changed.",
            "statecli audit model.safetensors --model net.py:Net --values -f github": (
                "In CI: also read the values of large files, and annotate the pull request on GitHub."
            ),
            "statecli audit checkpoints/ -f sarif -o audit.sarif": "Write a report for code scanning.",
        },
        {
            0: "All targets were checked, and no finding reaches the severity of --fail-on.",
            1: "A finding reaches the severity of --fail-on.",
            2: f"A target could not be read, nothing was audited, a requested rule did not run, {_WRONG_LINE}",
        },
    ),
    "explain": Manual(
        {
            "statecli explain net.py:Net model.safetensors": "Print the cause, and Python code that loads the file.",
            "statecli explain net.py:Net old.pt -f json": "Write the cause and the code as JSON.",
            "python train.py 2>&1 | statecli explain": (
                "Explain the error message of load_state_dict in the output of train.py."
            ),
        },
        {
            0: "A strict load_state_dict loads the checkpoint into the class, without changes.",
            1: "The class does not load the checkpoint. The output has the cause and, if possible, Python "
            "code that loads the checkpoint.",
            2: "A target could not be read, the model could not be built, the text has no known error, " + _WRONG_LINE,
        },
    ),
    "lock": Manual(
        {
            "statecli lock checkpoints/ -o statecli.lock.json": "Lock all checkpoints of a folder.",
            "statecli lock model.safetensors --digest sha256": "Print a lock with SHA-256 digests.",
            "statecli lock checkpoints/ --tensors-only -o weights.lock.json": "Lock tensors only.",
        },
        {
            0: "The lock file was written or printed.",
            2: f"A target could not be read, the lock file could not be written, {_WRONG_LINE}",
        },
    ),
    "log": Manual(
        {
            "statecli log checkpoints/": "Show a line for each checkpoint of a run.",
            "statecli log 'checkpoints/*.pt' --top 5": "Show the five modules that changed most.",
            "statecli log checkpoints/ -f html -o run.html": "Write a report with plots over the steps.",
            "statecli log checkpoints/ --fail-on warning": "Fail for warnings too, such as a new NaN.",
        },
        {
            0: "All checkpoints were read, and no finding reaches the severity of --fail-on.",
            1: "A finding reaches the severity of --fail-on; with --fail-on warning, a new NaN in a tensor is enough.",
            2: f"A checkpoint or a tensor could not be read, no checkpoint was found, {_WRONG_LINE}",
        },
    ),
    "bisect": Manual(
        {
            "statecli bisect checkpoints/ --condition nan": "Find the first checkpoint with NaN.",
            "statecli bisect checkpoints/ --condition 'changed head.*'": "Find when a layer first changed.",
            "statecli bisect checkpoints/ --condition 'cosine<0.9' -f json": (
                "Find the first checkpoint whose weights have a cosine below 0.9 with the first checkpoint."
            ),
        },
        {
            0: "statecli found the first checkpoint for which the condition is true.",
            1: "Not found: the condition is false at the last checkpoint.",
            2: "A checkpoint that is needed for the answer could not be read, the glob matches no tensor, "
            f"{_WRONG_LINE}",
        },
    ),
    "resume-check": Manual(
        {
            "statecli resume-check train.py::main": "Train 4 steps, resume from step 2, and compare.",
            "statecli resume-check train.py::main --report junit=resume.xml": "Also write JUnit for CI.",
            "statecli resume-check train.py::main --steps 20 -f json": "Resume from step 10; print JSON.",
        },
        {
            0: "The resumed training equals the uninterrupted training.",
            1: "Some state is not restored. Each finding shows the missing line of the script.",
            2: "The script fails, two runs with the same arguments differ (add a seed), the values of a state cannot "
            f"be read, {_WRONG_LINE}",
        },
    ),
    "watch": Manual(
        {
            "statecli watch checkpoints/ --count 1": "Print the last checkpoint, or wait for the first one.",
            "statecli watch checkpoints/ --history --count 1": "Print the first checkpoint of the run.",
            "statecli watch checkpoints/ --count 1 -f jsonl": "Print a JSON object instead of a line.",
        },
        {
            0: "statecli wrote the number of lines given by --count.",
            1: "With --fail-on-nan: a tensor has NaN or infinite values for the first time.",
            2: f"A checkpoint could not be read, {_WRONG_LINE}",
        },
    ),
    "browse": Manual(
        {
            "statecli browse model.safetensors": "Look at the tensors of a checkpoint.",
            "statecli browse old.pt new.safetensors": "Compare two checkpoints.",
            "statecli browse llama --model auto": "Build the model to show kinds and tied weights.",
            "statecli browse net.py:Net": "Browse a model class; press e to open its source code.",
        },
        {
            0: "You left the browser.",
            2: "The target could not be read, the output is not a terminal, "
            f"textual is missing ({install_extra('tui')}), " + _WRONG_LINE,
        },
    ),
    "merge": Manual(
        {
            "statecli merge 1.part 2.part": "Merge the part files that statecli diff --shard wrote.",
            "statecli merge 1.part 2.part -f json -o diff.json": "Write the result as JSON.",
            "statecli merge 1.part 2.part --copies": (
                "Merge part files of jobs that read separate copies of the checkpoints."
            ),
        },
        {
            0: "The command without --shard would exit with status 0.",
            1: "The command without --shard would exit with status 1: findings or differences.",
            2: f"A part file is missing, unreadable or made from other checkpoints, {_WRONG_LINE}",
        },
    ),
    "git setup": Manual(
        {
            "statecli git setup": "Set up this repository.",
            "git diff": "Show the tensors that changed since the last git add.",
            "statecli git setup --global": "Set up git for all your repositories.",
            "statecli git setup --remove": "Remove the driver from this repository.",
        },
        {
            0: "git was set up, or the driver was removed.",
            2: f"git is not installed, the current folder is not in a repository, {_WRONG_LINE}",
        },
    ),
    "git textconv": Manual(
        {
            "statecli git textconv model.safetensors": "Print the text that git diff compares.",
            "statecli git textconv train.ckpt": "Print the text of a training checkpoint.",
            "statecli git textconv net.py": "Print the error of a file that is not a checkpoint.",
        },
        {
            0: "The text or an error message was printed. (git would stop at any other status.)",
            2: "The command line is wrong.",
        },
    ),
    "git external-diff": Manual(
        {
            "git diff": "Show a table for each changed checkpoint; git calls statecli git external-diff.",
            "statecli git external-diff old.pt old.pt 0 100644 new.pt 0 100644": (
                "Print the output of git diff for one file."
            ),
            "statecli git external-diff old.pt": "Print the output of git diff for a file with a merge conflict.",
        },
        {
            0: "The table or an error message was printed. (git would stop at any other status.)",
            2: "The command line is wrong.",
        },
    ),
    "git difftool": Manual(
        {
            "statecli git difftool old.pt new.pt": "Compare two versions of a file.",
            "statecli git difftool old.pt new.pt weights/net.pt": "Show the file under its name in the repository.",
            "statecli git difftool old.pt missing.pt": "Print the error of a version that cannot be read.",
        },
        {
            0: "The table or an error message was printed. (git would ask whether to continue at any other status.)",
            2: "The command line is wrong.",
        },
    ),
    "rules": Manual(
        {
            "statecli rules": "List the rules of all commands.",
            "statecli rules nan": "Explain one rule: why it matters, an example and the fix.",
            "statecli rules -f markdown -o rules.md": "Write the rules as a Markdown table.",
        },
        {0: "The rules were printed.", 2: f"The rule does not exist, {_WRONG_LINE}"},
    ),
    "config": Manual(
        {
            "statecli config": "Print the configuration of the current folder.",
            "statecli config --config ci.toml": "Print the configuration of a file.",
            "statecli config -f json": "Print the configuration as JSON, with the file that sets each key.",
        },
        {0: "The configuration was printed.", 2: f"The configuration file is wrong or unreadable, {_WRONG_LINE}"},
    ),
    "schema": Manual(
        {
            "statecli schema inspect": "Print the schema of inspect -f json.",
            "statecli schema audit > audit.schema.json": "Write a schema to a file.",
            "statecli schema lock": "Print the schema of lock files.",
        },
        {0: "The schema was printed.", 2: f"The command has no JSON output, {_WRONG_LINE}"},
    ),
    "samples": Manual(
        {
            "statecli samples sample_models": "Write the sample models into the folder sample_models.",
            "statecli samples tutorial/models": "Create the folder tutorial/models, and write them there.",
            "statecli samples ~/statecli-samples": "Write them into a folder in your home directory.",
        },
        {0: "The samples were written.", 2: f"A file exists already and differs from its sample, {_WRONG_LINE}"},
    ),
    "completion": Manual(
        {
            "source <(statecli completion bash)": "Bash: add this line to ~/.bashrc.",
            "source <(statecli completion zsh)": "Zsh: add this line to ~/.zshrc, after compinit.",
            "statecli completion fish > ~/.config/fish/completions/statecli.fish": "Fish: run this once.",
            "statecli completion powershell | Out-String | Invoke-Expression": (
                "PowerShell: add this line to the file $PROFILE."
            ),
        },
        {0: "The script was printed.", 2: f"statecli has no script for this shell, {_WRONG_LINE}"},
    ),
}
