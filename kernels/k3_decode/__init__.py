"""k3_decode: a specialised Kimi K3 decode path, and the model, oracles and canary that judge it."""

__all__: list[str] = []
