"""The committed JSON Schemas."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from harness.domain.resources import data_folder
from harness.evidence.attestation import sign_bundle
from harness.evidence.schemas import check_schemas, render_schemas, write_schemas
from harness.evidence.verify import verify
from tests.evidence.example_run import example_plan, only, write_example
from tests.evidence.test_attestation import KEY


def test_the_committed_schemas_fit_the_records() -> None:
    assert check_schemas(data_folder("bundles") / "schema") == ()


def test_a_schema_that_was_edited_or_is_missing_is_named(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    (tmp_path / "plan.v1.json").unlink()
    (tmp_path / "outcome.v1.json").write_text("{}")
    named = [problem.split()[0] for problem in check_schemas(tmp_path)]
    assert named == ["plan.v1.json", "outcome.v1.json"]


def test_every_json_file_of_a_bundle_fits_its_schema(tmp_path: Path) -> None:
    folder = write_example(
        tmp_path / "bundle", only(example_plan(), lambda c: c.stage in ("audit", "isolation"))
    )
    sign_bundle(folder, KEY)
    schemas = {
        name.split(".")[0]: Draft202012Validator(json.loads(t)) for name, t in render_schemas().items()
    }
    for name in ("manifest", "plan", "environment", "attestation"):
        schemas[name].validate(json.loads((folder / f"{name}.json").read_bytes()))
    for line in (folder / "outcomes.jsonl").read_bytes().splitlines():
        schemas["outcome"].validate(json.loads(line))
    for path in folder.glob("samples/*/samples.json"):
        schemas["samples"].validate(json.loads(path.read_bytes()))
    schemas["verification"].validate(verify(folder).model_dump(mode="json"))
