from __future__ import annotations

import pytest

from agilerl.data.adapt import TemplateAdapter
from agilerl.data.records import Chat, RowFault
from agilerl.data.template import Template
from tests.data.helpers import LATE, REASONING, STYLES, chat, example_of, renderer_of, styled_tokenizer, trained_texts
from tests.helpers import tiny_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

CONVERSATIONS = {
    "single": chat(("user", "How are you?"), ("assistant", "Fine.")),
    "multi": chat(("user", "One?"), ("assistant", "A first."), ("user", "Two?"), ("assistant", "A second,\nlonger.")),
    "system": chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo")),
}


def expected_stop(style: str) -> str:
    return STYLES[style][1]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_trained_spans_are_the_answers_and_their_stop_token(style: str, kind: str) -> None:
    tokenizer = styled_tokenizer(style)
    messages = CONVERSATIONS[kind]
    example = example_of(tokenizer, messages)
    answers = [message["content"] + expected_stop(style) for message in messages if message["role"] == "assistant"]
    assert trained_texts(tokenizer, example) == answers
    assert example.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)


@pytest.mark.parametrize("style", STYLES)
def test_tool_calls_are_trained_up_to_the_stop_token(style: str) -> None:
    tokenizer = styled_tokenizer(style)
    messages = [
        *chat(("user", "1+1?")),
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        *chat(("assistant", "It is 2.")),
    ]
    adapted = TemplateAdapter(Template(tokenizer)).adapt(Chat(messages, TOOLS))
    example = example_of(tokenizer, messages, TOOLS)
    called = '{"name": "add", "arguments": {"a": 1}}'
    call = f"[TOOL_CALLS]{called}" if style == "native-tools" else f"\n<tool_call>\n{called}\n</tool_call>"
    first = (
        "<think>\n\n</think>\n\n" if style == "reasoning" else ""
    )  # its thoughts belong to all turns after the last user
    assert [text.removeprefix(first) for text in trained_texts(tokenizer, example)] == [
        f"Wait.{call}{expected_stop(style)}",
        f"It is 2.{expected_stop(style)}",
    ]
    rendered = tokenizer.apply_chat_template(adapted.messages, tools=adapted.tools, return_dict=False)
    assert example.ids.tolist() == rendered
    assert '"name": "add"' in tokenizer.decode(example.ids).split("Wait.")[0]
    assert (adapted.tools is None) == (style not in ("reasoning", "native-tools"))


def test_a_template_of_another_family_is_plain_text_but_still_ends_with_eos() -> None:
    tokenizer = tiny_tokenizer(all_bytes=True)
    example = example_of(tokenizer, CONVERSATIONS["single"], source=STYLES["zephyr"][0])
    assert trained_texts(tokenizer, example) == ["Fine.</s>"]


def test_a_turn_closed_by_the_next_speakers_tag_is_trained_on_that_tag() -> None:
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=LATE)
    tokenizer.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    example = example_of(tokenizer, CONVERSATIONS["multi"])
    assert trained_texts(tokenizer, example) == ["A first.<|user|>", "A second,\nlonger.<|user|>"]


def test_a_turn_closed_by_a_plain_text_tag_is_trained_on_it_and_the_last_one_on_eos() -> None:
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=LATE)
    example = example_of(tokenizer, CONVERSATIONS["multi"])
    assert trained_texts(tokenizer, example) == ["A first.<|user|>", "A second,\nlonger.</s>"]


def test_a_template_without_stop_token_gets_eos_after_the_last_answer() -> None:
    tokenizer = tiny_tokenizer(
        all_bytes=True,
        chat_template="{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )
    example = example_of(tokenizer, CONVERSATIONS["multi"])
    assert trained_texts(tokenizer, example) == ["A first.\n", "A second,\nlonger.\n</s>"]


@pytest.mark.parametrize("spelling", ["content", "reasoning_content"])
def test_thoughts_are_trained_where_they_are_rendered_and_only_there(spelling: str) -> None:
    tokenizer = styled_tokenizer("reasoning")
    messages = chat(("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2"))
    for message, thought in ((messages[1], "first thought"), (messages[3], "second thought")):
        if spelling == "content":
            message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
        else:
            message["reasoning_content"] = thought
    example = example_of(tokenizer, messages)
    assert trained_texts(tokenizer, example) == ["1<|im_end|>", "<think>\nsecond thought\n</think>\n\n2<|im_end|>"]
    text = tokenizer.decode(example.ids)
    assert (text.count("<think>"), text.count("first thought")) == (1, 0)
    assert example.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)


def test_a_template_that_rewrites_the_opening_of_an_answer_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ m.role + ('!' if loop.last else '?') + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant#{% endif %}"
    )
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=template)
    with pytest.raises(RowFault, match="opening of an answer"):
        example_of(tokenizer, CONVERSATIONS["multi"])


def test_a_template_that_writes_between_opening_and_answer_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + ('Sure: ' if m.role == 'assistant' else '') + m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=template)
    with pytest.raises(RowFault, match="'Sure:' between the opening"):
        example_of(tokenizer, CONVERSATIONS["single"])


def test_a_template_that_changes_the_text_is_still_located() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.replace('bad', 'good') + '<|im_end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=template)
    rows = chat(("user", "bad day"), ("assistant", "Fine."))
    assert trained_texts(tokenizer, example_of(tokenizer, rows)) == ["Fine.<|im_end|>"]
    with pytest.raises(RowFault, match="beyond recognition"):
        example_of(tokenizer, chat(("user", "day"), ("assistant", "Too bad.")))


def test_a_template_that_refuses_a_system_turn_gets_its_text_in_the_first_user_turn() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=template)
    renderer = renderer_of(tokenizer)
    (example,) = renderer.chats([Chat(CONVERSATIONS["system"])])
    assert not isinstance(example, RowFault)
    assert trained_texts(tokenizer, example) == ["Yo<|im_end|>"]
    assert "<|im_start|>user\nBe brief.\n\nHi<|im_end|>" in tokenizer.decode(example.ids)
    assert len(renderer.adapter.notices) == 1


def test_a_refused_conversation_is_named_without_its_neighbours() -> None:
    tokenizer = styled_tokenizer("mistral")
    odd = chat(("user", "a"), ("narrator", "b"), ("assistant", "c"))
    outcomes = renderer_of(tokenizer).chats([Chat(CONVERSATIONS["single"]), Chat(odd), Chat(CONVERSATIONS["multi"])])
    assert [isinstance(outcome, RowFault) for outcome in outcomes] == [False, True, False]
    assert "its roles are user, narrator, assistant" in str(outcomes[1])


def test_thinking_template_with_tools_prefers_its_own_tool_layout() -> None:
    tokenizer = tiny_tokenizer(all_bytes=True, chat_template=REASONING)
    assert TemplateAdapter(Template(tokenizer)).has_tools
    assert not TemplateAdapter(Template(styled_tokenizer("chatml"))).has_tools
