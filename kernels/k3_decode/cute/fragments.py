"""Register-level pieces of the attention kernels: narrow and predicated accesses, transposed fragments, gate
functions.

Invariant: as in `instructions`, activations and states take coherent, volatile loads; nothing here reads
ahead of a wait by itself. It leaves addresses and barriers to its callers.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute.instructions import Words, asm

__all__ = [
    "LN2",
    "LOG2E",
    "bulk_load_if",
    "choose_address",
    "copy_async_if",
    "choose_f32",
    "choose_word",
    "exp2",
    "expect_bytes_if",
    "finite_or_minus_inf",
    "keep_if",
    "load_bf16",
    "load_constant",
    "load_f32",
    "load_f32x4",
    "load_long",
    "load_matrices",
    "load_matrix_transposed",
    "load_pair",
    "log2",
    "mask_word",
    "max_lanes",
    "pack_fp8",
    "pick",
    "reciprocal",
    "shared_load_f32x2",
    "shared_load_pair",
    "shared_load_f32x4",
    "shared_store_bf16",
    "shared_store_f32x2",
    "shared_store_f32x4",
    "shared_store_word",
    "sigmoid",
    "sort_bytes",
    "store_f32",
    "store_f32x4_if",
    "store_pair_if",
    "store_remote_f32",
    "store_remote_f32x2",
    "store_remote_word",
    "store_remote_words",
    "store_word_if",
    "sum_lanes",
    "widen_fp8",
]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def exp2(x: Float32) -> Float32:
    """2^x by the approximate unit (2 ulp); -inf gives 0."""
    return asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], [Float32], is_pure=True)


def log2(x: Float32) -> Float32:
    """log2(x) by the approximate unit; 0 gives -inf."""
    return asm("lg2.approx.f32 $0, $1;", "=f,f", [x], [Float32], is_pure=True)


def reciprocal(x: Float32) -> Float32:
    """1/x by the approximate unit (1 ulp); inf gives 0."""
    return asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], [Float32], is_pure=True)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x)."""
    return reciprocal(exp2(x * -LOG2E) + 1.0)


def sum_lanes(values: list[Float32], offsets: tuple[int, ...]) -> list[Float32]:
    """Butterfly sums of independent values over the lanes that `offsets` (powers of two) span."""
    for offset in offsets:
        values = [v + cute.arch.shuffle_sync_bfly(v, offset) for v in values]
    return values


def mask_word(word: Int32, is_kept: Int32) -> Int32:
    """`word` where `is_kept` is not 0, else 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $2, 0; selp.b32 $0, $1, 0, p;}"
    return asm(template, "=r,r,r", [word, is_kept], [Int32], is_pure=True)


def load_bf16(address: Int64) -> Float32:
    """One bf16 that an earlier kernel wrote, as fp32."""
    template = "{.reg .b32 t; ld.global.u16 t, [$1]; shl.b32 $0, t, 16;}"
    return asm(template, "=f,l", [address], [Float32])


def load_pair(address: Int64) -> tuple[Int32, Int32]:
    """8 bytes that an earlier kernel wrote."""
    words: tuple[Int32, Int32] = asm("ld.global.v2.b32 {$0,$1}, [$2];", "=r,=r,l", [address], [Int32] * 2)
    return words


def load_f32x4(address: Int64) -> tuple[Float32, ...]:
    """Four fp32 of a state, read once: coherent, not kept in L1."""
    template = "ld.global.L1::no_allocate.v4.f32 {$0,$1,$2,$3}, [$4];"
    values: tuple[Float32, ...] = asm(template, "=f,=f,=f,=f,l", [address], [Float32] * 4)
    return values


def store_f32x4_if(address: Int64, values: tuple[Float32, ...], condition: Int32) -> None:
    """16 bytes to device memory where `condition` is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.f32 [$0], {$1,$2,$3,$4};}"
    asm(template, "l,f,f,f,f,r", [address, *values, condition])


