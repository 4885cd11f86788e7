"""CuTe DSL kernels of the fused ops, one module an op; importing the package imports neither torch nor cutlass."""

__all__: list[str] = []
