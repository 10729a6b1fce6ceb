"""The plugin's switch, its table of versions, and what it does where vLLM is not as expected. No vLLM is run here."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vllm_draft_spec
from vllm_draft_spec import install as installing
from vllm_draft_spec.versions import SUPPORTED, Anchor, minor, problems

ROOT = Path(__file__).resolve().parent.parent
OFF = """
import sys
import vllm_draft_spec
vllm_draft_spec.register()
heavy = {name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "specdec", "numpy"}
print(sorted(heavy), sorted(name for name in sys.modules if name.startswith("vllm_draft_spec")))
"""


def original(a: int, b: int) -> int:
    return a + b


def other(a: int) -> int:
    return a


def wrapped_by_another() -> Callable[..., int]:
    """Like functools.wraps in a module of that name: it says that it is the original."""
    scope: dict[str, Any] = {"__name__": "another.plugin", "original": original, "functools": functools}
    exec("@functools.wraps(original)\ndef act(*args): return original(*args)", scope)
    return scope["act"]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vllm of a supported version, one function to replace in it, and a plugin that is not installed yet."""
    fake = ModuleType("vllm")
    fake.__version__ = f"{list(SUPPORTED)[-1]}.0"  # type: ignore[attr-defined]
    fake.act = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(installing, "_state", {"done": False})
    monkeypatch.setenv("SPECDEC_PLUGIN", "1")
    return fake


def part(anchor: Anchor, calls: list[str], name: str = "part") -> SimpleNamespace:
    def install() -> None:
        calls.append(name)
        anchor.replace(lambda a, b: 0)

    return SimpleNamespace(ANCHORS=(anchor,), install=install)


ACT = Anchor(module="vllm", name="act", owner=__name__, parameters=("a", "b"))


@pytest.mark.parametrize("switch", [None, "", "0"])
def test_without_the_switch_nothing_is_imported(switch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_PLUGIN", raising=False)
    if switch is not None:
        monkeypatch.setenv("SPECDEC_PLUGIN", switch)
    done = subprocess.run([sys.executable, "-c", OFF], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['vllm_draft_spec']"


def test_installs_once_however_often_it_is_called(fake_vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(installing, "parts", lambda: (part(ACT, calls),))
    for _ in range(3):
        vllm_draft_spec.register()
    assert calls == ["part"]
    assert fake_vllm.act(1, 2) == 0


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda vllm: setattr(vllm, "__version__", "0.99.1"), r"vLLM 0\.99\.1 is not supported, only 0\.26"),
        (lambda vllm: delattr(vllm, "act"), r"vllm\.act is missing"),
        (lambda vllm: setattr(vllm, "act", problems), r"vllm\.act was replaced by vllm_draft_spec\.versions; switch"),
        (lambda vllm: setattr(vllm, "act", wrapped_by_another()), r"vllm\.act was replaced by another\.plugin; switch"),
        (lambda vllm: setattr(vllm, "act", other), r"vllm\.act has no parameter b"),
    ],
)
def test_another_vllm_gets_one_error_line_and_is_left_as_it_is(
    spoil: Callable[[ModuleType], None],
    message: str,
    fake_vllm: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: pytest.LogCaptureFixture,
) -> None:
    """Also the parts whose own anchors are fine: all anchors are checked before the first is replaced."""
    spoil(fake_vllm)
    before = dict(vars(fake_vllm))
    calls: list[str] = []
    fine = Anchor(module="vllm", name="__version__")
    monkeypatch.setattr(installing, "parts", lambda: (part(fine, calls, "fine"), part(ACT, calls)))
    vllm_draft_spec.register()
    assert calls == []
    assert dict(vars(fake_vllm)) == before
    [record] = plugin_log.records
    assert record.levelname == "ERROR"
    assert len(record.getMessage().splitlines()) == 1
    assert re.search(message, record.getMessage())


def test_versions() -> None:
    assert minor("0.32.0+cpu") == "0.32"
    assert problems("0.32.1", []) == []
    assert len(problems("1.32.0", [ACT])) == 1


def test_every_anchor_is_there_in_the_installed_vllm() -> None:
    vllm = pytest.importorskip("vllm")
    anchors = [anchor for module in installing.parts() for anchor in module.ANCHORS]
    assert problems(vllm.__version__, anchors) == []
