"""The fused decode path inside vLLM: an opt-in plugin. Importing it loads neither vLLM nor torch."""

__all__: list[str] = []
