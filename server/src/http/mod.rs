//! The HTTP interface: routes, health, and the rules that hold for every request. `serve` has what answers requests,
//! `operate` what tells of the server and changes how it runs.

use std::{any::Any, sync::Arc, time::Instant};

use axum::{
    Json, Router,
    extract::{FromRequestParts, MatchedPath, Path, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request::Parts},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{MethodRouter, delete, get, post},
};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tonic::Code;
use tower_http::catch_panic::CatchPanicLayer;
use uuid::Uuid;

mod access;
mod error;
mod fields;
mod json;
mod operate;
mod quota;
mod serve;
mod unread;

pub use access::Access;
pub use error::ApiError;
use error::ErrorCode;
use operate::{info, machine, metrics, openapi, page, replicas};
pub use operate::{info::Settings, openapi::document};
pub use serve::responses::ResponseStore;
use serve::{anthropic, completions, render, responses, tokens};

use crate::{
    engine::EngineState,
    frontend::{Frontend, RequestId, in_words},
    grpc,
    request::RequestError,
    trace::RESPONSE,
};

/// Names a request in responses and logs; a client may choose it.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest name that is taken from a client.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Where it is asked whether the server lives and serves.
const HEALTH: [&str; 4] = ["/health/live", "/health/ready", "/health", "/ping"];

/// What other servers' models do, and no model here.
const OTHER_MODELS: [(&str, &str); 12] = [
    ("/v1/embeddings", "embeddings"),
    ("/v1/audio/speech", "speech"),
    ("/v1/audio/transcriptions", "transcriptions"),
    ("/v1/audio/translations", "translations"),
    ("/v1/images/generations", "images"),
    ("/v1/images/edits", "images"),
    ("/v1/moderations", "moderations"),
    ("/v1/rerank", "rankings"),
    ("/rerank", "rankings"),
    ("/v1/score", "scores"),
    ("/classify", "classes"),
    ("/pooling", "embeddings"),
];

/// What llama.cpp, vLLM and TGI have under names of their own, and what serves instead.
const ELSEWHERE: [(&str, &str); 12] = [
    ("/props", "GET /server_info, GET /v1/models"),
    ("/slots", "GET /load, GET /metrics"),
    ("/completion", "POST /v1/completions"),
    ("/completions", "POST /v1/completions"),
    ("/chat/completions", "POST /v1/chat/completions"),
    ("/infill", "POST /v1/completions, with the model's own fill-in-the-middle tokens in the prompt"),
    ("/lora-adapters", "a server of its own for each model"),
    ("/generate", "POST /v1/completions"),
    ("/inference/v1/generate", "POST /v1/completions, whose prompt may be token ids"),
    ("/v1/load_lora_adapter", "a server of its own for each model"),
    ("/v1/unload_lora_adapter", "a server of its own for each model"),
    ("/invocations", "POST /v1/chat/completions, POST /v1/completions"),
];

/// What the handlers share.
#[derive(Debug, Clone)]
pub struct App {
    /// Requests, engine and text.
    pub frontend: Arc<Frontend>,
    /// Where clients reach this server, for the page at `/`.
    pub base_url: Arc<str>,
    /// Who may ask.
    pub access: Access,
    /// Responses that clients may go on from.
    pub responses: Arc<ResponseStore>,
    /// What `/metrics` says.
    pub registry: Arc<Registry>,
    /// What `/server_info` says of the options.
    pub settings: Settings,
    /// The server listens where only this machine reaches it.
    pub is_local: bool,
}

impl App {
    /// For clients that reach the server at `base_url`, an address of this machine alone if `is_local`.
    pub fn new(
        frontend: Arc<Frontend>,
        base_url: Arc<str>,
        is_local: bool,
        access: Access,
        responses: ResponseStore,
        settings: Settings,
    ) -> Self {
        let registry = Arc::new(metrics::registry(&frontend, access.keys.as_ref()));
        Self { frontend, base_url, access, responses: Arc::new(responses), registry, settings, is_local }
    }
}

/// All paths of HTTP, with what answers there.
pub fn routes() -> Vec<(&'static str, MethodRouter<App>)> {
    let mut routes = vec![
        ("/", get(welcome)),
        ("/v1/chat/completions", post(completions::chat)),
        ("/v1/completions", post(completions::completion)),
        ("/v1/messages", post(anthropic::messages)),
        ("/v1/messages/count_tokens", post(anthropic::count_tokens)),
        ("/v1/responses", post(responses::create)),
        ("/v1/responses/{id}", get(responses::get).delete(responses::delete)),
        ("/v1/responses/{id}/cancel", post(responses::cancel)),
        ("/v1/chat/completions/render", post(render::chat)),
        ("/v1/completions/render", post(render::completion)),
        ("/apply-template", post(render::apply_template)),
        ("/v1/models", get(models)),
        ("/v1/models/{*id}", get(model)),
        ("/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/version", get(info::version)),
        ("/openapi.json", get(async || Json(openapi::document()))),
        ("/server_info", get(info::server_info)),
        ("/load", get(info::load)),
        ("/replicas", get(replicas::list)),
        ("/replicas/{id}/restart", post(replicas::restart)),
        ("/machine", get(machine::machine)),
        ("/requests/{*id}", delete(machine::abort)),
    ];
    routes.extend(probes());
    routes.extend(OTHER_MODELS.map(|(path, what)| (path, refuse(what))));
    routes.extend(ELSEWHERE.map(|(path, instead)| (path, refer(instead))));
    routes
}

