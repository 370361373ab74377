"""Triton kernels for CUDA tensors, one file per family, behind `mstar.kernels.ops`.

Run on the thread of the forward, on the current stream; launches depend on shapes only and nothing is read on the host,
so every operation here can be captured in a CUDA graph. Imported only once a CUDA tensor asks for them: builds of torch
for CPUs come without Triton.
"""
