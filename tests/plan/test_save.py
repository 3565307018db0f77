"""A choice as a recipe: it loads again, and says the same layout."""

from __future__ import annotations

import pytest

from meshwright.cost.candidate import Candidate
from meshwright.errors import SpecError
from meshwright.plan.forecast import candidate_of
from meshwright.plan.save import planned_recipe, reference_section
from meshwright.plan.search import runs
from meshwright.spec.catalogue import decoder_of_shape, find_model
from meshwright.spec.dump import to_toml
from meshwright.spec.layout import resolve
from meshwright.spec.load import loads
from meshwright.spec.shape import resolve_shape

RECIPE = loads(
    """
    [model]
    name = "llama"
    [batch]
    global_batch_size = 64
    [optimizer]
    lr = 1e-3
    [train]
    steps = 10
    """
)

CHOICES = [
    Candidate(num_microbatches=64),
    Candidate(dp_replicate=4, microbatch_size=2, num_microbatches=8),
    Candidate(dp_shard=4, zero_stage=1, microbatch_size=2, num_microbatches=8, recompute=1),
    Candidate(dp_shard=4, zero_stage=3, num_microbatches=16, sync_every=1, recompute=2),
    Candidate(dp_shard=4, zero_stage=3, num_microbatches=16),
    Candidate(dp_replicate=2, dp_shard=4, zero_stage=2, tp=2, pp=2, schedule=2, chunks=2, num_microbatches=8),
]


@pytest.mark.parametrize("one", CHOICES, ids=lambda one: one.word)
def test_a_saved_choice_loads_as_what_was_chosen(one: Candidate) -> None:
    saved = loads(to_toml(planned_recipe(RECIPE, one)))
    assert resolve(saved.layout, None) == one.layout
    assert saved.batch.microbatch_size == one.microbatch_size
    assert saved.train.recompute == ("none", "selective", "full")[one.recompute]
    sync = saved.train.sync or ("every" if one.zero_stage >= 2 and one.pp == 1 else "last")
    assert one.num_microbatches == 1 or sync == ("every" if one.sync_every else "last")
    assert one.pp == 1 or (saved.layout.pp_schedule, saved.layout.pp_chunks) == ("interleaved1f1b", 2)
    assert candidate_of(saved, one.layout) == one


def test_what_the_choice_does_not_decide_stays_as_it_was() -> None:
    saved = planned_recipe(RECIPE, CHOICES[1])
    assert saved.workload.differences(RECIPE.workload) == []


@pytest.mark.parametrize("one", [Candidate(cp=2), Candidate(ep=2, dp_shard=2, zero_stage=1), Candidate(offload=1)])
def test_what_a_recipe_cannot_say_is_refused(one: Candidate) -> None:
    with pytest.raises(SpecError, match="a recipe cannot say yet"):
        planned_recipe(RECIPE, one)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-2-7b", "gpt2"])
def test_a_reference_model_stands_for_a_decoder_of_its_kind(name: str) -> None:
    decoder = find_model(name)
    section = reference_section(decoder)
    assert section is not None
    made = decoder_of_shape(resolve_shape(section, 1024, None))
    assert made.num_parameters == decoder.num_parameters and made.layers == decoder.layers


@pytest.mark.parametrize("name", ["7B", "qwen2.5-7b", "mixtral-8x7b", "gemma-2-9b"])
def test_no_reference_model_stands_for_another_kind(name: str) -> None:
    assert reference_section(find_model(name)) is None


def test_what_is_said_to_run_is_what_training_accepts() -> None:
    from meshwright.train.runnable import require_runnable

    others = [Candidate(tp=2), Candidate(pp=2, num_microbatches=4), Candidate(dp_shard=2, zero_stage=3, tp=2)]
    for one in [*CHOICES, *others]:
        recipe = planned_recipe(RECIPE, one)
        try:
            require_runnable(recipe, one.layout)
            accepted = True
        except SpecError:
            accepted = False
        assert bool(runs(one)) == accepted, one.word
