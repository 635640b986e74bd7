"""What Gluon kernels for Hopper share: names that triton 3.6 and 3.9 have, and the order among launches."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

#: asynchronous copy by each thread of its bytes
copy_bytes = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: asynchronous copy of a tile
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: until all warps of the program, or of its group, are here
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
def touch(pointer, lane):
    """Has the arguments' part that holds this one brought, which takes as long as any memory when it is first used."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
        [pointer + lane * 0, lane], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ask(rows, row, column, arrived, tiles, slot, there, BYTES: gl.constexpr):
    """Begins to copy a tile of BYTES bytes whose first element is at a row and column of a descriptor."""
    mbarrier.expect(arrived.index(slot), BYTES, there)
    copy_tile(rows, [row, column], arrived.index(slot), tiles.index(slot), there)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot of a ring after this one, and its barriers' phase there."""
    slot += 1
    wraps = slot == SLOTS
    return gl.where(wraps, 0, slot), phase ^ wraps.to(gl.int32)


@gluon.jit
def release(free, slot, there, SLOTS: gl.constexpr):
    """Says that the slot before this one is read."""
    mbarrier.arrive(free.index(gl.where(slot == 0, SLOTS, slot) - 1), pred=there)
