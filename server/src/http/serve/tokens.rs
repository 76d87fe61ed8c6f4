//! `/tokenize` and `/detokenize`, as vLLM has them: what a prompt or a chat becomes, and back.

use axum::{
    Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use serde_json::Value;

use super::{
    App,
    completions::{check_content_type, enter},
    error::ApiError,
    fields::Fields,
    json::parse as parse_json,
    messages, parse,
};
use crate::{
    engine::{FinishReason, ModelInfo},
    frontend::{Place, Prepared},
    request::{FieldError, Input, RequestError, decode, encode},
    text::Text,
};

pub(in crate::http) async fn tokenize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, "/tokenize", request, |mut fields, model, text| {
        let Tokenize { input, with_texts, add_special } = read_tokenize(&mut fields)?;
        fields.finish()?;
        let tokens = match (&input, add_special) {
            // A template has written them.
            (Input::Chat(_), Some(true)) => {
                return Err(RequestError::special_of_chat().into());
            }
            (Input::Chat(_), _) => encode(input, "messages", true, model, text)?,
            _ => encode(input, "prompt", add_special.unwrap_or(true), model, text)?,
        };
        let of = |id: &u32| String::from_utf8_lossy(text.tokenizer.token_bytes(*id)).into_owned();
        let texts = with_texts.then(|| tokens.iter().map(of).collect::<Vec<_>>());
        let (count, max_model_len) = (tokens.len(), model.max_context);
        Ok(serde_json::json!({"count": count, "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts}))
    })
    .await
}

pub(in crate::http) async fn detokenize(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    answer(app, "/detokenize", request, |mut fields, model, text| {
        let ids = read_detokenize(&mut fields)?;
        fields.finish()?;
        let prompt = decode(&ids, "tokens", model, text)?;
        Ok(serde_json::json!({"prompt": prompt}))
    })
    .await
}

/// What `/tokenize` is asked.
pub(in crate::http) struct Tokenize {
    input: Input,
    with_texts: bool,
    add_special: Option<bool>,
}

pub(in crate::http) fn read_tokenize(fields: &mut Fields) -> Result<Tokenize, ApiError> {
    let with_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let add_special = fields.boolean("add_special_tokens")?;
    let input = match fields.string("prompt")? {
        Some(prompt) => Input::Texts(vec![prompt]),
        None => Input::Chat(messages::conversation(fields)?),
    };
    Ok(Tokenize { input, with_texts, add_special })
}

pub(in crate::http) fn read_detokenize(fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let ids = fields.list("tokens", "a list of token ids", "integer")?;
    let missing = || RequestError::field("tokens", FieldError::Missing, "must be given");
    parse::token_ids(&ids.ok_or_else(missing)?, "tokens")
}

pub(in crate::http) type Work = fn(Fields, &ModelInfo, &Text) -> Result<Value, ApiError>;

/// Does `work` with the fields of a request's body, within the bounds of a request for text.
pub(in crate::http) async fn answer(
    app: App,
    route: &'static str,
    request: Request,
    work: Work,
) -> Result<Response, ApiError> {
    let place = enter(&app, route, &request)?;
    let record = place.record.clone();
    let result = prepare(app, place, request, work).await;
    match result {
        Ok(_) => record.finished(FinishReason::Stop),
        Err(ref error) => record.failed(error.code),
    }
    result
}

async fn prepare(app: App, place: Place, request: Request, work: Work) -> Result<Response, ApiError> {
    check_content_type(request.headers())?;
    let (head, body) = request.into_parts();
    let body = app.frontend.read(head.extensions.get(), body).await?;
    let (bytes, frontend) = (body.bytes(), app.frontend.clone());
    let prepare = move |model: &ModelInfo, text: &Text| -> Result<_, ApiError> {
        let mut fields = Fields::new(parse_json(&body.blocks, model.max_context)?, "")?;
        frontend.check_model(&fields.string("model")?.unwrap_or_default())?;
        work(fields, model, text)
    };
    let Prepared { prepared, .. } = app.frontend.prepare(place, bytes, prepare).await?;
    Ok(Json(prepared).into_response())
}
