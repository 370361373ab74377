"""Load against any OpenAI-compatible server: `python -m benchmark.runner --help`. The same as `mstar bench`."""

from __future__ import annotations

from mstar.bench.command import main

if __name__ == "__main__":
    main(called="python -m benchmark.runner")
