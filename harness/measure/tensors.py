"""Tensors under test: guarded copies of arguments, poison, what was touched, and errors against an oracle.

Every tensor argument is copied into a buffer of its own with guard bands on both sides, at its own strides.
So a write outside an argument, into the gap between strided rows, into an input, or into state that the call
does not own is seen, and so is an output element that no call wrote: poison is a NaN of a payload that no
arithmetic gives (or a rare number, for integers). Errors are kept per token and never lost: where classes
differ (a NaN against a number), the error is `WORST`.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "WORST",
    "Guarded",
    "TokenError",
    "Touch",
    "checksum",
    "exact_mismatches",
    "guard",
    "operations_of",
    "poison",
    "same_bits",
    "shared_operations",
    "token_errors",
    "unwritten",
]

WORST = 1e30
"""What an error counts as that no number can express, such as a NaN in place of a number."""
BAND_BYTES = 256
BAND_VALUE = 0xA5
POISON_BITS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.bfloat16: (torch.int16, 0x7FD3),
    torch.float16: (torch.int16, 0x7ED3),
    torch.float32: (torch.int32, 0x7FD35A5A),
    torch.float64: (torch.int64, 0x7FF8D35A5A5A5A5A),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.uint8: (torch.uint8, 0xD3),
    torch.int8: (torch.int8, 0x53),
    torch.int16: (torch.int16, 0x53A5),
    torch.int32: (torch.int32, -0x5A5A5A5B),
    torch.int64: (torch.int64, -0x5A5A5A5A5A5A5A5B),
    torch.bool: (torch.uint8, 1),
}
"""By dtype: the integer type of its bits, and the poison."""
LOOKS = frozenset(
    {
        "__get__",
        "stride",
        "size",
        "dim",
        "numel",
        "is_contiguous",
        "element_size",
        "data_ptr",
        "storage_offset",
    }
)
"""Calls that look at a tensor and compute nothing."""
MANTISSA_BITS = {
    torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52, torch.float8_e4m3fn: 3,
}  # fmt: skip


class TokenError(NamedTuple):
    """How far one token's row is from the oracle."""

    relative_l2: float
    worst: float
    """Largest deviation of an element over the row's largest true value."""
    ulp: float
    """One unit in the last place of the output's dtype at the row's scale, over that scale."""
    least: float
    """What no output of this dtype can tell from zero, over the row's scale: a deviation of that size is
    underflow, and no error.
    """


class Touch(NamedTuple):
    """Bytes that a call changed and must not have."""

    argument: str
    kind: str
    """`guard`, `gap`, `input`, `untouched_state`, or `version`: written in place and put back."""
    bytes_changed: int


