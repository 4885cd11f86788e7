"""The command line: each module parses, calls one function, prints and exits. Importing it loads no torch."""

__all__: list[str] = []
