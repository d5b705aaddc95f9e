"""Tensors' bytes at memory speed: where they lie, what they are worth, whether they arrive on a device.

Importing this package imports nothing. Its modules need numpy (`place` also torch, when it is called):

    elements.py   stored bytes -> numbers: every element type torch can save
    read.py       a `TensorData` -> its values, chunk by chunk, in bounded memory; checksums
    blocks.py     what ggml has quantized: its blocks as they are stored, or what they are worth, by the package gguf
    live.py       a live torch tensor -> the same view of its storage
    stats.py      values -> `Stats`
    facts.py      a checkpoint's tensors -> `Facts` that rules judge; scan.py: of one block, _native.c or numpy
    place.py      a checkpoint's tensors -> a device, and back, compared
    compare.py    pairs of tensors -> how they differ: the plan, and adding it up
    run.py        one task of that plan, in any process; pool.py has the processes
    kernels.py    two blocks of values -> their `Tally` (tally.py): _native.c where it was compiled, numpy otherwise;
                  on_device.py the same on a GPU
    sparse.py     two sparse tensors by value; histogram.py how differences are spread
"""
