"""The block that this step writes is not among those that it reads."""

from tests.faults.planting import op_fault

FAULT = op_fault(
    "block_written_late",
    op="attn_res",
    title="The block that this step writes is not among those that it reads.",
    report="vllm-project/vllm#53912",
    fault={
        "sources = torch.cat((blocks[:, :blocks_read], prefix.unsqueeze(1)), dim=1).float()": "sources = torch.cat((blocks[:, : max(1, blocks_read - 1)], prefix.unsqueeze(1)), dim=1).float()",
    },
    repaired={
        "sources = torch.cat((blocks[:, :blocks_read], prefix.unsqueeze(1)), dim=1).float()": "sources = torch.cat((blocks.narrow(1, 0, blocks_read), prefix.unsqueeze(1)), dim=1).float()",
    },
)
