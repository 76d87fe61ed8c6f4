"""Asks a running Looplane as the official openai client does: whole, streaming, parsed into types, with tools.

    pip install openai
    looplane serve --model DIR &
    python3 deploy/clients/openai_client.py http://127.0.0.1:8000

Ends with an error where an answer is not what the client promises. Behind the address an API key may stand.
`--without-tools` leaves tools out, for models whose template has none.
"""

import json
import sys
from typing import Annotated

from openai import OpenAI
from pydantic import BaseModel, Field

given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
client = OpenAI(base_url=given[0] + "/v1", api_key=given[1] if len(given) > 1 else "none")
model = client.models.list().data[0].id


# With bounds, so that a model that knows nothing of JSON comes to an end as well. It fills its answer with spaces: up
# to 64 of them may stand wherever JSON has room, which takes tokens.
Name = Annotated[str, Field(max_length=30)]
ENOUGH_TOKENS = 1500


class City(BaseModel):
    name: Name
    country: Name
    rivers: Annotated[list[Name], Field(max_length=3)]


def weather(city: str, unit: str) -> str:
    return f"21 degrees {unit} in {city}"


TOOLS = [{
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather in a city", "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"], "additionalProperties": False,
        },
    },
}]


def whole_and_streamed() -> None:
    messages = [{"role": "user", "content": "Count from one to five."}]
    asks = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**asks).choices[0].message.content
    chunks = list(client.chat.completions.create(**asks, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole == streamed and chunks[-1].usage.completion_tokens > 0, (whole, streamed)
    print("whole and streamed:", whole)


def parsed() -> None:
    messages = [{"role": "user", "content": "Name a city, its country and its rivers, in JSON."}]
    answer = client.chat.completions.parse(model=model, messages=messages, response_format=City, temperature=0,
                                           max_tokens=ENOUGH_TOKENS)
    city = answer.choices[0].message.parsed
    assert isinstance(city, City), answer
    print("parsed:", city)


def called() -> None:
    messages = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    asks = {"model": model, "tools": TOOLS, "temperature": 0, "max_tokens": 100}
    choice = client.chat.completions.create(**asks, messages=messages, tool_choice="required").choices[0]
    call = choice.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert choice.finish_reason == "tool_calls" and set(arguments) == {"city", "unit"}, choice
    name, pieces = "", ""
    for chunk in client.chat.completions.create(**asks, messages=messages, tool_choice="required", stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.index == 0:
                name += delta.function.name or ""
                pieces += delta.function.arguments or ""
    assert (name, pieces) == (call.function.name, call.function.arguments), (name, pieces)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)}]
    told = client.chat.completions.create(**asks, messages=messages).choices[0].message.content
    print("called:", call.function.name, arguments, "->", told)


whole_and_streamed()
parsed()
if "--without-tools" not in sys.argv:
    called()
