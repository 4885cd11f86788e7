"""A CuTe DSL kernel whose load stands below the wait for the previous grid, and is moved above it by the
assembler: a non-coherent load, which it takes for one of memory that nobody writes. The twin's is coherent.

`python compiler_hoist.py FOLDER ARCHITECTURE...` leaves PTX and cubin of both; what they become is planted in
the audit as `compiler_hoist`.
"""

import os
import sys
from pathlib import Path
from typing import Any

KINDS = {"fault": "ld.global.nc.b32", "fixed": "ld.global.b32"}


def main(folder: Path, architectures: list[str]) -> None:
    os.environ |= {"CUTE_DSL_ARCH": architectures[0], "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_NO_CACHE": "1"}
    os.environ["CUTE_DSL_DUMP_DIR"] = str(folder)

    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
    from k3_decode.cute import instructions as ins
    from k3_decode.device_code import DeviceCode, device_code

    @cute.kernel
    def planted(x: cute.Tensor, out: cute.Tensor, steps: Int32, load: cutlass.Constexpr):
        tid, _, _ = cute.arch.thread_idx()
        total = Int32(0)
        for i in cutlass.range(steps, unroll=1):
            cute.arch.griddepcontrol_wait()
            word = ins.asm(f"{load} $0, [$1];", "=r,l", [ins.byte_address(x) + Int64(tid) * 4], [Int32])
            total = total ^ (word + i)
        cute.arch.griddepcontrol_wait()
        out[tid] = total

    @cute.jit
    def launch(x: cute.Tensor, out: cute.Tensor, steps: Int32, stream: Any, load: cutlass.Constexpr):
        planted(x, out, steps, load).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream, use_pdl=True)

    x, out = (make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4) for _ in range(2))
    for kind, load in KINDS.items():
        made = device_code(
            lambda load=load: cute.compile(launch, x, out, Int32(1), make_fake_stream(), load),
            architectures,
            folder,
        )
        for architecture, code in made.items():
            if not isinstance(code, DeviceCode):
                raise SystemExit(code)
            (folder / f"{kind}.{architecture}.ptx").write_text(code.ptx)
            (folder / f"{kind}.{architecture}.cubin").write_bytes(code.cubin)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
