"""The machine instructions that the kernels share: 16-byte loads and stores, bf16 pairs, exchanges, launch
counting.

Invariant: every load is a volatile statement with a memory clobber, so that no compiler may move one of an
activation (`load_activation`, `ld.global`) above `griddepcontrol.wait`. Constant weights have loads of their
own (`load_weight`, `ld.weak.global`), which stand before the wait in the machine code too: the non-coherent
form (`ld.global.nc`) does not, as the assembler holds it for free to move and sinks it below the wait.
Addresses in device memory are 64-bit byte addresses (`Int64`), addresses in shared memory 32-bit ones. What
leaves these functions is a register (`Int32` word, `Float32`); a word holds two bf16, the lower address in
the low half.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

__all__ = [
    "Words",
    "add_launch",
    "advanced",
    "asm",
    "at_most",
    "bulk_load",
    "byte_address",
    "choose_address",
    "cluster_address",
    "copy_async",
    "copy_async_if",
    "fence_async_reads",
    "multiply_tiles",
    "shared_store_f32_if",
    "shared_store_if",
    "tile_descriptor",
    "high_half",
    "load_activation",
    "load_activation_word",
    "load_activation_word_if",
    "load_arriving",
    "load_matrix",
    "load_weight",
    "load_weight_f32",
    "low_half",
    "mma_bf16",
    "pack_halves",
    "shared_load",
    "shared_load_f32",
    "shared_store",
    "shared_store_f32",
    "shared_load_pair",
    "shared_store_pair",
    "send_f32",
    "send_pair",
    "prefetch_bytes",
    "store_arriving",
    "store_remote_f32",
    "store_f32_pair_if",
    "store_word_if",
    "store_word",
    "store_words",
    "store_f32",
]

Words = tuple[Int32, Int32, Int32, Int32]
"""16 bytes in four registers."""


def asm(
    template: str, constraints: str, args: Sequence[Any], results: Sequence[Any] = (), is_pure: bool = False
) -> Any:
    """One inline PTX statement; without `is_pure` it is volatile and clobbers memory, so it keeps its place.

    `results` lists the DSL types of the outputs: none gives `None`, one a value, several a tuple.
    """
    types = [kind.mlir_type for kind in results]
    kind = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    clobbers = "" if is_pure else ",~{memory}" if constraints else "~{memory}"
    value = llvm.inline_asm(
        kind,
        [arg.ir_value() for arg in args],
        template,
        constraints + clobbers,
        has_side_effects=not is_pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](value)
    return tuple(
        r(llvm.extractvalue(t, value, [i])) for i, (r, t) in enumerate(zip(results, types, strict=True))
    )


def byte_address(tensor: Any) -> Int64:
    """Device address of a tensor's first element."""
    return tensor.iterator.toint()


def advanced(address: Int64, count: int) -> Int64:
    """An address `count` bytes on, in a form that the compiler does not take for a base and an index: of a
    loop's many addresses it would keep both in registers.
    """
    return asm(f"add.s64 $0, $1, {count};", "=l,l", [address], [Int64], is_pure=True)


def load_weight(address: Int64) -> Words:
    """16 constant bytes, read once: not kept in L1, the whole L2 line fetched.

    Measured where a row's lanes read half a line at once: 3 % faster than with 256 bytes, 6 % than without.
    """
    template = "ld.weak.global.L1::no_allocate.L2::128B.v4.b32 {$0,$1,$2,$3}, [$4];"
    return asm(template, "=r,=r,=r,=r,l", [address], [Int32] * 4)


def load_weight_f32(address: Int64) -> tuple[Float32, ...]:
    """Four constant fp32 values."""
    return asm("ld.weak.global.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,l", [address], [Float32] * 4)


def load_activation(address: Int64) -> Words:
    """16 bytes that an earlier kernel wrote."""
    return asm("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", [address], [Int32] * 4)


def load_arriving(address: Int64) -> Words:
    """16 bytes that other blocks of this launch may be writing: around L1, each word as it is now."""
    template = "ld.relaxed.gpu.global.v4.b32 {$0,$1,$2,$3}, [$4];"
    return asm(template, "=r,=r,=r,=r,l", [address], [Int32] * 4)


def load_activation_word(address: Int64) -> Int32:
    """4 bytes that an earlier kernel wrote."""
    return asm("ld.global.b32 $0, [$1];", "=r,l", [address], [Int32])


def store_words(address: Int64, words: Words) -> None:
    """16 bytes to device memory."""
    asm("st.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r", [address, *words])


def store_word(address: Int64, word: Int32) -> None:
    """4 bytes to device memory."""
    asm("st.global.b32 [$0], $1;", "l,r", [address, word])


def store_arriving(address: Int64, word: Int32) -> None:
    """4 bytes to device memory that other blocks of this launch wait for with `load_arriving`."""
    asm("st.relaxed.gpu.global.b32 [$0], $1;", "l,r", [address, word])


