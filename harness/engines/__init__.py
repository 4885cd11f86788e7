"""How the code under judgement is found and driven: packs, and models in this process."""

__all__: list[str] = []
