"""The entry point that `import torch` runs if shmring is installed (see pyproject.toml).

This module loads neither shmring's engine nor NumPy.
"""

from __future__ import annotations

import warnings
from typing import Any


def register() -> None:
    """Register the backend "shmring" with torch.distributed. A failure only warns."""
    try:
        from torch.distributed import Backend

        Backend.register_backend("shmring", _create_group, devices=["cpu"])
    except Exception as error:  # a torch without distributed, or an unknown version
        warnings.warn(f"the backend shmring was not registered with torch.distributed: {error}", stacklevel=2)


def _create_group(*arguments: Any) -> Any:
    from ..torch import create_group

    return create_group(*arguments)
