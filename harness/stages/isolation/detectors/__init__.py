"""How findings are made: one function a detector, named by the rules."""

from collections.abc import Callable, Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.detectors.conditions import find_feature_narrowed
from harness.stages.isolation.detectors.cpp import find_launch_without_stream, find_macro_redefined
from harness.stages.isolation.detectors.definitions import (
    find_default_changed,
    find_signature_changed,
)
from harness.stages.isolation.detectors.files import (
    find_file_kind,
    find_giant_file,
    find_judge_and_judged,
    find_licence_removed,
    find_opaque_evidence,
)
from harness.stages.isolation.detectors.named import find_named, find_step_tensor_written
from harness.stages.isolation.detectors.overrides import find_private_override
from harness.stages.isolation.detectors.patterns import find_ast_grep, find_path, find_regex
from harness.stages.isolation.detectors.python_reach import (
    find_computed_attribute,
    find_computed_call,
    find_device_wait_in_step,
    find_environment_read,
    find_handed_object_changed,
    find_imported_object_changed,
    find_model_code_imported,
    find_module_imported,
    find_shared_instance_changed,
)
from harness.stages.isolation.detectors.switches import find_open_guard, find_switch_default
from harness.stages.isolation.detectors.tests_kept import (
    find_assertions_gone,
    find_conditional_skip_added,
    find_skip_added,
    find_test_removed,
    find_tolerance_widened,
)
from harness.stages.isolation.detectors.text import find_hidden_text, find_homoglyph, find_unreadable
from harness.stages.isolation.detectors.written_files import find_file_written
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = ["DETECTORS", "Detector"]

Detector = Callable[[Rule, Source, Surroundings], Iterator[Match]]

DETECTORS: Final[dict[str, Detector]] = {
    "ast_grep": find_ast_grep,
    "regex": find_regex,
    "path": find_path,
    "imported_object_changed": find_imported_object_changed,
    "shared_instance_changed": find_shared_instance_changed,
    "handed_object_changed": find_handed_object_changed,
    "computed_attribute": find_computed_attribute,
    "computed_call": find_computed_call,
    "environment_read": find_environment_read,
    "device_wait_in_step": find_device_wait_in_step,
    "open_guard": find_open_guard,
    "model_code_imported": find_model_code_imported,
    "module_imported": find_module_imported,
    "private_override": find_private_override,
    "default_changed": find_default_changed,
    "signature_changed": find_signature_changed,
    "macro_redefined": find_macro_redefined,
    "launch_without_stream": find_launch_without_stream,
    "named": find_named,
    "step_tensor_written": find_step_tensor_written,
    "hidden_text": find_hidden_text,
    "homoglyph": find_homoglyph,
    "unreadable": find_unreadable,
    "file_written": find_file_written,
    "file_kind": find_file_kind,
    "giant_file": find_giant_file,
    "opaque_evidence": find_opaque_evidence,
    "licence_removed": find_licence_removed,
    "judge_and_judged": find_judge_and_judged,
    "test_removed": find_test_removed,
    "assertions_gone": find_assertions_gone,
    "tolerance_widened": find_tolerance_widened,
    "skip_added": find_skip_added,
    "conditional_skip_added": find_conditional_skip_added,
    "feature_narrowed": find_feature_narrowed,
    "switch_default": find_switch_default,
}
"""By the name that a rule's `detector` gives."""
