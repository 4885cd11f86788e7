"""The fused ops on a CPU, in fp32 and as few passes as torch allows; same names and arguments as `ops/`."""

__all__: list[str] = []
