"""The plugin's settings: what is given, what is the default, and what each mistake is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec.controller import Adaptive, FixedK, Geometric
from vllm_draft_spec.config import check
from vllm_draft_spec.settings import Settings, read_settings


def test_defaults_follow_num_speculative_tokens() -> None:
    expected = Settings(controller="adaptive", k_max=6, k=6, decay=2000.0, exploration=0.001, log_interval_s=10.0)
    assert read_settings({}, 6) == read_settings({"other": 1, "specdec": {}}, 6) == expected
    assert read_settings({"specdec": {"k_max": 4}}, 6).k_max == 4


def test_each_controller_gets_its_own_settings() -> None:
    fixed = read_settings({"specdec": {"controller": "fixed", "k": 0}}, 6).make_controller()
    assert isinstance(fixed, FixedK)
    assert fixed.choose(1) == 0
    geometric = read_settings({"specdec": {"controller": "geometric", "decay": 300}}, 6).make_controller()
    assert isinstance(geometric, Geometric)
    assert [window.tokens for window in geometric._acceptance._windows] == [24, 128, 300]
    adaptive = read_settings({"specdec": {"k_max": 3, "exploration": 0}}, 6).make_controller()
    assert isinstance(adaptive, Adaptive)
    assert (adaptive.k_max, adaptive._explore_share) == (3, 0)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kmax": 3}, r"unknown key specdec\.kmax; did you mean k_max\?"),
        ({"speed": 3}, r"unknown key specdec\.speed; expected one of: controller, k_max, k, decay"),
        ({"controller": "adaptiv"}, r"specdec\.controller is 'adaptiv'; did you mean adaptive\?"),
        (
            {"k_max": 0},
            r"k_max is 0; expected a whole number from 1 to num_speculative_tokens \(6\); not to draft at all",
        ),
        ({"k_max": 7}, r"k_max is 7; expected a whole number from 1 to num_speculative_tokens \(6\)$"),
        ({"k_max": True}, r"k_max is True"),
        ({"controller": "fixed", "k": 5, "k_max": 4}, r"k is 5; expected a whole number from 0 to k_max \(4\)"),
        ({"k": 2}, r"specdec\.k has no effect with controller adaptive, only with fixed"),
        ({"controller": "fixed", "decay": 500}, r"decay has no effect with controller fixed, only with geometric or a"),
        ({"controller": "geometric", "exploration": 0.1}, r"exploration has no effect with controller geometric"),
        ({"decay": 0}, r"decay is 0; expected a number from 100 on"),
        ({"exploration": 2}, r"exploration is 2; expected a number from 0 to 0\.2"),
        ({"log_interval_s": "10"}, r"log_interval_s is '10'; expected a number from 0 on"),
        ({"decay": float("nan")}, r"decay is nan"),
        (["adaptive"], r"specdec is \['adaptive'\]; expected an object with some of: controller"),
    ],
)
def test_mistakes_are_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings({"specdec": given}, 6)


def test_a_mistake_is_told_before_the_model_is_loaded(plugin_log: pytest.LogCaptureFixture) -> None:
    """Whatever the method: the lengths of vLLM's own proposers are chosen too."""
    own = SimpleNamespace(method="eagle", num_speculative_tokens=3)
    with pytest.raises(
        ValueError, match=r"specdec\.k_max is 4; expected a whole number from 1 to num_speculative_tokens"
    ):
        check(SimpleNamespace(speculative_config=own, additional_config={"specdec": {"k_max": 4}}))
    check(SimpleNamespace(speculative_config=own, additional_config={}))
    assert "that of eagle stays vLLM's" in plugin_log.text
    check(SimpleNamespace(speculative_config=None, additional_config={"specdec": {"k_max": 4}}))
    assert "nothing to do without a speculative config" in plugin_log.text
