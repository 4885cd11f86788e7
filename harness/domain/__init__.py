"""The nouns of fasttrack as frozen records. No I/O; imports nothing else of the harness."""

__all__: list[str] = []
