"""Runs an exchange kernel's own Python source on the CPU, every GPU thread a thread of this process, so that
ranks, blocks and threads really overlap and wait for each other.

The body runs on plain ints over one memory of bytes; accesses, waits and barriers are small functions here,
and the arithmetic PTX of `exchange_steps` is interpreted. What it proves: addresses, epochs, re-arming, sums
and reports. What it cannot prove: memory order of a GPU, timing.
"""

import ast
import inspect
import re
import struct
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from k3_decode.cute import exchange_steps as steps
from k3_decode.ops.mailbox import CONTROL_WORDS, SENTINEL, MailboxLayout

LOOK_S = 0.002
"""Pause between two looks: with none, the waiting threads of many ranks leave the others no time."""
PATIENCE_S = 20.0
"""A word that is missing for so long in a test is a hang."""


class Memory:
    """All tensors of a run in one space of addresses."""

    def __init__(self) -> None:
        self.bytes = bytearray(4096)
        self.lock = threading.Lock()

    def place(self, value: torch.Tensor) -> SimpleNamespace:
        """A contiguous tensor's bytes, with the face of a cute tensor."""
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        base = len(self.bytes)
        self.bytes += bytes(flat.tolist()) + bytes(-flat.numel() % 16)
        return SimpleNamespace(
            base=base, size=flat.numel(), dtype=value.dtype, shape=tuple(value.shape), stride=value.stride()
        )

    def read(self, tensor: SimpleNamespace) -> torch.Tensor:
        """What the tensor holds now."""
        flat = torch.frombuffer(
            bytearray(self.bytes[tensor.base : tensor.base + tensor.size]), dtype=torch.uint8
        )
        return flat.view(tensor.dtype).view(tensor.shape)

    def load(self, address: int, count: int) -> tuple[int, ...]:
        assert address % (4 * count) == 0, "unaligned load"
        return struct.unpack_from(f"<{count}I", self.bytes, address)

    def store(self, address: int, words: Sequence[int]) -> None:
        assert address % (4 * len(words)) == 0, "unaligned store"
        for i, word in enumerate(words):
            struct.pack_into("<I", self.bytes, address + 4 * i, int(word) & 0xFFFFFFFF)

    def add(self, address: int, value: int) -> int:
        with self.lock:
            (before,) = self.load(address, 1)
            self.store(address, (before + value,))
        return before


class Place(threading.local):
    """Where the running thread stands."""

    tid = block = local = 0


def interpret(template: str, args: Sequence[int]) -> int:
    """A few instructions on 32-bit words: `$0` is the result, `$1` onward the arguments."""
    values: dict[str, Any] = {f"${i + 1}": arg & 0xFFFFFFFF for i, arg in enumerate(args)}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0) & 0xFFFFFFFF

    operations: dict[str, Callable[..., Any]] = {
        "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "add.u32": lambda a, b: a + b,
        "setp.eq.b32": lambda a, b: a == b, "selp.b32": lambda a, b, p: a if p else b,
    }  # fmt: skip
    for statement in template.strip("{}").split(";"):
        opcode, _, rest = statement.strip().partition(" ")
        if opcode and not opcode.startswith(".reg"):
            target, *sources = [part.strip() for part in rest.split(",")]
            found = operations[opcode](*(value(s) for s in sources))
            values[target] = found if isinstance(found, bool) else found & 0xFFFFFFFF
    return int(values["$0"])


