"""JSON of each command, as types for encoding; `statecli schema` prints their JSON Schema.

Rows of tensors are `Rows` in fields of type tuple, because each row is encoded only on writing.
"""
