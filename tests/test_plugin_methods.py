"""The controller on real vLLM with each kind of drafter that it serves: one of ours, one of vLLM's that makes as many
drafts as it is told, one that is cut. At temperature 0 the texts are those without speculation, and the counts hold
together and agree with vLLM's own. (n-gram is of the second kind; after it has run, vLLM starts no other engine in the
same process.)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import serving_drafts
from tests import plugin_vllm
from tests.vllm_steps import save_pair

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [[(7 * i + j * j) % 250 for j in range(4 + 3 * i)] + [9, 8, 7, 9, 8, 7, 9] for i in range(8)]
TOKENS = [120, 30, 64, 50, 7, 90, 1, 40]
METHODS = {
    "draft_model": {},
    "custom_class": {"method": "custom_class", "model": "bench.repeat_proposer.RepeatProposer"},
    "eagle": {"method": "eagle"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("methods")
    target, draft = save_pair(folder)
    with plugin_vllm.installed():
        plain = texts(plugin_vllm.make_engine(target))
        yield SimpleNamespace(folder=folder, target=target, draft=draft, plain=plain)


def texts(engine: Any) -> list[list[int]]:
    import vllm

    settings = [
        vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in TOKENS
    ]
    return plugin_vllm.ids(plugin_vllm.generate(engine, PROMPTS, settings))


def figures(engine: Any) -> dict[str, float]:
    """Counters and gauges of the plugin and vLLM's own, summed over labels; steps by length as steps0, steps1, ..."""
    found: dict[str, float] = {}
    for metric in engine.get_metrics():
        if hasattr(metric, "value"):
            name = metric.name.removeprefix("vllm:") + metric.labels.get("k", "")
            found[name] = found.get(name, 0) + metric.value
    return found


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_the_targets_and_counts_agree(method: str, models: SimpleNamespace) -> None:
    speculative: dict[str, object] = dict(METHODS[method])
    if method == "eagle":
        head = models.folder / "eagle"
        head.mkdir()
        serving_drafts._make_eagle(Path(models.target), "eagle", head)
        speculative["model"] = str(head)
    engine = plugin_vllm.make_engine(models.target, models.draft, speculative=speculative, max_num_seqs=6)
    for _ in range(2):
        assert texts(engine) == models.plain
    seen = figures(engine)
    rounds = sum(seen[f"specdec_{kind}_rounds"] for kind in ("drafting", "plain", "prefill"))
    assert seen["specdec_prefill_rounds"] == 2 * len(PROMPTS)
    assert seen["specdec_generated_tokens"] == seen["specdec_accepted_tokens"] + rounds >= 2 * sum(TOKENS)
    assert 0 < seen["specdec_draft_tokens"] == seen["spec_decode_num_draft_tokens"]
    assert seen["specdec_accepted_tokens"] == seen["spec_decode_num_accepted_tokens"] <= seen["specdec_draft_tokens"]
    used = [k for k in range(plugin_vllm.K_MAX + 1) if seen[f"specdec_steps{k}"]]
    assert len(used) > 1, "the controller tries more than one length"
    assert seen["specdec_cost_ratio"] >= 0, "times reached the controller"
    assert (seen["specdec_draft_kv_tokens"] > 0) == (method in ("draft_model", "eagle"))
