"""Cut GitHub's published API description down to the operations that fasttrack calls, as plain JSON Schema.

    npm pack @octokit/openapi@23.0.2 && tar xzf octokit-openapi-23.0.2.tgz
    python tests/forge/openapi/extract.py package/generated/api.github.com.json

Only what a validator needs is kept: no prose, no examples. OpenAPI 3.0's `nullable` becomes a type.
"""

import json
import sys
from pathlib import Path
from typing import Any

OPERATIONS = (
    ("get", "/user"),
    ("get", "/repos/{owner}/{repo}/pulls/{pull_number}"),
    ("get", "/repos/{owner}/{repo}/compare/{basehead}"),
    ("get", "/repos/{owner}/{repo}/issues/{issue_number}/comments"),
    ("post", "/repos/{owner}/{repo}/issues/{issue_number}/comments"),
    ("patch", "/repos/{owner}/{repo}/issues/comments/{comment_id}"),
    ("post", "/repos/{owner}/{repo}/check-runs"),
    ("patch", "/repos/{owner}/{repo}/check-runs/{check_run_id}"),
)
PROSE = (
    "description",
    "summary",
    "title",
    "example",
    "examples",
    "externalDocs",
    "deprecated",
    "discriminator",
)


def main(source: Path) -> None:
    """Write `github.json` beside this file."""
    document = json.loads(source.read_text(encoding="utf-8"))
    operations = {f"{method} {path}": _operation(document, method, path) for method, path in OPERATIONS}
    content = {
        "source": f"npm @octokit/openapi {document['info']['version']}",
        "license": document["info"]["license"]["name"],
        "operations": operations,
        "schemas": _closure(document, operations),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    Path(__file__).with_name("github.json").write_text(text + "\n", encoding="utf-8")


def _operation(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    found = document["paths"][path][method]
    body = found.get("requestBody")
    return {
        "parameters": [_parameter(_resolved(document, p)) for p in found.get("parameters", [])],
        "body": None if body is None else _plain(body["content"]["application/json"]["schema"]),
        "responses": {
            status: _plain(_content(_resolved(document, response)))
            for status, response in found["responses"].items()
        },
    }


def _parameter(parameter: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": parameter["name"],
        "in": parameter["in"],
        "required": parameter.get("required", False),
        "schema": _plain(parameter["schema"]),
    }


def _content(response: dict[str, Any]) -> dict[str, Any]:
    content = response.get("content", {})
    schema: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    return schema


def _resolved(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    found: Any = document
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return dict(found)


def _closure(document: dict[str, Any], node: Any) -> dict[str, Any]:
    """Every schema that `node` refers to, and that those refer to."""
    schemas: dict[str, Any] = {}
    todo = sorted(_references(node))
    while todo:
        name = todo.pop()
        if name not in schemas:
            schemas[name] = _plain(document["components"]["schemas"][name])
            todo += sorted(_references(schemas[name]))
    return schemas


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].rsplit("/", 1)[1]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(v) for v in node.values()))
    return set().union(*(_references(v) for v in node)) if isinstance(node, list) else set()


def _plain(schema: Any, is_names: bool = False) -> Any:
    """JSON Schema without prose; `is_names` where the keys are names of properties."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if is_names:
        return {name: _plain(value) for name, value in schema.items()}
    kept = {k: v for k, v in schema.items() if k not in PROSE and k != "nullable" and not k.startswith("x-")}
    plain = {
        k: v if k in ("enum", "default", "required") else _plain(v, k == "properties")
        for k, v in kept.items()
    }
    if "$ref" in plain:
        plain = {"$ref": "#/schemas/" + plain["$ref"].rsplit("/", 1)[1]}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") else plain


if __name__ == "__main__":
    main(Path(sys.argv[1]))