/// What is asked to see whether the server lives and serves, and how it fares.
fn probes() -> [(&'static str, MethodRouter<App>); 5] {
    [
        ("/ping", get(ready).post(ready)),
        ("/health", get(ready)),
        ("/health/live", get(live)),
        ("/health/ready", get(ready)),
        ("/metrics", get(async |State(app): State<App>| metrics::scrape(&app.registry))),
    ]
}

/// The service as a whole; `grpc` answers the gRPC methods on the same port.
pub fn router(app: App, grpc: Router) -> Router {
    ruled(app, routes(), grpc)
}

/// Of a host that computes for another front end: it says how it is, and serves nobody.
pub fn probes_alone(app: App) -> Router {
    let here =
        get(async || "Looplane computes here for another front end: GET /metrics, /health/live, /health/ready\n");
    ruled(app, probes().into_iter().chain([("/", here)]), Router::new())
}

/// Every layer holds for every route.
fn ruled(app: App, routes: impl IntoIterator<Item = (&'static str, MethodRouter<App>)>, grpc: Router) -> Router {
    let routes = routes.into_iter().fold(Router::new(), |router, (path, methods)| router.route(path, methods));
    let router = routes
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone())
        .merge(grpc)
        .fallback(not_found)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(app.clone(), access::authorize));
    access::share(router, &app.access.cors_origins)
        .layer(from_fn_with_state(app.frontend.clone(), unread::discard))
        .layer(from_fn_with_state(app.frontend, identify))
}

/// What holds for an answer wherever it was made.
pub fn protect(headers: &mut HeaderMap) {
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// Whether a path is a probe's: answered even where there is no place for anybody else. Reflection and health over gRPC
/// are no work, either, but those calls may stay open for ever.
pub fn is_probe(path: &str) -> bool {
    is_health(path) || path == "/metrics" || path.starts_with("/grpc.reflection.")
}

/// Whether a path is one of those that say whether the server lives and serves, and no more.
fn is_health(path: &str) -> bool {
    HEALTH.contains(&path) || path.starts_with("/grpc.health.")
}

/// The answer to anything but a probe where all connections are taken.
pub fn too_many_connections() -> Response {
    let message = "as many connections are open as this server takes (--max-connections), and none is idle";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message)
        .retry("service_unavailable_error", 1)
        .into_response()
}

/// A `curl` to paste that the model can answer: it can chat where it has a chat template, and else goes on with a text.
/// The key, where one is asked for, is in the shell's variable from which OpenAI's clients take it.
pub fn example(base_url: &str, model_id: &str, can_chat: bool, with_key: bool) -> String {
    let (path, body) = match can_chat {
        true => (
            "/v1/chat/completions",
            json!({"model": model_id, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}),
        ),
        false => ("/v1/completions", json!({"model": model_id, "prompt": "12 + 30 =", "max_tokens": 32})),
    };
    let key = if with_key { " -H \"authorization: Bearer $OPENAI_API_KEY\"" } else { "" };
    format!("curl {base_url}{path}{key} -H 'content-type: application/json' -d '{body}'")
}

/// Browsers get a page, all others a text that says what is here.
async fn welcome(State(app): State<App>, headers: HeaderMap) -> Response {
    if wants_page(&headers) {
        return page::page();
    }
    let state = in_words(&app.frontend.engine.state());
    let model_id = &app.frontend.model_id;
    format!(
        "Looplane serves the model {model_id}; it is {state}.\n\n\
         OpenAI-style: POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, GET /v1/models\n\
         Anthropic-style: POST /v1/messages, POST /v1/messages/count_tokens\n\
         Tokens: POST /tokenize, POST /detokenize\n\
         Without generating: POST /v1/chat/completions/render, POST /v1/completions/render, POST /apply-template\n\
         Health: GET /health/live, GET /health/ready (also /health and /ping)\n\
         About the server: GET /version, GET /server_info, GET /load, GET /machine, GET /replicas, GET /openapi.json\n\
         For its operator: POST /replicas/{{id}}/restart\n\
         Requests by their x-request-id: DELETE /requests/ID\n\
         For Prometheus: GET /metrics\n\
         gRPC on the same port: looplane.inference.v1, with health and reflection\n\
         A browser gets a page to chat with the model and to watch the machine.\n\n{}\n",
        example(&app.base_url, model_id, can_chat(&app), app.access.keys.is_some())
    )
    .into_response()
}

