"""The entry point that `import torch` runs if shmring is installed (see pyproject.toml).

It also puts shmring in the place of gloo if SHMRING_REPLACES says so. This module loads neither shmring's
engine nor NumPy.
"""

from __future__ import annotations

import os
import warnings
from typing import Any


def register() -> None:
    """Register the backend "shmring" with torch.distributed. A failure only warns.

    With SHMRING_REPLACES, a failure is an error: the program counts on shmring.
    """
    try:
        import torch.distributed

        register_in(torch.distributed)
    except Exception as error:  # a torch without distributed, or an unknown version
        warnings.warn(f"the backend shmring was not registered with torch.distributed: {error}", stacklevel=2)
    if _replaced_backend() == "gloo":
        import torch.distributed.distributed_c10d as c10d

        from .replacing import replace_gloo

        replace_gloo(c10d)


def _replaced_backend() -> str | None:
    if "SHMRING_REPLACES" not in os.environ:  # most often; loading the settings takes 2 ms
        return None
    from ..._config.settings import replaced_backend

    return replaced_backend()


def register_in(distributed: Any) -> None:
    """Register the backend with the module torch.distributed. Idempotent."""
    distributed.Backend.register_backend("shmring", _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, _: Any) -> Any:
    from .group import Group
    from .meeting import meet
    from .reconfiguring import group_for

    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1":
        warnings.warn("TORCH_DIST_NAN_CHECK has no effect on process groups of shmring", stacklevel=2)
    return group_for(options, Group, meet)
