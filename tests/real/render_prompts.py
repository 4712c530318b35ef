"""Runs in the engine runtime: vLLM's own request models and renderer, without an engine. Prints the ids of each request.

Argument: the model's folder. Standard input: JSON `[[template or null, …], [[path, body], …]]`. Printed: for each template a
list with one entry per request: its ids, or a sentence where vLLM refuses it or makes several prompts of it.
"""

import asyncio
import json
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer


class Messages(AnthropicServingMessages):
    """The part of the server for `/v1/messages` that makes a chat request, which needs no engine."""

    def __init__(self, renderer):
        self.online_renderer = renderer
        self.model_config = renderer.model_config
        self._merge_inline_system = self._should_merge_inline_system(renderer)
        self._disabled_thinking_effort = None

    async def chat(self, body):
        request = AnthropicMessagesRequest.model_validate(body)
        disabled = {}
        if request.thinking is not None and request.thinking.type == "disabled":
            disabled["disabled_thinking_effort"] = await self._get_disabled_thinking_effort()
        return self.to_chat_completion_request(request, merge_inline_system=self._merge_inline_system, **disabled)


async def engine_inputs(renderer, messages, path, body):
    if path == "/v1/completions":
        return await renderer.render_completion(CompletionRequest.model_validate(body))
    if path == "/v1/responses":
        made = await renderer.render_responses(ResponsesRequest.model_validate(body))
        return made if isinstance(made, ErrorResponse) else [made.engine_input]
    request = await messages.chat(body) if path == "/v1/messages" else ChatCompletionRequest.model_validate(body)
    made = await renderer.render_chat(request)
    return made if isinstance(made, ErrorResponse) else made[1]


async def ids(renderer, messages, path, body):
    try:
        made = await engine_inputs(renderer, messages, path, body)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    if isinstance(made, ErrorResponse):
        return made.error.message
    return list(made[0]["prompt_token_ids"]) if len(made) == 1 else "several prompts"


async def main(folder, templates, requests):
    config = EngineArgs(model=folder, dtype="float32", enforce_eager=True).create_engine_config()
    for template in templates:
        renderer = OnlineRenderer(
            model_config=config.model_config,
            renderer=renderer_from_config(config),
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        messages = Messages(renderer)
        yield [await ids(renderer, messages, path, body) for path, body in requests]


async def collected(folder, templates, requests):
    return [answers async for answers in main(folder, templates, requests)]


if __name__ == "__main__":
    answers = asyncio.run(collected(sys.argv[1], *json.load(sys.stdin)))
    print()
    print(json.dumps(answers), flush=True)
