"""The host's clock is read as soon as the work is queued, while the device still runs."""

from tests.faults.played_timing import timer_faulty

FAULT = timer_faulty(
    "clock_read_before_the_device_is_done",
    "The host's clock is read as soon as the work is queued, while the device still runs.",
    "TristanBilot/mlx-benchmark#21",
    fault={
        "    begun.record()\n": "    torch.cuda.synchronize()\n    from_ns = time.perf_counter_ns()\n",
        "    ended.synchronize()\n": "",
        "float(begun.elapsed_time(ended)) * 1e3 / passes": "(time.perf_counter_ns() - from_ns) / 1e3 / passes",
    },
    repaired={
        "    begun.record()\n": "    torch.cuda.synchronize()\n    from_ns = time.perf_counter_ns()\n",
        "float(begun.elapsed_time(ended)) * 1e3 / passes": "(time.perf_counter_ns() - from_ns) / 1e3 / passes",
    },
)
