"""What runs under compute-sanitizer: one call of an op, or a kernel of ours that each tool must report."""

import struct

import torch

from harness.domain.cell import Cell
from harness.domain.pack import OpContract, Pack
from harness.measure.driver import Module
from harness.measure.trial import LAUNCH_SLOTS

__all__ = ["call_once", "plant"]

PLANTED = b"""
.version 8.0
.target sm_90
.address_size 64

.visible .entry memcheck(.param .u64 buffer)
{
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [buffer];
  st.global.u32 [%rd1+4096], 7;
  ret;
}

.visible .entry initcheck(.param .u64 buffer)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [buffer];
  ld.global.u32 %r1, [%rd1+64];
  st.global.u32 [%rd1], %r1;
  ret;
}

.visible .entry racecheck(.param .u64 buffer)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<2>;
  .shared .align 4 .b8 words[1024];
  ld.param.u64 %rd1, [buffer];
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  mov.u32 %r3, words;
  add.u32 %r2, %r2, %r3;
  st.shared.u32 [%r2], %r1;
  ld.shared.u32 %r1, [words];
  st.global.u32 [%rd1], %r1;
  ret;
}

.visible .entry synccheck(.param .u64 buffer)
{
  .reg .pred %p<2>;
  .reg .b32 %r<2>;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 48;
  @!%p1 bra LEAVE;
  bar.sync 0;
LEAVE:
  ret;
}

.visible .entry synccheck_mask(.param .u64 buffer)
{
  bar.warp.sync 0x0000ffff;
  ret;
}
"""
"""A store behind a buffer, a load of what nobody wrote, a word of shared memory read while others write it, a
barrier of a block that a part of a warp leaves out, and one of a warp by threads outside of its mask."""
KERNELS = {
    "memcheck": (("memcheck", 1),),
    "initcheck": (("initcheck", 1),),
    "racecheck": (("racecheck", 256),),
    "synccheck": (("synccheck", 64), ("synccheck_mask", 32)),
}
"""By tool: what is launched, with how many threads."""


def call_once(
    pack: Pack, contract: OpContract, cell: Cell, model: str, implementation: str, seed: int
) -> None:
    """One call of an op on inputs of its first regime."""
    with torch.no_grad():
        args = pack.make_args(contract.name, cell, contract.regimes[0], seed, "cuda", model)
        launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device="cuda")
        pack.bind_optimised(contract.name, implementation, args, launches)()
        torch.cuda.synchronize()


def plant(tool: str) -> None:
    """The kernels of which a tool must report something."""
    buffer = torch.empty(32, dtype=torch.int32, device="cuda")
    module = Module(PLANTED)
    stream = torch.cuda.current_stream().cuda_stream
    parameter = struct.pack("<Q", buffer.data_ptr())
    for name, threads in KERNELS[tool]:
        module.kernel(name).launch((1, 1, 1), (threads, 1, 1), (parameter,), stream=stream)
        torch.cuda.synchronize()
