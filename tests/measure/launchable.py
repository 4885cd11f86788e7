"""Small kernels as PTX, and records that launch them: what the tests of described launches work on."""

from pathlib import Path
from typing import Any

from harness.domain.launch_record import (
    Buffer,
    KernelLaunch,
    LaunchParameter,
    LaunchRecord,
    Pointer,
    TensorMap,
)
from harness.measure.tensor_files import file_digest

__all__ = ["ADDED", "PTX", "TILE", "added_record", "tile_record", "write_binary"]

ADDED, TILE = "add_weight", "copy_tile"
SIDE = 8
PTX = """
.version 8.0
.target sm_90
.address_size 64

.visible .entry add_weight(.param .u64 x, .param .u64 weight, .param .u64 out, .param .u64 launches)
{
  .reg .pred %p<2>;
  .reg .b32 %r<6>;
  .reg .f32 %f<4>;
  .reg .b64 %rd<10>;
  griddepcontrol.wait;
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [weight];
  ld.param.u64 %rd3, [out];
  ld.param.u64 %rd4, [launches];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mad.lo.u32 %r4, %r2, %r3, %r1;
  mul.wide.u32 %rd5, %r4, 4;
  mul.wide.u32 %rd6, %r1, 4;
  add.u64 %rd7, %rd1, %rd5;
  add.u64 %rd8, %rd2, %rd6;
  add.u64 %rd9, %rd3, %rd5;
  ld.global.f32 %f1, [%rd7];
  ld.global.f32 %f2, [%rd8];
  add.f32 %f3, %f1, %f2;
  st.global.f32 [%rd9], %f3;
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra DONE;
  ld.global.u32 %r5, [%rd4];
  add.u32 %r5, %r5, 1;
  st.global.u32 [%rd4], %r5;
DONE:
  ret;
}

.visible .entry copy_tile(.param .align 64 .b8 tile_map[128], .param .u64 out)
{
  .reg .pred %p<3>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<8>;
  .shared .align 128 .b8 buffer[256];
  .shared .align 8 .b64 barrier;
  mov.b64 %rd1, tile_map;
  cvta.param.u64 %rd2, %rd1;
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mov.u32 %r3, 0;
  mbarrier.init.shared.b64 [%r1], 1;
  fence.proxy.async;
  mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r1], 256;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r2], [%rd2, {%r3, %r3}], [%r1];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
  @!%p1 bra WAIT;
  ld.param.u64 %rd4, [out];
COPY:
  ld.shared.u32 %r4, [%r2];
  st.global.u32 [%rd4], %r4;
  add.u32 %r2, %r2, 4;
  add.u64 %rd4, %rd4, 4;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p2, %r3, 64;
  @%p2 bra COPY;
  ret;
}
"""


def write_binary(folder: Path, text: str = PTX) -> dict[str, Path]:
    """A file with the kernels, by its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.cubin"
    path.write_text(text)
    return {file_digest(path): path}


def pointer(buffer: str, offset: int = 0) -> LaunchParameter:
    return LaunchParameter(
        constant="00" * 8, pointers=(Pointer(offset=0, buffer=buffer, buffer_offset=offset),)
    )


def added_record(digest: str, rows: int, width: int, **changes: Any) -> LaunchRecord:
    """out[row] = x[row] + weight, fp32, one block a row."""
    launch = KernelLaunch(
        cubin=digest, kernel=ADDED, grid=(rows, 1, 1), block=(width, 1, 1), shared_bytes=0, is_dependent=True,
        parameters=tuple(pointer(name) for name in ("x", "weight", "out", "kept.launches")),
    )  # fmt: skip
    return LaunchRecord(
        op="add", implementation="cute", steps=(launch.model_copy(update=changes),),
        buffers=(
            Buffer(name="x", size_bytes=4 * rows * width, origin="argument"),
            Buffer(name="weight", size_bytes=4 * width, origin="argument"),
            Buffer(name="out", size_bytes=4 * rows * width, origin="argument"),
            Buffer(name="kept.launches", size_bytes=64, origin="workspace"),
        ),
    )  # fmt: skip


def tile_record(digest: str) -> LaunchRecord:
    """out = the first 8 x 8 of a 16 x 16 fp32 matrix, read through a tensor map."""
    wanted = TensorMap(
        buffer="x", buffer_offset=0, dtype=7, dims=(16, 16), strides=(64,), box=(SIDE, SIDE),
        element_strides=(1, 1),
    )  # fmt: skip
    launch = KernelLaunch(
        cubin=digest, kernel=TILE, grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, is_dependent=False,
        parameters=(LaunchParameter(constant="00" * 128, tensor_map=wanted), pointer("out")),
    )  # fmt: skip
    return LaunchRecord(
        op="tile", implementation="cute", steps=(launch,),
        buffers=(
            Buffer(name="x", size_bytes=1024, origin="argument"),
            Buffer(name="out", size_bytes=256, origin="argument"),
        ),
    )  # fmt: skip
