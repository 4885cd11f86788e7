"""Measuring: timers, clocks, ceilings, errors against an oracle, statistics, and what machine this is."""

__all__: list[str] = []
