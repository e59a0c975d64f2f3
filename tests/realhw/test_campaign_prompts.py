"""Prompts of the attention campaign reach their context and hold the question out."""

from __future__ import annotations

from realhw.campaigns.attention_campaign import PLANS, build_prompt, trace_names
from realhw.prompt_sets import Example
from tests.realhw.word_tokenizers import LengthTokenizer


class PlainTokenizer(LengthTokenizer):
    """Of a base model."""

    chat_template = ""


def test_a_base_model_gets_questions_and_answers_in_one_form() -> None:
    examples = [Example("gsm", "reasoning", f"question {i}", f"answer {i}") for i in range(40)]
    prompt = build_prompt(PlainTokenizer(), examples, "reasoning", 60, 0, share=1.0)
    assert prompt.text is not None
    parts = prompt.text.split("\n\n")
    assert [part.split(":")[0] for part in parts] == ["Question", "Answer"] * (len(parts) // 2)
    assert parts[-1] == "Answer:"


def test_prompts_reach_the_context() -> None:
    reasoning = [Example("gsm", "reasoning", f"question {i} " + "word " * 10, "answer " * 10) for i in range(600)]
    code = [Example("human", "code", f"def f{i}(): " + "pass " * 10, "return " * 10) for i in range(60)]
    for task in ("reasoning", "code", "needle", "multi-document"):
        for seed in range(3):
            prompt = build_prompt(LengthTokenizer(), reasoning + code, task, 400, seed)
            assert prompt.messages is not None
            words = LengthTokenizer()(" ".join(m.content for m in prompt.messages))["input_ids"]
            assert 400 <= len(words) < 460
            if task in ("reasoning", "code"):
                asked = next(e for e in reasoning + code if e.question == prompt.messages[-1].content)
                assert asked.held_out(0.1)
            else:
                assert prompt.answer is not None
                quoted = prompt.answer.split('"')[1::2] or [prompt.answer]
                assert all(part in prompt.messages[0].content for part in quoted)


def test_prompts_of_one_task_and_context_are_numbered() -> None:
    names = trace_names(PLANS["gemma3-270m"], "h200")
    assert names[:4] == [f"gemma3-270m-multi-document-{part}-h200" for part in ("16k", "16k-2", "16k-3", "32k")]
    assert len(set(names)) == len(names) == 12
