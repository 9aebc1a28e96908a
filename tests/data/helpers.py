"""Tokenizers, templates and conversations for the tests of the data room."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agilerl.data.chat import ChatRenderer, ChatSettings
from agilerl.data.encoder import TextEncoder
from agilerl.data.records import Chat, Example
from agilerl.data.template import Template
from agilerl.data.templates import TEMPLATES
from tests.helpers import tiny_tokenizer

# A template with tools of its own, whose turns may think; it keeps thoughts in the last turn only.
REASONING = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}<tools>"
    "{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}\n</tools><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- set last = namespace(user=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > last.user %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{- content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ ('\n' if content else '') + '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Tools and calls as tokens and JSON of its own, a call ending in EOS as an answer does.
NATIVE_TOOLS = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}{{ '[INST]' + (first if loop.first else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + (call.function | tojson) }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
_NATIVE = [
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]

# The tag of the next speaker is what ends a turn.
LATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

STYLES: dict[str, tuple[str, str, list[str]]] = {
    # name: (template, stop token, further control tokens)
    "chatml": (TEMPLATES["chatml"], "<|im_end|>", []),
    "llama-3": (TEMPLATES["llama-3"], "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "gemma": (TEMPLATES["gemma"], "<end_of_turn>", ["<start_of_turn>", "<end_of_turn>"]),
    "mistral": (TEMPLATES["mistral"], "</s>", ["[INST]", "[/INST]"]),
    "llama-2": (TEMPLATES["llama-2"], " </s>", []),
    "zephyr": (TEMPLATES["zephyr"], "</s>", []),
    "phi-3": (TEMPLATES["phi-3"], "<|end|>", ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]),
    "vicuna": (TEMPLATES["vicuna"], "</s>", []),
    "alpaca": (TEMPLATES["alpaca"], "</s>", []),
    "reasoning": (REASONING, "<|im_end|>", []),
    "native-tools": (NATIVE_TOOLS, "</s>", _NATIVE),
}


def styled_tokenizer(style: str, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has the control tokens of a style, and its template."""
    template, stop, controls = STYLES[style]
    tokenizer = tiny_tokenizer(all_bytes=True, **kwargs)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in controls], special_tokens=True)
    tokenizer.chat_template = template
    if stop.strip() != "</s>":
        tokenizer.eos_token = stop
    return tokenizer


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages from (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in turns]


def renderer_of(
    tokenizer: Any, *, control_tokens: str = "text", source: str | None = None, **settings: Any
) -> ChatRenderer:
    """A chat renderer for the tokenizer's own template, or another."""
    template = Template(tokenizer, source) if source or tokenizer.chat_template else None
    known = {"markers": template.markers, "tags": template.tags} if template else {}
    return ChatRenderer(TextEncoder(tokenizer, control_tokens, **known), template, ChatSettings(**settings))


def example_of(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **settings: Any) -> Example:
    """One chat as an example; a fault is raised."""
    outcome = renderer_of(tokenizer, **settings).chats([Chat(messages, tools)])[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def trained_texts(tokenizer: Any, example: Example) -> list[str]:
    """The trained runs as text."""
    return [tokenizer.decode(example.ids[span.start : span.end]) for span in example.spans]