@dataclass(frozen=True, slots=True)
class Guarded:
    """Arguments in guarded buffers, and what they held before the call."""

    args: dict[str, Any]
    _buffers: dict[str, torch.Tensor]
    _before: dict[str, torch.Tensor]
    _spans: dict[str, tuple[int, int]]
    _versions: dict[str, int]
    """Torch's own count of in-place operations on each tensor."""

    def changed(self, may_change: Mapping[str, torch.Tensor | None]) -> tuple[Touch, ...]:
        """What was changed outside `may_change`: argument name to a mask of its elements, or None for all of
        them.
        """
        found = []
        for name, buffer in self._buffers.items():
            before = self._before[name]
            if torch.equal(buffer, before):
                if name not in may_change and self.args[name]._version != self._versions[name]:
                    found.append(Touch(name, "version", self._spans[name][1]))
                continue
            start, size = self._spans[name]
            tensor = self.args[name]
            moved = buffer != before
            bands = int(moved[:start].sum()) + int(moved[start + size :].sum())
            inner = moved[start : start + size]
            gaps = 0 if tensor.is_contiguous() else int((inner & ~_byte_mask(tensor, size, None)).sum())
            kind, wrong = "input", int(inner.sum()) - gaps
            if name in may_change:
                mask = may_change[name]
                kind = "untouched_state"
                wrong = 0 if mask is None else wrong - int((inner & _byte_mask(tensor, size, mask)).sum())
            found += [Touch(name, k, n) for k, n in (("guard", bands), ("gap", gaps), (kind, wrong)) if n]
        return tuple(found)

    def has_whole_bands(self) -> bool:
        """Whether nothing was written before or behind any argument."""
        for name, buffer in self._buffers.items():
            start, size = self._spans[name]
            moved = buffer != BAND_VALUE
            if bool(moved[:start].any()) or bool(moved[start + size :].any()):
                return False
        return True

    def spoil_guard(self, name: str) -> None:
        """Flip the byte before an argument, as a write one element too early would."""
        self._buffers[name][self._spans[name][0] - 1] ^= 0xFF

    def spoil_first_byte(self, name: str) -> None:
        """Flip an argument's first byte."""
        self._buffers[name][self._spans[name][0]] ^= 0xFF

    def refill(self, source: Mapping[str, Any], keep: frozenset[str]) -> None:
        """Overwrite tensors in place with another set of arguments of the same shapes; `keep` names those
        that stay.
        """
        for name, value in source.items():
            if isinstance(value, torch.Tensor) and name not in keep:
                self.args[name].copy_(value)
        self.remember()

    def remember(self) -> None:
        """Take what the buffers hold now as what they held before the call."""
        for name, buffer in self._buffers.items():
            self._before[name].copy_(buffer)
        self.remember_versions()

    def remember_versions(self) -> None:
        """Take in-place operations so far as our own."""
        for name in self._buffers:
            self._versions[name] = self.args[name]._version

    def buffers(self, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """The whole buffers of arguments, guard bands included: bytes, a multiple of 256 of them."""
        return tuple(self._buffers[name] for name in names)


def guard(args: Mapping[str, Any]) -> Guarded:
    """Copies of the tensors in `args`, each in a buffer with guard bands; other arguments as they are."""
    copies: dict[str, Any] = {}
    buffers: dict[str, torch.Tensor] = {}
    spans: dict[str, tuple[int, int]] = {}
    for name, value in args.items():
        if not isinstance(value, torch.Tensor):
            copies[name] = value
            continue
        size = _span_bytes(value)
        padded = size + -size % BAND_BYTES
        buffer = torch.full((2 * BAND_BYTES + padded,), BAND_VALUE, dtype=torch.uint8, device=value.device)
        flat = buffer[BAND_BYTES : BAND_BYTES + size].view(value.dtype)
        flat.copy_(value.as_strided((flat.numel(),), (1,), value.storage_offset()))
        copies[name] = flat.as_strided(value.shape, value.stride(), flat.storage_offset())
        buffers[name], spans[name] = buffer, (BAND_BYTES, size)
    versions = {name: copies[name]._version for name in buffers}
    return Guarded(copies, buffers, {n: b.clone() for n, b in buffers.items()}, spans, versions)


def poison(tensor: torch.Tensor) -> None:
    """Fill with bits that no call gives."""
    bits, value = POISON_BITS[tensor.dtype]
    tensor.view(bits).fill_(value)


def unwritten(tensor: torch.Tensor) -> int:
    """Elements that still hold poison. float8 has one NaN only and bool no spare value: they tell nothing
    (0).
    """
    if tensor.dtype in (torch.float8_e4m3fn, torch.bool):
        return 0
    bits, value = POISON_BITS[tensor.dtype]
    return int((tensor.view(bits) == value).sum())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements whose bits differ; raises `ValueError` for tensors of different shape or dtype."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"{left.dtype} {tuple(left.shape)} is not comparable with {right.dtype} {tuple(right.shape)}"
        )
    bits = POISON_BITS[left.dtype][0]
    return int((left.contiguous().view(bits) != right.contiguous().view(bits)).sum())


def exact_mismatches(got: torch.Tensor, want: torch.Tensor) -> int:
    """Elements that are not the oracle's, rounded to their dtype: bits differ, and not both are NaN."""
    rounded = want.to(got.dtype)
    bits = POISON_BITS[got.dtype][0]
    differs = got.contiguous().view(bits) != rounded.contiguous().view(bits)
    if got.dtype.is_floating_point:
        differs &= ~(got.isnan() & rounded.isnan())
    return int(differs.sum())


