"""How the processes of an instance write their log: one format, told apart by the name of the process. Any process,
once, before its first line."""

import logging


def configure_log(name: str, level: str) -> None:
    """Lines go to standard error. `name`: of this process; `level`: as `MSTAR_LOG_LEVEL` has it."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname).1s {name}: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request of a download
