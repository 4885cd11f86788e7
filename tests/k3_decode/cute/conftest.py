"""What the kernel tests share: compiling in a child process, and a machine that runs row streams in numpy."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from k3_decode.cute.variant import COMPILED, DISPATCHED

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def compile_smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, str]]:
    """PTX by name of an op's smoke variants for an architecture, compiled in a process of its own: one for
    all architectures of an op, as `test_device_code.py` shows that this changes no byte.
    """
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("CuTe DSL (nvidia-cutlass-dsl) is not installed")

    @cache
    def compiled(op: str) -> Path:
        module = importlib.import_module(f"k3_decode.cute.{op}")
        names = [variant.name for variant in module.variants() if variant.is_smoke]
        folder = tmp_path_factory.mktemp(op)
        asked = [word for architecture in DISPATCHED + COMPILED for word in ("--arch", architecture)]
        command = [sys.executable, "-m", "k3_decode.compile", *asked, "--out", str(folder), *names]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT}"}
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return folder

    def compile_op(op: str, architecture: str) -> dict[str, str]:
        return {path.stem: path.read_text() for path in (compiled(op) / architecture).glob("*.ptx")}

    return compile_op


@pytest.fixture
def gpu() -> Any:
    """The CUDA device, or a skip that says what is missing."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("CuTe DSL (nvidia-cutlass-dsl) is not installed")
    return torch.device("cuda")


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of fp32 values, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class NumpyMachine:
    """Runs the traced functions of a row stream for all threads of a grid at once, a lane an array element.

    It knows one address space: tensors are placed one after another in a device memory of 4-byte words.
    """

    def __init__(self, blocks: int, threads: int, cluster: int, shared_bytes: int) -> None:
        self.threads, self.cluster = threads, cluster
        self.tid = np.tile(np.arange(threads), blocks)
        self.bid = np.repeat(np.arange(blocks), threads)
        self.device = np.zeros(64, np.uint32)
        self.shared = np.full((blocks, shared_bytes // 4), 0x7FC00000, np.uint32)
        self.expected = np.zeros(blocks, np.int64)
        self.received = np.zeros(blocks, np.int64)

    def place(self, words: np.ndarray, shape: tuple[int, ...], stride: tuple[int, ...]) -> SimpleNamespace:
        """A tensor of the given words (uint32) in device memory."""
        base = len(self.device) * 4
        self.device = np.concatenate([self.device, words.ravel(), np.zeros(-words.size % 32, np.uint32)])
        return SimpleNamespace(base=base, words=words.size, shape=shape, stride=stride)

    def place_bf16(self, values: np.ndarray) -> SimpleNamespace:
        """A compact bf16 tensor."""
        strides = tuple(int(s) // values.itemsize for s in values.strides)
        return self.place(to_bf16_bits(values).ravel().view(np.uint32), values.shape, strides)

    def read(self, tensor: SimpleNamespace) -> np.ndarray:
        """A tensor's words."""
        return self.device[tensor.base // 4 : tensor.base // 4 + tensor.words]

    def all_lanes(self, value: Any) -> np.ndarray:
        """`value` as one array element a thread."""
        return np.broadcast_to(np.asarray(value), self.tid.shape)

    def load(self, address: Any, count: int) -> tuple[np.ndarray, ...]:
        at = self.all_lanes(address) // 4
        return tuple(self.device[at + i] for i in range(count))

    def store(self, address: Any, words: list[np.ndarray], wanted: Any = 1) -> None:
        at, keep = self.all_lanes(address) // 4, self.all_lanes(wanted) != 0
        for i, word in enumerate(words):
            self.device[at[keep] + i] = word[keep]

    def store_half(self, address: Any, half: np.ndarray, wanted: Any) -> None:
        at, keep = self.all_lanes(address) // 2, self.all_lanes(wanted) != 0
        self.device.view(np.uint16)[at[keep]] = half[keep]

    def shared_load(self, address: Any, count: int) -> tuple[np.ndarray, ...]:
        at = self.all_lanes(address) // 4
        return tuple(self.shared[self.bid, at + i].view(np.float32) for i in range(count))

    def shared_store(self, address: Any, values: list[Any], wanted: Any = 1) -> None:
        words = [self.all_lanes(value).astype(np.float32).view(np.uint32) for value in values]
        self.shared_store_words(address, words, wanted)

    def copy_shared(self, shared: Any, address: Any, wanted: Any = 1) -> None:
        keep = self.all_lanes(wanted) != 0
        words = self.load(np.where(keep, self.all_lanes(address), 0), 4)
        self.shared_store_words(shared, words, wanted)

    def shared_store_words(self, shared: Any, words: Any, wanted: Any) -> None:
        to, keep = self.all_lanes(shared) // 4, self.all_lanes(wanted) != 0
        for i, word in enumerate(words):
            self.shared[self.bid[keep], to[keep] + i] = self.all_lanes(word)[keep]

    def send(self, address: Any, values: list[np.ndarray], wanted: Any) -> None:
        code, keep = self.all_lanes(address), self.all_lanes(wanted) != 0
        block = self.bid - self.bid % self.cluster + (code >> 24)
        for i, value in enumerate(values):
            at = (code & 0xFFFFFF) // 4 + i
            self.shared[block[keep], at[keep]] = (
                self.all_lanes(value).astype(np.float32).view(np.uint32)[keep]
            )
        np.add.at(self.received, block[keep], 4 * len(values))

    def mma(self, a: Any, b: Any, c: Any) -> tuple[np.ndarray, ...]:
        """m16n8k16 by the fragment layout of the PTX manual, warp by warp."""
        warps = self.tid.size // 32
        lane = np.arange(32)
        g, t = lane // 4, lane % 4
        left, right = np.zeros((warps, 16, 16)), np.zeros((warps, 8, 16))
        for i, word in enumerate(a):
            pair = self.all_lanes(word).astype(np.uint32).reshape(warps, 32)
            for half in (0, 1):
                bits = (pair >> np.uint32(16 * half)).astype(np.uint16)
                left[:, g + 8 * (i % 2), 2 * t + 8 * (i // 2) + half] = from_bf16_bits(bits)
        for i, word in enumerate(b):
            pair = self.all_lanes(word).astype(np.uint32).reshape(warps, 32)
            for half in (0, 1):
                bits = (pair >> np.uint32(16 * half)).astype(np.uint16)
                right[:, g, 2 * t + 8 * i + half] = from_bf16_bits(bits)
        product = np.einsum("wmk,wnk->wmn", left, right)
        out = []
        for i, value in enumerate(c):
            part = product[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1)
            out.append((self.all_lanes(value) + part).astype(np.float32))
        return tuple(out)

    def multiply_tiles(self, sums: Any, rows: Any, tokens: Any, width: int) -> tuple[np.ndarray, ...]:
        """m64nNk16 four times, warpgroup by warpgroup, from swizzled lines as `multiply_tiles` says."""
        groups = self.tid.size // 128
        tiles = []
        for address, lines in ((rows, 64), (tokens, width)):
            base = self.all_lanes(address).reshape(groups, 128)[:, 0]
            block = self.bid.reshape(groups, 128)[:, 0]
            line, piece = np.meshgrid(np.arange(lines), np.arange(8), indexing="ij")
            at = (line * 128 + (piece ^ line % 8) * 16)[None] + base[:, None, None]
            words = np.stack([self.shared[block[:, None, None], at // 4 + i] for i in range(4)], axis=-1)
            tiles.append(from_bf16_bits(words.reshape(groups, lines, 32).view(np.uint16)))
        product = np.einsum("wmk,wnk->wmn", *(tile.astype(np.float64) for tile in tiles))
        thread = np.arange(128)
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        out = []
        for i, value in enumerate(sums):
            part = product[:, row + i % 4 // 2 * 8, column + i // 4 * 8 + i % 2].reshape(-1)
            out.append((self.all_lanes(value) + part).astype(np.float32))
        return tuple(out)

    def shuffle(self, value: np.ndarray, offset: int) -> np.ndarray:
        lane = np.arange(self.tid.size)
        return self.all_lanes(value)[lane ^ offset]


@pytest.fixture
def numpy_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NumpyMachine]:
    """Builds a machine and points the traced modules at it."""
    pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

    from k3_decode.cute import row_gemm, row_plan, row_product, row_stream, row_sums

    def build(op: Any, plan: Any, rows: int) -> NumpyMachine:
        size = row_plan.shared_layout(plan).size
        machine = NumpyMachine(row_product.blocks_of(plan, rows), plan.threads, plan.cluster, size)
        for module in (row_plan, row_stream, row_gemm, row_sums, row_product, op):
            monkeypatch.setattr(module, "ins", _instructions(machine))
            for name in ("Int32", "Int64"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, lambda value: np.asarray(value) * 1)
            if hasattr(module, "Float32"):
                monkeypatch.setattr(module, "Float32", np.float32)
            monkeypatch.setattr(module, "cute", _device(machine))
        return machine

    return build


def _instructions(machine: NumpyMachine) -> SimpleNamespace:
    """The functions of `k3_decode.cute.instructions` that row streams use."""

    def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return to_bf16_bits(low).astype(np.uint32) | to_bf16_bits(high).astype(np.uint32) << np.uint32(16)

    def bits(value: Any) -> np.ndarray:
        return machine.all_lanes(value).astype(np.float32).view(np.uint32)

    return SimpleNamespace(
        Words=tuple,
        advanced=lambda address, count: address + count,
        byte_address=lambda tensor: np.int64(tensor.base),
        at_most=lambda value, bound: np.minimum(value, bound),
        choose_address=lambda sign, negative, other: np.where(np.asarray(sign) < 0, negative, other),
        load_weight=lambda address: machine.load(address, 4),
        load_activation=lambda address: machine.load(address, 4),
        load_activation_word_if=lambda address, wanted: machine.load(np.where(wanted, address, 0), 1)[0],
        mma_bf16=machine.mma,
        low_half=lambda word: from_bf16_bits((np.asarray(word) & 0xFFFF).astype(np.uint16)),
        high_half=lambda word: from_bf16_bits((np.asarray(word) >> 16).astype(np.uint16)),
        pack_halves=pack,
        copy_async_if=machine.copy_shared,
        fence_async_reads=lambda: None,
        multiply_tiles=machine.multiply_tiles,
        shared_store_if=machine.shared_store_words,
        shared_store_f32_if=lambda address, value, wanted: machine.shared_store(address, [value], wanted),
        shared_load=lambda address: tuple(w.view(np.uint32) for w in machine.shared_load(address, 4)),
        shared_load_f32=lambda address: machine.shared_load(address, 1)[0],
        shared_load_pair=lambda address: machine.shared_load(address, 2),
        shared_store_f32=lambda address, value: machine.shared_store(address, [value]),
        shared_store_pair=lambda address, low, high: machine.shared_store(address, [low, high]),
        cluster_address=lambda address, rank: machine.all_lanes(address) + (machine.all_lanes(rank) << 24),
        send_f32=lambda at, value, _, wanted: machine.send(at, [value], wanted),
        send_pair=lambda at, low, high, _, wanted: machine.send(at, [low, high], wanted),
        store_word_if=lambda address, word, wanted: machine.store(address, [word], wanted),
        store_half_if=lambda address, value, wanted: machine.store_half(address, to_bf16_bits(value), wanted),
        store_f32_pair_if=lambda at, low, high, wanted: machine.store(at, [bits(low), bits(high)], wanted),
    )


def _device(machine: NumpyMachine) -> SimpleNamespace:
    """The parts of `cutlass.cute` that row streams use."""

    def nothing(*_: Any) -> None:
        return None

    names = (
        "griddepcontrol_launch_dependents",
        "griddepcontrol_wait",
        "sync_threads",
        "cluster_wait",
        "cp_async_commit_group",
        "cp_async_wait_group",
    )
    arch = SimpleNamespace(
        thread_idx=lambda: (machine.tid, 0, 0),
        block_idx=lambda: (machine.bid, 0, 0),
        make_warp_uniform=lambda value: value,
        get_dyn_smem=lambda *_, **__: SimpleNamespace(toint=lambda: 0),
        shuffle_sync_bfly=machine.shuffle,
        mbarrier_wait=nothing,
        **dict.fromkeys(names, nothing),
    )
    return SimpleNamespace(
        arch=arch,
        Tensor=object,
        rsqrt=lambda value: 1.0 / np.sqrt(value),
        make_rmem_tensor=lambda shape, _: [None] * shape[0],
    )
