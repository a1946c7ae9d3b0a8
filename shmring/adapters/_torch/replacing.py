"""shmring in the place of gloo: what `replace_gloo` changes in torch.distributed.

torch.distributed makes each group in `_new_process_group_helper`. The function here takes its place, and asks
it for another backend where a program asks for gloo for CPU tensors. It then enters the group under the name
that the program gave. Direct uses of torch's class ProcessGroupGloo, such as RPC's, stay as they are.

This module loads neither NumPy nor shmring's engine, because `import torch` may run it.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from .unfit import Unfit

_log = logging.getLogger("shmring")
_NAME = "shmring_for_gloo"  # of the backend, within torch only


def replace_gloo(c10d: Any) -> None:
    """Put shmring in gloo's place in the module torch.distributed.distributed_c10d. Idempotent."""
    if is_gloo_replaced(c10d):
        return
    c10d.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
    c10d._new_process_group_helper = _instead_of(c10d._new_process_group_helper, c10d)
    c10d._set_pg_timeout = _for_any_group(c10d._set_pg_timeout, c10d)


def restore_gloo(c10d: Any) -> None:
    """Let torch make gloo's groups again. Existing groups stay as they are."""
    if is_gloo_replaced(c10d):
        for name in ("_new_process_group_helper", "_set_pg_timeout"):
            setattr(c10d, name, getattr(c10d, name).__wrapped__)


def is_gloo_replaced(c10d: Any) -> bool:
    return getattr(c10d._new_process_group_helper, "replaces_gloo", False)


def _instead_of(make: Callable[..., Any], c10d: Any) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_group(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*arguments, **keywords)
        given = dict(bound.arguments)
        backend = str(given["backend"])
        by_device = _backends_by_device(backend, c10d)
        if by_device.get("cpu") != "gloo":
            return make(*arguments, **keywords)
        try:
            # torch would use the device only to ask whether the backend of that device can split groups.
            bound.arguments |= {"backend": _ours(by_device, given, c10d), "device_id": None}
            group, store = make(*bound.args, **bound.kwargs)
        except Unfit as reason:
            if given["group_rank"] == 0:
                _log.warning("gloo itself makes the group %r: %s", backend, reason)
            return make(*arguments, **keywords)
        if hasattr(group, "device_types_of_gloo"):  # else this rank is not a member
            c10d._world.pg_map[group] = (given["backend"], store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(given["backend"]))
            group.device_types_of_gloo = list(by_device)
        return group, store

    make_group.replaces_gloo = True  # type: ignore[attr-defined]
    return make_group


def _for_any_group(set_timeout: Callable[..., None], c10d: Any) -> Callable[..., None]:
    """Return torch's _set_pg_timeout; torch 2.13 asks each group whether its class is gloo's own."""

    @functools.wraps(set_timeout)
    def set_any_timeout(timeout: Any, group: Any = None) -> None:
        group = group or c10d._get_default_group()
        if hasattr(group, "device_types_of_gloo"):
            group.set_timeout(timeout)
        else:
            set_timeout(timeout, group)

    return set_any_timeout


def _backends_by_device(backend: str, c10d: Any) -> dict[str, str]:
    """Return the backend of each type of device; nothing if gloo is none of them."""
    if backend != c10d.Backend.UNDEFINED and "gloo" not in backend.lower():
        return {}
    return dict(c10d.BackendConfig(backend).get_device_backend_map())


def _ours(by_device: Mapping[str, str], given: Mapping[str, Any], c10d: Any) -> str:
    """Return the backend that torch is to make instead. Raises Unfit if shmring cannot do what is asked."""
    if getattr(c10d, "_use_torchcomms_enabled", bool)():
        raise Unfit("torchcomms is on")
    if given.get("backend_options") is not None:
        raise Unfit("shmring does not know its options (pg_options)")
    if os.environ.get("TORCH_DIST_NAN_CHECK") == "1" and hasattr(c10d, "NanCheckHook"):
        raise Unfit("TORCH_DIST_NAN_CHECK is set, and shmring has no such check")
    if any(name != "gloo" for name in by_device.values()):
        # shmring's group is one of Python, and torch makes no other backend beside one of these.
        raise Unfit("it has several backends; for CPU tensors alone, new_group(backend='gloo') gets shmring")
    return f"cpu:{_NAME}"


def _create(options: Any, _: Any) -> Any:
    """Return this rank's group. Raises Unfit, on all ranks, if shmring cannot connect them."""
    from .meeting import meet_in_place_of_gloo
    from .reconfiguring import group_for
    from .replacement import Replacement

    return group_for(options, Replacement, meet_in_place_of_gloo)
