"""Settings that every test runs under: one thread a worker, no network for models, no site facts of this machine."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, missing

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
HAS_GPU = shutil.which("nvidia-smi") is not None
if not HAS_GPU:  # read when triton is first imported, whoever does that
    os.environ["TRITON_INTERPRET"] = "1"
SITE_FACTS = ("SPEC_DATA_ROOT", "SPEC_ARCHIVE_ROOT", "SPEC_PROMPTS", "SPEC_GPU_CAP", "SLURM_CONF")


@pytest.fixture(autouse=True)
def _no_site_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SITE_FACTS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plugin_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """caplog with the plugin's lines from INFO on. vLLM's first engine in a process would set its loggers up anew."""
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    logger = logging.getLogger("vllm.plugins.vllm_draft_spec")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SPEC_DATA_ROOT."""
    root = tmp_path / "spec_data"
    root.mkdir()
    monkeypatch.setenv("SPEC_DATA_ROOT", str(root))
    return root


@pytest.fixture
def archive_root(tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty SPEC_ARCHIVE_ROOT, beside an empty SPEC_DATA_ROOT."""
    root = tmp_path / "archive"
    root.mkdir()
    monkeypatch.setenv("SPEC_ARCHIVE_ROOT", str(root))
    return root


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> str:
    """Where Triton kernels run: interpreted on the CPU, and compiled where there is a GPU."""
    pytest.importorskip("triton", reason="triton is not installed")
    from specdec.fast_kernels import INTERPRETED

    if (request.param == "cpu") != INTERPRETED:
        pytest.skip("Triton compiles for a GPU in this process" if HAS_GPU else "Triton is interpreted in this process")
    return str(request.param)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm of two nodes, one a test process. Skips where it is not installed."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Cluster.started(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is no NVIDIA driver."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
