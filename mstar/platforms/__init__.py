"""What this machine is and can do. Any process; importing it loads no torch, only a question about an accelerator does.

`current_platform` answers for the process. Nothing else in the package looks at device capabilities, vendor builds of
torch or processor flags.
"""

from mstar.platforms.platform import Platform

current_platform = Platform()

__all__ = ["Platform", "current_platform"]
