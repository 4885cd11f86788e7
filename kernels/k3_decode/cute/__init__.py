"""CuTe DSL kernels of the fused ops, one module an op. Importing it imports neither torch nor cutlass."""

__all__: list[str] = []
