"""Asks a running Looplane over gRPC as grpcurl does: all that it knows of methods and errors is what reflection says.

    pip install grpcio grpcio-reflection
    looplane serve --model DIR &
    python3 deploy/clients/grpc_client.py http://127.0.0.1:8000

Ends with an error where an answer is not what the methods promise. Behind the address an API key may stand.
"""

import sys

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "looplane.inference.v1.Inference"
TIMEOUT_SECONDS = 60

channel = grpc.insecure_channel(sys.argv[1].removeprefix("http://"))
metadata = [("authorization", f"Bearer {sys.argv[2]}")] if len(sys.argv) > 2 else []
reflection = ProtoReflectionDescriptorDatabase(channel)
assert SERVICE in reflection.get_services(), reflection.get_services()
pool = DescriptorPool(reflection)
methods = pool.FindServiceByName(SERVICE).methods_by_name


def call(name: str, body: dict):
    """The answer, or the call of a stream of answers."""
    method = methods[name]
    request = json_format.ParseDict(body, message_factory.GetMessageClass(method.input_type)())
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    ask = kind(f"/{SERVICE}/{name}", request_serializer=lambda message: message.SerializeToString(),
               response_deserializer=message_factory.GetMessageClass(method.output_type).FromString)
    return ask(request, metadata=metadata, timeout=TIMEOUT_SECONDS)


def decoded(kind: str, message: bytes):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(kind)).FromString(message)


def details(error: grpc.RpcError) -> dict:
    """The details of an error, by the names of their types."""
    status = decoded("google.rpc.Status", dict(error.trailing_metadata())["grpc-status-details-bin"])
    kinds = [(detail.type_url.split("/")[-1], detail.value) for detail in status.details]
    return {kind: decoded(kind, value) for kind, value in kinds}


def answered() -> None:
    body = {"chat": {"messages": [{"role": "user", "content": "What is 12 + 30?"}]},
            "sampling": {"temperature": 0, "max_tokens": 40}}
    events = list(call("Chat", body))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"delta"}, kinds
    text = "".join(event.delta.text for event in events)
    assert text and events[-1].finished.completion_tokens > 0, events
    print("Chat:", text)


def generated() -> None:
    sampling = {"temperature": 0, "max_tokens": 8, "logprobs": 2, "regex": "[0-9]{3}"}
    events = list(call("Generate", {"prompt": "12 + 30 =", "sampling": sampling}))
    text = "".join(event.delta.text for event in events)
    assert len(text) == 3 and text.isdigit(), text
    tokens = [token for event in events for token in event.delta.tokens]
    assert tokens and all(len(token.top) == 2 and token.logprob <= 0 for token in tokens), tokens
    ids = call("Tokenize", {"prompt": text, "add_special_tokens": False}).ids
    assert call("Detokenize", {"ids": list(ids)}).text == text, ids
    print("Generate:", text)


def aborted() -> None:
    sampling = {"max_tokens": 1500, "ignore_eos": True}
    stream = call("Generate", {"prompt": "On and on", "sampling": sampling})
    started = next(stream).started
    assert call("Abort", {"request_id": started.request_id}).requests == 1
    try:
        told = sum(len(event.delta.generated) for event in stream)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.CANCELLED, error
        print("Abort:", error.details())
    else:
        raise AssertionError(f"an aborted request went on to its end, {told} tokens")


def refused() -> None:
    try:
        list(call("Generate", {"prompt": "x", "sampling": {"temperature": 9}}))
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        told = details(error)
        assert told["google.rpc.ErrorInfo"].reason == "invalid_value", told
        fields = [violation.field for violation in told["google.rpc.BadRequest"].field_violations]
        assert fields == ["sampling.temperature"], told
        print("refused:", error.details())
    else:
        raise AssertionError("a temperature of 9 was taken")


answered()
generated()
aborted()
refused()
