"""A kernel keeps a flag on the device and does nothing from the second launch on."""

from tests.faults.described import described_fault

FLAG = ".visible .global .align 4 .u32 seen = 0;\n\n.visible .entry add_weight("
SKIP = """  griddepcontrol.wait;
  ld.volatile.global.u32 %r5, [seen];
  setp.gt.u32 %p1, %r5, 127;
  @%p1 bra DONE;
  atom.global.add.u32 %r5, [seen], 1;
"""


def fault(text: str) -> str:
    return text.replace(".visible .entry add_weight(", FLAG, 1).replace("  griddepcontrol.wait;\n", SKIP, 1)


FAULT = described_fault(
    "work_done_once_on_the_device",
    title="A kernel keeps a flag on the device and does nothing from the second launch on.",
    report="karpathy/llm.c#851",
    binary=fault,
)
