"""A tile of `mla_attend`: 32 tokens of the cache meet 16 (row, head) pairs, in scores, softmax and values.

Eight warps share a tile. When a stage is filled and freed, and the barriers between these parts, are the
kernel's business.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins

__all__ = [
    "FP8_PITCH", "HALF_STEPS", "LATENT", "PAIRS", "PITCH", "PROBABILITY_PITCH", "ROPE", "ROW", "SCORE_PITCH",
    "THREADS", "TILE", "WARPS", "mixed_of", "scores_of", "softmax", "spread_query", "stage_queries",
]  # fmt: skip

LATENT, ROPE = 512, 64
ROW = LATENT + ROPE
TILE = 32
WARPS = 8
THREADS = 32 * WARPS
"""Threads that compute; the loading warps come after them."""
PAIRS = 16
"""(row, head) pairs of a block: the rows of an mma tile."""
PITCH = ROW * 2 + 16
FP8_PITCH = ROW + 16
HALF_STEPS = ROW // 2 // 16
SCORE_PITCH = 40
"""Floats between rows of scores: neighbouring rows 8 banks apart."""
PROBABILITY_PITCH = TILE * 2 + 16


def stage_queries(
    query: cute.Tensor,
    to: Int32,
    first_token: Int32,
    first_pair: Int32,
    pairs: Int32,
    heads: Int32,
    tid: Int32,
) -> None:
    """Copies of 16 queries on their way to shared memory; a row of a pair past the end keeps what it holds.

    That may be anything: rows of a product do not mix, and those rows are never stored.
    """
    pieces = PAIRS * ROW * 2 // 16
    query_at, query_bytes = ins.byte_address(query), Int64(query.stride[0]) * 2
    for i in range((pieces + THREADS - 1) // THREADS):
        piece = tid + i * THREADS
        own, part = piece // (ROW * 2 // 16), piece % (ROW * 2 // 16)
        pair = cutlass.min(first_pair + own, pairs - 1)
        from_at = query_at + Int64(first_token + pair // heads) * query_bytes
        from_at = from_at + Int64(pair % heads * (ROW * 2) + part * 16)
        is_real = Int32(piece < pieces) * Int32(first_pair + own < pairs)
        frag.copy_async_if(to + own * PITCH + part * 16, from_at, is_real)


def softmax(
    score_lane: Int32, visible: list[Int32], peaks: list[Float32], score_scale: Float32
) -> tuple[list[Float32], list[Float32], list[Float32]]:
    """Of two pairs and this lane's token: probabilities, factors of what came before, new unscaled peaks."""
    parts = [
        ins.shared_load_f32(score_lane + offset * SCORE_PITCH * 4) for offset in (0, PAIRS, 1, PAIRS + 1)
    ]
    raw = [parts[0] + parts[1], parts[2] + parts[3]]
    hidden = Float32(-Float32.inf)
    scores = [frag.choose_f32(is_seen, score, hidden) for is_seen, score in zip(visible, raw, strict=True)]
    tops = frag.max_lanes(scores)
    new = [cute.arch.fmax(peak, top) for peak, top in zip(peaks, tops, strict=True)]
    shifts = [frag.choose_f32(Int32(peak > hidden), peak, Float32(0.0)) for peak in new]
    shares = [frag.exp2((score - shift) * score_scale) for score, shift in zip(scores, shifts, strict=True)]
    rescales = [frag.exp2((peak - shift) * score_scale) for peak, shift in zip(peaks, shifts, strict=True)]
    return shares, rescales, new


def spread_query(at: Int32) -> ins.Words:
    """Rows `quad` and `quad` + 8 of 16 columns in the order in which e4m3 keys come: 4 neighbours a lane."""
    low, high = frag.shared_load_pair(at), frag.shared_load_pair(at + 8 * PITCH)
    return low[0], high[0], low[1], high[1]


def _key_words(keys_at: Int32, first: int, end: int, is_fp8: bool) -> list[tuple[Int32, Int32]]:
    """8 tokens x 16 columns for each step of a range that begins with a matrix load."""
    words: list[tuple[Int32, Int32]] = []
    if is_fp8:
        for step in range(first, end, 4):
            matrices = frag.load_matrices(keys_at + step * 16, min(end - step, 4))
            words += [frag.widen_fp8(matrix) for matrix in matrices]
        return words
    for step in range(first, end, 2):
        b = ins.load_matrix(keys_at + step * 32)
        words += [(b[0], b[1]), (b[2], b[3])]
    return words


def scores_of(queries: list[ins.Words], keys_at: Int32, is_fp8: bool) -> list[Float32]:
    """16 pairs x 8 tokens over half of the columns.

    Sums of 48 or 64 columns, two at a time so that the tensor cores need not wait, are added in fp32, as a
    tensor core drops low bits at every step.
    """
    total = [Float32(0.0)] * 4
    for first, end in ((0, 8), (8, 16), (16, 18)) if is_fp8 else ((0, 6), (6, 12), (12, 18)):
        words = _key_words(keys_at, first, end, is_fp8)
        chains = [(Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)) for _ in range(2)]
        for step in range(first, end):
            chains[step % 2] = ins.mma_bf16(queries[step], words[step - first], chains[step % 2])
        total = [t + (x + y) for t, x, y in zip(total, *chains, strict=True)]
    return total


def _value_words(values_at: Int32, n: int, is_fp8: bool) -> list[list[Int32]]:
    """32 tokens x two times 8 columns, 8 tokens a word: neighbours in bf16; with fp8 even columns and odd."""
    if is_fp8:
        matrices = frag.load_matrix_transposed(values_at + n * 16)
        wide = [frag.widen_fp8(frag.sort_bytes(matrix)) for matrix in matrices]
        return [[pair[0] for pair in wide], [pair[1] for pair in wide]]
    first = frag.load_matrix_transposed(values_at + n * 32)
    second = frag.load_matrix_transposed(values_at + n * 32 + 16 * PITCH)
    return [[first[0], first[1], second[0], second[1]], [first[2], first[3], second[2], second[3]]]


def mixed_of(
    mixed: list[tuple[Float32, ...]],
    low: Float32,
    high: Float32,
    weights: list[ins.Words],
    values_at: Int32,
    is_fp8: bool,
) -> list[tuple[Float32, ...]]:
    """Rescaled sums plus probabilities x values of one tile, 64 columns."""
    result = []
    for n in range(4):
        for words, old in zip(_value_words(values_at, n, is_fp8), mixed[2 * n : 2 * n + 2], strict=True):
            sums: tuple[Float32, ...] = (old[0] * low, old[1] * low, old[2] * high, old[3] * high)
            for k in range(TILE // 16):
                sums = ins.mma_bf16(weights[k], (words[2 * k], words[2 * k + 1]), sums)
            result.append(sums)
    return result