def store_pair_if(address: Int64, words: tuple[Int32, Int32], condition: Int32) -> None:
    """8 bytes to device memory where `condition` is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.v2.b32 [$0], {$1,$2};}"
    asm(template, "l,r,r,r", [address, *words, condition])


def store_word_if(address: Int64, word: Int32, condition: Int32) -> None:
    """4 bytes to device memory where `condition` is not 0."""
    asm(
        "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1;}",
        "l,r,r",
        [address, word, condition],
    )


def shared_store_word(address: Int32, word: Int32) -> None:
    """4 bytes to shared memory."""
    asm("st.shared.b32 [$0], $1;", "r,r", [address, word])


def shared_store_bf16(address: Int32, value: Float32) -> None:
    """One fp32 rounded to bf16 to shared memory."""
    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, $1; st.shared.b16 [$0], h;}", "r,f", [address, value])


def shared_load_f32x4(address: Int32) -> tuple[Float32, ...]:
    """Four fp32 of shared memory."""
    template = "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];"
    values: tuple[Float32, ...] = asm(template, "=f,=f,=f,=f,r", [address], [Float32] * 4)
    return values


def shared_store_f32x4(address: Int32, values: tuple[Float32, ...]) -> None:
    """Four fp32 to shared memory."""
    asm("st.shared.v4.f32 [$0], {$1,$2,$3,$4};", "r,f,f,f,f", [address, *values])


def store_remote_f32(address: Int32, value: Float32) -> None:
    """One fp32 to the shared memory of a block of the cluster; a cluster barrier must follow before it is
    read.
    """
    asm("st.shared::cluster.f32 [$0], $1;", "r,f", [address, value])


def load_matrices(address: Int32, count: int) -> tuple[Int32, ...]:
    """1, 2 or 4 8x8 bf16 matrices by `ldmatrix`; a lane l below 8 `count` gives the address of row l%8 of
    matrix l//8.
    """
    places = ",".join(f"${i}" for i in range(count))
    template = f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{places}}}, [${count}];"
    words = asm(template, ",".join(["=r"] * count + ["r"]), [address], [Int32] * count)
    return (words,) if count == 1 else tuple(words)


def load_matrix_transposed(address: Int32) -> Words:
    """Four 8x8 bf16 matrices by `ldmatrix.trans`; lane l gives the row address of row l%8 of matrix l//8."""
    template = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
    words: Words = asm(template, "=r,=r,=r,=r,r", [address], [Int32] * 4)
    return words


def load_constant(address: Int64) -> Float32:
    """One constant fp32 value."""
    return asm("ld.weak.global.f32 $0, [$1];", "=f,l", [address], [Float32])


def choose_word(is_first: Int32, first: Int32, second: Int32) -> Int32:
    """`first` where `is_first` is not 0, else `second`, without a branch."""
    template = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.b32 $0, $1, $2, p;}"
    return asm(template, "=r,r,r,r", [first, second, is_first], [Int32], is_pure=True)


def choose_address(is_first: Int32, first: Int64, second: Int64) -> Int64:
    """The same for device addresses."""
    template = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.b64 $0, $1, $2, p;}"
    return asm(template, "=l,l,l,r", [first, second, is_first], [Int64], is_pure=True)


def pick(values: list[Int32], index: Int32) -> Int32:
    """`values[index]` for a run-time index, from registers; an index past the end gives the last."""
    value = values[-1]
    for i in range(len(values) - 1):
        value = choose_word(Int32(index == i), values[i], value)
    return value


def load_long(address: Int64) -> Int64:
    """8 bytes of an index that was written before the step."""
    return asm("ld.global.b64 $0, [$1];", "=l,l", [address], [Int64])


def shared_store_f32x2(address: Int32, low: Float32, high: Float32) -> None:
    """Two fp32 to shared memory."""
    asm("st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", [address, low, high])


def shared_load_f32x2(address: Int32) -> tuple[Float32, Float32]:
    """Two fp32 of shared memory."""
    values: tuple[Float32, Float32] = asm(
        "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [address], [Float32] * 2
    )
    return values


def shared_load_pair(address: Int32) -> tuple[Int32, Int32]:
    """8 bytes of shared memory."""
    words: tuple[Int32, Int32] = asm("ld.shared.v2.b32 {$0,$1}, [$2];", "=r,=r,r", [address], [Int32] * 2)
    return words


def sort_bytes(word: Int32) -> Int32:
    """The even bytes, then the odd ones."""
    return asm("prmt.b32 $0, $1, 0, 0x3120;", "=r,r", [word], [Int32], is_pure=True)


def store_remote_word(address: Int32, word: Int32) -> None:
    """4 bytes to the shared memory of a block of the cluster; a cluster barrier must follow before they are
    read.
    """
    asm("st.shared::cluster.b32 [$0], $1;", "r,r", [address, word])


