"""Compute kernels behind one set of signatures: `mstar.kernels.ops`.

`reference` specifies every operation in plain torch, `cpu` compiles the fast ones with the system compiler. Runs on the
thread of the forward; knows tensors only, never requests, models or resources.
"""
