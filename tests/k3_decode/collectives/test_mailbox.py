"""Where parts lie in a mailbox, as numbers."""

import pytest
from k3_decode.ops.mailbox import MailboxLayout


def test_epochs_take_turns_and_sums_follow_the_parts() -> None:
    layout = MailboxLayout(ranks=2, part_bytes=32)
    assert [layout.part(epoch, source) for epoch in range(3) for source in (0, 1)] == [0, 32, 64, 96, 0, 32]
    assert [layout.sum_part(epoch) for epoch in range(3)] == [128, 160, 128]
    assert layout.size == 192


@pytest.mark.parametrize(("ranks", "part_bytes"), [(0, 32), (2, 0), (2, 24)])
def test_a_mailbox_that_cannot_be_is_refused(ranks: int, part_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"mailbox of {ranks} ranks and parts of {part_bytes} bytes"):
        MailboxLayout(ranks, part_bytes)