fn wants_page(headers: &HeaderMap) -> bool {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    accepts.contains("text/html")
}

async fn models(State(app): State<App>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&app)]}))
}

async fn model(State(app): State<App>, Named(id): Named) -> Result<Json<Value>, ApiError> {
    if id == app.frontend.model_id {
        return Ok(Json(describe(&app)));
    }
    Err(RequestError::ModelNotFound { asked: id, served: app.frontend.model_id.clone() }.into())
}

fn describe(app: &App) -> Value {
    let Frontend { model_id, started, engine, .. } = &*app.frontend;
    // vLLM's, known once the model has loaded. `can_chat` is ours: the page at `/` asks by it.
    let max_model_len = engine.model().map(|model| model.max_context);
    json!({
        "id": model_id, "object": "model", "created": started, "owned_by": "looplane", "root": model_id,
        "parent": null, "max_model_len": max_model_len, "can_chat": can_chat(app),
    })
}

/// Answers for a model that is not here.
fn refuse(what: &'static str) -> MethodRouter<App> {
    post(async move || {
        let message = format!("the model generates text: there are no {what} here; GET / lists what is");
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_supported", message)
    })
}

/// Answers where another server's name is asked for.
fn refer(instead: &'static str) -> MethodRouter<App> {
    let refuse = async move || {
        let message = format!("this server does not have it; use {instead}");
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_supported", message)
    };
    get(refuse).post(refuse)
}

/// Whether the model has a chat template.
fn can_chat(app: &App) -> bool {
    app.frontend.text.template.is_some()
}

/// The process runs and answers; says nothing of the model.
async fn live() -> Json<Value> {
    Json(json!({"status": "live"}))
}

/// Whether requests are computed now.
async fn ready(State(app): State<App>) -> (StatusCode, Json<Value>) {
    let state = app.frontend.state();
    let status = if state == EngineState::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let detail = format!("the server is {}", in_words(&state));
    (status, Json(json!({"status": metrics::word(&state), "detail": detail})))
}

async fn not_found(request: Request) -> Response {
    if is_grpc(request.headers()) {
        return grpc_error(Code::Unimplemented, "not_found", &format!("no method {}", request.uri().path()));
    }
    nothing_at(request.uri().path()).into_response()
}

fn nothing_at(path: &str) -> ApiError {
    let message = format!("there is no {path} here; GET / lists what is");
    ApiError::new(StatusCode::NOT_FOUND, "not_found", message)
}

/// The part of a path that names something. What is no text names nothing.
struct Named(String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = Path::from_request_parts(parts, state).await;
        name.map(|Path(name)| Self(name)).map_err(|_| nothing_at(parts.uri.path()))
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// For a call that reaches no service.
fn grpc_error(code: Code, reason: &'static str, message: &str) -> Response {
    let mut response = grpc::refusal(code, reason, message).into_http::<axum::body::Body>();
    response.extensions_mut().insert(ErrorCode(reason));
    response
}

/// axum adds the `allow` header.
async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} does not take {}", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let text = panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|text| text.to_string()));
    tracing::error!(panic = text.as_deref().unwrap_or("(no text)"), "a request handler panicked");
    let message = "internal error; the server's log says more";
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message).into_response()
}

/// Gives the request its name, the log its line, and counts its answer.
async fn identify(State(frontend): State<Arc<Frontend>>, mut request: Request, next: Next) -> Response {
    let chosen = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let visible = |id: &str| id.bytes().all(|byte| byte.is_ascii_graphic());
    let usable = |id: &&str| (1..=MAX_REQUEST_ID_BYTES).contains(&id.len()) && visible(id);
    let id = chosen.filter(usable).map_or_else(|| Uuid::new_v4().to_string(), str::to_owned);
    let header = HeaderValue::from_str(&id).expect("a header's text, or hexadecimal digits and dashes");
    let (method, path, start) = (request.method().clone(), request.uri().path().to_owned(), Instant::now());
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let record = Arc::new(frontend.arrive(RequestId::from(id.as_str()), request.headers()));
    request.extensions_mut().insert(record.clone());
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    record.answered(status);
    frontend.metrics.answered(matched.as_ref().map_or("none", MatchedPath::as_str), status);
    if let Some(ErrorCode(code)) = response.extensions().get() {
        frontend.metrics.failed(code);
    }
    tracing::debug!(request_id = id, %method, path, status, elapsed_ms = start.elapsed().as_millis(), "answered");
    response.headers_mut().insert(REQUEST_ID, header);
    if let Some(span) = record.exported() {
        response.headers_mut().insert(RESPONSE, span);
    }
    response
}
