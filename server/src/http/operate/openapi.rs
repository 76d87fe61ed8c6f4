//! The document at `/openapi.json`: the routes, the fields of bodies, and the shapes of answers and errors.
//!
//! The fields, their kinds and their ranges are not written down here. The parsers are asked, with a body of each
//! route: what they look for is what is said. The shapes of answers are, in `answers`; tests hold every answer to them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{
    ApiError, ResponseStore, anthropic,
    fields::{
        Fields,
        asked::{self, Kind},
    },
    replicas, responses, tokens,
};
use crate::http::serve::{messages, parse};

mod answers;

/// Fields of a body with their kinds, and those that must be there.
type Body = (BTreeMap<String, Kind>, &'static [&'static str]);

/// The routes by method, with what they do. Those that only refuse are not among them.
const ROUTES: [(&str, &str, &str); 30] = [
    ("get", "/", "A page to chat with the model and to watch the machine, or a text about the server"),
    ("post", "/v1/chat/completions", "The answer to a chat"),
    ("post", "/v1/completions", "What follows a text"),
    ("post", "/v1/chat/completions/render", "What a chat would be computed as"),
    ("post", "/v1/completions/render", "What a text would be computed as"),
    ("post", "/apply-template", "The prompt of a chat as text"),
    ("post", "/v1/messages", "The answer to a chat, as Anthropic has it"),
    ("post", "/v1/messages/count_tokens", "Tokens of a chat, as Anthropic has it"),
    ("post", "/v1/responses", "A response, as OpenAI has it"),
    ("get", "/v1/responses/{id}", "A response that is kept"),
    ("delete", "/v1/responses/{id}", "Forgets a response"),
    ("post", "/v1/responses/{id}/cancel", "Refused: no response is in the background"),
    ("get", "/v1/models", "The model"),
    ("get", "/v1/models/{id}", "The model, by its name"),
    ("post", "/tokenize", "Tokens of a text or a chat"),
    ("post", "/detokenize", "Text of tokens"),
    ("get", "/version", "The server's version"),
    ("get", "/server_info", "What the server is, and its settings"),
    ("get", "/load", "Requests that are being served"),
    ("get", "/replicas", "How each replica is"),
    ("post", "/replicas/{id}/restart", "Restarts a replica's workers while the others serve; for keys with admin"),
    ("get", "/machine", "What the server does now, and requests of the caller's key"),
    ("delete", "/requests/{id}", "Ends the requests of the caller's key that have this x-request-id"),
    ("get", "/openapi.json", "This document"),
    ("get", "/ping", "Whether requests are computed"),
    ("post", "/ping", "Whether requests are computed"),
    ("get", "/health", "Whether requests are computed"),
    ("get", "/health/live", "Whether the process answers"),
    ("get", "/health/ready", "Whether requests are computed"),
    ("get", "/metrics", "For Prometheus"),
];

/// What a parser asks for when it reads this body, without what is inside of a field.
fn fields<T>(body: Value, read: impl FnOnce(Value) -> Result<T, ApiError>) -> BTreeMap<String, Kind> {
    let (_, mut fields) = asked::during(|| read(body));
    fields.retain(|path, _| !path.contains(['.', '[']));
    fields
}

fn body(path: &str) -> Option<Body> {
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    match path.strip_suffix("/render").unwrap_or(path) {
        "/v1/chat/completions" => Some((fields(chat, parse::chat), &["messages"])),
        "/v1/completions" => Some((fields(json!({"prompt": "x"}), parse::completion), &["prompt"])),
        "/v1/messages" => Some((fields(chat, anthropic::request::messages), &["model", "messages", "max_tokens"])),
        "/v1/responses" => {
            let store = ResponseStore::new(0);
            Some((fields(json!({"input": "x"}), |body| responses::request::create(body, &store)), &["input"]))
        }
        "/tokenize" => Some((behind_the_model(chat, |mut fields| tokens::read_tokenize(&mut fields)), &[])),
        "/detokenize" => {
            let body = json!({"tokens": []});
            Some((behind_the_model(body, |mut fields| tokens::read_detokenize(&mut fields)), &["tokens"]))
        }
        "/apply-template" => {
            Some((behind_the_model(chat, |mut fields| messages::conversation(&mut fields)), &["messages"]))
        }
        "/replicas/{id}/restart" => Some((fields(json!({}), replicas::read_restart), &[])),
        "/v1/messages/count_tokens" => Some((behind_the_model(chat, anthropic::request::counted), &["messages"])),
        _ => None,
    }
}

/// The same of a parser that reads what is left behind the model's name.
fn behind_the_model<T>(body: Value, read: impl FnOnce(Fields) -> Result<T, ApiError>) -> BTreeMap<String, Kind> {
    fields(body, |body| {
        let mut fields = Fields::new(body, "")?;
        fields.string("model")?;
        read(fields)
    })
}

