"""Chat templates by name, from files, or as text."""

from __future__ import annotations

from pathlib import Path

from agilerl.errors import DataError

__all__ = ["TEMPLATES", "find_template"]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim + '\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim + '\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (first if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('this template knows user and assistant turns only') }}{% endif %}{% endfor %}"
)
_LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set first = '<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (first if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('this template knows user and assistant turns only') }}{% endif %}{% endfor %}"
)
_ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\\n\\n' }}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] | trim + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] | trim + '\\n' }}"
    "{% else %}{{ raise_exception('this template knows user and assistant turns only') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
_ALPACA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim + '\\n\\n' }}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'assistant' %}"
    "{{ '### Response:\\n' + message['content'] | trim + eos_token + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] | trim + '\\n\\n' }}"
    "{% else %}{{ raise_exception('this template knows user and assistant turns only') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "llama-2": _LLAMA2,
    "llama-3": _LLAMA3,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "zephyr": _ZEPHYR,
    "phi-3": _PHI3,
    "vicuna": _VICUNA,
    "alpaca": _ALPACA,
}
"""Templates of ours, by name. Control tokens that the tokenizer does not have are then ordinary text."""


def find_template(name: str) -> str:
    """Jinja text of a template given by name, as a file, or as text.

    Raises:
        DataError: It is none of these.
    """
    key = name.strip().lower().replace("_", "-")
    for known in (key, key.replace("llama3", "llama-3").replace("llama2", "llama-2").replace("phi3", "phi-3")):
        if known in TEMPLATES:
            return TEMPLATES[known]
    if "{{" in name or "{%" in name:
        return name
    path = Path(name).expanduser()
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"The chat template {name} is not UTF-8 text (byte {error.start}).") from None
    raise DataError(f"The chat template {name!r} is neither a known one ({', '.join(TEMPLATES)}) nor a file.")
