"""The tables of an audit check."""

from collections.abc import Mapping

from harness.domain.table_shape import COUNT, FLAG, SIZE, TEXT, Column, TableShape, choice, optional

__all__ = ["SHAPES"]

_LEVEL = choice("ptx", "sass")
_ACCESS: Mapping[str, Column] = {
    "subject": TEXT, "level": _LEVEL, "kind": TEXT, "opcode": TEXT, "roles": TEXT, "parameters": TEXT,
    "is_before_wait": FLAG, "is_non_coherent": FLAG,
    "order": choice("weak", "relaxed", "acquire", "release", "acq_rel"),
    "guard": choice("none", "polled", "handed_over", "acquired"), "is_repeated": FLAG,
    "narrow_factor": optional(COUNT),
    "width_bytes": optional(COUNT), "path": TEXT,
    "line": optional(COUNT),
}  # fmt: skip
_PROGRAM: Mapping[str, Column] = {
    "subject": TEXT, "level": _LEVEL, "instructions": COUNT, "is_dependent": optional(FLAG),
    "has_wait": FLAG, "has_matched_roles": FLAG, "unresolved": COUNT, "tensor_core": COUNT,
    "matrix_opcode": optional(TEXT), "loop_instructions": COUNT, "loop_tensor_core": COUNT,
    "loop_accesses": COUNT,
    "local_accesses": COUNT, "multicast": COUNT, "local_bytes": COUNT, "cluster_blocks": COUNT,
    "threads": optional(SIZE),
}  # fmt: skip
_RESOURCES: Mapping[str, Column] = {
    "registers": SIZE, "frame_bytes": COUNT, "shared_bytes": COUNT,
    "dynamic_shared_bytes": optional(COUNT), "named_barriers": COUNT, "mbarriers": COUNT,
    "threads": optional(SIZE),
}  # fmt: skip
_LAUNCH: Mapping[str, Column] = {
    "subject": TEXT, "grid_x": optional(TEXT), "grid_y": optional(TEXT), "grid_z": optional(TEXT),
    "cluster_x": SIZE, "cluster_y": SIZE, "cluster_z": SIZE, "is_cooperative": FLAG,
}  # fmt: skip
"""Grids as formulas over the sizes of the kernel's arguments, postfix."""
_CONTROL: Mapping[str, Column] = {
    "name": TEXT, "level": choice("ptx", "sass", "launch", "cost"), "expected": TEXT, "observed": TEXT,
    "is_right": FLAG,
}  # fmt: skip
_COMPILE: Mapping[str, Column] = {
    "error": optional(TEXT), "missing": optional(TEXT), "variant": TEXT, "target": optional(TEXT),
}  # fmt: skip
"""`variant`: whose files were read; `target`: what the machine code itself says that it runs on."""
_BASE_LIMIT: Mapping[str, Column] = {
    "limit": choice("spill", "registers", "shared_memory", "multicast", "wide_loads"), "value": COUNT,
    "accepted": optional(COUNT), "reason": optional(TEXT),
}  # fmt: skip
_LOST_LIMIT: Mapping[str, Column] = {"kernel": TEXT, "why": choice("unlimited", "gone")}
SHAPES: Mapping[str, TableShape] = {
    "compile": TableShape(_COMPILE, is_required=True, max_rows=1),
    "programs": TableShape(_PROGRAM, key=("subject", "level")),
    "accesses": TableShape(_ACCESS),
    "resources": TableShape(_RESOURCES),
    "launches": TableShape(_LAUNCH),
    "mutants": TableShape({"mutation": TEXT, **{name: optional(c) for name, c in _ACCESS.items()}}),
    "base_limits": TableShape(_BASE_LIMIT, key=("limit",)),
    "lost_limits": TableShape(_LOST_LIMIT, key=("kernel",)),
    "control": TableShape(_CONTROL, key=("name", "level")),
}
