"""What torch runs when it is imported, where shmring is installed: an entry point in pyproject.toml.

It loads neither shmring's engine nor NumPy.
"""

from __future__ import annotations

import warnings
from typing import Any


def register() -> None:
    """Tell torch.distributed of the backend "shmring"; if that fails, `import torch` does not."""
    try:
        from torch.distributed import Backend

        Backend.register_backend("shmring", _create_group, devices=["cpu"])
    except Exception as error:  # a torch without distributed, or one whose ways are not known yet
        warnings.warn(f"torch.distributed was not told of the backend shmring: {error}", stacklevel=2)


def _create_group(*arguments: Any) -> Any:
    from ..torch import create_group

    return create_group(*arguments)
