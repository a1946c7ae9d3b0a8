"""Collectives as custom calls of XLA, in the order of the program.

A collective is the primitive `collective_p`. It is lowered to a custom call, which runs the handler in
`_compiled` on the buffers of the program.

XLA runs independent operations concurrently and in any order, but all ranks must make their collectives in
one order. So `collective_p` has an ordered effect of JAX: each custom call takes the token that the call
before it gave. The effect orders the calls in loops, branches and nested functions, too, and JAX orders by
it one program after the other. All communicators share one effect.

A program with an effect leaves the path on which JAX dispatches in C++: under plain `jax.jit` a call takes
some 100 us longer. Hence the *region*, `region_p`, which `jit` puts around its whole function. The region
contains a program with the effect and has none itself: its lowering makes the first token, and a last
custom call takes the last token. `jit` waits for this custom call. So the collectives are over when a call
returns: programs need no token between them, an error is raised in the call, in its own class, and Ctrl-C
works. Under a transformation of JAX (grad, vmap, an outer jit), `jit` is plain `jax.jit`: the outermost
function is the region, or is a plain program with the effect.

The result of an all-reduce takes the memory of its argument, if an operation of the program has made the
argument or the caller has donated it. Other arguments would be copied first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, effects
from jax._src.interpreters import ad, batching, mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

import shmring

from .. import _compiled
from .call import Call, Group
from .errors import note, own_error

_TARGET = "shmring"
_END = b"end"  # the text of the custom call that ends a region
_calls: dict[bytes, _compiled.XlaCall] = {}  # by the text in custom calls
_eager: weakref.WeakKeyDictionary[shmring.Comm, Callable[[Call], Any]] = weakref.WeakKeyDictionary()


class _Order(effects.Effect):  # type: ignore[misc]
    """The order of all collectives of a program."""

    def __str__(self) -> str:
        return "order of collectives"


_ORDER = _Order()
_context, _no_trace = core.trace_ctx, core.eval_trace
_tokens = dispatch.runtime_tokens
_Array = type(jax.numpy.zeros(0))
for _allowed in (
    effects.ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects,
):
    _allowed.add_type(_Order)

# --- the primitive of a collective ---

collective_p = core.Primitive("shmring_collective")
collective_p.multiple_results = True


def collective(call: Call, leaves: Sequence[Any]) -> list[Any]:
    """Make the call, or add it to the program that JAX traces."""
    return list(collective_p.bind(*leaves, call=call))


def _abstract(*leaves: Any, call: Call) -> Any:
    results = call.results([(leaf.shape, leaf.dtype) for leaf in leaves])
    return [core.ShapedArray(shape, np.dtype(dtype)) for shape, dtype in results], {_ORDER}


def _implement(*leaves: Any, call: Call) -> Any:
    comm = call.group.comm()
    program = _eager_program(call) if comm is None else _eager_programs(comm)(call)
    with jax.disable_jit(False):
        return program(*leaves)


def _eager_programs(comm: shmring.Comm) -> Callable[[Call], Any]:
    """Return the function that gives the communicator's programs, which are freed with it."""
    programs = _eager.get(comm)
    if programs is None:
        programs = _eager[comm] = functools.lru_cache(maxsize=1024)(_eager_program)
    return programs


def _eager_program(call: Call) -> Callable[..., Any]:
    return jit(lambda *leaves: collective_p.bind(*leaves, call=call), {})


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    """Make the call, and the same call on the tangents of the real leaves: it is linear."""
    call.check_gradient()
    results = collective(call, primals)
    changes = [ad.Zero(core.typeof(result).to_tangent_aval()) for result in results]
    real = [i for i, primal in enumerate(primals) if jax.dtypes.issubdtype(primal.dtype, np.inexact)]
    moved = collective(call, [ad.instantiate_zeros(tangents[i]) for i in real])
    for i, change in zip(real, moved, strict=True):
        changes[i] = change
    return results, changes


def _transpose(cotangents: Sequence[Any], *leaves: Any, call: Call) -> Any:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    found = call.transposed(given, collective)
    return [
        leaf.reshape(old.aval.shape) if ad.is_undefined_primal(old) else None  # None for a constant
        for leaf, old in zip(found, leaves, strict=True)
    ]


def _batch(leaves: Sequence[Any], dims: Sequence[Any], *, call: Call) -> Any:
    """Make the call on all elements of the batch at once."""
    leaves, dims = list(leaves), list(dims)
    if call.kind in ("reduce_scatter", "all_to_all"):
        for i, dim in enumerate(dims):
            if dim is not None:  # dimension 0 is that of the ranks
                leaves[i], dims[i] = jax.numpy.moveaxis(leaves[i], dim, -1), leaves[i].ndim - 1
    results = collective(call, leaves)
    if call.kind == "all_gather":
        dims = [dim if dim is None else dim + 1 for dim in dims]
    if call.kind == "reduce_scatter":
        fewer = [leaf.ndim - result.ndim for leaf, result in zip(leaves, results, strict=True)]
        dims = [dim if dim is None else dim - less for dim, less in zip(dims, fewer, strict=True)]
    return results, dims[: len(results)]