def checksum(tensors: Mapping[str, Any]) -> str:
    """sha256 over names and bytes of tensors, other values left out."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        if isinstance(value, torch.Tensor):
            total.update(name.encode() + b"\0")
            total.update(value.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def token_errors(
    got: torch.Tensor,
    want: torch.Tensor,
    dtype: torch.dtype,
    token_axis: int | None,
    mask: torch.Tensor | None = None,
) -> tuple[TokenError, ...]:
    """Errors of each token's row, or of the whole where there is no token axis.

    `got` may be wider than `dtype`, the dtype that rounding is measured in. Elements outside `mask` count as
    right.
    """
    wide, truth = got.double(), want.double()
    if dtype.is_floating_point and dtype is not torch.float8_e4m3fn:
        # Beyond the dtype's range the right answer is an infinity.
        truth = torch.where(truth.to(dtype).isinf(), truth.to(dtype).double(), truth)
    if mask is not None:
        truth = torch.where(mask, truth, 0.0)
        wide = torch.where(mask, wide, 0.0)
    if token_axis is None or wide.ndim == 0:
        wide, truth = wide.reshape(1, -1), truth.reshape(1, -1)
    else:
        wide = wide.movedim(token_axis, 0).reshape(wide.shape[token_axis], -1)
        truth = truth.movedim(token_axis, 0).reshape(truth.shape[token_axis], -1)
    is_settled = (wide == truth) | (wide.isnan() & truth.isnan())
    gap = torch.where(is_settled, 0.0, (wide - truth).abs()).nan_to_num(nan=WORST, posinf=WORST)
    finite = torch.where(truth.isfinite(), truth, 0.0)
    scale, norm = finite.abs().amax(-1), finite.norm(dim=-1)
    worst = _over(gap.amax(-1), scale)
    relative = _over(_norm(gap), norm)
    steps = MANTISSA_BITS.get(dtype, 0)
    return tuple(
        TokenError(min(r, WORST), min(w, WORST), _relative_ulp(s, steps), _relative_least(s, dtype))
        for r, w, s in zip(relative.tolist(), worst.tolist(), scale.tolist(), strict=True)
    )


def operations_of(work: Callable[[], object]) -> tuple[str, ...]:
    """Every torch function that `work` calls, in order, with the dtypes and shapes that it reads."""
    seen: list[str] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Any,
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            name = getattr(func, "__name__", str(func))
            if name not in LOOKS:
                read = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
                seen.append(f"{name}({', '.join(f'{t.dtype}{tuple(t.shape)}' for t in read)})")
            return func(*args, **(kwargs or {}))

    with Recorder():
        work()
    return tuple(seen)


def shared_operations(stock: Sequence[str], other: Sequence[str]) -> float:
    """Share of stock's operations, as a multiset, that the other arm does too; 0 where stock does none."""
    if not stock:
        return 0.0
    common = Counter(stock) & Counter(other)
    return sum(common.values()) / len(stock)


def _norm(gap: torch.Tensor) -> torch.Tensor:
    """Euclidean norm that does not overflow at `WORST`."""
    top = gap.amax(-1, keepdim=True).clamp(min=1e-300)
    unit: torch.Tensor = (gap / top).norm(dim=-1)
    return unit * top.squeeze(-1)


def _over(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """value / scale; a deviation from an all-zero row is `WORST`."""
    empty = torch.where(value == 0, 0.0, WORST)
    return torch.where(scale > 0, value / scale.clamp(min=1e-300), empty)


def _relative_ulp(scale: float, mantissa_bits: int) -> float:
    """One unit in the last place at `scale`, over `scale`; 0 at zero."""
    if scale <= 0 or mantissa_bits == 0:
        return 0.0
    return float(math.ldexp(1.0, math.frexp(scale)[1] - 1 - mantissa_bits) / scale)


def _relative_least(scale: float, dtype: torch.dtype) -> float:
    """The larger of fp32's smallest normal number and the dtype's smallest step, over `scale`; 0 at zero.

    Sums are fp32, whose results below 2^-126 hardware may flush to zero; a narrower dtype has its own end.
    """
    if scale <= 0 or not dtype.is_floating_point:
        return 0.0
    end = torch.finfo(dtype)
    return min(WORST, max(torch.finfo(torch.float32).smallest_normal, end.smallest_normal * end.eps) / scale)


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _byte_mask(tensor: torch.Tensor, size: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Bytes of a tensor's span that belong to its elements, or to those that `mask` selects."""
    wide = tensor.element_size()
    elements = torch.zeros(size // wide, dtype=torch.bool, device=tensor.device)
    if size:
        view = elements.as_strided(tensor.shape, tensor.stride())
        if mask is None:
            view.fill_(True)
        else:
            view.copy_(mask.to(tensor.device))
    return elements.repeat_interleave(wide)
