"""The mailbox protocol in numbers: what the models explore and the kernels do.

Every rank owns a mailbox, to which its peers write and which it alone reads. An *epoch* is one exchange of a
group, the same for all its ranks whatever its shape or form; it is counted on the device, so that a replayed
graph goes on where the last one stopped. Two epochs have slots of their own: a rank that has finished epoch e
may write e + 1 at once, and cannot write e + 2 before every peer has published e + 1, which each does after
it has read e and put the sentinel back. So one counter serves all shapes and forms over the same memory, and
only the reader of a word re-arms it.

Data carry their own mark: a word of 4 bytes (the unit of atomicity; a wider access counts as several words
in any order) is there when it is not the sentinel, two bf16 -0.0, which no payload holds because the sender
turns -0.0 into 0.0. NaN and infinities pass. There is no flag and no fence.
"""

from dataclasses import dataclass

__all__ = ["CONTROL_WORDS", "EPOCHS", "EXCHANGES", "SENTINEL", "VECTOR_BYTES", "MailboxLayout"]

EXCHANGES = (
    "one_shot", "two_stage", "scatter", "gather", "transpose", "attn_res", "attn_res_two_stage", "moe_tail",
    "flags", "mla_value",
)  # fmt: skip
"""Every exchange; a fault names it by its place, counted from 1."""
CONTROL_WORDS = 8
"""int32 of a rank's control: epoch, blocks that have read it, then the fault: 0 or the exchange's number, its
epoch, the rank whose words are missing, the 16-byte vector, and two spare."""

EPOCHS = 2
"""Epochs whose slots lie side by side."""
SENTINEL = 0x80008000
"""A word that no payload holds: bf16 -0.0 twice."""
VECTOR_BYTES = 16
"""What one thread moves at once."""


@dataclass(frozen=True, slots=True)
class MailboxLayout:
    """Where parts lie in one rank's mailbox: [epoch % 2][source rank][bytes], then [epoch % 2][bytes] of the
    sums that owners send out in the two-stage form.
    """

    ranks: int
    part_bytes: int
    """Room for one rank's part, a multiple of 16."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.part_bytes < VECTOR_BYTES or self.part_bytes % VECTOR_BYTES:
            raise ValueError(
                f"mailbox of {self.ranks} ranks and parts of {self.part_bytes} bytes; parts are multiples "
                f"of {VECTOR_BYTES}"
            )

    @property
    def sums(self) -> int:
        """Byte offset of the distributed sums."""
        return EPOCHS * self.ranks * self.part_bytes

    @property
    def size(self) -> int:
        """Bytes of one rank's mailbox."""
        return self.sums + EPOCHS * self.part_bytes

    def part(self, epoch: int, source: int) -> int:
        """Byte offset of what rank `source` sends in an epoch."""
        return (epoch % EPOCHS * self.ranks + source) * self.part_bytes

    def sum_part(self, epoch: int) -> int:
        """Byte offset of an epoch's distributed sums."""
        return self.sums + epoch % EPOCHS * self.part_bytes
