"""What is sent to GitHub, as records: a dry run prints them, and a real run sends the same ones.

Sizes are GitHub's own limits, held here so that a request that could not be accepted cannot be built.
"""

from typing import Annotated, Literal

from pydantic import Field

from harness.domain.change import Sha
from harness.domain.record import Record

__all__ = [
    "CHECK_RUN_ID", "MAX_ANNOTATIONS", "MAX_BODY", "Annotation", "ApiRequest", "CheckOutput", "CheckRun",
    "CheckRunUpdate", "CommentBody", "Conclusion",
]  # fmt: skip

MAX_BODY = 65_535
"""Characters of a comment, a summary or a text."""
MAX_ANNOTATIONS = 50
"""In one request; more go into updates of the same run."""
CHECK_RUN_ID = "{check_run_id}"
"""Stands in a path for the id that GitHub gives when the run is created."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_BODY)]
Conclusion = Literal["success", "failure", "action_required"]


class CommentBody(Record):
    """A comment, new or edited."""

    body: Text


class Annotation(Record):
    """A remark at lines of a file of the head commit."""

    path: str = Field(min_length=1, max_length=1024)
    start_line: int = Field(ge=1)
    end_line: int = Field(ge=1)
    annotation_level: Literal["notice", "warning", "failure"]
    title: str = Field(min_length=1, max_length=255)
    message: str = Field(min_length=1, max_length=16_000)
    """GitHub takes 64 KB; 16,000 characters fit whatever they are."""


class CheckOutput(Record):
    """What a check run shows. Annotations are added to those that the run has."""

    title: str = Field(min_length=1, max_length=255)
    summary: Text
    annotations: tuple[Annotation, ...] = Field(default=(), max_length=MAX_ANNOTATIONS)


class CheckRun(Record):
    """A new check run on one commit; without a conclusion it is in progress."""

    name: str = Field(min_length=1, max_length=100)
    head_sha: Sha
    external_id: str = Field(max_length=200)
    status: Literal["in_progress", "completed"]
    conclusion: Conclusion | None = None
    output: CheckOutput


class CheckRunUpdate(Record):
    """More annotations for a check run; with the last ones, its conclusion."""

    status: Literal["in_progress", "completed"]
    conclusion: Conclusion | None = None
    output: CheckOutput


class ApiRequest(Record):
    """One request that changes something."""

    method: Literal["POST", "PATCH"]
    path: str = Field(pattern=r"^/[A-Za-z0-9/._{}-]+$")
    body: CommentBody | CheckRun | CheckRunUpdate

    def json_body(self) -> dict[str, object]:
        """The body as JSON data, without what is not set."""
        return self.body.model_dump(mode="json", exclude_none=True)
