"""Runs a kernel's own Python source on the CPU, all threads of a cluster in lockstep, to prove its index maps
without a GPU.

The kernel body is executed statement by statement on numpy arrays with one entry a thread: a dynamic `if`
becomes a mask for stores, tensors become bytes with checked bounds, shared memory bytes a block, and the
instructions of `k3_decode.cute.instructions` and `fragments` small numpy functions. What it proves:
addresses, fragment layouts, masks and formulas. What it cannot prove: barriers (every statement is a barrier
here), timing, and rounding of approximate units.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from k3_decode.ops.mailbox import CONTROL_WORDS, SENTINEL, VECTOR_BYTES

Array = np.ndarray[Any, Any]
PACKAGE = "k3_decode.cute"
EMULATED = (
    "exchange_steps",
    "fragments",
    "instructions",
    "reduction",
    "ring",
    "row_plan",
    "row_product",
    "row_stream",
    "variant",
)
"""Kernel modules that are not run but replaced."""
SYNCHRONISATION = (
    "griddepcontrol_wait",
    "griddepcontrol_launch_dependents",
    "sync_threads",
    "sync_warp",
    "barrier",
    "cluster_arrive",
    "cluster_arrive_relaxed",
    "cluster_wait",
    "mbarrier_init",
    "mbarrier_init_fence",
    "mbarrier_wait",
    "mbarrier_arrive",
    "cp_async_commit_group",
    "cp_async_wait_group",
    "fence_proxy",
)
"""What does nothing here: every statement is a barrier."""


class _Tensor:
    """A torch tensor with the face of a cute tensor: shape, strides, and a base address of its own."""

    def __init__(self, value: torch.Tensor, index: int) -> None:
        self.shape, self.stride = tuple(value.shape), tuple(value.stride())
        storage = value.untyped_storage()
        flat = torch.tensor([], dtype=torch.uint8).set_(storage)
        self.bytes: Array = flat.numpy()
        self.base = ((index + 1) << 44) + value.storage_offset() * value.element_size()


class Lockstep:
    """One cluster's run of a kernel; `blocks` blocks of `threads` threads."""

    def __init__(self, tensors: Sequence[_Tensor], blocks: int, threads: int) -> None:
        self.tensors = tensors
        self.blocks, self.threads = blocks, threads
        self.count = blocks * threads
        self.shared = np.zeros((blocks, 1 << 18), dtype=np.uint8)
        self.shared[:] = 0xFF
        self.shared_used = 0
        self.masks: list[Array] = [np.ones(self.count, dtype=bool)]

    # masks
    def enter(self, test: Any) -> Iterator[None]:
        """Runs the body once where a scalar test holds, or under the mask of an array test."""
        if np.ndim(test) == 0:
            if test:
                yield
            return
        mask = self.masks[-1] & test
        if mask.any():
            self.masks.append(mask)
            yield
            self.masks.pop()

    def _spread(self, value: Any, dtype: Any) -> Array:
        return np.broadcast_to(np.asarray(value).astype(dtype), (self.count,))

    # device memory
    def load(self, address: Any, size: int) -> Array:
        """`size` bytes a thread as uint8 [threads, size]."""
        at = self._spread(address, np.int64)
        result = np.zeros((self.count, size), dtype=np.uint8)
        for base in np.unique(at >> 44):
            mine = at >> 44 == base
            if not 1 <= base <= len(self.tensors):
                if self.masks[-1][mine].any():
                    raise IndexError(f"load from address {at[mine][0]:#x}, which is no tensor's")
                continue
            memory = self.tensors[int(base) - 1].bytes
            offset = at[mine] & ((1 << 44) - 1)
            active = self.masks[-1][mine]
            inside = (offset >= 0) & (offset + size <= len(memory))
            if not (inside | ~active).all():
                raise IndexError(
                    f"load outside tensor {int(base) - 1}: {offset[~inside & active][:4]} + {size}"
                )
            assert (offset[active] % min(size, 16) == 0).all(), "unaligned load"
            clipped = np.clip(offset, 0, len(memory) - size)
            result[mine] = memory[clipped[:, None] + np.arange(size)]
        return result

    def store(self, address: Any, data: Array, condition: Any = 1) -> None:
        """Bytes [threads, size] where the mask and the condition hold."""
        at = self._spread(address, np.int64)
        size = data.shape[1]
        active = self.masks[-1] & (self._spread(condition, np.int64) != 0)
        for thread in np.flatnonzero(active):
            memory = self.tensors[int(at[thread] >> 44) - 1].bytes
            offset = int(at[thread] & ((1 << 44) - 1))
            if offset < 0 or offset + size > len(memory):
                raise IndexError(f"store outside tensor {int(at[thread] >> 44) - 1}: {offset} + {size}")
            assert offset % size == 0 or size > 16, "unaligned store"
            memory[offset : offset + size] = data[thread]

    # shared memory: an address is (block + 1) << 20 | offset once mapped, or an offset in the thread's own
    # block
    def _places(self, address: Any) -> tuple[Array, Array]:
        at = self._spread(address, np.int64)
        own = np.arange(self.count) // self.threads
        return np.where(at >> 20 > 0, (at >> 20) - 1, own), at & ((1 << 20) - 1)

    def shared_load(self, address: Any, size: int) -> Array:
        block, offset = self._places(address)
        active = self.masks[-1]
        assert (offset[active] + size <= self.shared_used).all(), "shared load outside"
        assert (offset[active] % size == 0).all(), "unaligned shared load"
        offset = np.clip(offset, 0, self.shared.shape[1] - size)
        return self.shared[block[:, None], offset[:, None] + np.arange(size)]

    def shared_store(self, address: Any, data: Array, condition: Any = 1) -> None:
        block, offset = self._places(address)
        size = data.shape[1]
        active = self.masks[-1] & (self._spread(condition, np.int64) != 0)
        assert (offset[active] + size <= self.shared_used).all(), "shared store outside"
        assert (offset[active] % min(size, 16) == 0).all(), "unaligned shared store"
        self.shared[block[active][:, None], offset[active][:, None] + np.arange(size)] = data[active]

    def bulk(self, shared: Any, address: Any, size: int, condition: Any) -> None:
        """Copies of `size` bytes by single threads from device to shared memory."""
        assert size % 16 == 0, "a bulk copy moves a multiple of 16 bytes"
        active = self.masks[-1] & (self._spread(condition, np.int64) != 0)
        block, offset = self._places(shared)
        at = self._spread(address, np.int64)
        for thread in np.flatnonzero(active):
            memory = self.tensors[int(at[thread] >> 44) - 1].bytes
            start, place = int(at[thread] & ((1 << 44) - 1)), int(offset[thread])
            assert start % 16 == 0, "unaligned bulk copy"
            assert place % 16 == 0, "unaligned bulk copy in shared memory"
            if start < 0 or start + size > len(memory) or place + size > self.shared_used:
                raise IndexError(f"bulk copy outside: {start} + {size}, shared {place}")
            self.shared[block[thread], place : place + size] = memory[start : start + size]

    def allocate(self, size: int, alignment: int) -> int:
        start = -(-self.shared_used // alignment) * alignment
        self.shared_used = start + size
        return start


def _bytes(*values: Any, count: int, dtype: Any) -> Array:
    columns = [np.broadcast_to(np.asarray(v).astype(dtype), (count,)) for v in values]
    return np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)


