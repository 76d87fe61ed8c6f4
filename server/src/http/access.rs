//! Who may ask: requests with a key, probes, and pages of the origins that are let in.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tonic::Code;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::{
    App, REQUEST_ID, completions::SEED_HEADER, error::ApiError, grpc_error, is_grpc, is_health, quota, wants_page,
};
use crate::{keys::Keys, reload::Reloaded, trace::RESPONSE};

/// The header of Anthropic's clients.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// OpenAI's, for a key that is missing as for one that is wrong.
const CODE: &str = "invalid_api_key";

/// Who may ask for what.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// One of these is asked for; `None`: everybody may ask.
    pub keys: Option<Arc<Reloaded<Keys>>>,
    /// `/metrics` is answered without a key.
    pub metrics_without_key: bool,
    /// Origins whose pages may ask; `*` for all.
    pub cors_origins: Vec<HeaderValue>,
}

impl Access {
    /// What is answered without a key: probes that say no more than the engine's state, and the page that asks for the
    /// key. A route is closed unless it is named here.
    fn is_open(&self, request: &Request) -> bool {
        let path = request.uri().path();
        is_health(path)
            || (path == "/metrics" && self.metrics_without_key)
            || (path == "/" && wants_page(request.headers()))
    }
}

/// Refuses requests without a key, before their body is read and a place is taken. Handlers find the key among the
/// request's extensions.
pub(super) async fn authorize(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let Some(keys) = &app.access.keys else { return next.run(request).await };
    let presented = presented(request.headers());
    match presented.and_then(|key| keys.current().find(key)) {
        Some(key) => {
            request.extensions_mut().insert(key.clone());
            let mut response = next.run(request).await;
            quota::tell(&key, response.headers_mut());
            return response;
        }
        None if app.access.is_open(&request) => {}
        None => return refusal(&request, presented.is_some()),
    }
    next.run(request).await
}

/// The key as the client sent it: `Authorization: Bearer KEY`, or else `x-api-key: KEY`. Metadata of gRPC are headers.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = || {
        let (scheme, key) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim().as_bytes())
    };
    bearer().or_else(|| Some(headers.get(API_KEY)?.as_bytes()))
}

fn refusal(request: &Request, presented: bool) -> Response {
    let message = match presented {
        true => "this API key is not known here",
        false => "an API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
    };
    let mut response = match is_grpc(request.headers()) {
        true => grpc_error(Code::Unauthenticated, CODE, message),
        false => ApiError::new(StatusCode::UNAUTHORIZED, CODE, message).into_response(),
    };
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Lets pages of other origins ask, and read all that answers say. A browser's question whether it may is answered
/// here, without a key, which it does not send.
pub(super) fn share(router: Router, origins: &[HeaderValue]) -> Router {
    let origin = match origins {
        [] => return router,
        all if all.contains(&HeaderValue::from_static("*")) => AllowOrigin::any(),
        some => AllowOrigin::list(some.to_vec()),
    };
    let told = [REQUEST_ID, RESPONSE, SEED_HEADER, header::RETRY_AFTER, header::WWW_AUTHENTICATE].into_iter();
    router.layer(
        CorsLayer::new()
            .allow_origin(origin)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(told.chain(quota::names()).collect::<Vec<_>>()),
    )
}
