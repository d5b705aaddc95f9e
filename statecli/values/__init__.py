"""Tensors' bytes at memory speed: where they lie, what they are worth, whether they arrive on a device.

Importing this package imports nothing. Its modules need numpy (`place` also torch, when it is called):

    elements.py   stored bytes -> numbers: every element type torch can save
    read.py       a `TensorData` -> its values, chunk by chunk, in bounded memory; checksums
    live.py       a live torch tensor -> the same view of its storage
    stats.py      values -> `Stats`
    place.py      a checkpoint's tensors -> a device, and back, compared
"""
