"""Prompts of the quality campaign: long enough, held out, with answers where they are asked for."""

from __future__ import annotations

import pytest

from realhw.campaigns.quality_campaign import FULL, PREDICTORS, Run, build_prompts
from realhw.models import LoadedModel
from realhw.prompt_sets import Example
from realhw.quality_options import QualityOptions, policies_of
from tests.realhw.word_tokenizers import LengthTokenizer
from traces.errors import InputError
from traces.schema import ModelGeometry

LOADED = LoadedModel(
    None,
    LengthTokenizer(),
    ModelGeometry(name="none", num_layers=1, num_query_heads=1, num_kv_heads=1, head_dim=8),
    "none",
)
GSM8K = [Example("gsm", "reasoning", f"question {i} " + "word " * 10, "so " * 10 + f"\n#### {i}") for i in range(600)]
MATH = [Example("math", "reasoning", f"problem {i} " + "word " * 10, "thus " * 10) for i in range(300)]
CODE = [Example("human", "code", f"def f{i}(): " + "pass " * 10, "return " * 10) for i in range(60)]


def test_prompts_reach_the_context_and_take_turns() -> None:
    run = Run((("reasoning", 4), ("code", 2), ("needle", 3)), 400)
    prompts = build_prompts(LOADED, GSM8K + MATH + CODE, FULL, run)
    assert [prompt.task for prompt in prompts[:6]] == ["reasoning", "code", "needle"] * 2
    assert len({prompt.name for prompt in prompts}) == len(prompts) == 9
    for prompt in prompts:
        assert prompt.messages is not None
        text = " ".join(message.content for message in prompt.messages)
        assert 400 <= len(text.split()) < 440
        assert (prompt.answer is None) == (prompt.task == "code")
        if prompt.task != "needle":
            asked = next(e for e in GSM8K + CODE if e.question == prompt.messages[-1].content)
            assert asked.held_out(0.1)
            assert prompt.answer is None or prompt.answer == "#### " + asked.answer.rsplit("#### ", 1)[1]
            assert sum(asked.question in message.content for message in prompt.messages) == 1


def test_too_few_examples_are_an_error() -> None:
    with pytest.raises(InputError, match="examples make less than 4096 tokens"):
        build_prompts(LOADED, GSM8K[:50] + CODE[:50], FULL, Run((("reasoning", 1),), 4096))


def test_grid_has_every_cell() -> None:
    options = QualityOptions(
        model="none",
        prompts=build_prompts(LOADED, GSM8K + MATH + CODE, FULL, Run(FULL.runs[0].prompts, 300)),
        fetch_caps=FULL.fetch_caps,
        budgets_tokens=FULL.budgets_tokens,
        block_sizes_tokens=FULL.block_sizes_tokens,
        predictors=PREDICTORS,
    )
    assert [len(policies_of(options, size)) for size in (8, 16, 32)] == [140] * 3
