"""The ops for CPUs: numba (LLVM, from wheels), compiled at first use and cached beside the source.

`jit` holds the compiler options and the thread pool, `memory` the element types, `tile` the two
register-tiled inner loops of attention. Everything else is one op per file.
"""