/// The document at `/openapi.json`.
pub fn document() -> Value {
    let mut paths = Map::new();
    for (method, path, summary) in ROUTES {
        let error = match path.starts_with("/v1/messages") {
            true => json!({"$ref": "#/components/responses/AnthropicError"}),
            false => json!({"$ref": "#/components/responses/Error"}),
        };
        let mut operation = json!({
            "summary": summary, "operationId": format!("{method} {path}"),
            "responses": {"200": {"description": summary, "content": answers::of(method, path)}, "default": error},
        });
        if super::HEALTH.contains(&path) {
            let not_now = "not now: `status` and `detail` say why";
            operation["responses"]["503"] = json!({"description": not_now, "content": answers::of(method, path)});
        }
        if path.contains("{id}") {
            operation["parameters"] =
                json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}]);
        }
        let takes_a_body = method == "post" && path != "/ping" && !path.ends_with("/cancel");
        if takes_a_body {
            let schema = schema(&body(path).expect("every route that takes a body has a parser"));
            operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
        }
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[method] = operation;
    }
    let response = |schema: &str| {
        let schema = json!({"$ref": format!("#/components/schemas/{schema}")});
        json!({"description": "What is wrong, and what to do", "content": {"application/json": {"schema": schema}}})
    };
    json!({
        "openapi": "3.1.0", "info": {"title": "Looplane", "version": env!("CARGO_PKG_VERSION")}, "paths": paths,
        "components": {
            "responses": {"Error": response("Error"), "AnthropicError": response("AnthropicError")},
            "schemas": answers::schemas(),
        },
    })
}

fn schema((fields, required): &Body) -> Value {
    let property = |(name, kind): (&String, &Kind)| {
        let kinds = |kind: &str| match required.contains(&name.as_str()) {
            true => json!({"type": kind}),
            false => json!({"type": [kind, "null"]}),
        };
        let schema = match *kind {
            Kind::Any => json!({}),
            Kind::Unsupported => json!({"description": "not supported: only values that ask for nothing are taken"}),
            Kind::Of(kind) => kinds(kind),
            Kind::List(items) => {
                let mut schema = kinds("array");
                schema["items"] = json!({"type": items});
                if items == "integer" {
                    // Tokens, of which the model says how many there are.
                    (schema["items"]["minimum"], schema["items"]["maximum"]) = (0.into(), u32::MAX.into());
                }
                schema
            }
            Kind::Integer(least, most) => {
                let mut schema = kinds("integer");
                (schema["minimum"], schema["maximum"]) = (least.into(), most.into());
                schema
            }
            Kind::Number(range) => {
                let mut schema = kinds("number");
                schema[if range.over_low { "exclusiveMinimum" } else { "minimum" }] = range.low.into();
                schema["maximum"] = range.high.into();
                schema
            }
        };
        (name.clone(), schema)
    };
    let properties: Map<String, Value> = fields.iter().map(property).collect();
    json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_that_works_is_in_the_document_and_no_other() {
        let refused: Vec<&str> =
            super::super::OTHER_MODELS.iter().chain(&super::super::ELSEWHERE).map(|(path, _)| *path).collect();
        let mut served: Vec<String> =
            super::super::routes().into_iter().map(|(path, _)| path.replace("{*id}", "{id}")).collect();
        served.retain(|path| !refused.contains(&path.as_str()));
        served.sort();
        let mut told: Vec<String> = document()["paths"].as_object().unwrap().keys().cloned().collect();
        told.sort();
        assert_eq!(told, served);
    }

    #[test]
    fn bodies_have_the_fields_that_their_parsers_read() {
        let document = document();
        let of = |path: &str| {
            document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].clone()
        };
        let chat = of("/v1/chat/completions");
        let properties = &chat["properties"];
        assert_eq!(properties["temperature"], json!({"type": ["number", "null"], "minimum": 0.0, "maximum": 2.0}));
        assert_eq!(properties["top_p"]["exclusiveMinimum"], 0.0);
        assert_eq!(properties["n"], json!({"type": ["integer", "null"], "minimum": 1, "maximum": 16}));
        assert_eq!(properties["stream"], json!({"type": ["boolean", "null"]}));
        assert_eq!(properties["metadata"], json!({"type": ["object", "null"]}));
        assert!(properties["store"]["description"].is_string() && properties.get("prompt").is_none());
        assert_eq!(of("/v1/chat/completions/render"), chat);
        assert_eq!(properties["bad_words"], json!({"type": ["array", "null"], "items": {"type": "string"}}));
        assert_eq!(properties["stop_token_ids"]["items"]["minimum"], 0);
        assert_eq!(of("/detokenize")["properties"]["tokens"]["type"], "array");
        assert!(of("/tokenize")["properties"].get("messages").is_some());
        assert!(of("/apply-template")["properties"].get("max_tokens").is_none());
        assert!(of("/v1/completions")["properties"].get("prompt").is_some());
        assert_eq!(of("/v1/messages")["properties"]["model"], json!({"type": "string"}));
        assert_eq!(of("/v1/responses")["properties"]["max_output_tokens"]["minimum"], 1);
    }

    /// A value of another kind than the document says is refused by the parser, and by the field's name.
    #[test]
    fn kinds_are_those_that_parsers_take() {
        for (name, kind) in body("/v1/completions").unwrap().0 {
            let wrong = match kind {
                Kind::Of("string" | "object") | Kind::List(_) => json!(1),
                Kind::Of(_) | Kind::Integer(..) | Kind::Number(_) => json!("x"),
                Kind::Any | Kind::Unsupported => continue,
            };
            let error = parse::completion(json!({"prompt": "x", name.clone(): wrong})).expect_err(&name);
            assert_eq!(error.param.as_deref(), Some(name.as_str()));
        }
    }
}