class Device:
    """Played ranks on Python threads: mailboxes, controls, and launches that return when all threads have."""

    def __init__(self, ranks: int, room: int) -> None:
        self.layout, self.memory, self.place = MailboxLayout(ranks, room), Memory(), Place()
        words = self.layout.size // 4
        mark = torch.tensor([SENTINEL - (1 << 32)], dtype=torch.int32)
        self.mailboxes = [self.memory.place(mark.expand(words).clone()) for _ in range(ranks)]
        first = self.mailboxes[0].base
        reach = torch.tensor([box.base - first for box in self.mailboxes], dtype=torch.int64)
        self.reach = self.memory.place(reach)
        self.control = self.memory.place(torch.zeros((ranks, CONTROL_WORDS), dtype=torch.int32))
        self.launches = self.memory.place(torch.zeros(16, dtype=torch.int32))

    def run(
        self, module: ModuleType, kernel: str, tensors: Sequence[SimpleNamespace], constants: Sequence[Any],
        blocks: int, *, limit: int = 1 << 40, absent: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """One launch of all ranks but the absent ones; `constants` follow first rank and limit."""
        barriers = {}
        jobs, failures = [], []
        interval = sys.getswitchinterval()
        for local in range(self.layout.ranks):
            for block in range(blocks):
                barriers[local, block] = threading.Barrier(module.THREADS)
        function = _runnable(module, kernel, self, barriers, blocks)

        def job(local: int, block: int, tid: int) -> None:
            self.place.local, self.place.block, self.place.tid = local, block, tid
            try:
                function(*tensors, 0, limit, *constants)
            except BaseException as error:  # noqa: BLE001  # told to the test, which raises it
                failures.append(error)
                barriers[local, block].abort()

        for local in range(self.layout.ranks):
            if local not in absent:
                jobs += [
                    threading.Thread(target=job, args=(local, block, tid))
                    for block in range(blocks)
                    for tid in range(module.THREADS)
                ]
        sys.setswitchinterval(1e-4)
        try:
            for thread in jobs:
                thread.start()
            for thread in jobs:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        if failures:
            raise failures[0]


def _runnable(
    module: ModuleType,
    kernel: str,
    device: Device,
    barriers: dict[tuple[int, int], threading.Barrier],
    blocks: int,
) -> Callable[..., None]:
    """The kernel's source with everything below it replaced."""
    memory, place = device.memory, device.place

    def collected(address: int, sources: int, stride: int, limit: int, width: int) -> tuple[list[int], int]:
        begun, looks = time.monotonic(), 0
        while True:
            words = [w for s in range(sources) for w in memory.load(address + s * stride, width)]
            looks += 1
            if SENTINEL not in words:
                return words, 0
            if looks >= limit:
                return words, 1
            assert time.monotonic() - begun < PATIENCE_S, "a word never came"
            time.sleep(LOOK_S)

    def asm(
        template: str,
        _constraints: str,
        args: Sequence[int],
        results: Sequence[Any] = (),
        is_pure: bool = False,
    ) -> Any:
        if is_pure:
            return interpret(template, args)
        if template.startswith("atom.relaxed.gpu.global.add"):
            return memory.add(args[0], 1)
        if template.startswith("atom.relaxed.gpu.global.cas"):
            with memory.lock:
                (before,) = memory.load(args[0], 1)
                if before == 0:
                    memory.store(args[0], (args[1],))
            return before
        raise NotImplementedError(template)

    def pack(low: np.float32, high: np.float32) -> int:
        return _bf16(low) | _bf16(high) << 16

    def as_float(word: int) -> np.float32:
        return np.uint32(word & 0xFFFFFFFF).view(np.float32)

    arch = SimpleNamespace(
        thread_idx=lambda: (place.tid, 0, 0),
        block_idx=lambda: (place.block, 0, place.local),
        grid_dim=lambda: (blocks, 1, 1),
        sync_threads=lambda: barriers[place.local, place.block].wait(PATIENCE_S),
        griddepcontrol_wait=lambda: None,
        griddepcontrol_launch_dependents=lambda: None,
    )
    ins = SimpleNamespace(
        asm=asm,
        byte_address=lambda tensor: tensor.base,
        load_activation=lambda address: memory.load(address, 4),
        load_activation_word=lambda address: memory.load(address, 1)[0],
        store_words=memory.store,
        store_word=lambda address, word: memory.store(address, (word,)),
        low_half=lambda word: as_float(word << 16),
        high_half=lambda word: as_float(word & 0xFFFF0000),
        pack_halves=pack,
        add_launch=lambda address: memory.add(address, 1),
    )
    shared: dict[str, Any] = {
        "ins": ins,
        "frag": SimpleNamespace(choose_word=lambda condition, first, second: first if condition else second),
        "cute": SimpleNamespace(arch=arch, Tensor=object),
        "cutlass": SimpleNamespace(
            range=lambda first, end, step, unroll: range(first, end, step), range_constexpr=range,
            const_expr=bool, Constexpr=object, min=min,
        ),
        "Int32": int, "Int64": int,
    }  # fmt: skip
    below = _replaced(steps, shared | {
        "_collected": collected,
        "_load_distance": lambda address: struct.unpack_from("<q", memory.bytes, address)[0],
        "post": memory.store,
        "post_word": lambda address, word, wanted: memory.store(address, (word,)) if wanted else None,
        "delay": lambda *_: None,
    }, keep=("post", "post_word", "_collected", "_load_distance", "delay"))  # fmt: skip
    names = _replaced(module, shared | {"steps": SimpleNamespace(**below)})
    function: Callable[..., None] = names[kernel]
    return function


def _bf16(value: np.float32) -> int:
    """Rounded to nearest even; a NaN is the quiet one."""
    bits = int(np.float32(value).view(np.uint32))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _replaced(module: ModuleType, names: dict[str, Any], keep: Sequence[str] = ()) -> dict[str, Any]:
    """A module's functions from their source, without decorators, over other names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(module)))
    functions = [
        node for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name not in (*keep, "_launch", "_compile", "variants")
    ]  # fmt: skip
    for node in functions:
        node.decorator_list = []
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    space = vars(module) | names
    code = ast.Module(body=list(functions), type_ignores=[])
    exec(compile(ast.fix_missing_locations(code), module.__name__, "exec"), space)
    return space


def canonical(word: int) -> int:
    """`exchange_steps.canonical`, by its PTX."""
    return interpret(_template(steps.canonical), (word,))


def canonical_fp32(word: int) -> int:
    """`exchange_steps.canonical_fp32`, by its PTX."""
    template = f"{{.reg .pred p; setp.eq.b32 p, $1, {SENTINEL:#x}; selp.b32 $0, 0x80000000, $1, p;}}"
    assert "selp.b32 $0, 0x80000000, $1, p;" in inspect.getsource(steps.canonical_fp32)
    return interpret(template, (word,))


def _template(function: Callable[..., Any]) -> str:
    return "".join(re.findall(r'"([^"]*;[^"]*)"', inspect.getsource(function)))
