"""Load generator for OpenAI-compatible servers, behind `mstar bench` and `benchmark/runner.py`.

Speaks HTTP only and imports nothing else of the package: what it measures may be any server.
"""
