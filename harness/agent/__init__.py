"""The agent's side: a bounded loop, and a server of tools, whose reward is the policy's verdict."""

__all__: list[str] = []