def store_f32(address: Int64, value: Float32) -> None:
    """One fp32 value to device memory."""
    asm("st.global.f32 [$0], $1;", "l,f", [address, value])


def store_word_if(address: Int64, word: Int32, is_wanted: Int32) -> None:
    """4 bytes to device memory by the lanes whose flag is not 0."""
    asm(
        "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1;}",
        "l,r,r",
        [address, word, is_wanted],
    )


def store_half_if(address: Int64, value: Float32, is_wanted: Int32) -> None:
    """fp32 rounded to bf16, 2 bytes to device memory by the lanes whose flag is not 0."""
    asm(
        "{.reg .pred p; .reg .b16 h; setp.ne.b32 p, $2, 0; cvt.rn.bf16.f32 h, $1; @p st.global.b16 [$0], h;}",
        "l,f,r",
        [address, value, is_wanted],
    )


def store_f32_pair_if(address: Int64, low: Float32, high: Float32, is_wanted: Int32) -> None:
    """Two fp32 values to device memory by the lanes whose flag is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.v2.f32 [$0], {$1,$2};}"
    asm(template, "l,f,f,r", [address, low, high, is_wanted])


def load_activation_word_if(address: Int64, is_wanted: Int32) -> Int32:
    """4 bytes that an earlier kernel wrote, 0 in the lanes whose flag is 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1];}"
    return asm(template, "=&r,l,r", [address, is_wanted], [Int32])


def prefetch_bytes(address: Int64, size: Int32) -> None:
    """Ask for `size` consecutive bytes (a multiple of 16) to be in L2; lanes are served one after another."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", [address, size])


def at_most(value: Int32, bound: Int32) -> Int32:
    """The lesser of the two, signed."""
    return asm("min.s32 $0, $1, $2;", "=r,r,r", [value, bound], [Int32], is_pure=True)


def choose_address(sign: Int32, when_negative: Int64, otherwise: Int64) -> Int64:
    """One of two addresses by the sign of a number, without a branch."""
    template = "{.reg .pred p; setp.lt.s32 p, $3, 0; selp.b64 $0, $1, $2, p;}"
    return asm(template, "=l,l,l,r", [when_negative, otherwise, sign], [Int64], is_pure=True)


def low_half(word: Int32) -> Float32:
    """The bf16 at the lower address, as fp32."""
    return asm("shl.b32 $0, $1, 16;", "=f,r", [word], [Float32], is_pure=True)


def high_half(word: Int32) -> Float32:
    """The bf16 at the higher address, as fp32."""
    return asm("and.b32 $0, $1, 0xffff0000;", "=f,r", [word], [Float32], is_pure=True)


def pack_halves(low: Float32, high: Float32) -> Int32:
    """Two fp32 rounded to bf16 (to nearest even; NaN and infinities kept), `low` at the lower address."""
    return asm("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], [Int32], is_pure=True)


def shared_load(address: Int32) -> Words:
    """16 bytes of shared memory."""
    return asm("ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r", [address], [Int32] * 4)


def shared_load_f32(address: Int32) -> Float32:
    """One fp32 value of shared memory."""
    return asm("ld.shared.f32 $0, [$1];", "=f,r", [address], [Float32])


def shared_store(address: Int32, words: Words) -> None:
    """16 bytes to shared memory."""
    asm("st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r", [address, *words])


def shared_store_f32(address: Int32, value: Float32) -> None:
    """One fp32 value to shared memory."""
    asm("st.shared.f32 [$0], $1;", "r,f", [address, value])


def shared_load_pair(address: Int32) -> tuple[Float32, Float32]:
    """Two fp32 values of shared memory."""
    return asm("ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [address], [Float32] * 2)


def shared_store_pair(address: Int32, low: Float32, high: Float32) -> None:
    """Two fp32 values to shared memory."""
    asm("st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", [address, low, high])


def shared_store_if(address: Int32, words: Words, is_wanted: Int32) -> None:
    """16 bytes to shared memory by the lanes whose flag is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $5, 0; @p st.shared.v4.b32 [$0], {$1,$2,$3,$4};}"
    asm(template, "r,r,r,r,r,r", [address, *words, is_wanted])


def shared_store_f32_if(address: Int32, value: Float32, is_wanted: Int32) -> None:
    """One fp32 value to shared memory by the lanes whose flag is not 0."""
    asm(
        "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.shared.f32 [$0], $1;}",
        "r,f,r",
        [address, value, is_wanted],
    )


