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


def test_the_own_draft_sees_everything_or_a_window() -> None:
    own = read_settings({"specdec": {"draft": "own"}}, 6)
    assert (own.draft, own.window, own.fast) == ("own", 0, None)
    assert read_settings({"specdec": {"draft": "own", "fast": True}}, 6).fast
    seeing = read_settings({"specdec": {"draft": "own", "window": 64}}, 6)
    assert (seeing.window, seeing.sinks) == (64, 4)
    assert read_settings({"specdec": {"draft": "own", "window": 64, "sinks": 0}}, 6).sinks == 0


def test_each_controller_gets_its_own_settings() -> None:
    fixed = read_settings({"specdec": {"controller": "fixed", "k": 0}}, 6).make_controller()
    assert isinstance(fixed, FixedK)
    assert fixed.choose(1) == 0
    geometric = read_settings({"specdec": {"controller": "geometric", "decay": 300}}, 6).make_controller()
    assert isinstance(geometric, Geometric)
    assert geometric._acceptance._long.tokens == 300
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
        ({"draft": "ours"}, r"specdec\.draft is 'ours'; expected one of: vllm, own"),
        ({"window": 5}, r"specdec\.window has no effect without draft: own"),
        ({"draft": "own", "sinks": 5}, r"specdec\.sinks has no effect without window"),
        (
            {"draft": "own", "window": 0},
            r"window is 0; expected a whole number from 1 on; leave it out",
        ),
        ({"draft": "own", "window": 8, "sinks": -1}, r"sinks is -1; expected a whole number from 0 on"),
        ({"draft": "own", "window": 8.5}, r"window is 8\.5; expected a whole number"),
        ({"fast": True}, r"specdec\.fast has no effect without draft: own"),
        ({"draft": "own", "window": 9, "fast": True}, r"specdec\.fast has no effect with a window"),
        ({"draft": "own", "fast": "yes"}, r"specdec\.fast is 'yes'; expected true or false"),
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


def test_the_own_draft_needs_model_runner_v1() -> None:
    """As on a GPU with VLLM_USE_V2_MODEL_RUNNER=1; on a CPU vLLM itself refuses V2."""
    speculative = SimpleNamespace(method="draft_model", num_speculative_tokens=3, parallel_drafting=False)
    made = SimpleNamespace(
        speculative_config=speculative,
        additional_config={"specdec": {"draft": "own"}},
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(is_multimodal_model=False, enable_prompt_embeds=False),
        use_v2_model_runner=True,
    )
    with pytest.raises(ValueError, match=r"draft is own with VLLM_USE_V2_MODEL_RUNNER=1: unset it"):
        check(made)
    made.use_v2_model_runner = False
    check(made)
