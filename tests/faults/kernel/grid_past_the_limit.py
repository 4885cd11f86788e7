"""At the envelope's largest step the grid has more blocks along its second axis than a launch takes."""

from tests.faults.compiled_pack import kernel_fault

FAULT = kernel_fault(
    "grid_past_the_limit",
    title="At the envelope's largest step a grid has more blocks along its second axis than a launch takes.",
    report="triton-lang/triton#580",
    kernel="tall_grid",
    roles=(("x", "activation"), ("out", "output")),
)