def cluster_address(address: Int32, rank: Int32) -> Int32:
    """The address, seen from here, of the same place in the shared memory of block `rank` of the cluster."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [address, rank], [Int32], is_pure=True)


def store_remote_f32(address: Int32, value: Float32, barrier: Int32) -> None:
    """One fp32 value to a block of the cluster; its 4 bytes count towards that block's `barrier`.

    Both addresses come from `cluster_address`.
    """
    template = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];"
    word = asm("mov.b32 $0, $1;", "=r,f", [value], [Int32], is_pure=True)
    asm(template, "r,r,r", [address, word, barrier])


def send_f32(address: Int32, value: Float32, barrier: Int32, is_wanted: Int32) -> None:
    """As `store_remote_f32`, by the lanes whose flag is not 0."""
    template = (
        "{.reg .pred p; .reg .b32 a; setp.ne.b32 p, $3, 0; mov.b32 a, $1; "
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], a, [$2];}"
    )
    asm(template, "r,f,r,r", [address, value, barrier, is_wanted])


def send_pair(address: Int32, low: Float32, high: Float32, barrier: Int32, is_wanted: Int32) -> None:
    """As `store_remote_f32` for two fp32 values (8 bytes), by the lanes whose flag is not 0."""
    template = (
        "{.reg .pred p; .reg .b32 a, b; setp.ne.b32 p, $4, 0; mov.b32 a, $1; mov.b32 b, $2; "
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [$0], {a, b}, [$3];}"
    )
    asm(template, "r,f,f,r,r", [address, low, high, barrier, is_wanted])


def copy_async(shared: Int32, address: Int64) -> None:
    """16 bytes from device to shared memory by `cp.async`, around L1; ordered by commit and wait groups."""
    asm("cp.async.cg.shared.global.L2::256B [$0], [$1], 16;", "r,l", [shared, address])


def copy_async_if(shared: Int32, address: Int64, is_wanted: Int32) -> None:
    """16 bytes from device to shared memory by `cp.async`, around L1, by the lanes whose flag is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.cg.shared.global.L2::128B [$0], [$1], 16;}"
    asm(template, "r,l,r", [shared, address, is_wanted])


def fence_async_reads() -> None:
    """Let matrix unit and copy engine see what this thread wrote to shared memory; a barrier must follow."""
    asm("fence.proxy.async.shared::cta;", "", [])


def multiply_tiles(sums: Sequence[Float32], rows: Int32, tokens: Int32, width: int) -> tuple[Float32, ...]:
    """sums += rows @ tokens^T by one warpgroup (sm_90a), 64 rows and `width` tokens of 64 bf16 each.

    Both lie in shared memory as lines of 128 bytes in the 128-byte swizzle (16-byte piece p of line l at
    p xor l % 8), 1024-byte aligned. Returns when the products are done, so the sums are safe to use.
    """
    count = width // 2
    registers = ",".join(f"${i}" for i in range(count))
    a, b = f"${2 * count}", f"${2 * count + 1}"
    steps = "".join(
        f"add.s64 da, {a}, {2 * step}; add.s64 db, {b}, {2 * step}; "
        f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{registers}}}, da, db, p, 1, 1, 0, 0; "
        for step in range(4)
    )
    template = (
        "{ .reg .pred p; .reg .b64 da, db; setp.eq.u32 p, 1, 1; wgmma.fence.sync.aligned; "
        + steps
        + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
    )
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l", "l"])
    args = [*sums, tile_descriptor(rows), tile_descriptor(tokens)]
    return asm(template, constraints, args, [Float32] * count)


def tile_descriptor(address: Int32) -> Int64:
    """What the matrix unit needs of a swizzled tile: its address, and 1024 bytes from 8 lines to the next."""
    fixed = (1 << 62) | (64 << 32) | (1 << 16)
    return Int64((address & 0x3FFFF) >> 4) | Int64(fixed)


def bulk_load(shared: Int32, address: Int64, size: Int32, barrier: Int32) -> None:
    """`size` consecutive bytes (a multiple of 16) to shared memory by the copy engine; `barrier` counts them.

    One thread issues it, after arriving on the barrier with the expected bytes.
    """
    template = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(template, "r,l,r,r", [shared, address, size, barrier])


def load_matrix(address: Int32) -> Words:
    """Four 8x8 bf16 matrices by `ldmatrix`; lane l gives the row address of row l%8 of matrix l//8."""
    template = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];"
    return asm(template, "=r,=r,=r,=r,r", [address], [Int32] * 4)


def mma_bf16(a: Sequence[Int32], b: Sequence[Int32], c: Sequence[Float32]) -> tuple[Float32, ...]:
    """16x8 += 16x16 @ 16x8 on one warp: bf16 operands, fp32 accumulator, by `mma.sync`."""
    template = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return asm(template, constraints, [*a, *b, *c], [Float32] * 4)


def add_launch(counter: Int64) -> None:
    """Count this launch at device address `counter` (int32), by one relaxed add of the calling thread."""
    one = Int32(1)
    asm("red.relaxed.gpu.global.add.s32 [$0], $1;", "l,r", [counter, one])
