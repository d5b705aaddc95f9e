"""`statecli diff`: compare two checkpoints or model classes.

    names ──▶ metadata ──▶ values ──▶ equal bytes under another name ──▶ expectations

`run.py` does these steps in order. `pairing.py` pairs tensors by name, `changed_fields.py` compares their metadata,
`settings.py` compares numbers and texts. `renames.py` finds equal bytes under other names, and `suggest_map.py`
suggests a `--map`. `load_check.py` compares a class with a checkpoint, and `expectations.py` decides the exit status.
"""
