"""Search a kernel's declared choices: what wins must be right, and faster than noise, to be written down."""

__all__: list[str] = []
