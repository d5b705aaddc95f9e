"""`statecli diff`: two states -> what differs.

    names ──▶ metadata ──▶ values ──▶ equal bytes under another name ──▶ what was expected

`run.py` goes that way; `pairing.py` says what is compared with what, `fields.py` what of it differs,
`renames.py` finds what no name found, `hints.py` says which `--map` would, `loading.py` is for a class against a
checkpoint, `expectations.py` for the exit code. Values are read in `values/`.
"""
