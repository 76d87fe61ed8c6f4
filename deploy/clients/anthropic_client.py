"""Asks a running Looplane as Anthropic's official client does: whole, streaming, with tools, tokens counted.

    pip install anthropic
    looplane serve --model DIR &
    python3 deploy/clients/anthropic_client.py http://127.0.0.1:8000

Ends with an error where an answer is not what the client promises. Behind the address an API key may stand.
`--without-tools` leaves tools out, for models whose template has none.
"""

import sys

from anthropic import Anthropic, BadRequestError

given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
client = Anthropic(base_url=given[0], api_key=given[1] if len(given) > 1 else "none", max_retries=0)
model = client.models.list().data[0].id

# Drawn greedily, so that whole and streamed answers are the same; the client itself has no such argument any more.
TOOLS = [{
    "name": "weather", "description": "The weather in a city", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"], "additionalProperties": False,
    },
}]


def text(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def whole_and_streamed() -> None:
    messages = [{"role": "user", "content": "Count from one to five."}]
    asks = {"model": model, "system": "Be brief.", "messages": messages, "max_tokens": 40}
    asks["extra_body"] = {"temperature": 0}
    whole = client.messages.create(**asks)
    with client.messages.stream(**asks) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text(whole) == streamed == text(final), (whole, streamed)
    assert whole.usage.output_tokens == final.usage.output_tokens > 0, (whole.usage, final.usage)
    assert whole.stop_reason == final.stop_reason, (whole.stop_reason, final.stop_reason)
    counted = client.messages.count_tokens(model=model, system="Be brief.", messages=messages).input_tokens
    told = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted == told, (counted, whole.usage)
    print("whole, streamed and counted:", streamed)


def called() -> None:
    messages = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    asks = {"model": model, "tools": TOOLS, "extra_body": {"temperature": 0}, "max_tokens": 100}
    whole = client.messages.create(**asks, messages=messages, tool_choice={"type": "any"})
    call = next(block for block in whole.content if block.type == "tool_use")
    assert whole.stop_reason == "tool_use" and set(call.input) == {"city", "unit"}, whole
    with client.messages.stream(**asks, messages=messages, tool_choice={"type": "any"}) as stream:
        streamed = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    assert (streamed.name, streamed.input) == (call.name, call.input), (streamed, call)
    messages += [
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}]},
    ]
    print("called:", call.name, call.input, "->", text(client.messages.create(**asks, messages=messages)))


def refused() -> None:
    try:
        client.messages.create(model=model, messages=[], max_tokens=8)
    except BadRequestError as error:
        print("refused:", error.message)
    else:
        raise AssertionError("a chat of no messages was answered")


whole_and_streamed()
refused()
if "--without-tools" not in sys.argv:
    called()
