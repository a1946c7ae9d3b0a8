"""Sums of sparse tensors: every rank gathers the entries of all ranks, as in gloo."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import shmring
from shmring.errors import agreed

from .tensors import ArgumentError, bytes_of, plain_torch, stage_memory


def gather_entries(comm: shmring.Comm, tensor: torch.Tensor) -> tuple[list[Any], Callable[[], None]]:
    """Start to gather the entries of COO tensors of one shape; return the calls and a function.

    Call the function when the calls are complete: it sets `tensor` to the sum. A rank may have any number of
    entries. Entries are added in rank order.
    """
    if tensor.layout != torch.sparse_coo:
        raise ArgumentError(
            f"shmring adds sparse tensors in COO layout only, not {tensor.layout}; use tensor.to_sparse_coo()"
        )
    with plain_torch():
        entries = tensor.detach().coalesce()
        indices, values = entries.indices().t().contiguous(), entries.values().contiguous()
    form = np.array([zlib.crc32(repr((*tensor.shape, tensor.sparse_dim(), tensor.dtype)).encode())])
    forms = np.empty(comm.size, form.dtype)
    # A tensor that is not served is refused before the first call: after it, an error ends the communicator.
    rows = [_rows(of_entries) for of_entries in (indices, values)]
    calls: list[Any] = [comm.all_gather(form, out=forms, async_op=True)]
    calls += [comm.all_gather_v(of_rows, async_op=True) for of_rows in rows]

    def add() -> None:
        if (forms != form[0]).any():
            others = np.flatnonzero(forms != form[0])
            raise agreed(ArgumentError(f"ranks {others} passed a sparse tensor of another shape or dtype"))
        # The tensor takes over the indices and values: they must be inference tensors only if it is one.
        with plain_torch(inference=tensor.is_inference()):
            everybodys = [_joined(calls[1].result(), indices).t(), _joined(calls[2].result(), values)]
            tensor.copy_(torch.sparse_coo_tensor(*everybodys, tensor.shape).coalesce())

    return calls, add


def _rows(of_entries: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the entries as rows of bytes."""
    nbytes = of_entries.element_size() * math.prod(of_entries.shape[1:])
    return np.reshape(bytes_of(stage_memory(of_entries)), (of_entries.shape[0], nbytes))


def _joined(pieces: list[np.ndarray[Any, Any]], like: torch.Tensor) -> torch.Tensor:
    """Return the entries of all ranks, in rank order."""
    nrows = sum(len(piece) for piece in pieces)  # without sparse dimensions, rows of indices are empty
    joined = torch.from_numpy(np.concatenate(pieces).reshape(-1))
    return joined.view(like.dtype).reshape(nrows, *like.shape[1:])
