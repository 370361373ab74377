"""Host cost of a worker's step, stage by stage: `python -m benchmark.worker_phases`. See README.md beside this file."""
