"""Chat templates in the shape of Qwen's, in our own words: what they do to tools, calls and reasoning is theirs."""

from __future__ import annotations

_TOOLS = """\
{%- macro system(text) %}
{{- '<|im_start|>system\\n' }}
{%- if text %}{{- text + ('\\n\\n' if tools else '') }}{%- endif %}
{%- if tools %}
{{- '# Tools\\n\\nThese functions may be called:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nA call is an object between marks:\\n<tool_call>\\n' }}
{{- '{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endmacro %}
{%- macro calls(message, content) %}
{%- for call in message.tool_calls %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- ARGUMENTS }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{%- macro result(index) %}
{%- if index == 0 or messages[index - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + messages[index].content + '\\n</tool_response>' }}
{%- if index + 1 == messages|length or messages[index + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endmacro %}
{%- if messages[0].role == 'system' or tools %}
{{- system(messages[0].content if messages[0].role == 'system' else '') }}
{%- endif %}
"""

QWEN25 = (
    _TOOLS.replace("ARGUMENTS", "call.function.arguments | tojson")
    + """\
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- result(loop.index0) }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- if message.tool_calls %}{{- calls(message, message.content) }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""No reasoning; arguments are written as JSON whatever they are."""

_QWEN3_MESSAGES = """\
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- result(loop.index0) }}
{%- elif message.role == 'assistant' %}
{%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.asked and thoughts %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content.lstrip('\\n') }}
{%- if message.tool_calls %}{{- calls(message, message.content) }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
"""
_EITHER = "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson"

QWEN3 = (
    _TOOLS.replace("ARGUMENTS", _EITHER)
    + _QWEN3_MESSAGES
    + """\
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
"""Thinks, unless `enable_thinking` is false; drops the reasoning of turns before the last question."""

QWEN3_THINKING = (
    _TOOLS.replace("ARGUMENTS", _EITHER)
    + _QWEN3_MESSAGES
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}\n"
)
"""Always thinks: it opens the block in the prompt."""