def store_remote_words(address: Int32, words: Words) -> None:
    """16 bytes to the shared memory of a block of the cluster; a cluster barrier must follow before they are
    read.
    """
    asm("st.shared::cluster.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r", [address, *words])


def pack_fp8(values: list[Float32]) -> Int32:
    """Four fp32 as e4m3, saturating, the first at the lowest address."""
    template = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
        "mov.b32 $0, {l, h};}"
    )
    return asm(template, "=r,f,f,f,f", values, [Int32], is_pure=True)


def load_f32(address: Int64) -> Float32:
    """One fp32 value that an earlier kernel wrote."""
    return asm("ld.global.f32 $0, [$1];", "=f,l", [address], [Float32])


def keep_if(value: Float32, condition: Int32) -> Float32:
    """`value` where `condition` is not 0, else 0 (even for NaN)."""
    template = "{.reg .pred p; setp.ne.b32 p, $2, 0; selp.f32 $0, $1, 0f00000000, p;}"
    return asm(template, "=f,f,r", [value, condition], [Float32], is_pure=True)


def finite_or_minus_inf(value: Float32, condition: Int32) -> Float32:
    """`value` where it is finite and `condition` is not 0, else -inf."""
    template = (
        "{.reg .pred p, q; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, 0f7F800000; "
        "setp.ne.and.b32 q, $2, 0, p; "
        "selp.f32 $0, $1, 0fFF800000, q;}"
    )
    return asm(template, "=f,f,r", [value, condition], [Float32], is_pure=True)


def store_remote_f32x2(address: Int32, low: Float32, high: Float32) -> None:
    """Two fp32 to the shared memory of a block of the cluster; a cluster barrier must follow before they are
    read.
    """
    asm("st.shared::cluster.v2.f32 [$0], {$1,$2};", "r,f,f", [address, low, high])


def choose_f32(condition: Int32, when_set: Float32, when_zero: Float32) -> Float32:
    """`when_set` where `condition` is not 0, else `when_zero`, whatever the other holds."""
    template = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p;}"
    return asm(template, "=f,f,f,r", [when_set, when_zero, condition], [Float32], is_pure=True)


def max_lanes(values: list[Float32]) -> list[Float32]:
    """The largest of each value over the warp, in every lane."""
    for offset in (16, 8, 4, 2, 1):
        values = [cute.arch.fmax(v, cute.arch.shuffle_sync_bfly(v, offset)) for v in values]
    return values


def store_f32(address: Int64, value: Float32) -> None:
    """One fp32 to device memory."""
    asm("st.global.f32 [$0], $1;", "l,f", [address, value])


def expect_bytes_if(barrier: Int32, size: Int32, condition: Int32) -> None:
    """Arrive on a shared-memory barrier and add `size` bytes to what it waits for, where `condition` is not
    0.
    """
    template = (
        "{.reg .pred p; .reg .b64 t; setp.ne.b32 p, $2, 0; "
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 t, [$0], $1;}"
    )
    asm(template, "r,r,r", [barrier, size, condition])


def bulk_load_if(shared: Int32, address: Int64, size: Int32, barrier: Int32, condition: Int32) -> None:
    """`instructions.bulk_load` where `condition` is not 0; each lane may issue its own."""
    template = (
        "{.reg .pred p; setp.ne.b32 p, $4, 0; "
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];}"
    )
    asm(template, "r,l,r,r,r", [shared, address, size, barrier, condition])


def widen_fp8(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 as four bf16 (exact), the lowest address first."""
    template = (
        "{.reg .b16 a, b, c, d; .reg .b32 l, h; .reg .f32 w, x, y, z; mov.b32 {a, b}, $2; "
        "cvt.rn.f16x2.e4m3x2 l, a; cvt.rn.f16x2.e4m3x2 h, b; mov.b32 {a, b}, l; mov.b32 {c, d}, h; "
        "cvt.f32.f16 w, a; cvt.f32.f16 x, b; cvt.f32.f16 y, c; cvt.f32.f16 z, d; "
        "cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y;}"
    )
    words: tuple[Int32, Int32] = asm(template, "=r,=r,r", [word], [Int32] * 2, is_pure=True)
    return words


def copy_async_if(shared: Int32, address: Int64, condition: Int32) -> None:
    """`instructions.copy_async` where `condition` is not 0; else shared memory keeps what it holds."""
    template = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.cg.shared.global [$0], [$1], 16;}"
    asm(template, "r,l,r", [shared, address, condition])
