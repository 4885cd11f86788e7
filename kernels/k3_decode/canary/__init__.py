"""The canary: a small trained model of K3's architecture whose answers change when a decode kernel is
wrong."""

__all__: list[str] = []
