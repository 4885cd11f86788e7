"""Where sampling runs: in child processes of this machine (`local`). Executors receive callables and know no
stage.
"""

__all__: list[str] = []
