"""What Gluon kernels for Hopper share: names that triton 3.6 and 3.9 have, and the order among launches."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

#: asynchronous copy of a tile
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: until all warps of the program are here
all_warps = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def wait():
    """For the end of the kernel ahead."""
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_next():
    """Lets the next kernel be launched, which waits itself for what it reads."""
    zero = gl.to_tensor(0)
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ask(rows, row, column, arrived, tiles, slot, there, BYTES: gl.constexpr):
    """Begins to copy a tile of BYTES bytes whose first element is at a row and column of a descriptor."""
    mbarrier.expect(arrived.index(slot), BYTES, there)
    copy_tile(rows, [row, column], arrived.index(slot), tiles.index(slot), there)
