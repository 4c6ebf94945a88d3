"""How CPU kernels are compiled and run on threads.

Threads: kernels run on torch's own OpenMP pool. `parallel` calls `GOMP_parallel`, which every OpenMP runtime
that torch is built with exports, with the job on the caller's stack. One pool: a kernel right after a torch
product finds its threads awake, and no second pool spins beside the first one for the same cores. (Each of
numba's threading layers brings a pool of its own, and its OpenMP layer asks for a system libgomp.)
"""

import ctypes
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numba.extending
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.core.errors import RequireLiteralValue, TypingError

from kernels.cpu.cache import cache_directory

# Sums may be reordered (that is what vector registers need); NaN and infinity keep their meaning.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz", "afn"}

F = TypeVar("F", bound=Callable[..., Any])
Emitter = Callable[..., Any]


def jit(function: F, cache: bool = True) -> F:
    """Compile at the first call per combination of argument types; nothing is checked, nothing raises."""
    compiler = numba.njit(cache=cache, nogil=True, error_model="numpy", fastmath=FAST_MATH)
    return cast(F, compiler(function))


def intrinsic(emitter: Emitter) -> Emitter:
    """A function for jitted code that is given as LLVM instructions."""
    return cast(Emitter, numba.extending.intrinsic(emitter))


def literal_intrinsic(emitter: Emitter) -> Emitter:
    """An intrinsic that sees the values of arguments that are literals."""
    return cast(Emitter, numba.extending.intrinsic(prefer_literal=True)(emitter))


def literal_value(number: Any) -> int:
    """The value of a literal argument of an intrinsic; where numba tried without, ask it for the literal."""
    if not isinstance(number, types.IntegerLiteral):
        raise RequireLiteralValue("this intrinsic wants integer literals")
    value: int = number.literal_value
    return value


def find_gomp_parallel() -> int:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch loaded; 0 (one thread) without one."""
    torch.get_num_threads()  # torch must have loaded its runtime first
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        warnings.warn(
            "torch's OpenMP runtime has no GOMP_parallel: CPU kernels run on one thread", stacklevel=2
        )
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


numba_config: Any = numba.config
numba_config.CACHE_DIR = str(cache_directory())
cgutils: Any = untyped_cgutils
GOMP_PARALLEL = find_gomp_parallel()


@intrinsic
def parallel(typing_context: Any, gomp: Any, num_threads: Any, function: Any, job: Any) -> Any:
    """Run the jitted `function(job)` once on each of `num_threads` threads; `gomp` is GOMP_PARALLEL.

    The function shares the work out itself (`next_item`), so that a thread that is held up delays no other.
    """
    if not isinstance(function, types.Dispatcher):
        raise TypingError("parallel runs a jitted function")
    call = typing_context.resolve_function_type(function, (job,), {})

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gomp_address, threads, _, job_value = arguments
        compiled = function.dispatcher.get_compile_result(call)
        callee = context.declare_function(builder.module, compiled.fndesc)
        context.add_linking_libs([compiled.library])
        slot = cgutils.alloca_once_value(builder, job_value)
        byte_pointer = ir.IntType(8).as_pointer()
        body_type = ir.FunctionType(ir.VoidType(), [byte_pointer])
        body = ir.Function(builder.module, body_type, builder.module.get_unique_name("parallel_body"))
        body.linkage = "internal"
        inner = ir.IRBuilder(body.append_basic_block("entry"))
        job_copy = inner.load(inner.bitcast(body.args[0], slot.type))
        context.call_conv.call_function(inner, callee, call.return_type, call.args, [job_copy])
        inner.ret_void()
        pointer = builder.bitcast(slot, byte_pointer)
        no_pool = builder.icmp_unsigned("==", gomp_address, gomp_address.type(0))
        one_thread = builder.icmp_signed("<=", threads, threads.type(1))
        with builder.if_else(builder.or_(no_pool, one_thread)) as (alone, pool):
            with alone:
                builder.call(body, [pointer])
            with pool:
                word = ir.IntType(32)
                run_type = ir.FunctionType(ir.VoidType(), [body_type.as_pointer(), byte_pointer, word, word])
                run = builder.inttoptr(gomp_address, run_type.as_pointer())
                builder.call(run, [body, pointer, builder.trunc(threads, word), word(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, function, job), codegen


@intrinsic
def next_item(typing_context: Any, counter: Any) -> Any:
    """Take the next number from the shared counter (int64 at that address): 0, 1, 2, … over all threads."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.int64), codegen


@intrinsic
def reset(typing_context: Any, counter: Any) -> Any:
    """Set the shared counter to 0."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(ir.IntType(64)(0), builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


GRAIN = 1 << 15  # elements for which waking a thread pays


@jit
def share_out(counter: int, threads: int, rows: int, elements: int) -> tuple[int, int]:
    """Reset the shared counter; return the threads that `elements` of work pay for, and the items to cut.

    `over_rows` makes the function that takes them.
    """
    reset(counter)
    workers = min(threads, 1 + elements // GRAIN)
    return workers, 1 if workers == 1 else min(rows, 4 * workers)


def over_rows(function: Callable[[Any, int], None]) -> Callable[[tuple[Any, int, int, int]], None]:
    """A worker for `parallel` that runs the jitted `function(job, row)`; it gets (job, counter, rows, items).

    Item i covers rows [i · rows // items, (i + 1) · rows // items). The worker is compiled into its caller.
    """

    def take_rows(share: tuple[Any, int, int, int]) -> None:
        job, counter, rows, items = share
        item = next_item(counter)
        while item < items:
            for row in range(item * rows // items, (item + 1) * rows // items):
                function(job, row)
            item = next_item(counter)

    return jit(take_rows, cache=False)
