"""What the kernels are measured against, called from prebuilt binaries, and how to pack it."""

__all__: tuple[str, ...] = ()
