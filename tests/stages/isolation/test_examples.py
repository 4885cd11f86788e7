"""What an example stands for: the file that git would show."""

import pytest

from harness.domain.change import FileKind
from harness.domain.policy import Example
from harness.stages.isolation.examples import EXAMPLE_ZONES, _source
from harness.stages.isolation.zones import ZoneIndex

ZONES = ZoneIndex(EXAMPLE_ZONES, frozenset())


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"after": "x = 1\n"}, "added", FileKind.TEXT),
        ({"before": "x = 1\n", "after": "x = 2\n"}, "modified", FileKind.TEXT),
        ({"before": "x = 1\n", "after": "a.py", "mode": "120000"}, "type_changed", FileKind.SYMLINK),
        ({"before": "x = 1\n", "after": "", "mode": "000000"}, "deleted", FileKind.TEXT),
        ({"after": "caf\u00e9\n"}, "added", FileKind.TEXT),
        ({"after": "caf\u00e9\n", "encoding": "latin-1"}, "added", FileKind.NOT_UTF8),
        ({"after": "plain\n", "encoding": "latin-1"}, "added", FileKind.TEXT),
    ],
)
def test_an_example_is_the_change_that_git_would_show(
    fields: dict[str, str], status: str, kind: FileKind
) -> None:
    example = Example.model_validate({"name": "e", "path": "model/decode.py", "matches": True, **fields})
    file = _source(example, ZONES).file
    assert (file.status, file.kind) == (status, kind)