def _words(data: Array) -> tuple[Array, ...]:
    return tuple(data.view(np.int32)[:, i].astype(np.int64) for i in range(data.shape[1] // 4))


def _floats(data: Array) -> tuple[Array, ...]:
    return tuple(data.view(np.float32)[:, i].copy() for i in range(data.shape[1] // 4))


def _u32(word: Any) -> Array:
    return (np.asarray(word) & 0xFFFFFFFF).astype(np.uint32)


def _bf16_bits(value: Any) -> Array:
    bits = np.asarray(value, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(value), 0x7FC0, rounded).astype(np.int64)


def _e4m3(values: Sequence[Array]) -> Array:
    stacked = np.stack([np.clip(v, -448, 448) for v in values], axis=1).astype(np.float32)
    result: Array = torch.from_numpy(stacked).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return result


def _namespaces(run: Lockstep) -> dict[str, Any]:
    """What the kernel's source sees under the names that it imports."""
    count = run.count
    ids = np.arange(count)
    thread = ids % run.threads
    lane = thread % 32

    def as_int(value: Any) -> Any:
        return np.asarray(value).astype(np.int64) if np.ndim(value) else int(value)

    def as_float(value: Any) -> Any:
        return np.float32(value) if np.ndim(value) == 0 else np.asarray(value, dtype=np.float32)

    as_float.inf = float("inf")  # type: ignore[attr-defined]

    def shuffle(value: Any, offset: int) -> Any:
        spread = np.broadcast_to(value, (count,))
        return spread[ids ^ offset]

    def bf16_low(word: Any) -> Array:
        return (_u32(word) << np.uint32(16)).view(np.float32)

    def bf16_high(word: Any) -> Array:
        return (_u32(word) & np.uint32(0xFFFF0000)).view(np.float32)

    def pack(low: Any, high: Any) -> Array:
        lower, upper = np.broadcast_to(low, (count,)), np.broadcast_to(high, (count,))
        word: Array = _bf16_bits(lower) | _bf16_bits(upper) << 16
        return word

    def matrix(address: Any, is_transposed: bool) -> tuple[Array, ...]:
        rows = run.shared_load(address, 16).view(np.uint16).reshape(-1, 4, 8, 8)
        result = []
        for m in range(4):
            tile = rows[:, m].transpose(0, 2, 1) if is_transposed else rows[:, m]
            pairs = tile.reshape(-1, 8, 4, 2).astype(np.int64)
            result.append((pairs[..., 0] | pairs[..., 1] << 16).reshape(-1))
        return tuple(result)

    def mma(a: Any, b: Any, c: Any) -> tuple[Array, ...]:
        warps = count // 32
        left = np.zeros((warps, 16, 16), dtype=np.float32)
        right = np.zeros((warps, 16, 8), dtype=np.float32)
        quad, quarter = np.arange(32) // 4, np.arange(32) % 4
        for i in range(4):
            word = np.broadcast_to(a[i], (count,)).reshape(warps, 32)
            row, column = quad + 8 * (i % 2), quarter * 2 + 8 * (i // 2)
            left[:, row, column], left[:, row, column + 1] = bf16_low(word), bf16_high(word)
        for i in range(2):
            word = np.broadcast_to(b[i], (count,)).reshape(warps, 32)
            row = quarter * 2 + 8 * i
            right[:, row, quad], right[:, row + 1, quad] = bf16_low(word), bf16_high(word)
        with np.errstate(all="ignore"):
            product = np.matmul(left, right)
        return tuple(
            (
                np.broadcast_to(c[i], (count,))
                + product[:, quad + 8 * (i // 2), quarter * 2 + i % 2].reshape(-1)
            ).astype(np.float32)
            for i in range(4)
        )

    def store_f32(address: Any, *values: Any, condition: Any = 1) -> None:
        run.store(address, _bytes(*values, count=count, dtype=np.float32), condition)

    def store_words(address: Any, words: Sequence[Any], condition: Any = 1) -> None:
        wrapped = [_u32(w).astype(np.int64) for w in words]
        run.store(address, _bytes(*wrapped, count=count, dtype=np.uint32), condition)

    def put_f32(address: Any, *values: Any) -> None:
        run.shared_store(address, _bytes(*values, count=count, dtype=np.float32))

    def put_words(address: Any, words: Sequence[Any]) -> None:
        run.shared_store(
            address, _bytes(*[_u32(w).astype(np.int64) for w in words], count=count, dtype=np.uint32)
        )

    def put_bf16(address: Any, value: Any) -> None:
        run.shared_store(
            address, _bytes(_bf16_bits(np.broadcast_to(value, (count,))), count=count, dtype=np.uint16)
        )

    def bulk(shared: Any, address: Any, size: int, barrier: Any, condition: Any) -> None:
        run.bulk(shared, address, int(size), condition)

    def copy_if(shared: Any, address: Any, condition: Any) -> None:
        active = np.broadcast_to(condition, (count,)) != 0
        run.masks.append(run.masks[-1] & active)
        run.shared_store(shared, run.load(address, 16))
        run.masks.pop()

    def sums(values: Sequence[Any], offsets: Sequence[int]) -> list[Any]:
        result = [np.broadcast_to(v, (count,)) for v in values]
        for offset in offsets:
            result = [v + shuffle(v, offset) for v in result]
        return result

    def largest(values: Sequence[Any]) -> list[Any]:
        for offset in (16, 8, 4, 2, 1):
            values = [np.maximum(v, shuffle(v, offset)) for v in values]
        return list(values)

    def select(condition: Any, first: Any, second: Any) -> Any:
        return np.where(np.broadcast_to(condition, (count,)) != 0, first, second)

    def pick(values: Sequence[Any], index: Any) -> Any:
        stacked = np.stack([np.broadcast_to(v, (count,)) for v in values])
        return stacked[np.minimum(np.broadcast_to(index, (count,)), len(values) - 1), ids]

    def widen(word: Any) -> tuple[Array, Array]:
        data = torch.from_numpy(_bytes(_u32(word).astype(np.int64), count=count, dtype=np.uint32).copy())
        wide = data.view(torch.float8_e4m3fn).float().numpy()
        return pack(wide[:, 0], wide[:, 1]), pack(wide[:, 2], wide[:, 3])

    def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*values: Any) -> Any:
            with np.errstate(all="ignore"):
                return np.asarray(function(*values)).astype(np.float32)

        return wrapped

    ins = SimpleNamespace(
        byte_address=lambda tensor: tensor.base,
        load_weight=lambda at: _words(run.load(at, 16)),
        load_activation=lambda at: _words(run.load(at, 16)),
        load_weight_f32=lambda at: _floats(run.load(at, 16)),
        load_activation_word=lambda at: _words(run.load(at, 4))[0],
        store_words=store_words,
        store_word=lambda at, word: store_words(at, [word]),
        low_half=bf16_low,
        high_half=bf16_high,
        pack_halves=pack,
        shared_load=lambda at: _words(run.shared_load(at, 16)),
        shared_load_f32=lambda at: _floats(run.shared_load(at, 4))[0],
        shared_store=put_words,
        shared_store_f32=put_f32,
        cluster_address=lambda at, rank: np.broadcast_to(at, (count,)) | (np.asarray(rank) + 1) << 20,
        copy_async=lambda shared, at: run.shared_store(shared, run.load(at, 16)),
        load_matrix=lambda at: matrix(at, False),
        mma_bf16=mma,
        shared_load_pair=lambda at: _floats(run.shared_load(at, 8)),
        shared_store_pair=put_f32,
        store_word_if=lambda at, word, condition: store_words(at, [word], condition),
        store_half_if=lambda at, value, condition: run.store(
            at, _bytes(_bf16_bits(np.broadcast_to(value, (count,))), count=count, dtype=np.uint16), condition
        ),
        add_launch=lambda at: run.store(
            at, _bytes(_words(run.load(at, 4))[0] + 1, count=count, dtype=np.uint32)
        ),
        Words=tuple,
    )
    frag = SimpleNamespace(
        LOG2E=1.4426950408889634,
        LN2=0.6931471805599453,
        exp2=quiet(np.exp2),
        log2=quiet(np.log2),
        reciprocal=quiet(lambda x: 1.0 / np.asarray(x)),
        sigmoid=quiet(lambda x: 1.0 / (1.0 + np.exp(-np.asarray(x)))),
        sum_lanes=sums,
        max_lanes=largest,
        mask_word=lambda word, kept: select(kept, word, 0),
        keep_if=lambda value, kept: select(kept, value, np.float32(0)),
        choose_f32=select,
        choose_word=select,
        choose_address=select,
        finite_or_minus_inf=lambda v, kept: select(
            (np.broadcast_to(kept, (count,)) != 0) & np.isfinite(v), v, np.float32(-np.inf)
        ),
        pick=pick,
        load_constant=lambda at: _floats(run.load(at, 4))[0],
        load_f32=lambda at: _floats(run.load(at, 4))[0],
        load_f32x4=lambda at: _floats(run.load(at, 16)),
        load_pair=lambda at: _words(run.load(at, 8)),
        load_long=lambda at: run.load(at, 8).view(np.int64)[:, 0],
        load_bf16=lambda at: bf16_low(run.load(at, 2).view(np.uint16)[:, 0].astype(np.int64)),
        store_f32=store_f32,
        store_f32x4_if=lambda at, values, condition: store_f32(at, *values, condition=condition),
        store_pair_if=store_words,
        store_word_if=lambda at, word, condition: store_words(at, [word], condition),
        shared_load_f32x2=lambda at: _floats(run.shared_load(at, 8)),
        shared_load_pair=lambda at: _words(run.shared_load(at, 8)),
        sort_bytes=lambda word: (
            (_u32(word) & 0xFF0000FF) | (_u32(word) & 0xFF00) << 8 | (_u32(word) & 0xFF0000) >> 8
        ).astype(np.int64),
        shared_load_f32x4=lambda at: _floats(run.shared_load(at, 16)),
        shared_store_f32x2=put_f32,
        shared_store_f32x4=lambda at, values: put_f32(at, *values),
        shared_store_word=lambda at, word: put_words(at, [word]),
        shared_store_bf16=put_bf16,
        store_remote_f32=put_f32,
        store_remote_f32x2=put_f32,
        store_remote_word=lambda at, word: put_words(at, [word]),
        store_remote_words=put_words,
        load_matrices=lambda at, number: matrix(at, False)[:number],
        load_matrix_transposed=lambda at: matrix(at, True),
        pack_fp8=lambda values: _words(
            np.ascontiguousarray(_e4m3([np.broadcast_to(v, (count,)) for v in values]))
        )[0],
        widen_fp8=widen,
        expect_bytes_if=lambda *_: None,
        copy_async_if=copy_if,
        bulk_load_if=bulk,
    )

    def nothing(*_: Any, **__: Any) -> None:
        return None

    class _Pointer(int):
        def toint(self) -> int:
            return int(self)

    arch = SimpleNamespace(
        alloc_smem=lambda kind, size, alignment: _Pointer(run.allocate(size * kind.size, alignment)),
        get_dyn_smem=lambda kind, alignment: _Pointer(run.allocate(run.dynamic_bytes, alignment)),  # type: ignore[attr-defined]
        shuffle_sync_bfly=shuffle,
        fmax=np.maximum,
        make_warp_uniform=lambda value: value,
        **dict.fromkeys(SYNCHRONISATION, nothing),
    )  # fmt: skip
    as_int.size, as_float.size = 4, 4  # type: ignore[attr-defined]

    def as_long(value: Any) -> Any:
        return as_int(value)

    as_long.size = 8  # type: ignore[attr-defined]

    def uniform_range(first: Any, end: Any = None, step: int = 1, unroll: int = 1) -> Iterator[Any]:
        """A loop whose bounds are the same in all threads gives scalars; else arrays under a mask."""
        first, end = (0, first) if end is None else (first, end)
        low, high = np.broadcast_to(first, (count,)), np.broadcast_to(end, (count,))
        if (low == low[0]).all() and (high == high[0]).all():
            yield from range(int(low[0]), int(high[0]), step)
            return
        index = low.copy()
        while (index < high).any():
            run.masks.append(run.masks[-1] & (index < high))
            yield index
            run.masks.pop()
            index = index + step

    return {
        "ins": ins,
        "frag": frag,
        "choose": lambda condition, first, second: select(condition, first, second),
        "cute": SimpleNamespace(
            arch=arch,
            make_rmem_tensor=lambda shape, _: [0] * shape[0],
            rsqrt=quiet(lambda x: 1.0 / np.sqrt(np.asarray(x))),
            log=quiet(np.log),
        ),
        "cutlass": SimpleNamespace(
            min=np.minimum,
            max=np.maximum,
            range_constexpr=range,
            range=uniform_range,
            const_expr=lambda test: test,
        ),
        "ring": SimpleNamespace(
            COUNTER_BYTES=128, situ=quiet(_situ), **dict.fromkeys(("arrive", "wait_for", "leave"), nothing)
        ),
        "row_plan": SimpleNamespace(STEP=32),
        "steps": _mail_steps(run, ins, frag),
        "VECTOR_BYTES": VECTOR_BYTES,
        "Int32": as_int,
        "Int64": as_long,
        "Float32": as_float,
        "Uint8": SimpleNamespace(size=1),
        "_enter": run.enter,
        "_thread": thread,
        "_lane": lane,
    }


def _mail_steps(run: Lockstep, ins: Any, frag: Any) -> SimpleNamespace:
    """`exchange_steps` where every word has been sent before: nothing waits, and the epoch stays."""
    count = run.count

    def open_mail(mailbox: _Tensor, reach: _Tensor, rank: Any, ranks: int) -> SimpleNamespace:
        peers = [frag.load_long(reach.base + 8 * peer) + mailbox.base for peer in range(ranks)]
        return SimpleNamespace(ranks=ranks, rank=rank, peers=peers, own=peers[int(rank)])

    def enter(control: _Tensor, local: Any, limit: Any) -> SimpleNamespace:
        at = control.base + local * CONTROL_WORDS * 4
        epoch, _, fault, _ = ins.load_activation(at)
        return SimpleNamespace(at=at, epoch=epoch, slot=epoch & 1, limit=np.where(fault, 0, limit))

    def collected(address: Any, sources: int, stride: int, width: int) -> tuple[list[Any], Any]:
        load = ins.load_activation if width == 4 else lambda at: (ins.load_activation_word(at),)
        found = [load(address + source * stride) for source in range(sources)]
        missing = sum(_u32(word) == np.uint32(SENTINEL) for words in found for word in words)
        return found, np.minimum(missing, 1)

    def collect_word(address: Any, sources: int, stride: int, _limit: Any) -> tuple[list[Any], Any]:
        found, missing = collected(address, sources, stride, 1)
        return [words[0] for words in found], missing

    def rearm(address: Any, sources: int, stride: int) -> None:
        for source in range(sources):
            ins.store_words(address + source * stride, [SENTINEL] * 4)

    def rearm_word(address: Any, sources: int, stride: int) -> None:
        for source in range(sources):
            ins.store_word(address + source * stride, SENTINEL)

    def canonical(word: Any) -> Any:
        low, high = _u32(word) & np.uint32(0xFFFF), _u32(word) >> np.uint32(16)
        kept = np.where(low == 0x8000, 0, low) | np.where(high == 0x8000, 0, high).astype(np.uint32) << 16
        return kept.astype(np.int64)

    def word_of(value: Any) -> Any:
        spread = np.broadcast_to(np.asarray(value, dtype=np.float32), (count,))
        return np.ascontiguousarray(spread).view(np.int32).astype(np.int64)

    return SimpleNamespace(
        open_mail=open_mail,
        peer_address=lambda mail, peer: frag.pick(mail.peers, peer),
        enter=enter,
        advance=lambda *_: None,
        report=lambda *_: None,
        arrived=lambda mail, state, room: mail.own + state.slot * (mail.ranks * room),
        post=ins.store_words,
        collect=lambda address, sources, stride, _limit: collected(address, sources, stride, 4),
        collect_word=collect_word,
        rearm=rearm,
        rearm_word=rearm_word,
        canonical_words=lambda words: tuple(canonical(word) for word in words),
        canonical_fp32=lambda word: np.where(_u32(word) == np.uint32(SENTINEL), 1 << 31, word),
        floats=lambda words: [half for word in words for half in (ins.low_half(word), ins.high_half(word))],
        poisoned_if=lambda words, missing: tuple(
            frag.choose_word(missing, 0x7FC07FC0, word) for word in words
        ),
        word_of=word_of,
        value_of=lambda word: _u32(np.broadcast_to(word, (count,))).view(np.float32),
        count_launch=lambda launches: ins.add_launch(launches.base + 14 * 4),
    )


def _situ(gate: Any, up: Any) -> Any:
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)


class _Masks(ast.NodeTransformer):
    """Turns every `if` whose test is not `const_expr` into a loop over `_enter(test)`."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if "const_expr" in ast.unparse(node.test):
            return node
        enter = ast.Call(func=ast.Name("_enter", ast.Load()), args=[_bitwise(node.test)], keywords=[])
        loops: list[ast.stmt] = [
            ast.For(
                target=ast.Name("_", ast.Store()), iter=enter, body=node.body, orelse=[], type_comment=None
            )
        ]
        if node.orelse:
            inverse = ast.Call(func=ast.Name("_not", ast.Load()), args=[_bitwise(node.test)], keywords=[])
            other = ast.Call(func=ast.Name("_enter", ast.Load()), args=[inverse], keywords=[])
            loops.append(
                ast.For(
                    target=ast.Name("_", ast.Store()),
                    iter=other,
                    body=node.orelse,
                    orelse=[],
                    type_comment=None,
                )
            )
        return loops


def _bitwise(test: ast.expr) -> ast.expr:
    """`a and b` as `a & b`, and `a or b` as `a | b`, which numpy understands."""
    if not isinstance(test, ast.BoolOp):
        return test
    operator: ast.operator = ast.BitAnd() if isinstance(test.op, ast.And) else ast.BitOr()
    result = test.values[0]
    for value in test.values[1:]:
        result = ast.BinOp(left=result, op=operator, right=value)
    return result


def _not(test: Any) -> Any:
    return np.logical_not(test) if np.ndim(test) else not test


def run_kernel(
    module: ModuleType,
    kernel: str,
    arguments: Sequence[Any],
    *,
    grid: tuple[int, int, int],
    cluster: int,
    threads: int,
    dynamic_bytes: int = 0,
) -> None:
    """Runs `module.kernel` over its grid (clusters along x), tensors among `arguments` being torch tensors on
    the CPU.
    """
    tensors: list[_Tensor] = []
    passed: list[Any] = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(_Tensor(value, len(tensors)))
            passed.append(tensors[-1])
        else:
            passed.append(value)
    codes = [(part.__name__.rpartition(".")[2], _code_of(part, kernel)) for part in _parts(module)]
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(0, grid[0], cluster):
                run = Lockstep(tensors, cluster, threads)
                run.dynamic_bytes = dynamic_bytes  # type: ignore[attr-defined]
                names = _namespaces(run)
                block = np.arange(run.count) // threads + x
                if cluster == 1:
                    block = x  # type: ignore[assignment]
                names["cute"].arch.thread_idx = lambda thread=names["_thread"]: (thread, 0, 0)
                names["cute"].arch.block_idx = lambda block=block, y=y, z=z: (block, y, z)
                names["cache"] = names["memoize"] = names["cute"].jit = lambda function: function
                names["_not"] = _not
                for name, code in codes:
                    own = dict(names)
                    exec(code, own)
                    defined = {key: value for key, value in own.items() if value is not names.get(key)}
                    names |= {**defined, name: SimpleNamespace(**defined)}
                with np.errstate(all="ignore"):
                    names[kernel](*passed)


def _parts(module: ModuleType) -> list[ModuleType]:
    """The kernel modules whose source runs here: those that `module` imports, and itself last."""
    found: list[ModuleType] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(PACKAGE):
            continue
        own = (node.module or "").removeprefix(PACKAGE).removeprefix(".")
        for name in [own] if own else [alias.name for alias in node.names]:
            if name not in EMULATED:
                part = importlib.import_module(f"{PACKAGE}.{name}")
                found += [other for other in _parts(part) if other not in found]
    return [*found, module]


def _is_traced(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "cute.jit" for decorator in function.decorator_list)


def _code_of(module: ModuleType, kernel: str) -> CodeType:
    """A module's functions and constants without decorators and annotations; masks in the kernel's body and
    in functions whose `if`s the DSL traces.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(module)))
    wanted = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.Assign, ast.AnnAssign))]
    masked = {n.name for n in wanted if isinstance(n, ast.FunctionDef) and _is_traced(n)} | {kernel}
    for node in ast.walk(ast.Module(body=list(wanted), type_ignores=[])):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
    body: list[ast.stmt] = []
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            body.append(_Masks().visit(node) if node.name in masked else node)
        elif (
            isinstance(node, ast.Assign)
            and "Tuple" not in ast.unparse(node)
            and "tuple[" not in ast.unparse(node)
        ):
            body.append(node)
    return compile(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])), module.__name__, "exec")
