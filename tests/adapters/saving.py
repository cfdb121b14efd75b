"""What the report of an adapter's run says that the plan saves."""

from __future__ import annotations

from typing import Any

from lowtide.report.run_folder import report_of_handle
from lowtide.units import format_bytes


def saved_share(handle: Any) -> float:
    """The share of the peak, after its report has said it: the peak with everything kept, the planned and the measured
    one, and what is saved."""
    report = report_of_handle(handle)
    tiles = {what: (value, beside) for what, value, beside in report.tiles}
    predicted = handle.plan.predicted
    saved_bytes = predicted.plain_peak_bytes - predicted.peak_bytes
    share = saved_bytes / predicted.plain_peak_bytes
    assert tiles["everything kept"][0] == format_bytes(predicted.plain_peak_bytes)
    assert tiles["peak, predicted"][0] == format_bytes(predicted.peak_bytes)
    assert tiles["peak, measured"][0] == format_bytes(handle.stats.peak_device_bytes)
    assert 0 < handle.stats.peak_device_bytes <= predicted.peak_bytes  # nobody counts temporaries here
    assert tiles["peak, measured"][1] == "temporaries not counted"
    assert tiles["saved by the plan"][0] == format_bytes(saved_bytes)
    assert tiles["saved by the plan"][1] == f"{100 * share:.0f} % of everything kept"
    assert report.played is not None
    return share
