# SPDX-License-Identifier: BSD-3-Clause
"""The tests marked cuda: skipped where they cannot run, and counted at the end of the run.

A plugin of its own, so that test_harness.py can run it on tests that are made up.
"""

import functools
from collections.abc import Collection, Generator

import pytest
import torch

import maxunpool_cuda


def obstacle() -> str:
    """Why no test can run on a GPU, or nothing if tests can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not maxunpool_cuda.build_info()["cuda"]:
        return "this build has no CUDA kernels"
    return ""


@functools.cache
def gpu_name() -> str:
    """The name of the current GPU. Asked once, before a test may have left the GPU in an error."""
    return torch.cuda.get_device_name()


def skip_without_memory(needed: int) -> None:
    """Skip a test if the GPU has fewer bytes free than it needs.

    If not, they are its own: PyTorch keeps what a tensor had, so no other process takes them first.
    """
    torch.cuda.empty_cache()  # what PyTorch keeps of earlier tests is free for this one
    try:
        torch.empty(needed, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        free, _ = torch.cuda.mem_get_info()
        pytest.skip(f"it needs {needed >> 20} MiB of GPU memory, and {free >> 20} MiB are free")


def count_line(selected: int, ran: int, gpus: Collection[str], reasons: Collection[str]) -> str:
    """What a run says at its end.

    Args:
        selected: how many tests marked cuda the run was about to run.
        ran: how many of them ran, whether they passed or failed.
        gpus: the names of the GPUs that they ran on.
        reasons: why the others were skipped.
    """
    if selected == 0:
        return "On a GPU: no test ran: 0 cuda tests were selected"
    because = "; ".join(sorted(reasons)) or "see the errors"
    if ran == 0:
        return f"On a GPU: none of {selected} cuda tests ran: {because}"
    on = f"On a GPU: {ran} of {selected} cuda tests ran, on {', '.join(sorted(gpus))}"
    return on if ran == selected else f"{on}; the others did not: {because}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := obstacle():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark the reports of cuda tests. A process of pytest-xdist sends the mark to the first one."""
    report = yield
    if item.get_closest_marker("cuda"):
        report.gpu = ""  # of a test that has not run
        if not obstacle() and not report.skipped:
            report.gpu = gpu_name()
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Write the line, after all other summaries."""
    yield
    if terminalreporter.config.option.collectonly:
        return
    every = [report for kind in terminalreporter.stats.values() for report in kind]
    reports = [report for report in every if hasattr(report, "gpu")]
    ran = [report for report in reports if report.when == "call" and not report.skipped]
    # Of a skipped test, longrepr is a path, a line and "Skipped: " with the reason.
    reasons = {r.longrepr[2].removeprefix("Skipped: ") for r in reports if r.skipped}
    selected = {report.nodeid for report in reports}
    gpus = {report.gpu for report in ran}
    line = count_line(len(selected), len({report.nodeid for report in ran}), gpus, reasons)
    terminalreporter.write_line(line)
