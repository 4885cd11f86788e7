"""The fault suite: known ways in which such software went wrong, planted to measure the harness itself."""

from harness.faults.fault import Fault, Scene
from harness.faults.registry import Registered, registered_faults
from harness.faults.run import run_suite

__all__ = ["Fault", "Registered", "Scene", "registered_faults", "run_suite"]