collective_p.def_effectful_abstract_eval(_abstract)
collective_p.def_impl(_implement)
ad.primitive_jvps[collective_p] = _differentiate
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch

# --- lowering to custom calls ---


def _custom_call(
    text: bytes, token: Any, operands: Sequence[Any], results: Sequence[Any], in_place: Sequence[int] = ()
) -> Any:
    """Add a custom call of the handler; return its token and its results.

    results: their shapes and dtypes. in_place: the operands whose memory is the result's.
    """
    element = {dtype: mlir.dtype_to_ir_type(np.dtype(dtype)) for _, dtype in results}
    types = [ir.RankedTensorType.get(shape, element[dtype]) for shape, dtype in results]
    ranks = [len(ir.RankedTensorType(operand.type).shape) for operand in operands]
    call = mlir.custom_call(
        _TARGET,
        result_types=[mlir.token_type(), *types],
        operands=[token, *operands],
        backend_config={"call": ir.StringAttr.get(text.decode())},
        has_side_effect=True,
        api_version=4,
        operand_output_aliases={i + 1: i + 1 for i in in_place},
        operand_layouts=[(), *(range(rank - 1, -1, -1) for rank in ranks)],
        result_layouts=[(), *(range(len(shape) - 1, -1, -1) for shape, _ in results)],
    )
    token, *values = call.results
    return token, values


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    _check_device(ctx.module_context.axis_context)
    text = call.text.encode()
    if text not in _calls:
        op = call.how[0] if call.kind == "all_reduce" else None
        run = functools.partial(_run_on_separate_arrays, call) if op else call.run
        _calls[text] = _compiled.XlaCall(call.group.comm, run, op)
    in_place: list[int] = []
    if call.kind == "all_reduce":
        in_place = [i for i, operand in enumerate(operands) if _may_be_overwritten(operand)]
    results = [(aval.shape, aval.dtype) for aval in ctx.avals_out]
    token, values = _custom_call(text, ctx.tokens_in.get(_ORDER), operands, results, in_place)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return values


def _run_on_separate_arrays(
    call: Call, comm: shmring.Comm, arrays: list[shmring.Memory], outs: list[shmring.Memory]
) -> None:
    """Run a call whose arrays must be disjoint: XLA gives equal leaves one buffer."""
    seen: set[int] = set()
    for i, array in enumerate(arrays):
        if array.nbytes and array.address in seen:
            ctypes.memmove(outs[i].address, array.address, array.nbytes)
            arrays[i] = outs[i]
        seen.add(array.address)
    call.run(comm, arrays, outs)


def _check_device(context: Any) -> None:
    """Raise ValueError if the program is for several devices: each would make every call."""
    count = getattr(context, "num_devices", None)
    if count is None:
        count = context.mesh.size if hasattr(context, "mesh") else context.axis_env.nreps
    if count != 1:
        raise ValueError(
            f"a program with collectives of shmring is compiled for {count} devices of this process, and all "
            "of them would make the calls at the same time; use one device per process, and more processes"
        )


def _may_be_overwritten(operand: Any) -> bool:
    """Return whether an operation of the program has made the operand, or the caller has donated it."""
    owner = operand.owner
    if not isinstance(owner, ir.Block):
        return True
    try:
        attributes = ir.DictAttr(owner.owner.attributes["arg_attrs"][ir.BlockArgument(operand).arg_number])
    except (KeyError, IndexError, TypeError, ValueError):  # of a loop, or a function without attributes
        return False
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


# --- the region ---

region_p = core.Primitive("shmring_region")
region_p.multiple_results = True


def _abstract_region(*_: Any, jaxpr: Any) -> Any:
    results = [var.aval for var in jaxpr.outvars]
    others = {effect for effect in jaxpr.effects if effect is not _ORDER}
    return results or [core.ShapedArray((0,), np.dtype(np.uint8))], others


def _lower_region(ctx: Any, *operands: Any, jaxpr: Any) -> Any:
    _check_device(ctx.module_context.axis_context)
    tokens = mlir.TokenSet({**dict(ctx.tokens_in.items()), _ORDER: hlo.create_token()})
    inside = ctx.replace(tokens_in=tokens, tokens_out=None)
    values = mlir.lower_fun(lambda *args: core.eval_jaxpr(jaxpr, (), *args))(inside, *operands)
    left = dict(inside.tokens_out.items())
    _, end = _custom_call(_END, left.pop(_ORDER), [], [] if values else [((0,), np.uint8)])
    if left:  # of ordered effects of jax, such as its callbacks
        ctx.set_tokens_out(mlir.TokenSet(left))
    return values or end


