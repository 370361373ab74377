"""Let the model call functions: python examples/tools.py [URL]; the served model has to know tools."""

import json
import sys
from typing import Any

from mstar.client import Client, ClientError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """A function of your own."""
    return {"city": city, "days": days, "sky": "clear", "celsius": 21}


def main(url: str = "http://127.0.0.1:8000") -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with Client(url) as client:
        if not client.models()[0].capabilities.get("tool_calls"):
            sys.exit("the served model calls no tools; one that does: mstar serve qwen3_5")
        answer = client.chat(messages, tools=TOOLS, max_tokens=512)
        messages.append(answer.message.as_request())
        for call in answer.message.tool_calls:
            print(f"{call.function.name}({call.function.arguments})")
            result = weather(**call.arguments()) if call.function.name == "weather" else {"error": "no such function"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
        if answer.message.tool_calls:
            answer = client.chat(messages, tools=TOOLS, max_tokens=512)
        print(answer.text)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ClientError as error:
        sys.exit(str(error))
