"""The rules of `audit`, one module a subject. A rule is in RULES or does not exist: a test holds the folder to it."""

from __future__ import annotations

from statecli.auditing.rule import Rule
from statecli.rules import names, storage

#: In the order in which they are listed.
RULES: tuple[Rule, ...] = (*storage.RULES, *names.RULES)
