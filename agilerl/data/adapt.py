"""What a chat template cannot do is done in text: system turns, tool schemas, calls and results."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from agilerl.data.records import Chat, Message, RowFault
from agilerl.data.template import Template

__all__ = ["TOOLS_TEXT", "TemplateAdapter"]

TOOLS_TEXT = (
    "You may call these functions, given as JSON, one on each line:\n<tools>\n{schemas}\n</tools>\n"
    'A call is written as:\n<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)
"""How tool schemas are written into the system turn where a template knows no tools."""

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "zqprobe",
        "description": "zq",
        "parameters": {"type": "object", "properties": {"zqarg": {"type": "string", "description": "zq"}}},
    },
}
_PROBE_CALL = {
    "type": "function",
    "id": "zqprobe01",
    "function": {"name": "zqprobe", "arguments": {"zqarg": "zqvalue"}},
}


class TemplateAdapter:
    """Finds out what a template supports and rewrites conversations that need more.

    A system turn that the template refuses or drops opens the first user turn instead. Tools, calls and results that it does
    not know become text: schemas in the system turn, calls in the assistant's, results in the user's. What was done is in
    ``notices``, once each.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self.notices: list[str] = []

    @cached_property
    def has_system(self) -> bool:
        """Whether a system turn is rendered."""
        return "zqsystem" in self._probe(
            [{"role": "system", "content": "zqsystem"}, {"role": "user", "content": "zquser"}]
        )

    @cached_property
    def has_tools(self) -> bool:
        """Whether schemas, calls and results are all rendered."""
        user = {"role": "user", "content": "zquser"}
        if "zqprobe" not in self._probe([user], [_PROBE_TOOL]):
            return False
        text = self._probe(
            [
                user,
                {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
                {"role": "tool", "name": "zqprobe", "tool_call_id": "zqprobe01", "content": "zqresult"},
                {"role": "assistant", "content": "zqanswer"},
            ],
            [_PROBE_TOOL],
        )
        return all(part in text for part in ("zqvalue", "zqresult", "zqanswer"))

    def adapt(self, chat: Chat) -> Chat:
        """The conversation in a form that the template renders in full."""
        uses_tools = bool(chat.tools) or any(
            message.get("tool_calls") or message.get("role") == "tool" for message in chat.messages
        )
        if uses_tools and not self.has_tools:
            self._notice("the chat template knows no tools: schemas, calls and results are written as text")
            chat = _tools_as_text(chat)
        if chat.messages and chat.messages[0].get("role") == "system" and not self.has_system:
            self._notice("the chat template takes no system turn: its text opens the first user turn")
            chat = _system_as_text(chat)
        return chat

    def _probe(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        text = self._template.render([(messages, tools)])[0]
        return "" if isinstance(text, RowFault) else text

    def _notice(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)


def _tools_as_text(chat: Chat) -> Chat:
    messages: list[Message] = []
    first_trained = 0
    for index, message in enumerate(chat.messages):
        if index == chat.first_trained:
            first_trained = len(messages)
        message = dict(message)
        if message.get("role") == "tool":
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if messages and messages[-1].get("is_tool_text"):
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": "user", "content": text, "is_tool_text": True})
            continue
        if calls := message.pop("tool_calls", None):
            texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
            message["content"] = "\n".join([text for text in [_text(message), *texts] if text])
        messages.append(message)
    for message in messages:
        message.pop("is_tool_text", None)
    if chat.tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
        text = TOOLS_TEXT.format(schemas=schemas)
        if messages[0].get("role") == "system":
            messages[0] = messages[0] | {"content": f"{_text(messages[0])}\n\n{text}".strip()}
        else:
            messages.insert(0, {"role": "system", "content": text})
            first_trained += 1 if chat.first_trained else 0
    return Chat(messages, None, first_trained)


def _system_as_text(chat: Chat) -> Chat:
    system, *rest = chat.messages
    place = next((index for index, message in enumerate(rest) if message.get("role") == "user"), None)
    if place is None:
        raise RowFault(
            "template_error", "has a system turn, which the chat template refuses, and no user turn to put it in"
        )
    rest[place] = rest[place] | {"content": f"{_text(system)}\n\n{_text(rest[place])}".strip()}
    return Chat(rest, chat.tools, max(chat.first_trained - 1, 0))


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content or ""
