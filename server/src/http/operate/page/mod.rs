//! The page at `/`: chat with the model, and the machine live. One document without other resources, so that it opens
//! before a key is shown; nothing else is loaded or run.

use axum::{
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
};
use uuid::Uuid;

/// The document, with places for its parts.
const DOCUMENT: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPTS: [&str; 4] =
    [include_str!("chat.js"), include_str!("machine.js"), include_str!("timeline.js"), include_str!("start.js")];

/// The page. Its style and its script are known by a number that is drawn anew for each answer.
pub(in crate::http) fn page() -> Response {
    let nonce = Uuid::new_v4().simple().to_string();
    let page =
        DOCUMENT.replace("NONCE", &nonce).replace("/* STYLE */", STYLE).replace("/* SCRIPTS */", &SCRIPTS.join("\n"));
    let policy = format!(
        "default-src 'none'; connect-src 'self'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; base-uri \
         'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let policy = HeaderValue::try_from(policy).expect("hexadecimal digits in a policy");
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, Html(page)).into_response()
}