region_p.def_effectful_abstract_eval(_abstract_region)
for _primitive, _rule in (collective_p, _lower), (region_p, _lower_region):
    try:
        mlir.register_lowering(_primitive, _rule, platform="cpu", cacheable=False)
    except TypeError:  # jax up to 0.7 keeps no lowerings
        mlir.register_lowering(_primitive, _rule, platform="cpu")


@jax.tree_util.register_pytree_node_class
class _Nothing:
    """Results without an array, and the array that is ready when the region has run."""

    def __init__(self, structure: Any, end: Any) -> None:
        self.structure, self.end = structure, end

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.end,), self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, ends: Sequence[Any]) -> _Nothing:
        return cls(structure, ends[0])


def jit(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return the compiled function, whose collectives are a region."""
    inner = jax.jit(function, **options)
    region = _Region(function)
    outer = jax.jit(functools.wraps(function)(functools.partial(region.trace)), **options)
    call = _compiled.function_of_region(region, outer, inner, _context, _no_trace, _tokens, _Nothing)
    functools.update_wrapper(call, function)
    for name in ("lower", "trace", "eval_shape"):  # of the plain program, to inspect or to compile it
        setattr(call, name, getattr(inner, name))
    call._region = outer  # type: ignore[attr-defined]
    return call


class _Region:
    """A function that becomes a region when JAX traces it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._groups: set[Group] = set()  # those of all its programs

    def trace(self, *args: Any, **keywords: Any) -> Any:
        """Return the results of the region."""
        if _context.trace is _no_trace:  # jax.disable_jit
            return self._function(*args, **keywords)
        leaves, structure = jax.tree.flatten((args, keywords))
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, core.Tracer)]

        def run(*values: Any) -> Any:
            for i, value in zip(traced, values, strict=True):
                leaves[i] = value
            args, keywords = structure.unflatten(leaves)
            return self._function(*args, **keywords)

        operands = [leaves[i] for i in traced]
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*operands)
        self._groups |= _groups_of(closed.jaxpr)
        structure = jax.tree.structure(shapes)
        values = region_p.bind(*closed.consts, *operands, jaxpr=_without_constants(closed.jaxpr))
        return structure.unflatten(values) if structure.num_leaves else _Nothing(structure, *values)

    def await_end(self, results: Any) -> None:
        """Wait until the region has ended.

        Only the main thread runs signal handlers, and not while it waits within JAX.
        """
        first = _first_array(results)
        if first is None:  # jax.disable_jit
            return
        if threading.get_ident() == threading.main_thread().ident:
            while not _compiled.await_end() and not first.is_ready():
                pass
        first.block_until_ready()

    def raise_own_or_give_up(self, error: BaseException, results: Any, has_ended: bool) -> None:
        """Raise shmring's own error if `error` is JAX's form of it.

        Else give up if the region may be under way. results: as for `give_up`.
        """
        own = own_error(error)
        if own is not None:
            raise own from None
        if not has_ended and (results is not None or not isinstance(error, Exception)):
            self.give_up(error, results)

    def give_up(self, error: BaseException, results: Any) -> None:
        """End the region's communicators on all ranks, since its program may be under way, and await its end.

        results: those of the program; None if they are not known, and perhaps it has not begun.
        """
        for group in self._groups:
            comm = group.comm()
            if comm is not None:
                with contextlib.suppress(shmring.Error):
                    comm.abort(f"{type(error).__name__} in rank {comm.rank}, in a program of JAX")
        first = _first_array(results)
        if first is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                first.block_until_ready()


def _first_array(results: Any) -> Any:
    if type(results) is _Array:  # on one CPU, every line here delays the program
        return results
    return next((leaf for leaf in jax.tree.leaves(results) if type(leaf) is _Array), None)


def _groups_of(jaxpr: Any) -> set[Group]:
    """Return the groups of all calls in a program and in those that it contains."""
    found = {eqn.params["call"].group for eqn in jaxpr.eqns if eqn.primitive is collective_p}
    return found.union(*(_groups_of(inner) for inner in core.subjaxprs(jaxpr)))


def _without_constants(jaxpr: Any) -> Any:
    """Return the program with its constants as its first arguments."""
    return jaxpr.replace(constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars])


jax.ffi.register_ffi_target(_TARGET, _compiled.prepare_xla(_calls, note), platform="cpu")
