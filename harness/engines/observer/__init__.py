"""Runs inside vLLM and writes down what its own paths decide. It changes nothing and imports no harness."""

__all__: list[str] = []
